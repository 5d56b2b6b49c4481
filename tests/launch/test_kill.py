"""Runs of four ranks that are killed at random moments, and started again: they end as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from megalite.config_file import load
from megalite.data import TokenWriter
from megalite.data.ledger import audit
from megalite.train.loop import open_data

CONFIG = """
[model]
preset = "llama-tiny"
vocab_size = 97
[mesh]
tp = 2
zero = 1
[data]
paths = ["tokens"]
validation = 0.1
[train]
steps = 60
global_batch = 8
seq_len = 64
validation_batches = 1
[checkpoint]
every = 2
[run]
ranks = 4
timeout = 60.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    with TokenWriter(folder / "tokens", 97, 4) as writer:
        writer.write(np.random.default_rng(0).integers(97, size=20_000))
    (folder / "config.toml").write_text(CONFIG)
    return folder


def start(folder, run):
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-m", "megalite", "train", "config.toml", f"run.dir={run}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def descendants(pid):
    """Processes below one, by generation: the children first."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    below, generations = {pid}, []
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        generations.append(sorted(below))
    return generations


def kill(process, everything, number):
    """SIGKILL to one rank, or to all processes of the run, as where the machine is lost."""
    if everything:
        os.killpg(process.pid, signal.SIGKILL)
        return True
    ranks = descendants(process.pid)[1]
    if not ranks:
        return False
    with suppress(ProcessLookupError):
        os.kill(ranks[number % len(ranks)], signal.SIGKILL)
    return True


def steps_done(run):
    with suppress(OSError):
        return len((run / "metrics.jsonl").read_text().splitlines())
    return 0


def wait_until(moment, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not moment() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def let_live(process, run, generator):
    """Until a random moment: as it starts, after some steps, or, four times of ten, in the midst of a save."""
    least = steps_done(run) + generator.choice([0, 1, 3, 6, 12])
    wait_until(lambda: steps_done(run) > least, process)
    if while_saving := generator.random() < 0.4:
        wait_until(lambda: any((run / "checkpoints").glob(".tmp-*")), process)
    time.sleep(generator.random() * (0.02 if while_saving else 0.5))


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 61))
    return [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.fixture(scope="module")
def whole(folder):
    """Losses of the run that is never killed."""
    process = start(folder, "whole")
    assert process.wait(120) == 0, process.stdout.read()
    return losses(folder / "whole")


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.full)])
def test_a_run_that_is_killed_ends_with_the_same_losses(folder, whole, kills):
    generator, killed, runs = random.Random(kills), 0, 0
    while killed < kills:
        run = folder / f"killed-{kills}-{(runs := runs + 1)}"
        ended = False
        while not ended:
            process = start(folder, run)
            if killed < kills:
                let_live(process, run, generator)
                killed += kill(process, generator.random() < 0.3, generator.randrange(4))
            output = process.communicate(timeout=120)[0]
            assert process.returncode in (0, -signal.SIGKILL, 69), output
            assert "Traceback" not in output, output
            ended = process.returncode == 0
        assert losses(run) == whole
        config = load(run / "config.toml", [f"data.paths=['{folder / 'tokens'}']"])
        found = audit(run, open_data(config).train, config.train.global_batch)
        assert (found.steps, found.torn, found.problems) == (60, False, ())
        left = [path.name for path in (run / "checkpoints").iterdir()]
        assert sorted(left) == ["step-00000058", "step-00000060"]

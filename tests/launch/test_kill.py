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
from megalite.launch.cli import main
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
global_batch = 8
seq_len = 64
validation_batches = 1
[checkpoint]
every = 2
[run]
ranks = 4
timeout = 60.0
"""

SEED = 11  # by which the one kill of `make test` is that of a rank in the midst of a save, after seven steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    with TokenWriter(folder / "tokens", 97, 4) as writer:
        writer.write(np.random.default_rng(0).integers(97, size=20_000))
    (folder / "config.toml").write_text(CONFIG)
    return folder


def start(folder, run, steps):
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-m", "megalite", "train", "config.toml", f"run.dir={run}", f"train.steps={steps}"],
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
    """SIGKILL to one rank, or to all processes of the run, as where the machine is lost; whether there was any."""
    ranks = [pid for generation in descendants(process.pid)[1:2] for pid in generation]
    with suppress(ProcessLookupError):
        if everything and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            return True
        if ranks:
            os.kill(ranks[number % len(ranks)], signal.SIGKILL)
            return True
    return False


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


def losses(run, steps):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    return [(line["loss"], line["grad_norm"]) for line in lines]


def never_killed(folder, steps, monkeypatch):
    """Losses of the run that nobody kills; its ranks begin where PyTorch is imported already."""
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["train", "config.toml", f"run.dir=whole-{steps}", f"train.steps={steps}"])
    assert ended.value.code == 0
    return losses(folder / f"whole-{steps}", steps)


@pytest.mark.parametrize(("kills", "steps"), [(1, 24), pytest.param(50, 60, marks=pytest.mark.full)])
def test_a_run_that_is_killed_ends_with_the_same_losses(folder, kills, steps, monkeypatch):
    whole = never_killed(folder, steps, monkeypatch)
    generator, killed, runs = random.Random(SEED + kills), 0, 0
    while killed < kills:
        run = folder / f"killed-{kills}-{(runs := runs + 1)}"
        ended = False
        while not ended:
            process = start(folder, run, steps)
            if killed < kills:
                let_live(process, run, generator)
                killed += kill(process, generator.random() < 0.3, generator.randrange(4))
            output = process.communicate(timeout=120)[0]
            assert process.returncode in (0, -signal.SIGKILL, 69), output
            assert "Traceback" not in output, output
            ended = process.returncode == 0
        assert losses(run, steps) == whole
        config = load(run / "config.toml", [f"data.paths=['{folder / 'tokens'}']"])
        found = audit(run, open_data(config).train, config.train.global_batch)
        assert (found.steps, found.torn, found.problems) == (steps, False, ())
        left = [path.name for path in (run / "checkpoints").iterdir()]
        assert sorted(left) == [f"step-{steps - 2:08}", f"step-{steps:08}"]

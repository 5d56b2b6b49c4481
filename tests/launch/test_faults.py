"""Whole runs that are told to leave, killed, or hang: exit codes, one line that says why, run_status.json."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megalite.data import TokenWriter
from megalite.launch.cli import main

ROOT = str(Path(__file__).parents[2])

TINY = """
[model]
preset = "llama-tiny"
vocab_size = 97
[data]
paths = ["tokens"]
validation = 0.1
[train]
steps = 6
global_batch = 4
seq_len = 32
validation_batches = 1
[optimizer]
warmup = 1
[run]
dir = "run"
ranks = 2
timeout = 60
[mesh]
tp = 2
"""

# A rank with a fault: `fault` is called on the rank before step `step`, in attempt 0.
FAULTY = """
import os, signal, sys, time
from megalite.launch.cli import main
from megalite.train import loop

kind, rank, step, arguments = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
mine = os.environ["RANK"] == rank
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
rate = loop.learning_rate

def fault(index, *rest):
    if index + 1 == step and mine and first:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "sleep":
            time.sleep(1000)
        if kind == "bug":
            raise KeyError("no such layer")
    return rate(index, *rest)

loop.learning_rate = fault
if kind == "seed" and mine:
    arguments.append("train.seed=1")
main(arguments)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "faulty.py").write_text(FAULTY)
    with TokenWriter(tmp_path / "tokens", 97) as writer:
        writer.write(np.random.default_rng(0).integers(97, size=2000))
    return tmp_path


@pytest.fixture
def started(folder):
    """Starts Python with these arguments; whatever still runs at the end is killed with all its children."""
    processes = []

    def start(*arguments):
        clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=folder,
            env={**clean, "PYTHONPATH": ROOT},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def torchrun(started, kind, *overrides, rank=1, step=3, restarts=0):
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    fault = ["faulty.py", kind, rank, step]
    process = started("-m", "torch.distributed.run", *options, *fault, "train", "tiny.toml", *overrides)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def ended(folder):
    return json.loads((folder / "run" / "run_status.json").read_text())


def steps(folder):
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def said(err):
    return [line for line in err.splitlines() if line.startswith("megalite: error: ")]


def until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running(folder):
    """The steps of a run, once it has done some."""
    until(lambda: len(steps(folder)) >= 2)


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [False, True], ids=["launcher", "all processes"])
def test_sigterm_ends_the_run_after_a_whole_step_with_75(folder, started, group):
    process = started("-m", "megalite", "train", "tiny.toml", "train.steps=100000")
    running(folder)
    (os.killpg if group else os.kill)(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    found = ended(folder)
    assert (found["code"], found["retryable"], found["step"]) == (75, True, steps(folder)[-1])
    assert len(said(err)) == 1 and "Traceback" not in err


def test_sigusr1_saves_and_the_run_goes_on(folder, started):
    process = started("-m", "megalite", "train", "tiny.toml", "train.steps=100000", "checkpoint.every=0")
    running(folder)
    os.kill(process.pid, signal.SIGUSR1)
    until(lambda: list((folder / "run" / "checkpoints").glob("step-*/COMMITTED")))
    done = len(steps(folder))
    until(lambda: len(steps(folder)) > done)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert (ended(folder)["code"], ended(folder)["message"]) == (130, "ended by SIGINT")


# --- every end leaves a status --------------------------------------------------------------------------------------


def test_a_run_that_is_done_says_so_and_a_bad_setting_afterwards_too(folder, monkeypatch):
    def code(*overrides):
        with pytest.raises(SystemExit) as left:
            main(["train", "tiny.toml", *overrides])
        return left.value.code

    monkeypatch.chdir(folder)
    assert code() == 0
    assert ended(folder) == {"code": 0, "rank": None, "step": 6, "attempt": 0, "message": "done", "retryable": False}
    assert code("train.global_batch=5", "mesh.dp=2") == 78
    assert ended(folder)["code"] == 78 and "train.global_batch" in ended(folder)["message"]


@pytest.mark.full
def test_a_diverged_run_is_79_and_not_tried_again(folder, started):
    _, _, err = torchrun(started, "none", "optimizer.lr=1e30", "optimizer.warmup=0", restarts=1)
    found = ended(folder)
    assert (found["code"], found["retryable"], found["step"], found["attempt"]) == (79, False, 1, 1), err
    lines = said(err)
    assert len(lines) == 2 and lines[0] == lines[1] == f"megalite: error: {found['message']}"
    assert len(steps(folder)) == 1  # the second attempt has not computed


# --- lost, hanging and differing ranks under torchrun ---------------------------------------------------------------


def test_ranks_that_differ_are_76_before_anything(folder, started):
    _, _, err = torchrun(started, "seed")
    line = "megalite: error: ranks differ: train.seed is 0 on rank 0, 1 on rank 1; the same on all of them would do"
    assert said(err) == [line]
    assert (ended(folder)["code"], ended(folder)["rank"], ended(folder)["retryable"]) == (76, 0, False)
    assert err.count("exitcode  : 76") == 2 and not steps(folder)


def test_a_killed_rank_is_named_and_the_run_goes_on(folder, started):
    code, out, err = torchrun(started, "kill", "checkpoint.every=1", step=4, restarts=1)
    assert code == 0, err
    assert "mesh dp 1 × pp 1 × sp 1 × tp 2 on " in out
    lines = said(err)
    assert len(lines) == 1 and lines[0].startswith("megalite: error: rank 1 of 2 does not answer: it was ended"), err
    assert steps(folder) == [1, 2, 3, 4, 5, 6]
    assert (ended(folder)["code"], ended(folder)["attempt"]) == (0, 1)


@pytest.mark.full
def test_a_rank_that_sleeps_is_named_by_step_place_and_collective(folder, started):
    start = time.monotonic()
    _, _, err = torchrun(started, "sleep", "run.timeout=10")
    lines = said(err)
    assert len(lines) == 1, err
    assert lines[0].startswith("megalite: error: rank 1 of 2 hangs, in step 3 in __main__:")
    assert " fault; rank 0 waits for it in " in lines[0] and "#" in lines[0]
    found = ended(folder)
    assert (found["code"], found["rank"], found["step"], found["retryable"]) == (69, 1, 2, True)
    assert "in fault" in (folder / "run" / "stacks" / "rank-00001.txt").read_text()
    assert err.count("exitcode  : 69") == 2 and time.monotonic() - start < 120


def test_a_mistake_of_ours_keeps_its_stack_and_the_others_are_silent(folder, started):
    _, _, err = torchrun(started, "bug")
    assert said(err) == []
    assert "rank 1 of 2 failed:\nTraceback" in err and "KeyError: 'no such layer'" in err
    assert "Connection closed by peer" not in err
    found = ended(folder)
    assert (found["code"], found["rank"], found["step"]) == (70, 1, 2)
    assert found["message"] == "KeyError: 'no such layer'"


@pytest.mark.full
def test_a_stopped_rank_is_named_by_the_others(folder, started):
    _, _, err = torchrun(started, "stop", "run.timeout=10")  # torchrun kills it after 30 s
    assert said(err)[0].startswith("megalite: error: rank 1 of 2 does not answer: it was ended or stopped, in step 3")
    assert (ended(folder)["code"], ended(folder)["rank"]) == (69, 1)

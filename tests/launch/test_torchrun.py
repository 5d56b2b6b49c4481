"""Joining the world of a real torchrun, also after it has restarted the ranks."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megalite.errors import ConfigError
from megalite.launch.torchrun import World, join_torchrun, launched

WORLD = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from megalite.launch.torchrun import join_torchrun

world = join_torchrun(timeout=60)
attempt = world.attempt
total = torch.tensor([world.rank + 1.0])
dist.all_reduce(total)
print(f"attempt {attempt}: rank {world.rank} of {world.size} has {total.item()}\\n", end="", flush=True)
if "die" in sys.argv and attempt == 0 and world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if "hang" in sys.argv and world.rank == 1:
    time.sleep(60)
if sys.argv[1:]:
    dist.barrier()
"""


@pytest.fixture
def torchrun(tmp_path):
    started = []

    def start(*args, restarts=0):
        (tmp_path / "script.py").write_text(SCRIPT)
        options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, tmp_path / "script.py", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_no_world_without_torchrun(monkeypatch):
    for name in WORLD:
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    with pytest.raises(ConfigError, match="RANK is not set: start this with torchrun"):
        join_torchrun()


def test_the_place_comes_from_the_environment(monkeypatch):
    for name, value in WORLD.items():
        monkeypatch.setenv(name, value)
    assert launched() == World(rank=3, size=8, local_rank=1, local_size=2)
    monkeypatch.setenv("LOCAL_RANK", "one")
    with pytest.raises(ConfigError, match="LOCAL_RANK='one' in the environment: needs a number"):
        launched()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(ConfigError, match="RANK=8 in the environment: needs a number below WORLD_SIZE=8"):
        launched()
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match="RANK is set but LOCAL_RANK is not"):
        launched()


@pytest.mark.parametrize("time_of_20", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, 20))])
def test_ranks_join_and_meet_again_after_one_was_killed(torchrun, time_of_20):
    process = torchrun("die", restarts=1)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    said = [f"attempt {attempt}: rank {rank} of 2 has 3.0" for attempt in (0, 1) for rank in (0, 1)]
    assert sorted(out.split("\n")) == ["", *said], err
    assert "Connection refused" not in err  # by which PyTorch's own start meets the addresses of dead ranks


@pytest.mark.full
def test_ctrl_c_ends_a_rank_that_waits_in_a_collective(torchrun):
    process = torchrun("hang")
    for _ in range(2):
        assert " has 3.0" in process.stdout.readline()
    time.sleep(0.2)  # rank 0 is in the barrier by now
    start = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - start < 5, err  # torchrun kills after 30 s what does not end by itself
    assert 'script.py", line' not in err

"""What a user sees of ranks that `run_local` has started, and what is left of them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megalite.launch.local import SHOW_CURSOR

AT_ONCE = 3.0  # seconds: a tenth of one where the cores are free

STEPS = """
import os, sys, time
from megalite.errors import DataError, MegaliteError
from megalite.launch import local

def steps(world, fault):
    import torch
    import torch.distributed as dist
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
    if world.rank == 0:
        print(world, total.item(), sys.stdout.isatty(), flush=True)
    if world.rank == 1 and fault == "data":
        raise DataError("tokens.bin is empty")
    if world.rank == 1 and fault == "bug":
        raise KeyError("no such layer")
    if world.rank == 1 and fault == "kill":
        os.kill(os.getpid(), 9)
    if world.rank == 1 and fault == "sleep":
        time.sleep(60)
    if fault:
        dist.barrier()
"""

FAULTS = """
print("torch" in sys.modules)
for fault in "", "data", "bug", "kill":
    try:
        print(fault, local.run_local(steps, 3, (fault,)), flush=True)
    except MegaliteError as error:
        print(f"{fault}: {error} {type(error).__name__} {error.exit_code}", flush=True)
    except SystemExit as error:
        print(f"{fault}: exit {error.code}", flush=True)
print("torch" in sys.modules)
"""

HANG = """
local.run_local(steps, 3, ("sleep",))
"""


def group_members(group):
    """The processes of a group that are not zombies."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in table.splitlines()]
    return [int(pid) for pid, pgid, stat in rows if int(pgid) == group and not stat.startswith("Z")]


def seconds_until_gone(group, limit=10.0):
    start = time.monotonic()
    while members := group_members(group):
        assert time.monotonic() - start < limit, f"still there: {members}"
        time.sleep(0.02)
    return time.monotonic() - start


class Terminal:
    """A script at a terminal of its own, as a user starts it."""

    def __init__(self, script, tmp_path):
        self.folder = tmp_path / "tmp"
        self.folder.mkdir()
        (tmp_path / "script.py").write_text(script)
        self.screen, tty = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, tmp_path / "script.py"],
            stdin=tty,
            stdout=tty,
            stderr=tty,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )
        os.close(tty)
        self.text = ""

    def read(self, until=None):
        while until is None or until not in self.text:
            try:
                more = os.read(self.screen, 65536)
            except OSError:  # Linux's way to say that nobody has the terminal open any more
                more = b""
            if not more:
                assert until is None, self.text
                break
            self.text += more.decode().replace("\r\n", "\n")
        return self.text

    def left_files(self):
        return [path for path in self.folder.iterdir() if not path.name.startswith("torchinductor")]  # PyTorch's cache


@pytest.fixture
def terminal(tmp_path):
    started = []
    yield lambda script: started.append(Terminal(script, tmp_path)) or started[-1]
    for each in started:
        each.process.kill()
        each.process.wait()
        os.close(each.screen)


def test_each_failure_is_told_once(terminal):
    user = terminal(STEPS + FAULTS)
    text = user.read().replace(SHOW_CURSOR, "")
    assert user.process.wait() == 0
    joined = "World(rank=0, size=3, local_rank=0, local_size=3) 6.0 True\n"
    expected, traceback = text.split("rank 1 of 3 failed:\n")
    assert expected == (
        f"False\n{joined} None\n{joined}data: tokens.bin is empty DataError 65\n{joined}"  # the parent needs no torch
    )
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert traceback.endswith(
        f"in steps\n    raise KeyError(\"no such layer\")\nKeyError: 'no such layer'\n\nbug: exit 70\n"
        f"{joined}kill: rank 1 died of SIGKILL RankLost 69\nFalse\n"
    )
    assert seconds_until_gone(user.process.pid) < AT_ONCE
    assert not user.left_files()


@pytest.mark.parametrize(
    ("number", "whole_group", "code"),
    [
        pytest.param(signal.SIGINT, True, 130, id="ctrl-c"),
        pytest.param(signal.SIGINT, False, 130, id="int-parent"),
        pytest.param(signal.SIGTERM, True, 143, id="term-group", marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, False, 143, id="term-parent", marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, False, -9, id="kill-parent"),
    ],
)
def test_a_signal_ends_every_process_at_once(terminal, number, whole_group, code):
    user = terminal(STEPS + HANG)
    user.read(until="6.0 True\n")
    assert len(group_members(user.process.pid)) >= 5  # parent, server, three ranks
    if whole_group:
        os.killpg(user.process.pid, number)
    else:
        os.kill(user.process.pid, number)
    assert user.process.wait(10) == code
    assert seconds_until_gone(user.process.pid) < AT_ONCE
    assert not user.left_files()
    assert "Traceback" not in user.read()
    assert (SHOW_CURSOR in user.text) == (number != signal.SIGKILL)


def test_ctrl_c_while_torch_is_imported(terminal):
    user = terminal(STEPS + 'local.warm()\nprint("warm", flush=True)' + HANG)
    user.read(until="warm\n")
    time.sleep(0.3)
    os.killpg(user.process.pid, signal.SIGINT)
    assert user.process.wait(10) == 130
    assert seconds_until_gone(user.process.pid) < AT_ONCE
    assert "Traceback" not in user.read()

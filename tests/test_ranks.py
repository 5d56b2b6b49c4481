"""run_ranks: what a function finds on its ranks, and what the failure says when one of them fails."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megalite.testing import RanksFailed, run_ranks


class Scale(torch.nn.Module):
    """Defined in a test module, which the ranks cannot import."""

    def forward(self, x):
        return x * FACTOR


FACTOR = 3


def test_results_come_in_rank_order_with_their_tensors():
    offset = torch.tensor([10.0])  # in the closure

    def rank_and_total(x, *, scale):
        total = x * scale + offset
        dist.all_reduce(total)
        return dist.get_rank(), total

    results = run_ranks(rank_and_total, 3, torch.ones(2), scale=2)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(total, torch.full((2,), 36.0)) for _, total in results)


def test_what_a_test_module_defines_reaches_the_ranks():
    assert run_ranks(lambda: Scale()(2), 1) == [6]
    assert run_ranks(Scale(), 2, 2) == [6, 6]
    assert run_ranks(partial(Scale.forward, None), 1, 2) == [6]
    (back,) = run_ranks(lambda: Scale(), 1)
    assert type(back) is Scale


def test_operators_of_torch_reach_the_ranks():
    namespace = torch.ops.aten

    def run():
        return (torch.ops.aten.add(1, 1), namespace.mul(3, 2))

    assert run_ranks(run, 2) == [(2, 6)] * 2


def test_helper_modules_are_found_as_in_the_parent(tmp_path, monkeypatch):
    (tmp_path / "a_helper.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def use():
        from a_helper import twice

        return twice(2), os.getcwd()

    assert run_ranks(use, 2) == [(4, str(tmp_path))] * 2


def test_a_call_leaves_nothing_to_the_next():
    def state():
        draws = torch.rand(1).item(), random.random(), np.random.rand()
        return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), draws, dist.get_world_size()

    def disturb():
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_num_threads(2)
        torch.manual_seed(1)
        dist.new_group([0])

    before = run_ranks(state, 2)
    assert before[0] == before[1]
    assert before[0][:3] == (torch.float32, True, 1)
    run_ranks(disturb, 2)
    assert run_ranks(state, 2) == before


def test_processes_are_kept_and_added():
    pids = run_ranks(os.getpid, 2)
    assert run_ranks(os.getpid, 3)[:2] == pids
    assert run_ranks(os.getpid, 1) == pids[:1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_process_that_died_between_two_calls_is_replaced(number, capfd):
    pids = run_ranks(os.getpid, 3)
    os.kill(pids[1], number)
    while Path(f"/proc/{pids[1]}").exists():  # until the signal has done its work
        time.sleep(0.01)
    after = run_ranks(os.getpid, 3)
    assert after[0] == pids[0] and after[1] != pids[1] and after[2] == pids[2]
    assert capfd.readouterr().err == f"rank 1 died of {number.name} (between two calls; started anew)\n"
    assert run_ranks(dist.get_world_size, 3) == [3, 3, 3]
    assert capfd.readouterr().err == ""


def test_four_warm_ranks_start_in_well_under_half_a_second():
    run_ranks(dist.get_rank, 4)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert run_ranks(dist.get_rank, 4) == [0, 1, 2, 3]
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.25  # 0.05 s where the cores are free


def test_output_is_shown_by_rank(capsys):
    def speak():
        print("hello from", dist.get_rank())
        os.write(2, b"and from below\n")

    run_ranks(speak, 2)
    shown = "".join(f"rank {rank}: hello from {rank}\nrank {rank}: and from below\n" for rank in range(2))
    assert capsys.readouterr().out == shown


def test_failure_names_the_rank_that_raised_and_those_that_wait_for_it():
    def uneven():
        if dist.get_rank() == 1:
            raise ValueError("3 heads do not divide by 2")
        wait_for_all()

    def wait_for_all():
        dist.barrier()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(uneven, 3)
    message = str(caught.value)
    assert message.startswith("rank 1 of 3 raised ValueError: 3 heads do not divide by 2\nTraceback (most recent call")
    assert 'raise ValueError("3 heads do not divide by 2")' in message
    waiting = message[message.index("ranks 0, 2 of 3 did not finish in the next 2 s; latest call first:\n") :]
    assert "distributed_c10d.py" in waiting and waiting.index(" in barrier\n") < waiting.index(" in wait_for_all\n")
    assert waiting.splitlines()[-1].endswith(" in uneven")  # nothing of the pool's own
    assert sorted(caught.value.failures) == [0, 1, 2]
    assert run_ranks(dist.get_world_size, 3) == [3, 3, 3]  # on new ranks


def test_time_limit_tells_every_stack():
    def hang():
        if dist.get_rank() == 1:
            time.sleep(60)
        dist.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(hang, 2, timeout=1)
    assert time.monotonic() - start < 5
    message = str(caught.value)
    assert message.count("of 2 did not finish within 1 s") == 2
    assert " in all_reduce\n" in caught.value.failures[0] and " in all_reduce\n" not in caught.value.failures[1]
    assert all(" in hang\n" in failure for failure in caught.value.failures.values())


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "died of SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "died of SIGSEGV"),
        (lambda: os._exit(3), "exited with code 3"),
    ],
)
def test_a_rank_that_dies_comes_first(end, how):
    def die():
        if dist.get_rank() == 1:
            end()
        dist.barrier()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(die, 2)
    assert str(caught.value).startswith(f"rank 1 of 2 {how}\n")
    assert caught.value.failures[0].startswith("rank 0 raised RuntimeError:")
    assert (" in die\n" in caught.value.failures[1]) == ("SEGV" in how)


def test_ranks_that_fail_alike_are_told_once():
    def fail():
        raise SystemExit("too few heads")

    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail, 3)
    assert str(caught.value).startswith("ranks 0, 1, 2 of 3 raised SystemExit: too few heads\n")
    assert str(caught.value).count("Traceback") == 1


def test_what_cannot_be_sent_back_is_a_failure():
    with pytest.raises(RanksFailed, match="rank 0 of 1 raised TypeError: cannot pickle"):
        run_ranks(threading.Lock, 1)


def test_skip_and_xfail_pass_through():
    with pytest.raises(pytest.skip.Exception, match="no second GPU"):
        run_ranks(lambda: pytest.skip("no second GPU"), 2)
    with pytest.raises(pytest.xfail.Exception, match="known"):
        run_ranks(lambda: pytest.xfail("known"), 2)
    with pytest.raises(RanksFailed, match="raised Failed: on purpose"):
        run_ranks(lambda: pytest.fail("on purpose"), 2)


def test_a_world_needs_a_rank():
    with pytest.raises(ValueError, match="world_size=0: needs at least one rank"):
        run_ranks(dist.get_rank, 0)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGKILL])
def test_no_process_outlives_the_parent(tmp_path, number):
    # A script without `if __name__ == "__main__"`, whose ranks are busy when it is ended.
    script = """
import signal, time
from megalite.testing import run_ranks
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a pytest in the background would not pass on
print(run_ranks(lambda: 1, 2), flush=True)
run_ranks(time.sleep, 2, 60)
"""
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "[1, 1]\n"
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=5)  # which ends when nobody has the pipes open any more
    assert out == ""
    assert process.returncode == -number
    assert err.count("Traceback") == (number == signal.SIGINT)

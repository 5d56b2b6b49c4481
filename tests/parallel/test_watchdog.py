"""Ranks that hang, and who is named: asleep in Python, stopped, gone, or with a collective left out."""

import os
import queue
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from megalite.parallel import watchdog
from megalite.parallel.in_flight import issue_all_reduce
from megalite.parallel.mesh import Mesh
from megalite.parallel.peers import peers
from megalite.parallel.traffic import Traffic, traffic
from megalite.parallel.watchdog import Watchdog
from megalite.testing import run_ranks

TIMEOUT = 1.0


def watched(tmp_path, dp, tp, stacks=None):
    """A mesh and a watchdog whose verdict comes into the queue."""
    mesh, found = Mesh(dp=dp, tp=tp), queue.Queue()
    whom = peers(mesh.sizes, 1, dp).__getitem__
    store = dist.FileStore(str(tmp_path / "store"), mesh.size)
    vars(traffic).update(vars(Traffic()))  # warm ranks have counted what others of them took no part in
    traffic.did_step(4)
    return mesh, found, Watchdog(store, mesh.rank, mesh.size, TIMEOUT, whom, found.put, stacks)


def sleeps(tmp_path):
    mesh, found, dog = watched(tmp_path, 2, 2, tmp_path / "stacks")
    dog.start()
    issue_all_reduce(torch.ones(3), mesh.tp).wait()
    if mesh.rank == 1:
        verdict = found.get(timeout=10)
    issue_all_reduce(torch.ones(5), mesh.tp).wait()
    issue_all_reduce(torch.ones(7), mesh.dp).wait()
    verdict = verdict if mesh.rank == 1 else found.get(timeout=10)
    dog.stop()
    return verdict


def test_a_rank_that_sleeps_in_python_is_named_by_all(tmp_path):
    start = time.monotonic()
    verdicts = run_ranks(sleeps, 4, tmp_path)
    assert time.monotonic() - start < TIMEOUT + watchdog.GRACE + 10
    assert len(set(verdicts)) == 1
    assert (verdicts[0].rank, verdicts[0].step) == (1, 4)
    said = verdicts[0].message
    assert said.startswith("rank 1 of 4 hangs, in step 5 in queue:")
    assert "; rank 0 waits for it in tp#" in said and " all_reduce torch.float32[5] of " in said
    assert said.endswith(f"; stacks: {tmp_path}/stacks/")
    stacks = [(tmp_path / "stacks" / f"rank-{rank:05}.txt").read_text() for rank in range(4)]
    assert all("in sleeps" in stack for stack in stacks)


def leaves_one_out(tmp_path):
    mesh, found, dog = watched(tmp_path, 2, 2)
    dog.start()
    x, verdicts = torch.ones(3), []
    issue_all_reduce(x, mesh.tp).wait()

    def release():
        verdicts.append(found.get(timeout=10))
        if mesh.rank == 1:
            issue_all_reduce(x, mesh.tp).wait()

    releasing = threading.Thread(target=release)
    releasing.start()
    if mesh.rank != 1:
        issue_all_reduce(x, mesh.tp).wait()
    issue_all_reduce(x, mesh.tp).wait()  # of rank 1 the second, of the others the third, of equal shape
    issue_all_reduce(x, mesh.world).wait()
    releasing.join()
    dog.stop()
    return verdicts[0]


def test_a_collective_that_was_left_out_is_found_by_its_place(tmp_path):
    verdicts = run_ranks(leaves_one_out, 4, tmp_path)
    assert len(set(verdicts)) == 1 and (verdicts[0].rank, verdicts[0].step) == (1, 4)
    said = verdicts[0].message
    assert said.startswith("rank 1 of 4 took another way: its tp#")
    mine, theirs = said.partition(": its ")[2].partition(", in step 5")[0].split(" stands against ")
    assert mine.split(":")[0] == theirs.split(":")[0]  # the same number, dtype and shape, from another line
    assert mine != theirs.removesuffix(" of rank 0")


def stops(tmp_path):
    mesh, found, dog = watched(tmp_path, 4, 1)
    dog.start()
    (tmp_path / f"{mesh.rank}.pid").write_text(str(os.getpid()))
    issue_all_reduce(torch.ones(3), mesh.dp).wait()
    if mesh.rank == 2:
        time.sleep(2 * watchdog.POLL)  # so that it has once said where it is
        os.kill(os.getpid(), signal.SIGSTOP)
    verdicts = []
    waking = threading.Thread(target=wakes, args=(found, tmp_path, verdicts))
    waking.start()
    issue_all_reduce(torch.ones(5), mesh.dp).wait()
    waking.join()
    dog.stop()
    return verdicts[0]


def wakes(found, tmp_path, verdicts):
    verdicts.append(found.get(timeout=10))
    os.kill(int((tmp_path / "2.pid").read_text()), signal.SIGCONT)


def test_a_stopped_rank_is_named_by_the_others(tmp_path):
    verdicts = run_ranks(stops, 4, tmp_path)
    assert len(set(verdicts)) == 1 and (verdicts[0].rank, verdicts[0].step) == (2, 4)
    said = verdicts[0].message
    assert said.startswith("rank 2 of 4 does not answer: it was ended or stopped, in step 5")
    assert "; rank 0 waits for it in dp#" in said and " all_reduce torch.float32[5] of " in said


def gets_on(tmp_path):
    mesh, found, dog = watched(tmp_path, 2, 1)
    dog.start()
    for _ in range(3):
        time.sleep(TIMEOUT * 0.6)
        issue_all_reduce(torch.ones(3), mesh.dp).wait()
    if mesh.rank == 0:
        dog.stop()  # one that has left is not waited for
    else:
        assert found.get(timeout=10).rank == 1
        dog.stop()
    return found.empty()


def test_who_gets_on_is_left_alone_and_who_has_left_is_not_blamed(tmp_path):
    assert run_ranks(gets_on, 2, tmp_path) == [True, True]


@pytest.mark.parametrize(
    ("sizes", "ulysses", "shard"),
    [((2, 2, 1, 2), 1, 2), pytest.param((2, 1, 4, 1), 2, 4, marks=pytest.mark.full)],
    ids=str,
)
def test_peers_are_those_of_the_meshs_groups(sizes, ulysses, shard):
    def groups():
        mesh = Mesh(*sizes, ulysses=ulysses, shard=shard)
        axes = (mesh.dp, mesh.pp, mesh.sp, mesh.tp, mesh.ring, mesh.ulysses, mesh.copies, mesh.shards, mesh.world)
        axes += (mesh.replicas,)
        return {axis.name: tuple(dist.get_process_group_ranks(axis.group)) for axis in axes if axis.size > 1}

    by_arithmetic = peers(dict(zip(("dp", "pp", "sp", "tp"), sizes, strict=True)), ulysses, shard)
    for rank, found in enumerate(run_ranks(groups, 8)):
        assert found.items() <= by_arithmetic[rank].items()
        assert all(len(by_arithmetic[rank][axis]) == 1 for axis in by_arithmetic[rank].keys() - found - {"dp×sp"})

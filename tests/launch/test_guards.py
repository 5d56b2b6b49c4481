"""The guards at start by themselves: one attempt for all ranks, ranks that differ, the status file."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from megalite.config import Config, DataConfig, RunConfig, TrainConfig
from megalite.data import TokenWriter
from megalite.errors import MeshMismatch, NumericError, RankLost
from megalite.launch import status
from megalite.launch.attempt import agree_on_attempt
from megalite.launch.fingerprint import compare, fingerprint
from megalite.launch.guarded import peer_is_lost
from megalite.launch.status import Status


def on_threads(size, call):
    """`call(rank)` on as many threads; what each returned or raised."""

    def caught(rank):
        try:
            return call(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(caught, range(size)))


# --- one attempt for all --------------------------------------------------------------------------------------------


def test_ranks_agree_on_attempts_in_a_store_that_keeps_what_dead_ranks_wrote():
    store = dist.HashStore()
    for attempt in range(3):
        assert on_threads(4, lambda rank: agree_on_attempt(store, rank, 4, 10)) == [attempt] * 4
        store.set("hello/2", "of one that died before it was answered")


def test_an_attempt_in_which_a_rank_died_halfway_does_not_shift_the_next():
    store = dist.HashStore()
    first = on_threads(3, lambda rank: agree_on_attempt(store, rank, 4, 0.2))  # rank 3 never came
    assert [type(error) for error in first] == [RankLost] * 3
    assert str(first[0]) == "rank 3 of 4 did not join within 0.2 s" and first[0].rank == 3
    assert on_threads(2, lambda rank: agree_on_attempt(store, rank, 2, 10)) == [1, 1]  # a smaller world


def test_who_is_missing_is_named():
    error = on_threads(1, lambda rank: agree_on_attempt(dist.HashStore(), rank, 4, 0.1))[0]
    assert str(error) == "ranks 1, 2, 3 of 4 did not join within 0.1 s"


# --- ranks that differ ----------------------------------------------------------------------------------------------


def tokens(folder, first=1):
    with TokenWriter(folder, 97) as writer:
        writer.write(np.arange(first, first + 90))
    return str(folder)


def refusals(prints):
    store = dist.HashStore()
    return on_threads(len(prints), lambda rank: compare(store, rank, len(prints), prints[rank], 10))


def test_what_may_differ_between_machines_is_left_out(tmp_path):
    configs = [
        Config(data=DataConfig(paths=(tokens(tmp_path / name),)), run=RunConfig(dir=name)) for name in ("here", "there")
    ]
    assert refusals([fingerprint(config, 1, "cpu") for config in configs]) == [None, None]


def test_every_rank_names_key_values_and_ranks(tmp_path):
    mine = fingerprint(Config(), 1, "cpu")
    assert {"train.seed", "train.dtype", "mesh.tp", "code", "torch", "threads"} <= mine.keys()
    other = fingerprint(replace(Config(), train=TrainConfig(seed=1)), 2, "cpu")
    errors = refusals([mine, mine, other, mine])
    assert [type(error) for error in errors] == [MeshMismatch] * 4
    said = (
        "ranks differ: threads is 1 on ranks 0, 1, 3, 2 on rank 2; train.seed is 0 on ranks 0, 1, 3, 1 on rank 2; "
        "the same on all of them would do"
    )
    assert {str(error) for error in errors} == {said} and {error.rank for error in errors} == {2}
    assert errors[0].exit_code == 76 and not errors[0].retryable


def test_data_that_differs_in_content_alone(tmp_path):
    paths = [tokens(tmp_path / "a"), tokens(tmp_path / "b", first=2)]
    found = [fingerprint(Config(data=DataConfig(paths=(path,))), 1, "cpu") for path in paths]
    assert "data.paths[0].content is " in str(refusals(found)[0])


def test_more_than_a_line_can_hold_is_counted():
    errors = refusals([{f"key{i}": str(rank) for i in range(9)} for rank in range(2)])
    assert "key3 is 0 on rank 0, 1 on rank 1; and 5 more; " in str(errors[1])


def test_a_rank_that_says_nothing_is_named():
    with pytest.raises(RankLost, match=r"^ranks 1, 2 of 3 did not say within 0\.1 s what it runs$"):
        compare(dist.HashStore(), 0, 3, {}, 0.1)


# --- the status file ------------------------------------------------------------------------------------------------


def test_a_status_is_what_its_error_says_and_replaces_an_older_one_whole(tmp_path):
    error = NumericError("the loss is nan at step 4 on rank 2")
    error.rank, error.step = 2, 3
    status.write(tmp_path, Status.of(RankLost("gone")))
    status.write(tmp_path, Status.of(error, attempt=1))
    found = json.loads((tmp_path / "run_status.json").read_text())
    assert found == {
        "code": 79,
        "rank": 2,
        "step": 3,
        "attempt": 1,
        "message": "the loss is nan at step 4 on rank 2",
        "retryable": False,
    }
    again = Status(**found).error()
    assert (again.exit_code, again.rank, again.step, str(again)) == (79, 2, 3, str(error))
    assert os.listdir(tmp_path) == ["run_status.json"]
    status.clear(tmp_path)
    assert os.listdir(tmp_path) == []


def test_readers_never_see_half_a_status(tmp_path):
    status.write(tmp_path, Status(70, 0, 0, 0, "x" * 100_000, True))
    stop = threading.Event()

    def rewrite():
        while not stop.is_set():
            status.write(tmp_path, Status(70, 0, 0, 0, "y" * 100_000, True))

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(200):
            assert len(json.loads((tmp_path / "run_status.json").read_text())["message"]) == 100_000
    finally:
        stop.set()
        writer.join()


def test_a_status_that_cannot_be_written_hides_nothing(tmp_path):
    status.write(tmp_path / "no such folder", Status(0, None, 1, 0, "done", False))
    assert os.listdir(tmp_path) == []


# --- whose error it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4321"), True),
        (dist.DistBackendError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("Connection closed by peer"), False),
    ],
)
def test_a_lost_peer_is_told_from_a_mistake(error, lost):
    assert peer_is_lost(error) == lost
    outer = RuntimeError("rank 0, at 2F0: 1F0 did not come")
    outer.__cause__ = error
    assert peer_is_lost(outer) == lost

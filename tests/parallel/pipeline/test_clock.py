"""Ranks agree on the time: to microseconds where they must ask one another, and exactly where they need not."""

import time

import pytest
import torch

from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.pipeline.clock import Clock, gather, offset
from megalite.testing import run_ranks


def test_marks_of_a_cpu_are_seconds():
    clock = Clock(torch.device("cpu"))
    before = time.perf_counter()
    marks = [clock.mark(), clock.mark()]
    read = clock.read(marks)
    assert before <= read[0] <= read[1] <= time.perf_counter()


def test_ranks_of_one_machine_have_one_clock():
    def asked():
        return offset(Mesh(pp=2).pp)

    assert run_ranks(asked, 2) == [0.0, 0.0]
    assert offset(Axis()) == 0.0


@pytest.mark.parametrize("size", [2, 4])
def test_round_trips_find_a_clock_that_is_ahead(size, monkeypatch):
    """Told that they are apart, ranks of one machine find 0, or by how much a clock was put forward."""

    def asked():
        axis = Mesh(pp=size).pp
        found = [offset(axis, host=f"machine {axis.rank}") for _ in range(10)]
        true = time.perf_counter
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "perf_counter", lambda: true() + 1000.0 * axis.rank)
            ahead = offset(axis, host=f"machine {axis.rank}")
        return found, ahead + 1000.0 * axis.rank

    for rank, (found, ahead) in enumerate(run_ranks(asked, size)):
        errors = sorted(abs(value) * 1e6 for value in found)
        print(f"rank {rank} of {size}: median error {errors[5]:.1f} µs, largest {errors[-1]:.1f} µs")
        assert errors[5] < 200
        assert abs(ahead) < 5e-3


@pytest.mark.ranks(1, 3)
def test_times_of_every_rank_reach_every_rank():
    axis = Mesh(pp=torch.distributed.get_world_size()).pp
    wanted = [[1e6 + rank + i / 1e6 for i in range(4 - rank)] for rank in range(axis.size)]
    assert gather(axis, wanted[axis.rank], [4 - rank for rank in range(axis.size)]) == wanted


def test_another_number_of_times_is_refused():
    with pytest.raises(ValueError, match="2 times on rank 0, where 3 are expected"):
        gather(Axis(), [1.0, 2.0], [3])

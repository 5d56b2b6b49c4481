"""What the collectives are to PyTorch below them."""

import torch
from torch.profiler import ProfilerActivity, profile

from megalite.parallel.in_flight import (
    issue_all_gather,
    issue_all_reduce,
    issue_all_reduce_in_place,
    issue_all_to_all,
    issue_reduce_scatter,
)
from megalite.parallel.mesh import Mesh
from megalite.testing import run_ranks


def test_gloo_has_a_short_name_for_each():
    # A longer one, such as that of c10d::allgather_into_tensor_coalesced_, may corrupt the heap: see in_flight.py.
    def names():
        axis = Mesh(tp=2).tp
        x = torch.ones(2, 2)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            issue_all_gather(x, axis, 0).wait()
            issue_all_reduce(x, axis).wait()
            issue_all_reduce_in_place(x.clone(), axis).wait()
            issue_all_to_all(x, axis, 0, 1).wait()
            issue_reduce_scatter(x, axis, 0).wait()
        return {event.name for event in profiled.events() if event.name.startswith("c10d::")}

    for found in run_ranks(names, 2):
        assert found == {"c10d::_allgather_base_", "c10d::allreduce_", "c10d::alltoall_base_"}


def test_collectives_may_overlap_on_one_group():
    def overlap():
        axis = Mesh(tp=2).tp
        x = torch.arange(8.0).view(2, 4) + 10 * axis.rank
        whole = torch.cat([torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 4) + 10])
        for _ in range(100):
            pending = [issue(x, axis) for issue in (gather, exchange) * 4]
            for gathered, exchanged in zip(pending[::2], pending[1::2], strict=True):
                assert torch.equal(gathered.wait(), whole)
                assert torch.equal(exchanged.wait(), whole[axis.rank :: 2])

    def gather(x, axis):
        return issue_all_gather(x, axis, 0)

    def exchange(x, axis):
        return issue_all_to_all(x, axis, 0, 0)

    run_ranks(overlap, 2)

"""Ranks and coordinates are arithmetic; axes have the ranks that the picture in mesh.py shows."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megalite.parallel.mesh import AXES, Axis, Mesh, axis_ranks, coordinates, rank_at
from megalite.testing import run_ranks

SIZES = st.tuples(*[st.integers(1, 4)] * 4).map(lambda sizes: dict(zip(AXES, sizes, strict=True)))


@given(SIZES)
def test_ranks_and_coordinates_are_a_bijection(sizes):
    everywhere = [dict(zip(AXES, where, strict=True)) for where in itertools.product(*map(range, sizes.values()))]
    assert [coordinates(rank, sizes) for rank in range(math.prod(sizes.values()))] == everywhere  # tp innermost
    assert [rank_at(where, sizes) for where in everywhere] == list(range(len(everywhere)))


@given(SIZES)
def test_the_groups_of_an_axis_part_the_ranks(sizes):
    ranks = range(math.prod(sizes.values()))
    for name in AXES:
        groups = {tuple(axis_ranks(rank, name, sizes)) for rank in ranks}
        assert sorted(itertools.chain(*groups)) == list(ranks)
        for rank in ranks:
            group = axis_ranks(rank, name, sizes)
            assert len(group) == sizes[name]
            assert group[coordinates(rank, sizes)[name]] == rank


def test_the_formula_of_the_docstring():
    sizes = {"dp": 2, "pp": 3, "sp": 4, "tp": 5}
    assert rank_at({"dp": 1, "pp": 2, "sp": 3, "tp": 4}, sizes) == ((1 * 3 + 2) * 4 + 3) * 5 + 4
    assert axis_ranks(0, "tp", sizes) == [0, 1, 2, 3, 4]
    assert axis_ranks(7, "dp", sizes) == [7, 67]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_is_an_error(rank):
    with pytest.raises(ValueError, match=rf"rank {rank} is not in a mesh of dp 2 × tp 2"):
        coordinates(rank, {"dp": 2, "tp": 2})


def test_a_coordinate_outside_is_an_error():
    with pytest.raises(ValueError, match="coordinate tp=2 is not in a mesh of dp 2 × tp 2"):
        rank_at({"dp": 0, "tp": 2}, {"dp": 2, "tp": 2})


def test_the_mesh_of_one_needs_no_process_group():
    assert not dist.is_initialized()
    mesh = Mesh()
    assert (mesh.size, mesh.rank, mesh.device_mesh) == (1, 0, None)
    assert [mesh.dp, mesh.pp, mesh.sp, mesh.tp] == [Axis(name) for name in AXES]
    assert not mesh.tp.overlaps
    assert repr(mesh) == "Mesh(dp=1, pp=1, sp=1, tp=1, rank=0)"


@pytest.mark.parametrize("size", [0, -1, 1.0, "2", None])
def test_a_size_that_is_none_is_an_error(size):
    with pytest.raises(ValueError, match=r"mesh\.tp: .* given; a whole number of at least 1 would do"):
        Mesh(tp=size)


def test_ulysses_divides_sp():
    with pytest.raises(ValueError, match=r"mesh\.ulysses: 2 given; a divisor of sp=1 would do"):
        Mesh(ulysses=2)
    assert Mesh(ulysses=1).ulysses == 1


def test_more_ranks_than_were_started_is_an_error():
    with pytest.raises(ValueError, match="mesh dp 2 × pp 1 × sp 1 × tp 2 needs 4 ranks, 1 were started; start 4"):
        Mesh(dp=2, tp=2)


@pytest.mark.ranks(3)
def test_another_number_of_ranks_is_an_error():
    with pytest.raises(ValueError, match="mesh dp 1 × pp 1 × sp 1 × tp 2 needs 2 ranks, 3 were started"):
        Mesh(tp=2)
    assert Mesh().size == 1  # the dense twin, on ranks that are up


def test_an_axis_of_several_needs_a_group():
    with pytest.raises(ValueError, match="axis tp has 2 ranks and no process group"):
        Axis("tp", 2, 0)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 4), (4, 1, 1, 1), (2, 1, 1, 2), (1, 2, 1, 2), (1, 2, 2, 1), (2, 1, 1, 3)])
def test_groups_hold_the_ranks_of_their_axis(sizes):
    def seen():
        mesh = Mesh(*sizes)
        found = {}
        for axis in (mesh.dp, mesh.pp, mesh.sp, mesh.tp):
            assert (axis.group is None) == (axis.size == 1)
            ranks = [mesh.rank]
            if axis.group is not None:
                ranks = dist.get_process_group_ranks(axis.group)
                assert axis.rank == dist.get_group_rank(axis.group, mesh.rank)
            found[axis.name] = (axis.rank, ranks)
        return mesh.rank, found

    names = dict(zip(AXES, sizes, strict=True))
    for rank, (own, found) in enumerate(run_ranks(seen, math.prod(sizes))):
        assert own == rank
        where = coordinates(rank, names)
        assert found == {name: (where[name], axis_ranks(rank, name, names)) for name in AXES}


@pytest.mark.ranks(4)
def test_pytorchs_own_tools_accept_the_device_mesh():
    mesh = Mesh(dp=2, tp=2)
    assert isinstance(mesh.device_mesh, DeviceMesh)
    assert mesh.device_mesh.mesh_dim_names == AXES
    whole = torch.arange(24.0).view(4, 6)
    placed = distribute_tensor(whole, mesh.device_mesh["dp", "tp"], [Replicate(), Shard(1)])
    assert torch.equal(placed.to_local(), whole.chunk(2, 1)[mesh.tp.rank])
    assert torch.equal(placed.full_tensor(), whole)

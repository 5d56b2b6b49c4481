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
    assert [mesh.ring, mesh.ulysses, mesh.replicas] == [Axis("ring"), Axis("ulysses"), Axis("dp")]
    assert [mesh.copies, mesh.shards] == [Axis("copies"), Axis("shards")]
    assert not mesh.tp.overlaps
    assert repr(mesh) == "Mesh(dp=1, pp=1, sp=1, tp=1, rank=0)"


@pytest.mark.parametrize("size", [0, -1, 1.0, "2", None])
def test_a_size_that_is_none_is_an_error(size):
    with pytest.raises(ValueError, match=r"mesh\.tp: .* given; a whole number of at least 1 would do"):
        Mesh(tp=size)


@pytest.mark.parametrize(("sp", "ulysses"), [(1, 2), (4, 3), (4, 8), (1, 0), (1, -1), (2, 1.0), (2, "2")])
def test_ulysses_divides_sp(sp, ulysses):
    with pytest.raises(ValueError, match=f"mesh.ulysses: {ulysses!r} given; a divisor of sp={sp} would do"):
        Mesh(sp=sp, ulysses=ulysses)


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


MESHES_OF_SP = [  # dp, pp, sp, tp, ulysses
    (1, 1, 1, 1, None), (2, 1, 1, 1, 1), (1, 1, 2, 1, None), (1, 1, 2, 1, 2), (1, 1, 4, 1, None), (1, 1, 4, 1, 2),
    (1, 1, 4, 1, 4), (2, 1, 2, 1, 2), (2, 1, 1, 2, 1), (2, 1, 2, 2, 1), (2, 1, 2, 2, 2), (2, 1, 4, 1, 2),
    (1, 1, 4, 2, 2), (1, 1, 8, 1, 2), (1, 1, 8, 1, 4), (2, 2, 2, 1, 2), (1, 1, 6, 1, 3),
]  # fmt: skip


@pytest.mark.parametrize("sizes", MESHES_OF_SP, ids=str)
def test_ring_ulysses_and_replicas_hold_the_ranks_that_their_docstrings_say(sizes):
    """Each rank gathers the numbers of all ranks of an axis, by the group of that axis."""

    def seen():
        mesh = Mesh(*sizes)
        found = {}
        for name in ("ring", "ulysses", "replicas"):
            axis = getattr(mesh, name)
            assert (axis.group is None) == (axis.size == 1)
            ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(axis.size)]
            if axis.group is None:
                ranks[0] += mesh.rank
            else:
                dist.all_gather(ranks, torch.tensor([mesh.rank]), group=axis.group)
            found[name] = (axis.name, axis.rank, [int(rank) for rank in ranks])
        shared = mesh.ulysses.group is mesh.sp.group or mesh.ring.group is mesh.sp.group
        assert shared == (1 in (mesh.ring.size, mesh.ulysses.size))  # no group is made where sp's will do
        return found

    dp, pp, sp, tp, ulysses = sizes
    ulysses = ulysses or 1
    every = {"dp": dp, "pp": pp, "ring": sp // ulysses, "ulysses": ulysses, "tp": tp}
    whole = {"dp": dp, "pp": pp, "sp": sp, "tp": tp}
    for rank, found in enumerate(run_ranks(seen, math.prod(whole.values()))):
        where, at = coordinates(rank, every), coordinates(rank, whole)
        for name in ("ring", "ulysses"):
            assert found[name] == (name, where[name], axis_ranks(rank, name, every))
        name = "dp" if sp == 1 else "sp" if dp == 1 else "dp×sp"
        replicas = [rank_at({**at, "dp": d, "sp": s}, whole) for d in range(dp) for s in range(sp)]
        assert found["replicas"] == (name, at["dp"] * sp + at["sp"], replicas)


MESHES_OF_SHARDS = [  # dp, pp, sp, tp, shard
    (1, 1, 1, 1, None), (2, 1, 1, 1, None), (2, 1, 1, 1, 1), (4, 1, 1, 1, 2), (1, 1, 4, 1, 2), (2, 1, 2, 1, 2),
    (2, 1, 2, 1, 1), (2, 1, 2, 1, None), (4, 1, 1, 2, 2), (2, 1, 2, 2, 2), (2, 2, 2, 1, 2), (3, 1, 2, 1, 3),
    (2, 1, 4, 1, 4), (2, 1, 4, 1, 2), (6, 1, 1, 1, 3),
]  # fmt: skip


@pytest.mark.parametrize("sizes", MESHES_OF_SHARDS, ids=str)
def test_copies_and_shards_hold_the_ranks_that_their_docstrings_say(sizes):
    """Neighbours among the replicas, sp inside dp, are shards of one division; each rank gathers an axis' numbers."""

    def seen():
        mesh = Mesh(*sizes[:4], shard=sizes[4])
        found = {}
        for name in ("copies", "shards"):
            axis = getattr(mesh, name)
            assert (axis.group is None) == (axis.size == 1)
            ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(axis.size)]
            if axis.group is None:
                ranks[0] += mesh.rank
            else:
                dist.all_gather(ranks, torch.tensor([mesh.rank]), group=axis.group)
            found[name] = (axis.name, axis.rank, [int(rank) for rank in ranks])
        if 1 in (mesh.copies.size, mesh.shards.size) and mesh.replicas.size > 1:  # no group where replicas' will do
            assert mesh.replicas.group in (mesh.copies.group, mesh.shards.group)
        return found

    dp, pp, sp, tp, shard = sizes
    shard = shard or dp * sp
    whole = {"dp": dp, "pp": pp, "sp": sp, "tp": tp}
    for rank, found in enumerate(run_ranks(seen, math.prod(whole.values()))):
        at = coordinates(rank, whole)
        replicas = [rank_at({**at, "dp": d, "sp": s}, whole) for d in range(dp) for s in range(sp)]
        copy, place = divmod(replicas.index(rank), shard)
        assert found["shards"] == ("shards", place, replicas[copy * shard : (copy + 1) * shard])
        assert found["copies"] == ("copies", copy, replicas[place::shard])


@pytest.mark.parametrize("shard", [0, -1, 2, 1.0, "1"])
def test_shard_divides_the_replicas(shard):
    with pytest.raises(ValueError, match=rf"mesh.shard: {shard!r} given; a divisor of dp × sp = 1 would do"):
        Mesh(shard=shard)


@pytest.mark.ranks(4)
def test_pytorchs_own_tools_accept_the_device_mesh():
    mesh = Mesh(dp=2, tp=2)
    assert isinstance(mesh.device_mesh, DeviceMesh)
    assert mesh.device_mesh.mesh_dim_names == AXES
    whole = torch.arange(24.0).view(4, 6)
    placed = distribute_tensor(whole, mesh.device_mesh["dp", "tp"], [Replicate(), Shard(1)])
    assert torch.equal(placed.to_local(), whole.chunk(2, 1)[mesh.tp.rank])
    assert torch.equal(placed.full_tensor(), whole)

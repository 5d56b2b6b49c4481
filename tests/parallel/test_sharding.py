"""The Shard table: what all ranks hold makes up the whole, each row as often as its copies say."""

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.parallel.parameters import cut, join
from megalite.parallel.sharding import Block, Shard, fused, split_evenly


@st.composite
def shards(draw):
    """A Shard of up to 3 dims and 3 blocks, over up to 8 ranks; blocks need not divide."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    blocks = tuple(
        Block(draw(st.integers(1, 13)), draw(st.sampled_from(divisors))) for _ in range(draw(st.integers(1, 3)))
    )
    dims = draw(st.integers(1, 3))
    dim = draw(st.integers(0, dims - 1))
    shape = tuple(sum(b.size for b in blocks) if d == dim else draw(st.integers(1, 3)) for d in range(dims))
    return Shard(shape, "tp", ranks, dim, blocks)


@given(shards())
def test_each_row_is_held_exactly_as_often_as_its_pieces_say(shard):
    held, said = Counter(), {}
    for rank in range(shard.ranks):
        for piece in shard.pieces(rank):
            assert piece.rows > 0
            for row in range(piece.whole, piece.whole + piece.rows):
                held[row] += 1
                assert said.setdefault(row, piece.copies) == piece.copies
    assert dict(held) == said
    assert sorted(held) == list(range(shard.shape[shard.dim]))


@given(shards())
def test_pieces_lie_apart_within_what_a_rank_holds(shard):
    for rank in range(shard.ranks):
        rows = [row for piece in shard.pieces(rank) for row in range(piece.local, piece.local + piece.rows)]
        assert len(set(rows)) == len(rows)
        assert all(0 <= row < shard.local_shape[shard.dim] for row in rows)


@given(shards())
def test_join_undoes_cut_and_padding_is_zero(shard):
    whole = torch.arange(1, 1 + torch.Size(shard.shape).numel()).view(shard.shape)
    parts = [cut(whole, shard, rank) for rank in range(shard.ranks)]
    assert all(tuple(part.shape) == shard.local_shape for part in parts)
    assert torch.equal(join(parts, shard), whole)
    for rank, part in enumerate(parts):
        real = sum(piece.rows for piece in shard.pieces(rank)) * part.numel() // max(1, part.shape[shard.dim])
        assert int((part != 0).sum()) == real


@given(shards())
def test_cut_and_join_leave_what_they_are_given_alone(shard):
    whole = torch.randn(shard.shape)
    kept = whole.clone()
    parts = [cut(whole, shard, rank) for rank in range(shard.ranks)]
    for part in parts:
        part.fill_(7)
    assert torch.equal(whole, kept)
    join(parts, shard).fill_(0)
    assert all((part == 7).all() for part in parts)


@given(shards())
def test_ranges_say_of_every_number_that_a_rank_holds_how_many_hold_it(shard):
    """Of the flattened local tensor; what is in none, or in one of the whole, is padding."""
    for rank in range(shard.ranks):
        local = torch.zeros(shard.local_shape, dtype=torch.int64)
        for piece in shard.pieces(rank):
            local.narrow(shard.dim, piece.local, piece.rows).fill_(piece.copies)
        said = torch.zeros_like(local).flatten()
        for start, stop, copies in shard.ranges(rank):
            assert 0 <= start < stop <= said.numel()
            assert not said[start:stop].any()  # none counts twice
            said[start:stop] = copies
        real = local.flatten() > 0
        assert torch.equal(said[real], local.flatten()[real])


@given(shards())
def test_partial_ranges_are_of_blocks_that_several_ranks_hold(shard):
    assert shard.partial_ranges() == []
    partial = dataclasses.replace(shard, partial=True)
    expected = torch.zeros(shard.local_shape, dtype=torch.int64)
    local = 0
    for block in shard.blocks:
        if block.parts < shard.ranks:
            expected.narrow(shard.dim, local, block.rows).fill_(block.parts)
        local += block.rows
    said = torch.zeros_like(expected).flatten()
    for start, stop, parts in partial.partial_ranges():
        assert not said[start:stop].any()
        said[start:stop] = parts
    assert torch.equal(said, expected.flatten())


def test_ranges_of_a_scalar():
    scalar = Shard((), "tp", 4, partial=True)
    assert scalar.ranges(2) == [(0, 1, 4)] and scalar.partial_ranges() == [(0, 1, 1)]


def test_the_picture_of_the_docstring():
    qkv = Shard((8,), "tp", 4, 0, fused([4, 2, 2], [4, 2, 2]))
    names = torch.tensor([10, 11, 12, 13, 20, 21, 30, 31])  # q0 ... q3, k0, k1, v0, v1
    assert [cut(names, qkv, rank).tolist() for rank in range(4)] == [
        [10, 20, 30],
        [11, 20, 30],
        [12, 21, 31],
        [13, 21, 31],
    ]
    assert [[piece.copies for piece in qkv.pieces(rank)] for rank in range(4)] == [[1, 2, 2]] * 4
    assert not qkv.replicated


def test_padding_of_a_vocabulary():
    table = Shard((1001, 4), "tp", 4, 0, (Block(1001, 4),))
    assert table.local_shape == (251, 4)
    assert [sum(piece.rows for piece in table.pieces(rank)) for rank in range(4)] == [251, 251, 251, 248]


def test_a_part_of_padding_alone_has_no_pieces():
    table = Shard((5, 2), "tp", 4, 0, (Block(5, 4),))
    assert table.local_shape == (2, 2)
    assert [[(p.whole, p.rows) for p in table.pieces(rank)] for rank in range(4)] == [[(0, 2)], [(2, 2)], [(4, 1)], []]


def test_replicated():
    norm = Shard((5,), "tp", 4, partial=True)
    assert norm.replicated and norm.blocks == (Block(5, 1),) and norm.local_shape == (5,)
    assert norm.pieces(3)[0].copies == 4
    assert Shard((), "tp", 2).local_shape == ()
    assert cut(torch.tensor(3.0), Shard((), "tp", 2), 1) == 3


def test_blocks_that_do_not_make_the_whole():
    with pytest.raises(ValueError, match=r"blocks of \[4, 2\] rows do not make 7"):
        Shard((7, 2), "tp", 2, 0, fused([4, 2], [2, 2]))


def test_parts_that_cannot_be_laid_over_the_ranks():
    with pytest.raises(ValueError, match="3 parts cannot be laid over 4 ranks of axis tp"):
        Shard((6,), "tp", 4, 0, (Block(6, 3),))


def test_a_tensor_of_another_shape():
    with pytest.raises(ValueError, match=r"a tensor of shape \[2, 3\] given for a Shard of \[3, 2\]"):
        cut(torch.zeros(2, 3), Shard((3, 2), "tp", 2), 0)


def test_split_evenly():
    assert split_evenly(6, "tp", 3, "heads") == 2
    with pytest.raises(ValueError, match="heads=7 does not divide over the 3 ranks of tp; a multiple of 3 would do"):
        split_evenly(7, "tp", 3, "heads")

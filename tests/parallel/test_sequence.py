"""Tokens split between the linears: values are the dense ones, and so are the gradients of what sees only a part."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.parameters import shard_table
from megalite.parallel.sequence import applied_to_own_tokens, join_tokens, split_tokens
from megalite.parallel.sharding import Shard
from megalite.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.traffic import traffic
from megalite.testing import assert_matches_dense


class Sublayer(nn.Module):
    """x + row(f(column(norm(x)))): the residual stream and the norm see this rank's tokens only."""

    def __init__(self, axis, declared=True, dim=0):
        super().__init__()
        self.norm = nn.LayerNorm(10)
        if declared:
            applied_to_own_tokens(self.norm, axis)
        self.up = ColumnParallelLinear(10, 24, axis, sequence_dim=dim)
        self.down = RowParallelLinear(24, 10, axis, sequence_dim=dim)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).sin())


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_sublayer_is_the_dense_one(dim):
    assert_matches_dense(
        lambda axis: Sublayer(axis, dim=dim),
        Sublayer(Axis()),
        draw(12, 24, 10),
        ranks=(1, 2, 3, 4),
        input_dims=[dim],
        bound=1e-12,
    )


def test_a_norm_that_is_not_declared_is_found_out():
    """The trap that the file speaks of: its gradient would be a summand."""
    with pytest.raises(AssertionError, match=r"gradient of norm\.weight: relative error"):
        assert_matches_dense(
            lambda axis: Sublayer(axis, declared=False), Sublayer(Axis()), draw(12, 10), ranks=(2,), input_dims=[0]
        )


class Whole(nn.Module):
    """Takes whole tokens and gives whole tokens; in between each rank has its own."""

    def __init__(self, axis, dim):
        super().__init__()
        self.axis, self.dim = axis, dim
        self.inner = Sublayer(axis, dim=dim)

    def forward(self, x):
        return join_tokens(self.inner(split_tokens(x, self.axis, self.dim)), self.axis, self.dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_split_and_join(dim):
    assert_matches_dense(
        lambda axis: Whole(axis, dim), Whole(Axis(), dim), draw(12, 12, 10), ranks=(1, 2, 3, 4), bound=1e-12
    )


@pytest.mark.ranks(3)
def test_what_a_rank_holds():
    axis = Mesh(tp=3).tp
    x = draw(6, 2)
    own = split_tokens(x, axis)
    assert torch.equal(own, x[2 * axis.rank : 2 * axis.rank + 2])
    assert torch.equal(join_tokens(own, axis), x)
    with pytest.raises(ValueError, match=r"\[7, 2\] does not divide over the 3 ranks of axis tp"):
        split_tokens(draw(7, 2), axis)


@pytest.mark.ranks(2)
def test_declared_parameters_are_replicated_and_partial():
    axis = Mesh(tp=2).tp
    norm = applied_to_own_tokens(nn.LayerNorm(10), axis)
    assert isinstance(norm, nn.LayerNorm)
    table = shard_table(nn.ModuleDict({"norm": norm, "other": nn.LayerNorm(10)}), axis)
    assert table["norm.weight"] == table["norm.bias"] == Shard((10,), "tp", 2, partial=True)
    assert table["other.weight"] == Shard((10,), "tp", 2)


@pytest.mark.ranks(2, 4)
def test_the_bytes_are_those_of_plain_tensor_parallelism():
    """An all_reduce is a reduce_scatter and an all_gather."""
    n = dist.get_world_size()
    axis = Mesh(tp=n).tp
    moved = []
    for dim, tokens in ((None, 4 * n), (0, 4)):
        layer = Sublayer(axis, dim=dim)
        x = draw(tokens, 10).requires_grad_()
        traffic.reset()
        layer(x).sum().backward()
        moved.append(traffic.on("tp"))
    assert moved[0] == moved[1] == 2 * 2 * (n - 1) * 4 * 10 * 4

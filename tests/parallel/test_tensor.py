"""Column- and row-parallel linears against torch.nn.Linear: values, gradients, weights drawn, bytes moved."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalite.parallel.collectives import all_gather, copy, gather, reduce, reduce_scatter, scatter
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.parameters import cut
from megalite.parallel.sharding import Block, fused
from megalite.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.traffic import traffic
from megalite.testing import assert_matches_dense

RANKS = (1, 2, 3, 4)
BOUND = 1e-12  # float64; sums of at most a hundred numbers
matches = functools.partial(assert_matches_dense, ranks=RANKS, bound=BOUND)
BIAS = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
CHUNKS = pytest.mark.parametrize("chunks", [1, 2, 3, 100])  # 100: more than there are tokens


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


class Pair(nn.Module):
    """Column, something elementwise, row; tokens outside split along `dim` where it is given."""

    def __init__(self, axis, bias, dim=None, chunks=1):
        super().__init__()
        self.up = ColumnParallelLinear(10, 24, axis, bias, sequence_dim=dim)
        self.down = RowParallelLinear(24, 10, axis, bias, sequence_dim=dim)
        self.up.chunks = self.down.chunks = chunks

    def forward(self, x):
        return self.down(self.up(x).sin())


@pytest.mark.parametrize("shape", [(5, 10), (3, 5, 10), (2, 3, 2, 10), (1, 10)], ids=str)
@BIAS
def test_column(bias, shape):
    ranks = RANKS if shape == (3, 5, 10) else (3,)
    matches(lambda axis: ColumnParallelLinear(10, 24, axis, bias), nn.Linear(10, 24, bias), draw(*shape), ranks=ranks)


@BIAS
def test_column_gathered(bias):
    def gathered(axis):
        return ColumnParallelLinear(10, 24, axis, bias, gather_output=True)

    matches(gathered, nn.Linear(10, 24, bias), draw(3, 5, 10))


@BIAS
def test_row(bias):
    matches(lambda axis: RowParallelLinear(24, 10, axis, bias), nn.Linear(24, 10, bias), draw(3, 5, 24), input_dims=[2])


@BIAS
def test_row_of_a_whole_input(bias):
    def whole(axis):
        return RowParallelLinear(24, 10, axis, bias, input_is_parallel=False)

    matches(whole, nn.Linear(24, 10, bias), draw(3, 5, 24))


@CHUNKS
@BIAS
def test_a_pair(bias, chunks):
    ranks = RANKS if chunks == 1 else (3,)
    matches(lambda axis: Pair(axis, bias, chunks=chunks), Pair(Axis(), bias), draw(5, 3, 10), ranks=ranks)


@CHUNKS
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_a_pair_between_split_tokens(dim, chunks):
    ranks = RANKS if chunks == 1 else (3,)
    dense = Pair(Axis(), True)
    matches(lambda axis: Pair(axis, True, dim, chunks), dense, draw(24, 12, 10), ranks=ranks, input_dims=[dim % 3])


def test_a_pair_between_split_tokens_without_bias():
    matches(lambda axis: Pair(axis, False, 0), Pair(Axis(), False), draw(24, 10), input_dims=[0])


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.ranks(2, 3)
def test_chunks_change_no_value(dim):
    axis = Mesh(tp=dist.get_world_size()).tp
    torch.set_default_dtype(torch.float64)
    outcomes = []
    for chunks in (1, 2, 3):
        torch.manual_seed(0)
        pair = Pair(axis, True, dim, chunks)
        x = draw(5 * axis.size, 5 * axis.size, 10)
        x = (x if dim is None else x.chunk(axis.size, dim)[axis.rank]).clone().requires_grad_()
        y = pair(x)
        y.square().sum().backward()
        outcomes.append([y.detach(), x.grad, *(p.grad for p in pair.parameters())])
    for other in outcomes[1:]:
        for actual, expected in zip(other, outcomes[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


class Transposed(nn.Module):
    """Feeds a layer what is not contiguous, and takes a gradient that is not either."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 2)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_input_and_gradient_that_are_not_contiguous(dim):
    matches(
        lambda axis: Transposed(Pair(axis, True, dim)),
        Transposed(Pair(Axis(), True)),
        draw(12, 24, 10),
        ranks=(2, 3),
        input_dims=[None if dim is None else 1 - dim],
    )


class Fused(nn.Module):
    """A projection fused from blocks; sums over the ranks what must not depend on which of them holds it."""

    def __init__(self, axis, sizes, most, dim=None, chunks=1):
        super().__init__()
        self.axis, self.dim = axis, dim
        parts = [min(axis.size, part) for part in most]
        self.copies = [axis.size // part for part in parts]
        blocks = fused(sizes, parts)
        self.rows = [block.rows for block in blocks]
        self.linear = ColumnParallelLinear(10, sum(sizes), axis, blocks=blocks, sequence_dim=dim)
        self.linear.chunks = chunks

    def forward(self, x):
        parts = self.linear(x).split(self.rows, -1)
        own = sum(part.sin().sum(-1) / copies for part, copies in zip(parts, self.copies, strict=True))
        return reduce(own, self.axis) if self.dim is None else reduce_scatter(own, self.axis, self.dim)


@pytest.mark.parametrize(
    ("dim", "chunks"),
    [(None, 1), (0, 2), *(pytest.param(*more, marks=pytest.mark.full) for more in ((None, 2), (0, 1)))],
)
@pytest.mark.parametrize(
    ("sizes", "most", "ranks"),
    [
        ([24, 24], [12, 12], RANKS),
        ([24, 12, 12], [12, 12, 12], RANKS),
        ([12, 8, 8], [12, 2, 2], (1, 2, 4)),
        ([12, 9, 9], [12, 3, 3], (1, 3, 6)),
        ([12, 5, 5], [12, 1, 1], RANKS),
    ],
    ids=["gate and up", "qkv", "two kv heads", "three kv heads", "one kv head"],
)
def test_fused_blocks(sizes, most, ranks, dim, chunks):
    """Each block is cut for itself; what several ranks hold has the gradient of all of them."""
    dense = Fused(Axis(), sizes, most)
    matches(lambda axis: Fused(axis, sizes, most, dim, chunks), dense, draw(12, 5, 10), ranks=ranks, input_dims=[dim])


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_same_seed_draws_the_weights_of_nn_linear():
    axis = Mesh(tp=dist.get_world_size()).tp
    for layer, sizes in ((ColumnParallelLinear, (10, 24)), (RowParallelLinear, (24, 10))):
        for more in ({}, {"blocks": (Block(12, axis.size), Block(12, 1))}):
            if more and layer is RowParallelLinear:
                continue
            torch.manual_seed(5)
            dense = nn.Linear(*sizes)
            after = torch.rand(1)
            torch.manual_seed(5)
            parallel = layer(*sizes, axis, **more)
            assert torch.equal(torch.rand(1), after)  # and leaves the random state as it does
            for name, parameter in parallel.named_parameters():
                whole = dense.get_parameter(name).detach()
                assert torch.equal(parameter, cut(whole, parallel.shards[name], axis.rank))


def test_on_the_mesh_of_one_a_layer_is_nn_linear():
    layer = ColumnParallelLinear(10, 24, Axis())
    x = draw(2, 10)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


# --- what moves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.ranks(2, 3, 4)
def test_a_pair_moves_one_all_reduce_forward_and_one_backward(dim):
    n = dist.get_world_size()
    axis = Mesh(tp=n).tp
    x = draw(n, 2 * n, 10)
    x = (x if dim is None else x.chunk(n, dim)[axis.rank].contiguous()).requires_grad_()
    pair = Pair(axis, True, dim)
    whole = 4 * n * 2 * n * 10
    traffic.reset()
    y = pair(x)
    forward = {"all_reduce": 1} if dim is None else {"all_gather": 1, "reduce_scatter": 1}
    assert {operation: calls for (_, operation), calls in traffic.calls.items()} == forward
    assert traffic.on("tp") == 2 * (n - 1) * whole // n
    traffic.reset()
    y.sum().backward()
    assert {operation: calls for (_, operation), calls in traffic.calls.items()} == forward
    assert traffic.on("tp") == 2 * (n - 1) * whole // n


@pytest.mark.ranks(2)
def test_nothing_moves_for_a_gradient_that_is_not_asked_for():
    axis = Mesh(tp=2).tp
    pair = Pair(axis, True)
    y = pair(draw(3, 10))  # the input needs none
    traffic.reset()
    y.sum().backward()
    assert not traffic.calls
    pair.zero_grad()
    pair.requires_grad_(False)
    x = draw(3, 10).requires_grad_()
    pair(x).sum().backward()
    assert x.grad is not None and all(parameter.grad is None for parameter in pair.parameters())


@pytest.mark.parametrize("dim", [None, 0])
@pytest.mark.ranks(2)
def test_compile_takes_a_pair_whole(dim):
    axis = Mesh(tp=2).tp
    torch.set_default_dtype(torch.float64)
    pair = Pair(axis, True, dim)
    compiled = torch.compile(pair, fullgraph=True, backend="aot_eager")
    outcomes = []
    for function in (pair, compiled):
        x = draw(6, 10).requires_grad_()
        pair.zero_grad()
        y = function(x)
        y.square().sum().backward()
        outcomes.append([y.detach(), x.grad, *(p.grad.clone() for p in pair.parameters())])
    for actual, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.ranks(2)
def test_collectives_and_layers_compose():
    """What a user writes by hand is the layer: copy before a column, all_gather where tokens are split."""
    axis = Mesh(tp=2).tp
    torch.set_default_dtype(torch.float64)
    layer = ColumnParallelLinear(10, 24, axis)
    x, z = draw(4, 10).requires_grad_(), draw(4, 10).requires_grad_()
    gather(layer(x), axis, -1).sin().sum().backward()
    gather(nn.functional.linear(copy(z, axis), layer.weight, layer.bias), axis, -1).sin().sum().backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-13, atol=1e-13)
    split = ColumnParallelLinear(10, 24, axis, sequence_dim=0)
    own, other = (scatter(draw(4, 10), axis, 0).requires_grad_() for _ in range(2))
    split(own).sin().sum().backward()
    nn.functional.linear(all_gather(other, axis, 0), split.weight, split.bias).sin().sum().backward()
    torch.testing.assert_close(own.grad, other.grad, rtol=1e-13, atol=1e-13)


# --- errors and words ---------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_what_does_not_divide_is_an_error_with_both_numbers():
    axis = Mesh(tp=3).tp
    with pytest.raises(ValueError, match="out_features=10 does not divide over the 3 ranks of tp; a multiple of 3"):
        ColumnParallelLinear(6, 10, axis)
    with pytest.raises(ValueError, match="in_features=10 does not divide over the 3 ranks of tp; a multiple of 3"):
        RowParallelLinear(10, 6, axis)
    with pytest.raises(ValueError, match="gather_output"):
        ColumnParallelLinear(6, 6, axis, gather_output=True, blocks=fused([3, 3], [3, 3]))
    with pytest.raises(ValueError, match=r"\[4, 6\] .* 3 ranks"):
        RowParallelLinear(6, 6, axis, sequence_dim=0)(torch.zeros(4, 2))


@pytest.mark.ranks(2)
def test_a_layer_says_what_it_holds():
    axis = Mesh(tp=2).tp
    assert f"weight [12, 10] on rank {axis.rank} of 2 (tp)" in repr(ColumnParallelLinear(10, 24, axis))
    assert "tokens split on dim 0" in repr(RowParallelLinear(10, 24, axis, sequence_dim=0))

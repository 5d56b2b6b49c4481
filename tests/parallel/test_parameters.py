"""The table of a module, and the sum of gradients of which each rank holds only a summand."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.parameters import (
    Piece,
    cut,
    fill,
    shard_table,
    sum_partial_gradients,
    sum_partial_pieces,
    whole_pieces,
)
from megalite.parallel.sequence import applied_to_own_tokens
from megalite.parallel.sharding import Block, Shard, fused
from megalite.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.traffic import traffic
from megalite.parallel.vocab import VocabParallelEmbedding
from megalite.testing import run_ranks


def tp():
    torch.set_default_dtype(torch.float64)
    return Mesh(tp=dist.get_world_size()).tp


class Layers(nn.Module):
    """One of each kind: a vocabulary, fused kv heads that several ranks hold, a row, a norm, and what nobody claims."""

    def __init__(self, axis, kv_parts):
        super().__init__()
        self.embedding = VocabParallelEmbedding(7, 4, axis)
        self.qkv = ColumnParallelLinear(4, 20, axis, blocks=fused([12, 4, 4], [axis.size, kv_parts, kv_parts]))
        self.out = RowParallelLinear(12, 4, axis, sequence_dim=0)
        self.norm = applied_to_own_tokens(nn.LayerNorm(4), axis)
        self.scale = nn.Parameter(torch.ones(3))
        self.tied = self.embedding

    def names(self):
        return [name for name, _ in self.named_parameters()]


@pytest.mark.ranks(1, 2, 4)
def test_the_table_names_every_parameter_once():
    axis = tp()
    layers = Layers(axis, min(2, axis.size))
    table = shard_table(layers, axis)
    assert list(table) == layers.names()
    assert "tied.weight" not in table
    assert table["scale"] == Shard((3,), "tp", axis.size)
    for name, parameter in layers.named_parameters():
        assert table[name].local_shape == tuple(parameter.shape)
    assert [name for name, shard in table.items() if shard.partial] == [
        "qkv.weight", "qkv.bias", "out.bias", "norm.weight", "norm.bias"
    ]  # fmt: skip


def test_a_module_that_is_its_own_layer():
    layer = ColumnParallelLinear(4, 6, Axis("tp"))
    assert shard_table(layer, Axis("tp")) == {"weight": layer.shards["weight"], "bias": layer.shards["bias"]}


def summand(name, shape, rank):
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * rank)
    return torch.randn(shape, generator=generator)


@pytest.mark.parametrize("kv_parts", [1, 2])
@pytest.mark.ranks(1, 2, 4)
def test_what_several_ranks_hold_gets_the_sum_over_those_ranks(kv_parts):
    axis = tp()
    kv_parts = min(kv_parts, axis.size)
    layers = Layers(axis, kv_parts)
    table = shard_table(layers, axis)
    grads = {name: [summand(name, p.shape, r) for r in range(axis.size)] for name, p in layers.named_parameters()}
    for name, parameter in layers.named_parameters():
        parameter.grad = grads[name][axis.rank].clone()
    places = {name: parameter.grad.data_ptr() for name, parameter in layers.named_parameters()}
    sum_partial_gradients(layers.named_parameters(), table, axis)
    copies = axis.size // kv_parts
    neighbours = range(axis.rank // copies * copies, axis.rank // copies * copies + copies)
    for name, parameter in layers.named_parameters():
        own, whole = grads[name][axis.rank], sum(grads[name])
        if name in ("norm.weight", "norm.bias", "out.bias"):
            expected = whole
        elif name.startswith("qkv"):
            q = 12 // axis.size
            expected = torch.cat([own[:q], sum(grads[name][r] for r in neighbours)[q:]])
        else:  # a part of one's own, or replicated with a whole gradient
            expected = own
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-14, atol=1e-14)
        assert parameter.grad.data_ptr() == places[name]  # in place: it may be a view into a bucket


@pytest.mark.ranks(4)
def test_all_travel_in_one_all_reduce():
    axis = tp()
    layers = Layers(axis, 2)
    for name, parameter in layers.named_parameters():
        parameter.grad = summand(name, parameter.shape, axis.rank)
    traffic.reset()
    sum_partial_gradients(layers.named_parameters(), shard_table(layers, axis), axis)
    assert dict(traffic.calls) == {("tp", "all_reduce"): 1}
    partial = 2 * 4 * (4 + 1) + 4 + 4 + 4  # k and v with weight and bias; out.bias; norm
    assert traffic.on("tp") == 2 * 3 * partial * 8 // 4


@pytest.mark.parametrize("length", [1, 5, 7, 1000])
@pytest.mark.parametrize("kv_parts", [1, 2])
@pytest.mark.ranks(2, 4)
def test_cut_gradients_are_summed_as_whole_ones_are(kv_parts, length):
    """The flattened gradients in stretches of `length`, which begin and end anywhere, one call for every other one."""
    axis = tp()
    layers = Layers(axis, kv_parts)
    table = shard_table(layers, axis)
    for name, parameter in layers.named_parameters():
        parameter.grad = summand(name, parameter.shape, axis.rank)
    pieces = [
        Piece(name, start, gradient.flatten()[start : start + length].clone())
        for name, gradient in ((name, parameter.grad) for name, parameter in layers.named_parameters())
        for start in range(0, gradient.numel(), length)
    ]
    for half in (pieces[::2], pieces[1::2], []):
        sum_partial_pieces(half, table, axis)
    sum_partial_gradients(layers.named_parameters(), table, axis)
    gradients = {name: parameter.grad.flatten() for name, parameter in layers.named_parameters()}
    for name, start, piece in pieces:
        torch.testing.assert_close(piece, gradients[name][start : start + length], rtol=1e-14, atol=1e-14)


@pytest.mark.ranks(2)
def test_whole_pieces_are_views_of_the_gradients_that_there_are():
    layers = Layers(tp(), 1)
    layers.norm.weight.grad = torch.zeros(4)
    layers.out.weight.grad = torch.zeros(6, 4).t()  # not contiguous: made so
    pieces = whole_pieces(layers.named_parameters())
    assert [(name, start) for name, start, _ in pieces] == [("out.weight", 0), ("norm.weight", 0)]
    for _, _, gradient in pieces:
        gradient += 1
    assert (layers.norm.weight.grad == 1).all() and (layers.out.weight.grad == 1).all()


@pytest.mark.ranks(2)
def test_what_got_no_gradient_is_passed_over():
    axis = tp()
    layers = Layers(axis, 1)
    layers.norm.weight.grad = torch.ones(4) * (1 + axis.rank)
    sum_partial_gradients(layers.named_parameters(), shard_table(layers, axis), axis)
    assert torch.equal(layers.norm.weight.grad, torch.full((4,), 3.0))
    assert all(p.grad is None for name, p in layers.named_parameters() if name != "norm.weight")
    traffic.reset()
    layers.norm.weight.grad = None
    sum_partial_gradients(layers.named_parameters(), shard_table(layers, axis), axis)
    assert not traffic.calls


@pytest.mark.ranks(3)
def test_a_scalar_and_a_second_dim():
    axis = tp()
    table = {
        "scalar": Shard((), "tp", 3, partial=True),
        "columns": Shard((2, 9), "tp", 3, 1, fused([6, 3], [3, 1]), partial=True),
    }
    scalar, columns = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(2, 5))
    scalar.grad, columns.grad = torch.tensor(1.0 + axis.rank), torch.full((2, 5), 1.0 + axis.rank)
    sum_partial_gradients([("scalar", scalar), ("columns", columns)], table, axis)
    assert scalar.grad == 6
    assert columns.grad.tolist() == [[1 + axis.rank] * 2 + [6] * 3] * 2


def test_fill_draws_the_whole_and_nothing_on_meta():
    shard = Shard((7, 2), "tp", 3, 0, (Block(7, 3),))
    torch.manual_seed(1)
    whole = torch.empty(7, 2).normal_()
    for rank in range(3):
        parameter = torch.full((3, 2), 9.0)
        torch.manual_seed(1)
        fill(parameter, shard, rank, nn.init.normal_)
        assert torch.equal(parameter, cut(whole, shard, rank))
    fill(torch.empty(3, 2, device="meta"), shard, 0, lambda x: pytest.fail("drew on meta"))


def test_a_declaration_over_another_axis_is_refused():
    """Summed over tp, a gradient that is partial over sp would come out doubled."""

    def run():
        mesh = Mesh(sp=2)
        layer = applied_to_own_tokens(nn.LayerNorm(4), mesh.sp)
        assert shard_table(layer, mesh.sp)["weight"].partial
        with pytest.raises(ValueError, match="weight is declared over axis sp, and the table is of axis tp"):
            shard_table(layer, mesh.tp)

    run_ranks(run, 2)

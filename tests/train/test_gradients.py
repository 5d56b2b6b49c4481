"""The norm of the whole gradient, each weight counted once on any mesh; clipping."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from trajectory import Case

from megalite.model.gpt import GPT
from megalite.parallel.ddp import GradientBuckets
from megalite.parallel.mesh import Mesh
from megalite.parallel.parameters import cut, shard_table
from megalite.train.gradients import finish_gradients, gradient_norm

MODELS = {
    "llama": Case().model,
    "one kv head": Case(kv_heads=1).model,
    "gpt2": Case("gpt2").model,
    "a rank of padding": replace(Case().model, vocab_size=11),  # 6 ranks of 2: the last holds none
}


def draw(name, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))), dtype=torch.float64)


def with_gradients(config, tp, sequence_parallel=True):
    """A model whose gradient is a part of one whole that is the same on every mesh, and the norm of that whole."""
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(tp=tp)
    model = GPT(config, mesh, sequence_parallel=sequence_parallel)
    table = shard_table(model, mesh.tp)
    squares = []
    for name, parameter in model.named_parameters():
        whole = draw(name, table[name].shape)
        squares.append(whole.square().sum())
        parameter.grad = cut(whole, table[name], mesh.tp.rank)
    return model, table, mesh, math.sqrt(torch.stack(squares).sum())


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.ranks(1, 2, 3, 6)
def test_what_several_ranks_hold_counts_once(name, sequence_parallel):
    model, table, mesh, expected = with_gradients(MODELS[name], dist.get_world_size(), sequence_parallel)
    assert abs(gradient_norm(model, table, mesh) / expected - 1) < 1e-14


@pytest.mark.ranks(2)
def test_without_gradients_the_norm_is_zero():
    mesh = Mesh(tp=2)
    model = GPT(MODELS["llama"], mesh)
    assert gradient_norm(model, shard_table(model, mesh.tp), mesh) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.ranks(1, 2)
def test_a_norm_that_is_no_number_is_nan_on_every_rank(bad):
    model, table, mesh, _ = with_gradients(MODELS["llama"], dist.get_world_size())
    if mesh.rank == mesh.size - 1:
        model.blocks[1].mlp.down.weight.grad[0, 0] = bad
    assert math.isnan(gradient_norm(model, table, mesh))


@pytest.mark.parametrize("clip", [0.0, 1.0, 1e9])
@pytest.mark.ranks(1, 2)
def test_clipping_is_that_of_torch(clip):
    model, table, mesh, expected = with_gradients(MODELS["gpt2"], dist.get_world_size(), sequence_parallel=False)
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    # the gradient of this model is whole already: buckets of an axis of one and no partial sums
    norm = finish_gradients(model, GradientBuckets([], mesh.dp), table, mesh, clip)
    assert norm == pytest.approx(expected, rel=1e-14)
    factor = min(1.0, clip / (expected + 1e-6)) if clip else 1.0  # as torch.nn.utils.clip_grad_norm_
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name] * factor, rtol=1e-13, atol=0)
    if clip == 1.0:
        assert gradient_norm(model, table, mesh) == pytest.approx(1.0, rel=1e-6)

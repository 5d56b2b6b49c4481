"""The norm of the whole gradient, each weight counted once on any mesh; clipping."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from trajectory import Case

from megalite.model.gpt import GPT, Part
from megalite.parallel.ddp import GradientBuckets
from megalite.parallel.mesh import Mesh
from megalite.parallel.parameters import cut, shard_table
from megalite.parallel.traffic import traffic
from megalite.parallel.zero import ShardedParameters
from megalite.train.gradients import finish_gradients, gradient_norm, pieces_of, sum_tied_gradients

MODELS = {
    "llama": Case().model,
    "one kv head": Case(kv_heads=1).model,
    "gpt2": Case("gpt2").model,
    "a rank of padding": replace(Case().model, vocab_size=11),  # 6 ranks of 2: the last holds none
}


def draw(name, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))), dtype=torch.float64)


def with_gradients(config, tp, sequence_parallel=True, mesh=None):
    """A model whose gradient is a part of one whole that is the same on every mesh, and the norm of that whole."""
    torch.set_default_dtype(torch.float64)
    mesh = mesh or Mesh(tp=tp)
    model = GPT(config, mesh, sequence_parallel=sequence_parallel)
    table = shard_table(model, mesh.tp)
    squares = []
    for name, parameter in model.named_parameters():
        whole = draw(name, table[name].shape)
        squares.append(whole.square().sum())
        parameter.grad = cut(whole, table[name], mesh.tp.rank)
    return model, table, mesh, math.sqrt(torch.stack(squares).sum())


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.ranks(1, 2, 3, 6)
def test_what_several_ranks_hold_counts_once(sequence_parallel):
    mesh = Mesh(tp=dist.get_world_size())
    for name, config in MODELS.items():
        model, table, _, expected = with_gradients(config, mesh.size, sequence_parallel, mesh)
        assert abs(gradient_norm(model, table, mesh) / expected - 1) < 1e-14, name


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


# --- in slices --------------------------------------------------------------------------------------------------------

SHARDED = {2: [{"dp": 2}, {"sp": 2}], 4: [{"dp": 4, "shard": 2}, {"dp": 2, "sp": 2}, {"dp": 2, "tp": 2}]}


def slices_with_gradients(config, mesh, stage=1):
    """A model whose replicas' gradients sum up to a part of one whole, in slices; and all wholes by name."""
    model = GPT(config, mesh, sequence_parallel=False)
    table = shard_table(model, mesh.tp)
    buckets = ShardedParameters(model.parameters(), mesh.shards, mesh.copies, stage=stage, bucket_mb=0.02)
    wholes = {name: draw(name, table[name].shape) for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        share = (mesh.replicas.rank + 1) / sum(range(1, mesh.replicas.size + 1))
        parameter.grad = share * cut(wholes[name], table[name], mesh.tp.rank)
    return model, table, buckets, wholes


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.ranks(2, 4)
def test_norm_and_clipping_of_slices_are_those_of_the_whole(name):
    torch.set_default_dtype(torch.float64)
    meshes = [Mesh(**sizes) for sizes in SHARDED[dist.get_world_size()]]
    for mesh, clip in itertools.product(meshes, (0.0, 1.0, 1e9)):
        model, table, buckets, wholes = slices_with_gradients(MODELS[name], mesh)
        buckets.complete(model.parameters())
        norm = finish_gradients(model, buckets, table, mesh, clip)
        expected = math.sqrt(sum(whole.square().sum() for whole in wholes.values()))
        assert norm == pytest.approx(expected, rel=1e-14)
        factor = min(1.0, clip / (expected + 1e-6)) if clip else 1.0
        pieces = pieces_of(model, buckets)
        assert len(pieces) > 1
        for key, start, gradient in pieces:
            whole = cut(wholes[key], table[key], mesh.tp.rank).flatten()[start : start + len(gradient)]
            torch.testing.assert_close(gradient, whole * factor, rtol=1e-13, atol=1e-15)


@pytest.mark.ranks(4)
def test_partial_slices_are_summed_as_whole_gradients_are():
    """Replicated kv heads, norms, biases: the same gradients once in buckets and once in slices."""
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(dp=2, tp=2)
    for name, sequence_parallel in itertools.product(("llama", "one kv head", "gpt2"), (True, False)):
        sums_alike(mesh, name, sequence_parallel)


def sums_alike(mesh, name, sequence_parallel):
    found = []
    for stage in (0, 1):
        model = GPT(MODELS[name], mesh, sequence_parallel=sequence_parallel)
        table = shard_table(model, mesh.tp)
        whole = GradientBuckets(model.parameters(), mesh.dp)
        buckets = ShardedParameters(model.parameters(), mesh.shards, bucket_mb=0.02) if stage else whole
        for key, parameter in model.named_parameters():
            parameter.grad = draw(f"{key}{mesh.rank}", parameter.shape)
        buckets.complete(model.parameters())
        norm = finish_gradients(model, buckets, table, mesh, 1.0)
        found.append((norm, pieces_of(model, buckets)))
    (norm, pieces), (norm_of_slices, slices) = found
    assert norm_of_slices == pytest.approx(norm, rel=1e-14)
    gradients = {piece.name: piece.grad for piece in pieces}
    for key, start, gradient in slices:
        torch.testing.assert_close(gradient, gradients[key][start : start + len(gradient)], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.ranks(2)
def test_a_norm_of_slices_that_is_no_number_is_nan_on_every_rank(bad):
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(dp=2)
    model, table, buckets, _ = slices_with_gradients(MODELS["llama"], mesh)
    if mesh.rank == 1:
        model.blocks[1].mlp.down.weight.grad[0, 0] = bad
    assert math.isnan(finish_gradients(model, buckets, table, mesh, 1.0))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.ranks(4)
def test_tied_slices_are_summed_over_the_two_ends(stage):
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(dp=2, pp=2)
    part, config = part_of(MODELS["gpt2"], mesh.pp, (0, 1))
    model = GPT(config, mesh, parts=[part])
    weight = model.embedding.weight
    buckets = ShardedParameters(model.parameters(), mesh.shards, stage=stage, shared=[weight])
    weight.grad = draw(f"{mesh.rank}", tuple(weight.shape))
    finish_gradients(model, buckets, shard_table(model, mesh.tp), mesh, 0.0, (0, 1))
    expected = sum(draw(f"{rank}", tuple(weight.shape)) for rank in range(4)).flatten().chunk(2)[mesh.dp.rank]
    torch.testing.assert_close(buckets.gradient_of(weight), expected, rtol=1e-14, atol=1e-14)


# --- over pp ----------------------------------------------------------------------------------------------------------


def part_of(config, pp, ends):
    """One layer on each rank, embedding and head on the ends; and the config of as many layers."""
    return Part(range(pp.rank, pp.rank + 1), pp.rank == ends[0], pp.rank == ends[1]), replace(config, layers=pp.size)


def part_with_gradients(name, mesh, ends):
    """This pp rank's part of a model, with its gradient, and the norm of the whole."""
    part, config = part_of(MODELS[name], mesh.pp, ends)
    model = GPT(config, mesh, parts=[part])
    table = shard_table(model, mesh.tp)
    for key, parameter in model.named_parameters():
        parameter.grad = cut(draw(key, table[key].shape), table[key], mesh.tp.rank)
    squares = [draw(key, tuple(parameter.shape)).square().sum() for key, parameter in GPT(config).named_parameters()]
    return model, table, math.sqrt(torch.stack(squares).sum())


@pytest.mark.parametrize("name", ["llama", "gpt2", "a rank of padding"])
@pytest.mark.ranks(2, 3, 4)
def test_the_norm_of_a_pipeline_is_that_of_the_whole(name):
    """Tied or not, whichever ranks have the first stage and the last."""
    torch.set_default_dtype(torch.float64)
    ranks = dist.get_world_size()
    for tp in (1, 2) if ranks == 4 else (1,):
        mesh = Mesh(pp=ranks // tp, tp=tp)
        for ends in ((0, mesh.pp.size - 1), (1, 0), (0, 0)):
            model, table, expected = part_with_gradients(name, mesh, ends)
            assert abs(gradient_norm(model, table, mesh) / expected - 1) < 1e-14


@pytest.mark.parametrize("ends", [(0, 1), (2, 0), (1, 2)])
@pytest.mark.ranks(3, 6)
def test_tied_gradients_are_summed_over_the_two_ends_alone(ends):
    """Both have bitwise the same sum, also where one got none; the third rank only takes part."""
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(pp=3, tp=dist.get_world_size() // 3)
    rank = mesh.pp.rank
    part, config = part_of(MODELS["gpt2"], mesh.pp, ends)
    for empty in (None, 0, 1):
        model = GPT(config, mesh, parts=[part])
        assert (model.embedding is None) == (rank not in ends)
        own = {end: draw(f"{end}{mesh.tp.rank}", (-(-1001 // mesh.tp.size), 48)) for end in ends}
        if empty is not None:
            own[ends[empty]].zero_()
        if rank in ends and (empty is None or rank != ends[empty]):
            model.embedding.weight.grad = own[rank].clone()
        traffic.reset()
        sum_tied_gradients(model, mesh.pp, ends)
        if rank in ends:
            assert torch.equal(model.embedding.weight.grad, own[ends[0]] + own[ends[1]])
        assert traffic.on("pp") == (8 * own[ends[0]].numel() if rank in ends else 0)
        others = [name for name, p in model.named_parameters() if p.grad is not None and name != "embedding.weight"]
        assert not others


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.ranks(2)
def test_finishing_sums_tied_gradients_before_the_norm_and_clips_every_part_alike(clip):
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(pp=2)
    model, table, _ = part_with_gradients("gpt2", mesh, (0, 1))
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    before["embedding.weight"] *= 2  # of both ends
    whole = GPT(MODELS["gpt2"])
    squares = {name: draw(name, tuple(parameter.shape)).square().sum() for name, parameter in whole.named_parameters()}
    squares["embedding.weight"] *= 4
    expected = math.sqrt(sum(squares.values()))
    norm = finish_gradients(model, GradientBuckets([], mesh.dp), table, mesh, clip, (0, 1))
    assert norm == pytest.approx(expected, rel=1e-14)
    factor = clip / (expected + 1e-6) if clip else 1.0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name] * factor, rtol=1e-13, atol=0)

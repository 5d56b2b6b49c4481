"""Muon: torch.optim.Muon's step, on slices as on wholes, and what is a matrix."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from trajectory import OPTIMIZER, Case, Way

from megalite.config import Config, MeshConfig, OptimizerConfig, check
from megalite.errors import ConfigError
from megalite.model.gpt import GPT
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.parameters import cut
from megalite.parallel.sharding import Shard, fused
from megalite.testing import run_ranks
from megalite.train.muon import Muon, orthogonal
from megalite.train.step import TrainStep
from megalite.train.verify import own_share

MUON = replace(OPTIMIZER, name="muon")
STEPS = 6


def draw(*shape, seed=3, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48)])
def test_singular_values_are_about_one_and_vectors_as_they_were(shape, dtype):
    matrix = draw(*shape, dtype=dtype)
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    made = orthogonal(matrix)
    assert made.dtype == dtype
    about = u.T @ made.double() @ vt.T
    bound = 1e-9 if dtype == torch.float64 else 0.04  # bfloat16 within
    assert (about - about.diag().diag()).abs().max() < bound
    assert s.max() / s.min() > 2
    large = about.diag()[s > 0.05 * s.norm()]  # smaller ones take more than five iterations
    assert len(large) >= 14 and 0.6 < large.min() <= large.max() < 1.3


@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48)])
def test_steps_are_those_of_torch(shape):
    ours, theirs = (nn.Parameter(draw(*shape, dtype=torch.float32)) for _ in range(2))
    further = {"lr": 0.01, "weight_decay": 0.3}
    muon = Muon({ours: Shard(shape, "tp", 1)}, Axis(), **further)
    expected = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **further)
    for step in range(5):
        ours.grad, theirs.grad = (draw(*shape, seed=step, dtype=torch.float32) for _ in range(2))
        muon.step()
        expected.step()
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-7)


def test_parts_of_a_fused_projection_are_matrices_of_their_own():
    sizes, whole = [12, 6, 6], nn.Parameter(draw(24, 16))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split(sizes)]
    further = {"lr": 0.01, "weight_decay": 0.1}
    muon = Muon({whole: Shard((24, 16), "tp", 1, 0, fused(sizes, [1, 1, 1]))}, Axis(), **further)
    apart = Muon({part: Shard(tuple(part.shape), "tp", 1) for part in parts}, Axis(), **further)
    for step in range(3):
        whole.grad = draw(24, 16, seed=step)
        for part, grad in zip(parts, whole.grad.split(sizes), strict=True):
            part.grad = grad.clone()
        muon.step()
        apart.step()
    torch.testing.assert_close(whole.detach(), torch.cat(parts), rtol=1e-12, atol=1e-14)


def trained(case, way, steps=STEPS):
    """Losses, and this rank's weights at the end, in float64."""
    torch.set_default_dtype(torch.float64)
    mesh = way.mesh()
    schedule = way.stages(case).schedule if way.pp > 1 else None
    step = TrainStep(way.gpt(case, mesh), MUON, schedule=schedule, micro_batch=way.micro_batch)
    tokens, targets, documents = own_share(case.data(), mesh, way.layout)[:3]
    losses = [step(tokens, targets, 0.01 / (1 + i), documents=documents).loss for i in range(steps)]
    weights = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    return losses, weights, step.table, mesh.tp.rank


MESHES = [
    (Case(), Way(dp=2, micro_batch=1)),
    (Case("gpt2"), Way(tp=2)),
    (Case(kv_heads=3), Way(tp=3)),
    (Case("llama tied", kv_heads=1), Way(tp=2, sequence_parallel=False)),
    (Case("gpt2", layers=3), Way(pp=2, micro_batch=1)),
    (Case("llama tied", layers=3), Way(pp=2, schedule="zb-h1", micro_batch=1)),
    (Case(length=12), Way(sp=2)),
    (Case("gpt2", layers=2, length=12), Way(pp=2, sp=2, tp=2, micro_batch=1)),
]


@pytest.mark.combination(optimizer="muon")
@pytest.mark.parametrize(("case", "way"), MESHES, ids=str)
def test_steps_on_a_mesh_are_those_of_the_mesh_of_one(case, way):
    expected, whole, _, _ = run_ranks(trained, 1, case, Way())[0]
    furthest = worst = 0.0
    for losses, weights, table, rank in run_ranks(trained, way.ranks, case, way):
        furthest = max(furthest, *(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)))
        for name, weight in weights.items():
            worst = max(worst, (weight - cut(whole[name], table[name], rank)).abs().max().item())
    print(f"muon: loss {furthest:.1e} weights {worst:.1e}")
    assert expected[-1] < expected[0] - 0.5
    assert furthest < 1e-10 and worst < 1e-10


@pytest.mark.ranks(1)
def test_matrices_of_blocks_are_muons_and_the_rest_adamws():
    model = GPT(Case("gpt2").model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    muon, decayed, kept = TrainStep(model, MUON).optimizer.param_groups
    linears = ("attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight")
    assert {names[p] for p in muon["params"]} == {f"blocks.{i}.{linear}" for i in range(2) for linear in linears}
    assert {names[p] for p in decayed["params"]} == {"embedding.weight", "positions.weight"}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (OPTIMIZER.weight_decay, 0.0)
    assert len(muon["params"]) + len(decayed["params"]) + len(kept["params"]) == len(names)


@pytest.mark.ranks(2)
def test_masters_of_bfloat16_are_stepped():
    """As a float32 model of the same weights and gradients would be."""
    for mesh in (Mesh(dp=2), Mesh(tp=2)):
        torch.set_default_dtype(torch.bfloat16)
        case = Case()
        step = TrainStep(GPT(case.model, mesh, seed=5), MUON)
        torch.set_default_dtype(torch.float32)
        plain = GPT(case.model, mesh, seed=5)
        with torch.no_grad():
            for parameter, rounded in zip(plain.parameters(), step.model.parameters(), strict=True):
                parameter.copy_(rounded)
        expected = TrainStep(plain, MUON)
        twins = dict(zip(step.model.parameters(), plain.parameters(), strict=True))
        tokens, targets, _ = own_share(case.data(), mesh, "zigzag")[:3]
        losses = []
        for _ in range(3):
            losses.append(step.backward(tokens, targets)[0])
            step.finish_gradients(clip=0)
            for parameter, start, grad in step.buckets.pieces():
                assert start == 0
                twins[parameter].grad = grad.view_as(parameter).clone()
            for optimizer in (step.optimizer, expected.optimizer):
                optimizer.step()
                optimizer.zero_grad()
            step.buckets.publish()
            for parameter, twin in twins.items():
                assert torch.equal(parameter, twin.bfloat16())
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("zero", [1, 2])
def test_divided_matrices_are_refused_before_start(zero):
    config = Config(mesh=MeshConfig(zero=zero), optimizer=OptimizerConfig(name="muon"))
    with pytest.raises(ConfigError, match=f"^mesh.zero: {zero} given; 0 would do with optimizer.name='muon', which"):
        check(config)

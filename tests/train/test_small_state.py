"""AdamW with bfloat16 state: the formula, the rounding, and that replicas stay equal."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from trajectory import OPTIMIZER, Case, Way

from megalite.config import Config, OptimizerConfig, TrainConfig, check
from megalite.errors import ConfigError
from megalite.testing import run_ranks
from megalite.train.small_state import CHUNK, AdamWOfSmallState, rounded
from megalite.train.step import TrainStep
from megalite.train.verify import own_share

SMALL = replace(OPTIMIZER, state_dtype="bfloat16")


def draw(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("value", [1.001, -3.007, 1e-9, -2.5e-20])
def test_rounding_keeps_the_expectation(value):
    """Between two neighbours, and on average what was given."""
    salt = draw(100_000)
    found = rounded(torch.full_like(salt, value), salt)
    assert found.dtype == torch.bfloat16
    values = found.double().unique()
    gap = abs(values[1] - values[0]).item()
    assert len(values) == 2 and values[0] <= value <= values[1] and gap < abs(value) * 2**-7
    assert abs(found.double().mean().item() - value) < 0.01 * gap  # 6 standard deviations of a fair draw


def test_what_bfloat16_has_stays():
    x = draw(1000).bfloat16().float()
    assert torch.equal(rounded(x, draw(1000, seed=4)).float(), x)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_steps_are_nearly_those_of_torch(beta2):
    """With 0.999 too, where a mean of squares that is rounded to the nearest would never fall."""
    ours, theirs = (nn.Parameter(draw(64, 32)) for _ in range(2))
    start, further = ours.detach().clone(), {"lr": 1e-3, "betas": (0.9, beta2), "eps": 1e-8}
    small = AdamWOfSmallState([{"params": [ours], "weight_decay": 0.1}], **further)
    exact = torch.optim.AdamW([theirs], weight_decay=0.1, **further)
    for step in range(300):
        ours.grad = draw(64, 32, seed=step) / (1 + step)  # they shrink, and so do their squares
        theirs.grad = ours.grad.clone()
        small.step()
        exact.step()
    state, expected = small.state[ours], exact.state[theirs]
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    ratio = (state["exp_avg_sq"].double().sum() / expected["exp_avg_sq"].double().sum()).item()
    assert abs(ratio - 1) < 0.01
    distance = (ours - theirs).norm() / (theirs - start).norm()
    print(f"small state: {distance:.1e}")
    assert distance < 0.03


def test_chunks_are_all_of_it():
    whole = nn.Parameter(draw(CHUNK["cpu"] + 5))
    halves = [nn.Parameter(part.clone()) for part in whole.detach().split(CHUNK["cpu"])]
    for parameters in ([whole], halves):
        optimizer = AdamWOfSmallState([{"params": parameters, "weight_decay": 0.1}], lr=0.1, betas=(0.9, 0.9), eps=1e-8)
        for parameter in parameters:
            parameter.grad = parameter.detach().sin()
        optimizer.step()
    assert torch.equal(whole, torch.cat(halves))


def trained(case, way, config, dtype, zero=0, steps=20):
    """Losses, and a checksum of the copies of what several ranks hold."""
    torch.set_default_dtype(dtype)
    mesh = way.mesh()
    schedule = way.stages(case).schedule if way.pp > 1 else None
    step = TrainStep(way.gpt(case, mesh), config, schedule=schedule, micro_batch=way.micro_batch, zero=zero)
    tokens, targets, documents = own_share(case.data(), mesh, way.layout)[:3]
    losses = [step(tokens, targets, 3e-3, documents=documents).loss for _ in range(steps)]
    with step.gathered():
        return losses, {name: weight.detach().clone() for name, weight in step.model.named_parameters()}


@pytest.mark.combination(optimizer="adamw, bfloat16 state")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("way", "zero"), [(Way(dp=2), 0), (Way(dp=2), 2), (Way(tp=2), 0), (Way(pp=2, micro_batch=1), 0)], ids=str
)
def test_training_follows_and_copies_stay_equal(way, zero, dtype):
    case = Case("llama tied", layers=2)
    exact, _ = run_ranks(trained, 1, case, Way(), OPTIMIZER, dtype)[0]
    (losses, first), (others, second) = run_ranks(trained, 2, case, way, SMALL, dtype, zero)
    assert losses == others
    furthest = max(abs(a / b - 1) for a, b in zip(losses, exact, strict=True))
    print(f"small state: loss {furthest:.1e}")
    assert exact[-1] < exact[0] - 1
    assert furthest < 0.02
    copies = first.keys() & second.keys() if way.tp == 1 else {name for name in first if "norm" in name}
    assert copies >= ({"embedding.weight"} if way.tp == 1 else {"norm.weight"})
    assert all(torch.equal(first[name], second[name]) for name in copies)


def test_float64_has_no_small_state():
    config = Config(train=TrainConfig(dtype="float64"), optimizer=OptimizerConfig(state_dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"^optimizer.state_dtype: 'bfloat16' given; 'float32' would do with train"):
        check(config)

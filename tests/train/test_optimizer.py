"""AdamW: which weights decay, and that it is AdamW."""

import torch
from torch import nn
from trajectory import GPT2

from megalite.config import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.train.optimizer import adamw, matrices_of

CONFIG = OptimizerConfig(lr=0.1, weight_decay=0.5, beta1=0.8, beta2=0.9, eps=1e-6)


def test_matrices_decay_and_vectors_do_not():
    model = GPT(GPT2)
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, kept = adamw(matrices_of(model), CONFIG).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.5, 0.0)
    kept_names = {names[parameter] for parameter in kept["params"]}
    assert kept_names == {name for name in names.values() if name.endswith("bias") or "norm" in name}
    assert {names[p] for p in decayed["params"]} == set(names.values()) - kept_names
    assert all(group["fused"] for group in (decayed, kept))


def test_a_step_is_the_formula():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    optimizer = adamw(matrices_of(layer), CONFIG)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in before]
    for step in (1, 2):
        for parameter in layer.parameters():
            parameter.grad = parameter.detach().sin() + step
        for i, (parameter, decay) in enumerate(zip(before, (0.5, 0.0), strict=True)):
            grad = parameter.sin() + step
            first, second = moments[i]
            first, second = 0.8 * first + 0.2 * grad, 0.9 * second + 0.1 * grad**2
            moments[i] = first, second
            root = (second / (1 - 0.9**step)).sqrt() + 1e-6
            before[i] = parameter * (1 - 0.1 * decay) - 0.1 * first / (1 - 0.8**step) / root
        optimizer.step()
    for parameter, expected in zip(layer.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)


def test_frozen_weights_and_a_model_of_matrices_alone():
    layer = nn.Linear(3, 2, bias=False)
    assert len(adamw(matrices_of(layer), CONFIG).param_groups) == 1
    both = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)])
    assert sum(len(group["params"]) for group in adamw(matrices_of(both), CONFIG).param_groups) == 2

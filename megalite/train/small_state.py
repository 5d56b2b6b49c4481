"""AdamW whose state is bfloat16: 4 bytes a weight where float32 takes 8.

PyTorch's AdamW wants weights, gradients and state of one dtype. Here state is widened a chunk at a time, updated, and
rounded up or down with the chance that keeps its expectation: rounded to the nearest, a mean of squares could not fall
by a thousandth of itself a step, since neighbours in bfloat16 are 4 to 8 thousandths apart.

What decides is not a generator but a hash of the number and its gradient, so that ranks that hold the same weight,
wherever they hold it, keep the same state.

Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019); stochastic rounding as in Gupta et al., Deep
Learning with Limited Numerical Precision (2015), §2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = {"cpu": 2**15, "cuda": 2**22}  # elements that are widened at once: what fits a core's cache, what fills a GPU
ODD = -1640531535  # 2³² / the golden ratio, as int32: multiplied with it, low bits reach the high ones (Knuth)


class AdamWOfSmallState(torch.optim.Optimizer):
    """torch.optim.AdamW of contiguous float32 weights, with bfloat16 state."""

    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        (beta1, beta2), lr = group["betas"], group["lr"]
        rate = lr / (1 - beta1 ** state["step"])
        root = math.sqrt(1 - beta2 ** state["step"])
        parameter.mul_(1 - lr * group["weight_decay"])
        chunk = CHUNK[parameter.device.type]
        tensors = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        for weight, grad, mean, square in zip(*(x.view(-1).split(chunk) for x in tensors), strict=True):
            first = mean.float().lerp_(grad, 1 - beta1)
            second = square.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            weight.addcdiv_(first, second.sqrt().div_(root).add_(group["eps"]), value=-rate)
            mean.copy_(rounded(first, grad))
            square.copy_(rounded(second, grad))


def rounded(x: Tensor, salt: Tensor) -> Tensor:
    """float32 `x` as bfloat16, the farther of its neighbours the rarer; equal where `x` and `salt`, float32, are."""
    bits = x.view(torch.int32)
    mixed = (bits ^ salt.contiguous().view(torch.int32) * ODD) * ODD
    mixed = (mixed ^ (mixed >> 15)) * ODD
    chance = (mixed >> 16) & 0xFFFF
    return ((bits + chance) & -0x10000).view(torch.float32).bfloat16()

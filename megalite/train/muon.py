"""Muon: momentum whose singular values are all made about one, for the matrices of the blocks.

    gradient ─ momentum ─▶ slice ─ all_gather over tp ─▶ whole ─ Newton–Schulz ─▶ about U Vᵀ ─ cut ─▶ own slice's step

Momentum goes element by element and stays with the slice; what is orthogonalised is whole, and so is the same on every
mesh. A matrix is what a layer multiplies with for one purpose: of fused projections q, k, v, and gate and up, each for
itself (the blocks of their Shard).

A step has the root mean square of AdamW's, 0.2 · √max(rows, columns) · lr, so that both take the same lr and decay.

Source: Jordan, Muon (2024), https://kellerjordan.github.io/posts/muon/; Liu et al., Muon is Scalable for LLM Training
(2025), §2.2. As torch.optim.Muon(adjust_lr_fn="match_rms_adamw"), which takes no slices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel.in_flight import Pending, issue_all_gather
from megalite.parallel.mesh import Axis
from megalite.parallel.parameters import cut, join
from megalite.parallel.sharding import Shard

MOMENTUM = 0.95  # Nesterov's
ITERATIONS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, x³ and x⁵: steep at zero, and between 0.7 and 1.2 after five times
RMS = 0.2  # of a step, by lr
EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Steps matrices of which each tp rank holds a slice. matrices: with the Shard of each   axis: of the shards

    All ranks of the axis step together, with gradients for the same matrices.
    """

    def __init__(self, matrices: Mapping[nn.Parameter, Shard], axis: Axis, *, lr: float, weight_decay: float) -> None:
        self.shards, self.axis = dict(matrices), axis
        super().__init__(list(matrices), {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all that have a gradient; a matrix is on its way while the one before is orthogonalised."""
        for group in self.param_groups:
            going: deque[tuple[nn.Parameter, Pending]] = deque()
            for parameter in group["params"]:
                if parameter.grad is not None:
                    going.append((parameter, self._issue(self._momentum(parameter))))
                if len(going) > 1:
                    self._apply(*going.popleft(), group)
            while going:
                self._apply(*going.popleft(), group)

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        mean = state["momentum_buffer"].lerp_(grad, 1 - MOMENTUM)
        return grad.lerp(mean, MOMENTUM)

    def _issue(self, update: Tensor) -> Pending:
        update = update.unsqueeze(0)  # a dim for the ranks
        return Pending(update) if self.axis.size == 1 else issue_all_gather(update, self.axis, 0)

    def _apply(self, parameter: nn.Parameter, pending: Pending, group: Mapping[str, Any]) -> None:
        shard = self.shards[parameter]
        whole = join(list(pending.wait()), shard)
        parts = whole.split([block.size for block in shard.blocks], shard.dim)
        step = torch.cat([RMS * math.sqrt(max(part.shape)) * orthogonal(part) for part in parts], shard.dim)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(cut(step, shard, self.axis.rank), alpha=-group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """About U Vᵀ of a matrix U S Vᵀ, by Newton–Schulz: in bfloat16, whose errors do not grow, or in float64."""
    x = matrix if matrix.dtype == torch.float64 else matrix.bfloat16()
    a, b, c = COEFFICIENTS
    upright = x.shape[0] > x.shape[1]
    x = x.T if upright else x
    x = x / x.norm().clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if upright else x).to(matrix.dtype)

"""Feed-forward: gated (SwiGLU) or plain (GELU), gate and up fused in one projection.

Source: Shazeer, GLU Variants Improve Transformer (2020); split over ranks, Megatron-LM (2019), §3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megalite.config import ModelConfig
from megalite.model.recompute import Keeping
from megalite.parallel.mesh import Axis
from megalite.parallel.sharding import fused, split_evenly
from megalite.parallel.tensor import ColumnParallelLinear, RowParallelLinear


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) · up` of `[..., gate and up]`: `[..., 2f]` ─▶ `[..., f]`."""
    return _SwiGLU.apply(gate_up)


def gelu(x: Tensor) -> Tensor:
    """GELU by the error function."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, which GPT-2 was trained with."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"swiglu": swiglu, "gelu": gelu, "gelu_tanh": gelu_tanh}


class MLP(nn.Module):
    """Tokens `[n, d]` ─▶ `[n, d]` by way of `[n, ffn]`, which is split over `tp`."""

    def __init__(
        self,
        config: ModelConfig,
        tp: Axis,
        sequence_dim: int | None,
        keeping: Keeping = Keeping(),  # noqa: B008  frozen
    ) -> None:
        super().__init__()
        self.keeping = keeping
        split_evenly(config.ffn, tp.name, tp.size, "ffn")
        inner = [config.ffn] * (2 if config.gated else 1)
        self.activation = ACTIVATIONS[config.activation]
        self.up = ColumnParallelLinear(
            config.hidden,
            sum(inner),
            tp,
            config.bias,
            blocks=fused(inner, [tp.size] * len(inner)),
            sequence_dim=sequence_dim,
        )
        self.down = RowParallelLinear(config.ffn, config.hidden, tp, config.bias, sequence_dim=sequence_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.keeping.through(self.activation, self.up(x), self.down)


class _SwiGLU(Function):
    """Keeps its input only and computes silu(gate) again in backward: 2f a token where autograd would keep 3f."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, -1)
        grad_up.copy_(F.silu(gate).mul_(grad))
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return result

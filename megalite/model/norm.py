"""RMSNorm and LayerNorm over the last dim, as modules with a weight (and a bias).

Source: Zhang & Sennrich, Root Mean Square Layer Normalization (2019); Ba et al., Layer Normalization (2016).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megalite.config import ModelConfig


class RMSNorm(nn.Module):
    """`x / √(mean(x²) + eps) · weight`, statistics in float32 or better. x: `[..., d]`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class _RMSNorm(Function):
    """On CPU PyTorch composes rms_norm of five operations and keeps x twice: this keeps it once, in half the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        size = x.shape[-1]
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        along = grad * unit
        grad_weight = along.flatten(0, -2).sum(0).to(weight.dtype)
        mean = (along @ weight.to(along.dtype)).div_(x.shape[-1]).unsqueeze(-1)
        return (grad.to(along.dtype) * weight).sub_(unit.mul_(mean)).mul_(scale).to(x.dtype), grad_weight, None


class LayerNorm(nn.LayerNorm):
    """`(x − mean) / √(variance + eps) · weight + bias`, statistics and sums in float32 or better. x: `[..., d]`."""

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or input.dtype not in (torch.float16, torch.bfloat16):
            return super().forward(input)
        # there PyTorch sums the gradients of the weights of half-precision input in half precision
        bias = None if self.bias is None else self.bias.float()
        y = F.layer_norm(input.float(), self.normalized_shape, self.weight.float(), bias, self.eps)
        return y.to(input.dtype)


NORMS = (RMSNorm, LayerNorm)


def norm(config: ModelConfig) -> nn.Module:
    """The norm that the config asks for, over its hidden size."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden, config.norm_eps)
    return LayerNorm(config.hidden, config.norm_eps, bias=config.bias)

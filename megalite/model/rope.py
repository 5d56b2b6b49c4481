"""Rotary position embedding: each pair (i, i + e/2) of a head turns by position · fᵢ, fᵢ = θ^(−2i/e).

For sequences longer than those it was trained on, a model's pairs are slowed by a factor F:

    linear    fᵢ / F
    llama3    fᵢ · (s + (1 − s) / F),  s = (turns − low) / (high − low) within 0 and 1, turns = original · fᵢ / 2π

Angles are computed in float64 and rounded once; q and k of half precision are turned in float32 and rounded once too.
Heads are laid out in halves, as Hugging Face's Llama has them.

Source: Su et al., RoFormer (2021), §3.2.2; linear: Chen et al., Position Interpolation (2023); llama3: Grattafiori et
al., The Llama 3 Herd of Models (2024), as released with Llama 3.1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.config import ModelConfig


def rotary(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[s, 1, e/2]` of the angles at `positions` `[s]`, to turn what is of `dtype`: float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    angle = torch.outer(positions.double(), frequencies(config, positions.device)).unsqueeze(1)
    return angle.cos().to(wide), angle.sin().to(wide)


def frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians by which each pair of a head turns from one position to the next: float64 `[e/2]`."""
    half = config.head_dim // 2
    plain = config.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    if config.rope_scaling == "linear":
        return plain / config.rope_factor
    if config.rope_scaling == "llama3":
        turns = config.rope_original * plain / (2 * math.pi)
        kept = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
        return plain * (kept + (1 - kept) / config.rope_factor)
    return plain


def rotated_qkv(
    qkv: Tensor, heads: int, kv_heads: int, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a fused `[b, s, heads + 2·kv_heads, e]`, q and k turned by their positions; None: as they are."""
    if cos is None:
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        return q, k, v
    return _RotatedQKV.apply(qkv, heads, kv_heads, cos, sin)


class _RotatedQKV(Function):
    """One pass and one new tensor for all three, where separate operations would make six; backward turns back."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        turned = torch.empty_like(qkv)
        _turn(qkv[:, :, : heads + kv_heads], cos, sin, out=turned[:, :, : heads + kv_heads])
        q, k, v = turned.split([heads, kv_heads, kv_heads], dim=2)
        v.copy_(qkv[:, :, heads + kv_heads :])
        return q, k, v

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        heads, kv_heads = grad_q.shape[2], grad_k.shape[2]
        grad = grad_q.new_empty(*grad_q.shape[:2], heads + 2 * kv_heads, grad_q.shape[3])
        _turn(grad_q, cos, -sin, out=grad[:, :, :heads])
        _turn(grad_k, cos, -sin, out=grad[:, :, heads : heads + kv_heads])
        grad[:, :, heads + kv_heads :].copy_(grad_v)
        return grad, None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    first, second = x.chunk(2, -1)
    wide = out if out.dtype == cos.dtype else torch.empty_like(out, dtype=cos.dtype)
    to_first, to_second = wide.chunk(2, -1)
    # in place on views rather than by out=, which torch.compile takes for contiguous tensors only
    to_first.copy_(first).mul_(cos).addcmul_(second, sin, value=-1)
    to_second.copy_(second).mul_(cos).addcmul_(first, sin)
    if wide is not out:
        out.copy_(wide)

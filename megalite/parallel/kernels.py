"""Attention kernels that tell their log-sum-exp: PyTorch's flash attention on CPUs and GPUs, and a plain reference.

What a ring needs and F.scaled_dot_product_attention hides: `lse`, the log of the sum over keys of exp(scaled score), by
which partial results over different keys merge, and a backward that takes the lse and the output *of all keys* and so
gives exact gradients of any part of them.

Source: Dao et al., FlashAttention (2022), §3, and FlashAttention-2 (2023), §2.3; the kernels are PyTorch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from torch import Tensor

aten = torch.ops.aten


class Kernel(ABC):
    """softmax(scale · q kᵀ) v of q `[b, s, heads, e]` and k, v `[b, t, kv_heads, e]`, kv_heads a divisor of heads.

    causal: query i sees the keys 0 … i; then s = t
    """

    wide = False  # whether results of half precision come unrounded, in float32

    def dtype(self, given: torch.dtype) -> torch.dtype:
        """Of what `forward` and `backward` make of tensors of a dtype; lse is float32, or float64 for float64."""
        return torch.promote_types(given, torch.float32) if self.wide else given

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """out `[b, s, heads, e]` and lse `[b, s, heads]`."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What these keys contribute to the gradients of q, k, v; `out` and `lse` are over all keys."""


def kernel_for(q: Tensor) -> Kernel:
    """The fastest one for the device and dtype of `q`."""
    if q.device.type == "cpu":
        return CpuFlash()
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256:
        return CudaFlash()
    if q.device.type == "cuda" and q.dtype == torch.float32:
        return CudaEfficient()
    return Reference()


class CpuFlash(Kernel):
    """PyTorch's flash attention for CPUs: grouped queries, any strides.

    Half precision is computed in float32, which takes about half the time here and leaves the rounding to the end.
    """

    wide = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = _heads_first(*_widened(q, k, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = _heads_first(*_widened(grad, q, k, v, out, lse))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal, scale=scale)
        dq, dk, dv = _heads_first(*grads)
        return dq, dk, dv


class CudaFlash(Kernel):
    """FlashAttention-2 as PyTorch ships it: bfloat16 and float16, grouped queries, e up to 256."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        padded = _heads_first(*(_in_eights(x) for x in (q, k, v)))
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*padded, 0.0, causal, False, scale=scale)
        return out.transpose(1, 2)[..., : q.shape[-1]], lse.transpose(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        padded = _heads_first(*(_in_eights(x) for x in (grad, q, k, v, out)))
        random = torch.empty(2, dtype=torch.int64, device=q.device)  # there is no dropout to repeat
        grads = aten._scaled_dot_product_flash_attention_backward(
            *padded, lse.transpose(1, 2).contiguous(), None, None, q.shape[1], k.shape[1], 0.0, causal, random, random,
            scale=scale,
        )  # fmt: skip
        dq, dk, dv = (x[..., : q.shape[-1]] for x in _heads_first(*grads))
        return dq, dk, dv


class CudaEfficient(Kernel):
    """Memory-efficient attention (xFormers' kernel in PyTorch): for float32; kv heads are repeated, then summed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        k, v = (_one_for_each_query_head(x, q) for x in (k, v))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            *_heads_first(q, k, v), None, True, 0.0, causal, scale=scale
        )
        return out.transpose(1, 2), lse[..., : q.shape[1]].transpose(1, 2)  # it rounds s up to 32

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads = k.shape[2]
        k, v = (_one_for_each_query_head(x, q) for x in (k, v))
        rounded = F.pad(lse.transpose(1, 2), (0, -q.shape[1] % 32)).contiguous()
        random = torch.empty((), dtype=torch.int64, device=q.device)  # there is no dropout to repeat
        grad, q, k, v, out = _heads_first(grad, q, k, v, out)
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, rounded, random, random, 0.0, [True, True, True, False], causal, scale=scale
        )
        dq, dk, dv = _heads_first(*grads[:3])
        return dq, _summed_to(dk, kv_heads), _summed_to(dv, kv_heads)


class Reference(Kernel):
    """Matrix products and a softmax, as in the paper: any device and dtype, memory s · t."""

    wide = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = _widened(q, k, v)
        scores = self._scores(q, k, causal, scale)
        lse = scores.logsumexp(-1)
        probability = (scores - lse.unsqueeze(-1)).exp()
        return torch.einsum("bhst,bthe->bshe", probability, _one_for_each_query_head(v, q)), lse.transpose(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out, lse = _widened(grad, q, k, v, out, lse)
        probability = (self._scores(q, k, causal, scale) - lse.transpose(1, 2).unsqueeze(-1)).exp()
        kv_heads = k.shape[2]
        k, v = (_one_for_each_query_head(x, q) for x in (k, v))
        own = reduce(grad * out, "b s h e -> b h s 1", "sum")
        dscores = probability * (torch.einsum("bshe,bthe->bhst", grad, v) - own) * scale
        dv = torch.einsum("bhst,bshe->bthe", probability, grad)
        dq = torch.einsum("bhst,bthe->bshe", dscores, k)
        dk = torch.einsum("bhst,bshe->bthe", dscores, q)
        return dq, _summed_to(dk, kv_heads), _summed_to(dv, kv_heads)

    def _scores(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        scores = torch.einsum("bshe,bthe->bhst", q, _one_for_each_query_head(k, q)) * scale
        if not causal:
            return scores
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(above, float("-inf"))


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """As the kernels have it: `[b, s, heads, …]` ⇄ `[b, heads, s, …]`, without a copy."""
    return [x.transpose(1, 2) for x in tensors]


def _widened(*tensors: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _in_eights(x: Tensor) -> Tensor:
    """The head dim filled up with zeros to the multiple of 8 that the kernel asks for."""
    return F.pad(x, (0, -x.shape[-1] % 8))


def _one_for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    return repeat(x, "b t h e -> b t (h g) e", g=q.shape[2] // x.shape[2])


def _summed_to(x: Tensor, kv_heads: int) -> Tensor:
    return rearrange(x, "b t (h g) e -> b t h g e", h=kv_heads).sum(3)

"""Attention from its definition, over whole sequences: what every way of computing it is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_qkv(
    batch: int, length: int, heads: int, kv_heads: int, size: int = 8
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a gradient of the output."""
    numbers = enumerate((heads, kv_heads, kv_heads, heads))
    q, k, v, grad = (draw(batch, length, count, size, seed=seed) for seed, count in numbers)
    return q, k, v, grad


def draw_documents(batch: int, length: int, kind: str, seed: int = 0) -> Tensor | None:
    """Numbers of documents: "packed" ones follow each other, some of them padding; "mixed" ones alternate at random."""
    if kind == "none":
        return None
    numbers = torch.randint(-1, 4, (batch, length), generator=torch.Generator().manual_seed(seed))
    return numbers if kind == "mixed" else numbers.sort(1)[0]


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, documents: Tensor | None = None, window: int | None = None
) -> Tensor:
    """With scores as one matrix, a mask of booleans and a softmax; a query that sees nothing gets zeros."""
    position = torch.arange(q.shape[1])
    sees = torch.ones(q.shape[0], len(position), len(position), dtype=torch.bool)
    if causal:
        sees &= position <= position[:, None]
    if window is not None:
        sees &= position[:, None] - position < window
    if documents is not None:
        sees &= (documents[:, :, None] == documents[:, None]) & (documents[:, :, None] >= 0)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bshe,bthe->bhst", q, k) / q.shape[-1] ** 0.5
    finite = scores.masked_fill(~sees[:, None], -1e300)
    probability = finite.softmax(-1) * sees[:, None]
    return torch.einsum("bhst,bthe->bshe", probability, v)


def with_gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """out, dq, dk, dv."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def cut(x: Tensor | None, positions: np.ndarray) -> Tensor | None:
    """The tokens at some positions, of `[b, s, …]`."""
    return None if x is None else x[:, torch.from_numpy(positions)]


def worst(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest absolute difference; NaN where there is one."""
    return torch.stack([(a - e).abs().max() for a, e in zip(actual, expected, strict=True)]).max().item()

"""Attention that one rank computes: tile by tile, from blocks of k and v that it holds or is sent.

    for each block:  for each tile:  kernel ─▶ partial out, lse ─▶ merged

Partial results over different keys merge by their log-sum-exp, in float32 (float64 for float64):

    lse = log(exp lse₁ + exp lse₂)      out = out₁ + (out₂ − out₁) · σ(lse₂ − lse₁)

In backward each tile is given the out and lse of *all* keys, which makes what it contributes exact: no merging, only
sums. Where the blocks come from and the gradients go is an `Exchange`: here a rank alone, in ring.py a ring.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018); Liu et al., Ring Attention (2023), §3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalite.parallel.kernels import Kernel, kernel_for
from megalite.parallel.tiles import Mask, Plan, Tile


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    *,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention over a whole sequence on one rank: q `[b, s, heads, e]`; k, v `[b, s, kv_heads, e]` ─▶ as q.

    documents: `[b, s]` of whole numbers, only equal ones see each other; a negative one (padding) gives zeros
    window: a query sees at most this many keys, itself included   scale: of the scores; None: 1/√e
    """
    mask = Mask(causal, window, None if documents is None else as_array(documents))
    plan = Plan(mask, [np.arange(q.shape[1])])
    return attend(q, k, v, plan, Exchange(), scale=scale)


def as_array(documents: Tensor) -> np.ndarray:
    """Whole numbers, where the plan is made."""
    return documents.cpu().numpy()


@dataclass(frozen=True)
class Block:
    """k and v `[b, keys, kv_heads, e]` of some rank's `keys`."""

    k: Tensor
    v: Tensor
    keys: range


class Exchange:
    """How blocks come to a rank, and their gradients home: none do, since this one is alone."""

    rank = 0

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Block]]:
        """This rank's own (rank, block), and then those of others."""
        yield self.rank, Block(k, v, range(k.shape[1]))

    def send_home(self, source: int, dk: Tensor, dv: Tensor) -> None:
        """Called after every block but the own one: its gradients, in the dtype that the kernel has them in."""

    def came_home(self) -> Iterator[Block]:
        """Gradients of this rank's own k and v that others have sent."""
        yield from ()


@dataclass
class Work:
    """FLOPs of attention on this rank: 4·e forward and 10·e backward for each score that the mask shows."""

    forward: int = 0
    backward: int = 0

    def reset(self) -> None:
        """Start counting anew."""
        self.forward = self.backward = 0

    def __reduce__(self) -> str:
        return "work"  # a function sent to another process counts there


work = Work()  # this process's own: one rank is one process


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, exchange: Exchange, *, keep: bool = False, scale: float | None = None
) -> Tensor:
    """Attention of this rank's q to all keys of the plan; `keep`: the blocks of others are kept for backward."""
    if q.ndim != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} given; q [b, s, heads, e] and k, v "
            f"[b, s, kv_heads, e], kv_heads a divisor of heads, would do"
        )
    documents, whole = plan.mask.documents, (q.shape[0], plan.ranks * q.shape[1])
    if documents is not None and documents.shape != whole:
        raise ValueError(f"documents of {list(documents.shape)} tokens given; {list(whole)}, over all ranks, would do")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Attention.apply(q, k, v, plan, exchange, keep, _Tiled(kernel_for(q), scale))


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, exchange: Exchange, keep: bool, tiled: _Tiled
    ) -> Tensor:
        merged, kept = _Merged(q), []
        for source, block in exchange.blocks(k, v):
            for tile in plan.tiles(exchange.rank, source):
                merged.add(tile, *tiled.forward(tile, q, block))
            if keep and source != exchange.rank:
                kept.append((source, block))
        out, lse = merged.result()
        ctx.plan, ctx.exchange, ctx.tiled = plan, exchange, tiled
        ctx.kept = [(source, block.keys) for source, block in kept] if keep else None
        ctx.save_for_backward(q, k, v, out, lse, *(x for _, block in kept for x in (block.k, block.v)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, *kept = ctx.saved_tensors
        exchange, tiled = ctx.exchange, ctx.tiled
        dq, dk, dv = _Sum(q), _Sum(k), _Sum(v)
        for source, block in exchange.blocks(k, v) if ctx.kept is None else _again(ctx, k, v, kept):
            own = source == exchange.rank
            its_dk, its_dv = (dk, dv) if own else (_Sum(block.k), _Sum(block.v))
            for tile in ctx.plan.tiles(exchange.rank, source):
                part_dq, part_dk, part_dv = tiled.backward(tile, grad, q, block, out, lse)
                dq.add(part_dq, tile.queries, tile.row)
                its_dk.add(part_dk, _within(tile.keys, block), tile.row)
                its_dv.add(part_dv, _within(tile.keys, block), tile.row)
            if not own:
                dtype = tiled.kernel.dtype(k.dtype)
                exchange.send_home(source, its_dk.result(dtype), its_dv.result(dtype))
        for block in exchange.came_home():
            dk.add(block.k, block.keys)
            dv.add(block.v, block.keys)
        return dq.result(q.dtype), dk.result(k.dtype), dv.result(v.dtype), None, None, None, None


def _again(ctx: Any, k: Tensor, v: Tensor, kept: list[Tensor]) -> Iterator[tuple[int, Block]]:
    """The blocks that forward kept, and the own one last, while the others' gradients are on their way home."""
    for (source, keys), its_k, its_v in zip(ctx.kept, kept[::2], kept[1::2], strict=True):
        yield source, Block(its_k, its_v, keys)
    yield from Exchange.blocks(ctx.exchange, k, v)


@dataclass(frozen=True)
class _Tiled:
    """A kernel that is given tiles."""

    kernel: Kernel
    scale: float

    def forward(self, tile: Tile, q: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        q, k, v = _cut(tile, q, block)
        work.forward += 4 * q.shape[-1] * q.shape[2] * q.shape[0] * tile.pairs
        out, lse = self.kernel.forward(q, k, v, tile.shape != "full", self.scale)
        return _as_held(tile, out), _as_held(tile, lse)

    def backward(
        self, tile: Tile, grad: Tensor, q: Tensor, block: Block, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        grad, out, lse = (_read(x, tile.queries, tile) for x in (grad, out, lse))
        q, k, v = _cut(tile, q, block)
        work.backward += 10 * q.shape[-1] * q.shape[2] * q.shape[0] * tile.pairs
        grads = self.kernel.backward(grad, q, k, v, out, lse, tile.shape != "full", self.scale)
        return tuple(_as_held(tile, x) for x in grads)


def _cut(tile: Tile, q: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    keys = _within(tile.keys, block)
    return _read(q, tile.queries, tile), _read(block.k, keys, tile), _read(block.v, keys, tile)


def _within(keys: range, block: Block) -> range:
    """Where the keys stand in the block."""
    return range(keys.start - block.keys.start, keys.stop - block.keys.start)


def _read(x: Tensor, tokens: range, tile: Tile) -> Tensor:
    """A tile's part of `[b, s, …]`; backwards for an upper triangle, which then is a lower one."""
    x = x[_at(tokens, tile.row)]
    return x.flip(1) if tile.shape == "upper" else x


def _as_held(tile: Tile, result: Tensor) -> Tensor:
    return result.flip(1) if tile.shape == "upper" else result


def _at(tokens: range, row: int | None) -> tuple[slice, slice]:
    return slice(None) if row is None else slice(row, row + 1), slice(tokens.start, tokens.stop)


class _Merged:
    """Partial outputs as one, in float32 or float64; a query that no tile reached has out 0 and lse −∞."""

    def __init__(self, q: Tensor) -> None:
        self.q = q
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        if self.out is None and out.shape == self.q.shape:
            self.out, self.lse = out, lse
            return
        if self.out is None or self.lse is None:
            self.out = torch.zeros_like(self.q, dtype=self.wide)
            self.lse = self.q.new_full(self.q.shape[:3], float("-inf"), dtype=self.wide)
        self.out = self.out.to(self.wide)
        where = _at(tile.queries, tile.row)
        before = self.lse[where]
        self.out[where].lerp_(out.to(self.wide), torch.sigmoid(lse - before).unsqueeze(-1))
        self.lse[where] = torch.logaddexp(before, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        if self.out is None or self.lse is None:
            return torch.zeros_like(self.q), self.q.new_full(self.q.shape[:3], float("-inf"), dtype=self.wide)
        return self.out.to(self.q.dtype), self.lse


class _Sum:
    """A gradient as a sum of parts, in float32 or float64 as soon as there are two."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.wide = torch.promote_types(like.dtype, torch.float32)
        self.total: Tensor | None = None

    def add(self, part: Tensor, tokens: range, row: int | None = None) -> None:
        if self.total is None and part.shape == self.like.shape:
            self.total = part
            return
        if self.total is None:
            self.total = torch.zeros_like(self.like, dtype=self.wide, memory_format=torch.contiguous_format)
        self.total = self.total.to(self.wide)
        self.total[_at(tokens, row)] += part

    def result(self, dtype: torch.dtype) -> Tensor:
        if self.total is None:
            return torch.zeros_like(self.like, dtype=dtype, memory_format=torch.contiguous_format)
        return self.total.to(dtype)

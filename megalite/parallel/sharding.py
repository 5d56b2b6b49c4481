"""Shard: which slice of the whole a rank holds of one parameter.

A parameter is cut along one dim, in blocks that lie one behind the other; each block is cut in equal parts, and the
ranks of the axis hold them in order, several neighbours holding the same part where there are fewer parts than ranks:

    qkv of 4 query heads and 2 kv heads on 4 ranks     whole   q0 q1 q2 q3 │ k0 k1 │ v0 v1
    Block(4·e, 4), Block(2·e, 2), Block(2·e, 2)        rank 0  q0 k0 v0      rank 2  q2 k1 v1
                                                       rank 1  q1 k0 v0      rank 3  q3 k1 v1

A replicated parameter is one block in one part. A block that does not divide is padded: the last parts hold
fewer rows of the whole, and zeros behind them.

One table, parameter name → Shard, is read by initialisation, gradient sums, the gradient norm and the checks.
No torch here: everything is arithmetic on integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """`size` rows of the whole, cut in `parts` equal parts."""

    size: int
    parts: int

    @property
    def rows(self) -> int:
        """Rows of one part, padding included."""
        return -(-self.size // self.parts)


@dataclass(frozen=True)
class Piece:
    """Rows that a rank holds: `local` and `whole` are where they start, `rows` how many (padding excluded).

    copies: how many ranks hold the same rows
    """

    local: int
    whole: int
    rows: int
    copies: int


@dataclass(frozen=True)
class Shard:
    """How one parameter is laid over the ranks of one axis.

    shape: of the whole   dim: the one that is cut   blocks: along `dim`, in order
    axis, ranks: the axis' name and size
    partial: of a part that several ranks hold, each computes only a summand of the gradient, since each
             sees a part of the tokens (sequence parallelism) or of the heads (replicated kv heads)
    """

    shape: tuple[int, ...]
    axis: str
    ranks: int
    dim: int = 0
    blocks: tuple[Block, ...] = ()
    partial: bool = False

    def __post_init__(self) -> None:
        rows = self.shape[self.dim] if self.shape else 1
        if not self.blocks:
            object.__setattr__(self, "blocks", (Block(rows, 1),))
        if sum(block.size for block in self.blocks) != rows:
            raise ValueError(f"blocks of {[b.size for b in self.blocks]} rows do not make {rows}")
        for block in self.blocks:
            if self.ranks % block.parts:
                raise ValueError(f"{block.parts} parts cannot be laid over {self.ranks} ranks of axis {self.axis}")

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what each rank holds, padding included: the same on every rank."""
        if not self.shape:
            return ()
        rows = sum(block.rows for block in self.blocks)
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole."""
        return all(block.parts == 1 for block in self.blocks)

    def pieces(self, rank: int) -> list[Piece]:
        """What `rank` holds, one piece a block, in local order; a part that is all padding has none."""
        pieces, local, whole = [], 0, 0
        for block in self.blocks:
            copies = self.ranks // block.parts
            start = rank // copies * block.rows
            rows = min(block.rows, block.size - start)
            if rows > 0:
                pieces.append(Piece(local, whole + start, rows, copies))
            local += block.rows
            whole += block.size
        return pieces

    def ranges(self, rank: int) -> list[tuple[int, int, int]]:
        """Of the flattened local tensor from where to where it is held by how many ranks: (start, stop, copies).

        Padding is left out where the number changes; its gradient is zero.
        """
        pieces = self.pieces(rank)
        if len({piece.copies for piece in pieces}) <= 1:
            return [(0, math.prod(self.local_shape), piece.copies) for piece in pieces[:1]]
        return [(*run, piece.copies) for piece in pieces for run in self._runs(piece.local, piece.rows)]

    def partial_ranges(self) -> list[tuple[int, int, int]]:
        """Likewise, of what several ranks hold and each computes a summand of: (start, stop, parts of the block)."""
        found, local = [], 0
        for block in self.blocks if self.partial else ():
            if block.parts < self.ranks:
                found += [(*run, block.parts) for run in self._runs(local, block.rows)]
            local += block.rows
        return found

    def _runs(self, local: int, rows: int) -> Iterator[tuple[int, int]]:
        """Where rows of `dim` lie in the flattened local tensor: in one run, or, unless it is dim 0, several."""
        if not self.shape:
            yield 0, 1
            return
        inner = math.prod(self.shape[self.dim + 1 :])
        for outer in range(math.prod(self.shape[: self.dim])):
            start = (outer * self.local_shape[self.dim] + local) * inner
            yield start, start + rows * inner


def split_evenly(size: int, axis: str, ranks: int, what: str) -> int:
    """`size` over `ranks`, or a ValueError that names `what`."""
    if size % ranks:
        raise ValueError(
            f"{what}={size} does not divide over the {ranks} ranks of {axis}; a multiple of {ranks} would do"
        )
    return size // ranks


def fused(sizes: Sequence[int], parts: Sequence[int]) -> tuple[Block, ...]:
    """Blocks of a fused projection: `sizes[i]` rows cut in `parts[i]` parts."""
    return tuple(Block(size, part) for size, part in zip(sizes, parts, strict=True))

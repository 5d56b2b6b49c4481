"""Which tokens a rank holds where the sequence is cut over sp: contiguous, zigzag or striped over the ring.

    24 tokens over a ring of 3       rank 0             rank 1             rank 2
    contiguous                       0 … 7              8 … 15             16 … 23
    zigzag                           0 … 3, 20 … 23     4 … 7, 16 … 19     8 … 15
    striped                          0, 3, 6 … 21       1, 4, 7 … 22       2, 5, 8 … 23

Under a causal mask a late token sees more than an early one: contiguous ranks get 1, 3, 5 … parts of the work, zigzag
and striped ones get equal parts. On every rank positions grow, so that a rank's own block is an ordinary causal one.

Ulysses ranks are neighbours within a place of the ring and share its tokens evenly, in order:
sp rank = ring rank · ulysses + ulysses rank.

Sources: zigzag, the Llama 3 report (2024), §3.3.2; striped, Brandon et al., Striped Attention (2023).
"""

from __future__ import annotations

import math

import numpy as np

LAYOUTS = ("contiguous", "zigzag", "striped")


def sequence_divisor(layout: str, ring: int, ulysses: int = 1) -> int:
    """What the length of a sequence must be a multiple of."""
    return math.lcm(2 * ring if layout == "zigzag" and ring > 1 else ring, ring * ulysses)


def ring_positions(layout: str, ring: int, rank: int, length: int) -> np.ndarray:
    """Positions in the sequence of the tokens at one place of the ring, in growing order: `[length / ring]`.

    ValueError where `length` is no multiple of `sequence_divisor`, or for an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} given; one of {', '.join(LAYOUTS)} would do")
    if length % sequence_divisor(layout, ring):
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut over a {layout} ring of {ring}; "
            f"a multiple of {sequence_divisor(layout, ring)} would do"
        )
    every = np.arange(length)
    if layout == "striped":
        return every[rank::ring]
    if layout == "zigzag" and ring > 1:
        chunks = every.reshape(2 * ring, -1)
        return np.concatenate([chunks[rank], chunks[2 * ring - 1 - rank]])
    return every.reshape(ring, -1)[rank]


def own_positions(layout: str, ring: int, ulysses: int, rank: int, length: int) -> np.ndarray:
    """Positions in the sequence of the tokens that a rank of the whole sp axis holds: `[length / (ring · ulysses)]`."""
    if length % sequence_divisor(layout, ring, ulysses):
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut over a {layout} ring of {ring} × ulysses {ulysses}; "
            f"a multiple of {sequence_divisor(layout, ring, ulysses)} would do"
        )
    return ring_positions(layout, ring, rank // ulysses, length).reshape(ulysses, -1)[rank % ulysses]

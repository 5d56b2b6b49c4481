"""Ring attention: every rank keeps its queries, and the blocks of k and v go round.

    turn             0      1      2      3          rank 2 computes with the block of
    rank 0           0      3      2      1          itself, then of the rank one place back, two places back …
    rank 1           1      0      3      2          while the next block is on its way: post, compute, wait
    rank 2           2      1      0      3
    rank 3           3      2      1      0

k and v travel in one message, kv heads only. In backward they come again (unless kept), and each block's gradients go
home in one message. A block comes from its owner, not from the neighbour that had it last: the same turns and the
same bytes, but no rank hands on what only others need. So what the mask removes is not sent: of a contiguous ring
only what is earlier, of a zigzag one half of it; with documents or a window, only the keys that some query sees.
And gradients need no sum on the way: they arrive as the kernel made them and are summed at home, so that the error does
not grow with the ring.

Not to be confused with sequence.py, which splits tokens over tp between the linears. Which rank has which tokens: see
layout.py.

Bytes that a rank sends, with B = 2 · b · s/n · kv_heads · e · itemsize of k and v and n ranks:

    forward      (n − 1) · B · f      mean over the ranks; f = 1, or causal 3/4 zigzag, 1/2 contiguous, 1 − n/2s striped
    backward     as much for k and v, unless they are kept, and as much for their gradients, which for half precision
                 are float32 on CPUs and so twice as much

Source: Liu et al., Ring Attention with Blockwise Transformers (2023), §3; FlashAttention-2 (2023) for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from megalite.parallel.in_flight import Pending, issue_all_gather, issue_shift
from megalite.parallel.layout import ring_positions
from megalite.parallel.local_attention import Block, Exchange, as_array, attend
from megalite.parallel.mesh import Axis
from megalite.parallel.tiles import Mask, Plan


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    causal: bool = True,
    layout: str = "zigzag",
    *,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    keep_kv: bool = False,
) -> Tensor:
    """Attention over a sequence of which each rank of `axis` holds a part: q `[b, s/n, heads, e]` ─▶ as q.

    k, v: `[b, s/n, kv_heads, e]`, kv_heads a divisor of heads
    layout: which tokens a rank holds, "contiguous", "zigzag" or "striped" (layout.py)
    documents: `[b, s/n]` of whole numbers, only equal ones see each other; a negative one (padding) gives zeros
    window: a query sees at most this many keys, itself included   scale: of the scores; None: 1/√e
    keep_kv: keep the other ranks' k, v for backward rather than have them sent again

    Gradients are this rank's parts of dq, dk, dv. ValueError where a shape, the layout or the window cannot be.
    """
    plan = ring_plan(axis, q.shape[1], causal, layout, documents=documents, window=window)
    return ring_attention_by_plan(q, k, v, axis, plan, scale=scale, keep_kv=keep_kv)


def ring_plan(
    axis: Axis,
    length: int,
    causal: bool = True,
    layout: str = "zigzag",
    *,
    documents: Tensor | None = None,
    window: int | None = None,
) -> Plan:
    """What each rank computes, for `length` tokens a rank; made once for all layers, since documents are gathered."""
    if documents is None:
        return _plan_without_documents(axis.size, length, causal, layout, window)
    if axis.size > 1:
        documents = issue_all_gather(documents, axis, dim=1).wait()
    whole = _plan_without_documents(axis.size, length, causal, layout, window)
    return Plan(Mask(causal, window, as_array(documents)), whole.positions)


@lru_cache(maxsize=64)
def _plan_without_documents(size: int, length: int, causal: bool, layout: str, window: int | None) -> Plan:
    positions = [ring_positions(layout, size, rank, size * length) for rank in range(size)]
    return Plan(Mask(causal, window), positions)


def ring_attention_by_plan(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, plan: Plan, *, scale: float | None = None, keep_kv: bool = False
) -> Tensor:
    """`ring_attention` by a plan that was made before: see there."""
    return attend(q, k, v, plan, _Rotation(axis, plan), keep=keep_kv, scale=scale)


class _Rotation(Exchange):
    """In turn t a block comes from t places back, and the gradients of the block of turn t go t places back."""

    def __init__(self, axis: Axis, plan: Plan) -> None:
        self.axis, self.plan, self.rank = axis, plan, axis.rank
        self._homeward: list[tuple[Pending, range]] = []

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Block]]:
        """The own block, then those of all other ranks, the next one always under way while one is in use."""
        messages: dict[range, Tensor] = {}
        coming = self._post(1, k, v, messages)
        yield self.rank, Block(k, v, range(k.shape[1]))
        for turn in range(1, self.axis.size):
            source = self._back(turn)
            k_and_v = coming.wait()
            coming = self._post(turn + 1, k, v, messages)
            yield source, Block(k_and_v[0], k_and_v[1], self.plan.needs(self.rank, source))

    def send_home(self, source: int, dk: Tensor, dv: Tensor) -> None:
        """Post the gradients of a block to its owner, whose turn it is to post those of its own."""
        turn = (self.rank - source) % self.axis.size
        keys = self.plan.needs((self.rank + turn) % self.axis.size, self.rank)
        gradients = torch.stack((dk, dv))
        shape = (*gradients.shape[:2], len(keys), *gradients.shape[3:])
        self._homeward.append((issue_shift(gradients, self.axis, -turn, shape), keys))

    def came_home(self) -> Iterator[Block]:
        """Wait for the gradients that the other ranks posted, in turn."""
        homeward, self._homeward = self._homeward, []
        for pending, keys in homeward:
            gradients = pending.wait()
            yield Block(gradients[0], gradients[1], keys)

    def _back(self, places: int) -> int:
        return (self.rank - places) % self.axis.size

    def _post(self, turn: int, k: Tensor, v: Tensor, messages: dict[range, Tensor]) -> Pending:
        """Start the message of a turn; there is none after the last."""
        if turn >= self.axis.size:
            return Pending(k[:0])
        keys = self.plan.needs(self._back(-turn), self.rank)
        if keys not in messages:
            messages[keys] = torch.stack([x[:, keys.start : keys.stop] for x in (k, v)])
        shape = (2, k.shape[0], len(self.plan.needs(self.rank, self._back(turn))), *k.shape[2:])
        return issue_shift(messages[keys], self.axis, turn, shape)

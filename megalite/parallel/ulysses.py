"""Ulysses: trade a slice of tokens for a slice of heads, attend to the whole sequence, trade back.

    q, k, v    [b, s/n, heads, e]   ─ all_to_all ─▶   [b, s, heads/n, e]    all tokens, some heads
                                                             │ attend
    out        [b, s/n, heads, e]   ◀─ all_to_all ─   [b, s, heads/n, e]

q, k and v travel in one message. A rank needs the kv heads of its query heads: where there are fewer kv heads than
ranks, neighbours get the same one; their gradients are summed on the way back.

What attends may be anything of q, k, v: attention on this rank, or a ring over another axis, which makes the two one
method (unified sequence parallelism): `ulysses_attention(q, k, v, mesh.ulysses, attend=partial(ring_attention,
axis=mesh.ring))`. A rank's tokens are then a slice, in order, of what one place of the ring holds (layout.py).

Not to be confused with sequence.py, which splits tokens over tp between the linears.

Bytes that a rank sends, forward, on n ranks: (n−1)/n · b · s/n · e · itemsize · (2 · heads + 2 · kv), and backward as
many. kv counts each kv head as often as it travels: as they are where n divides them, n where n is a multiple of them,
and all heads where neither is so.

Sources: Jacobs et al., DeepSpeed Ulysses (2023), §3; Fang and Zhao, USP (2024), §3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor

from megalite.parallel.collectives import all_to_all
from megalite.parallel.in_flight import issue_all_gather
from megalite.parallel.local_attention import local_attention
from megalite.parallel.mesh import Axis


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    causal: bool = True,
    attend: Callable[..., Tensor] = local_attention,
    *,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention over a sequence of which each rank of `axis` holds the next s/n tokens: q `[b, s/n, heads, e]` ─▶ as q.

    k, v: `[b, s/n, kv_heads, e]`, kv_heads a divisor of heads
    attend: of q, k, v with all tokens and some heads; what differs here from its default among causal, documents,
        window and scale is handed on by name
    documents, window, scale: as for `local_attention`, documents `[b, s/n]`

    ValueError where the heads do not divide over the axis.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % axis.size:
        raise ValueError(
            f"{heads} heads do not divide over the {axis.size} ranks of axis {axis.name}; a divisor of {heads} would "
            f"do, or ring_attention, which does not divide heads (mesh.ulysses=1)"
        )
    further: dict[str, Any] = {} if causal else {"causal": False}
    if documents is not None:
        further["documents"] = documents if axis.size == 1 else issue_all_gather(documents, axis, dim=1).wait()
    further |= {name: value for name, value in (("window", window), ("scale", scale)) if value is not None}
    if axis.size == 1:
        return attend(q, k, v, **further)
    repeats = _repeats(heads, kv_heads, axis.size)
    k, v = (repeat(x, "b s h e -> b s (h r) e", r=repeats) for x in (k, v))
    to_each = [rearrange(x, "b s (n h) e -> n b s h e", n=axis.size) for x in (q, k, v)]
    own = all_to_all(torch.cat(to_each, 3), axis, dim=0, concat_dim=2).squeeze(0)
    q, k, v = own.split([x.shape[3] for x in to_each], 2)
    return all_to_all(attend(q, k, v, **further), axis, dim=1, concat_dim=2)


def _repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """How often each kv head travels: as little as lets every rank's heads form groups of one size."""
    group, own = heads // kv_heads, heads // ranks
    if own % group == 0:  # whole groups a rank
        return 1
    return group // own if group % own == 0 else group

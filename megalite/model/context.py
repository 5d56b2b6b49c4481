"""Context: what a layer must know of a batch beyond its tokens, worked out once for all layers.

mesh.ring, mesh.ulysses     attends
1, 1                        PyTorch's kernels; tile by tile where there are documents or a window
n, 1                        a ring                       (ring.py)
1, n                        heads traded for tokens      (ulysses.py)
m, n                        one over the other
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from megalite.config import ModelConfig
from megalite.model.rope import rotary
from megalite.parallel.in_flight import issue_all_gather
from megalite.parallel.layout import own_positions
from megalite.parallel.mesh import Mesh
from megalite.parallel.ring import ring_attention_by_plan, ring_plan
from megalite.parallel.ulysses import ulysses_attention

Core = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v and the result: [b, s, heads, e]


@dataclass(frozen=True)
class Context:
    """Where the tokens of a batch stand, and what attends.

    batch, length: tokens are `batch` sequences, of which this rank has `length` tokens each
    positions: `[length]`, of these tokens in their sequences
    cos, sin: `[length, 1, e/2]`; None where positions are learned
    """

    batch: int
    length: int
    positions: Tensor
    attend: Core
    cos: Tensor | None = None
    sin: Tensor | None = None


def context(
    config: ModelConfig,
    mesh: Mesh,
    tokens: Tensor,
    documents: Tensor | None,
    dtype: torch.dtype,
    *,
    layout: str,
    keep_kv: bool,
) -> Context:
    """Of this rank's `tokens` `[b, s / sp]` and `documents` likewise; q and k have `dtype`; the others: see `core`."""
    batch, length = tokens.shape
    own = own_positions(layout, mesh.ring.size, mesh.ulysses.size, mesh.sp.rank, length * mesh.sp.size)
    positions = torch.from_numpy(own).to(tokens.device)
    attend = core(mesh, length, documents, config.window or None, layout, keep_kv)
    if config.positions != "rope":
        return Context(batch, length, positions, attend)
    return Context(batch, length, positions, attend, *rotary(config, positions, dtype))


def core(mesh: Mesh, length: int, documents: Tensor | None, window: int | None, layout: str, keep_kv: bool) -> Core:
    """What attends, for `length` tokens a rank; layout, keep_kv: see ring_attention."""
    attend: Core = causal_attention
    if mesh.ring.size > 1 or window is not None or documents is not None:
        if documents is not None and mesh.ulysses.size > 1:
            documents = issue_all_gather(documents, mesh.ulysses, dim=1).wait()
        plan = ring_plan(mesh.ring, length * mesh.ulysses.size, True, layout, documents=documents, window=window)
        attend = partial(ring_attention_by_plan, axis=mesh.ring, plan=plan, keep_kv=keep_kv)
    if mesh.ulysses.size > 1:
        attend = partial(ulysses_attention, axis=mesh.ulysses, attend=attend)
    return attend


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention by PyTorch's kernels. q `[b, s, heads, e]`; k, v `[b, s, kv_heads, e]`."""
    q, k, v = (rearrange(x, "b s h e -> b h s e") for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return rearrange(out, "b h s e -> b s h e")

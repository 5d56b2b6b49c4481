"""The keys and values of tokens seen before: of a text that grows, only the token that follows is computed.

    tokens 0 … n − 1   attend to one another ─▶ keys, values kept
    token n            attends to what is kept and to itself ─▶ its own are kept too

A layer keeps `[b, capacity, kv_heads, e]` twice: the kv heads of this tp rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from megalite.config import ModelConfig
from megalite.model.context import Context, core
from megalite.model.rope import rotary
from megalite.parallel.mesh import Mesh


class KVCache:
    """What all layers keep of at most `capacity` tokens, whole sequences of them; q and k have `dtype`."""

    def __init__(self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        if not 1 <= capacity <= config.max_seq_len:
            raise ValueError(f"capacity: {capacity} given; 1 to max_seq_len={config.max_seq_len} would do")
        self.config, self.capacity = config, capacity
        self.length = 0  # tokens seen
        self.positions = torch.arange(capacity, device=device)
        self.angles = rotary(config, self.positions, dtype) if config.positions == "rope" else None
        self.layers: list[tuple[Tensor, Tensor]] = []

    def context(self, batch: int, count: int) -> Context:
        """Of the next `count` tokens of `batch` sequences, for one forward, whose layers attend once each in order.

        ValueError for more tokens than one after the first ones, and for more than there is room for.
        """
        start, end = self.length, self.length + count
        if start and count > 1:
            raise ValueError(f"{count} tokens given after {start}; one at a time would do")
        if end > self.capacity:
            raise ValueError(f"{count} tokens given after {start}; a capacity of {end} or more would do")
        self.length = end
        window = self.config.window or end
        among = core(Mesh(), count, None, self.config.window or None, "contiguous", keep_kv=False)
        layers = iter(range(self.config.layers))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            all_k, all_v = self._keep(next(layers), start, k, v)
            if not start:
                return among(q, k, v)
            seen = slice(max(0, end - window), end)
            return attention_of_one(q, all_k[:, seen], all_v[:, seen])

        cos, sin = (x[start:end] for x in self.angles) if self.angles else (None, None)
        return Context(batch, count, self.positions[start:end], attend, cos, sin)

    def _keep(self, layer: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer == len(self.layers):
            shape = (len(k), self.capacity, *k.shape[2:])
            self.layers.append((k.new_empty(shape), v.new_empty(shape)))
        for kept, x in zip(self.layers[layer], (k, v), strict=True):
            kept[:, start : start + x.shape[1]] = x
        return self.layers[layer]


def attention_of_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of one token's q `[b, 1, heads, e]` to all of k, v `[b, t, kv_heads, e]`."""
    q, k, v = (rearrange(x, "b s h e -> b h s e") for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return rearrange(out, "b h s e -> b s h e")

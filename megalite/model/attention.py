"""Attention: one fused projection to whole heads, rope, an attention core, one projection back.

    [b·s, d] ─▶ qkv (column) ─▶ [b, s, heads, e] ─▶ core ─▶ out (row) ─▶ [b·s, d]

Each tp rank holds whole heads. With fewer kv heads than ranks, neighbours hold the same kv head.

Source: Vaswani et al. (2017); grouped queries, Ainslie et al., GQA (2023); heads over ranks, Megatron-LM (2019), §3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.rope import Positions, rotated_qkv
from megalite.parallel.mesh import Axis
from megalite.parallel.sharding import fused, split_evenly
from megalite.parallel.tensor import ColumnParallelLinear, RowParallelLinear

Core = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v and the result: [b, s, heads, e]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention by PyTorch's kernels. q `[b, s, heads, e]`; k, v `[b, s, kv_heads, e]`."""
    q, k, v = (rearrange(x, "b s h e -> b h s e") for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return rearrange(out, "b h s e -> b s h e")


class Attention(nn.Module):
    """Causal self-attention over tokens `[b·s, d]`, batch-major; its heads split over `tp`.

    sequence_dim: 0 where the tokens outside are split over tp too   core: what attends, see `Core`
    """

    def __init__(self, config: ModelConfig, tp: Axis, sequence_dim: int | None, core: Core = causal_attention) -> None:
        super().__init__()
        self.heads = split_evenly(config.heads, tp.name, tp.size, "heads")
        kv_parts = min(config.kv_heads, tp.size)
        if config.kv_heads % kv_parts or tp.size % kv_parts:
            raise ValueError(f"kv_heads={config.kv_heads} is neither a divisor nor a multiple of {tp.name}={tp.size}")
        self.kv_heads = config.kv_heads // kv_parts
        self.core = core
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.qkv = ColumnParallelLinear(
            config.hidden,
            q + 2 * kv,
            tp,
            config.bias,
            blocks=fused([q, kv, kv], [tp.size, kv_parts, kv_parts]),
            sequence_dim=sequence_dim,
        )
        self.out = RowParallelLinear(q, config.hidden, tp, config.bias, sequence_dim=sequence_dim)

    def forward(self, x: Tensor, where: Positions) -> Tensor:
        heads = self.heads + 2 * self.kv_heads
        qkv = rearrange(self.qkv(x), "(b s) (h e) -> b s h e", s=where.seq_len, h=heads)
        out = self.core(*rotated_qkv(qkv, self.heads, self.kv_heads, where))
        return self.out(rearrange(out, "b s h e -> (b s) (h e)"))

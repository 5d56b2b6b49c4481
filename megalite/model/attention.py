"""Attention: one fused projection to whole heads, rope, what attends, one projection back.

    [b·s, d] ─▶ qkv (column) ─▶ [b, s, heads, e] ─▶ what attends (context.py) ─▶ out (row) ─▶ [b·s, d]

Each tp rank holds whole heads. With fewer kv heads than ranks, neighbours hold the same kv head.

Source: Vaswani et al. (2017); grouped queries, Ainslie et al., GQA (2023); heads over ranks, Megatron-LM (2019), §3.
"""

from __future__ import annotations

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.context import Context
from megalite.model.rope import rotated_qkv
from megalite.parallel.mesh import Axis
from megalite.parallel.sharding import fused, split_evenly
from megalite.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class Attention(nn.Module):
    """Self-attention over tokens `[b·s, d]`, batch-major, and padding after them; its heads split over `tp`.

    sequence_dim: 0 where the tokens outside are split over tp too
    """

    def __init__(self, config: ModelConfig, tp: Axis, sequence_dim: int | None) -> None:
        super().__init__()
        self.heads = split_evenly(config.heads, tp.name, tp.size, "heads")
        kv_parts = min(config.kv_heads, tp.size)
        if config.kv_heads % kv_parts or tp.size % kv_parts:
            raise ValueError(f"kv_heads={config.kv_heads} is neither a divisor nor a multiple of {tp.name}={tp.size}")
        self.kv_heads = config.kv_heads // kv_parts
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

    def forward(self, x: Tensor, context: Context) -> Tensor:
        heads, tokens = self.heads + 2 * self.kv_heads, context.batch * context.length
        qkv = self.qkv(x)
        padding = len(qkv) - tokens
        qkv = rearrange(qkv[:tokens], "(b s) (h e) -> b s h e", b=context.batch, h=heads)
        out = context.attend(*rotated_qkv(qkv, self.heads, self.kv_heads, context.cos, context.sin))
        out = rearrange(out, "b s h e -> (b s) (h e)")
        return self.out(F.pad(out, (0, 0, 0, padding)) if padding else out)

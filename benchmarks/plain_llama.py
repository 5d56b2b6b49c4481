"""The same Llama in plain PyTorch, as a careful user would write it: the yardstick of cpu_step.py.

Separate q, k, v and gate, up projections, nn.RMSNorm, F.cross_entropy over the logits; what FSDP, DDP and
`parallelize_module` examples are written for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.gpt import GPT


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.wq = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.wk = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.wv = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.wo = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.wo(out.transpose(1, 2).reshape(b, s, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(c.hidden, c.ffn, bias=False)
        self.w3 = nn.Linear(c.hidden, c.ffn, bias=False)
        self.w2 = nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(c.hidden, c.norm_eps), Attention(c)
        self.mlp_norm, self.mlp = nn.RMSNorm(c.hidden, c.norm_eps), MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class PlainLlama(nn.Module):
    """tokens `[b, s]` ─▶ logits `[b, s, V]`."""

    def __init__(self, c: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.hidden)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.head = nn.Linear(c.hidden, c.vocab_size, bias=False)
        half = c.head_dim // 2
        angle = torch.outer(torch.arange(seq_len).double(), c.rope_theta ** (-torch.arange(half).double() / half))
        self.register_buffer("cos", torch.cat([angle, angle], -1).cos().float(), persistent=False)
        self.register_buffer("sin", torch.cat([angle, angle], -1).sin().float(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))

    @torch.no_grad()
    def load(self, dense: GPT) -> PlainLlama:
        """Take the weights of a GPT on the mesh of one."""
        self.embedding.weight.copy_(dense.embedding.weight)
        self.norm.weight.copy_(dense.norm.weight)
        self.head.weight.copy_(dense.head.weight)
        for mine, theirs in zip(self.blocks, dense.blocks, strict=True):
            mine.attention_norm.weight.copy_(theirs.attention_norm.weight)
            mine.mlp_norm.weight.copy_(theirs.mlp_norm.weight)
            a, m = mine.attention, mine.mlp
            sizes = [a.wq.out_features, a.wk.out_features, a.wv.out_features]
            for linear, weight in zip((a.wq, a.wk, a.wv), theirs.attention.qkv.weight.split(sizes), strict=True):
                linear.weight.copy_(weight)
            a.wo.weight.copy_(theirs.attention.out.weight)
            for linear, weight in zip((m.w1, m.w3), theirs.mlp.up.weight.chunk(2), strict=True):
                linear.weight.copy_(weight)
            m.w2.weight.copy_(theirs.mlp.down.weight)
        return self

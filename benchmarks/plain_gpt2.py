"""The same GPT-2 in plain PyTorch, as a careful user would write it: the yardstick of gpu_step.py.

nn.LayerNorm, one fused q, k, v projection, scaled_dot_product_attention, tanh GELU, learned positions, a tied head and
F.cross_entropy over the logits; float32 weights under autocast, as nanoGPT has them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.gpt import GPT


class Block(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.hidden, c.norm_eps), nn.LayerNorm(c.hidden, c.norm_eps)
        self.qkv, self.out = nn.Linear(c.hidden, 3 * c.hidden), nn.Linear(c.hidden, c.hidden)
        self.up, self.down = nn.Linear(c.hidden, c.ffn), nn.Linear(c.ffn, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (y.view(b, s, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(d, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT2(nn.Module):
    """tokens, targets `[b, s]` ─▶ the mean loss."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(c.vocab_size, c.hidden), nn.Embedding(c.max_seq_len, c.hidden)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.hidden, c.norm_eps)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def load(self, dense: GPT) -> PlainGPT2:
        """Take the weights of a GPT on the mesh of one, whose order of parameters is this one's."""
        named = dict(dense.named_parameters())
        mine = {"embedding": "embedding", "positions": "positions", "norm": "norm"}
        within = {"norm1": "attention_norm", "qkv": "attention.qkv", "out": "attention.out"}
        within |= {"norm2": "mlp_norm", "up": "mlp.up", "down": "mlp.down"}
        for i in range(len(self.blocks)):
            mine |= {f"blocks.{i}.{here}": f"blocks.{i}.{there}" for here, there in within.items()}
        for name, parameter in self.named_parameters():
            module, _, kind = name.rpartition(".")
            parameter.copy_(named.pop(f"{mine[module]}.{kind}"))
        assert not named
        return self

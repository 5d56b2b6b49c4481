"""GPT(config, mesh): embedding, blocks, head, over a mesh; on the mesh of one an ordinary module.

    tokens [b, s] ─▶ embedding ─▶ blocks on [b·s, d] ─▶ norm ─▶ head ─▶ loss, or logits [b, s, V]

Between embedding and head, tokens are one dim, batch-major: everything but attention treats them alike, and a
collective over the leading dim needs no copy. With sequence parallelism (sequence.py) each tp rank holds
b·s / tp of them between the linears.

Every parameter is drawn whole from (seed, name) and then cut, so that all meshes start from the same weights.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.attention import Attention
from megalite.model.block import Block
from megalite.model.mlp import MLP
from megalite.model.norm import NORMS, norm
from megalite.model.rope import positions
from megalite.parallel.collectives import all_gather, copy, gather
from megalite.parallel.mesh import Mesh
from megalite.parallel.parameters import cut, shard_table
from megalite.parallel.sequence import applied_to_own_tokens
from megalite.parallel.vocab import (
    IGNORE_INDEX,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_linear_cross_entropy,
)


class GPT(nn.Module):
    """A decoder-only transformer of the GPT-2 or Llama family.

    config: its sizes   mesh: where it is computed   seed: of the weights
    sequence_parallel: between the linears, split tokens over tp; the same mathematics, activations / tp

    Device and dtype are PyTorch's defaults at the time. Raises ValueError where heads, kv heads or ffn do not divide.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh | None = None, *, seed: int = 0, sequence_parallel: bool = True
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh or Mesh()
        tp = self.mesh.tp
        self.sequence_parallel = sequence_parallel and tp.size > 1
        dim = 0 if self.sequence_parallel else None
        device = torch.get_default_device()
        with torch.device("meta"):  # nothing is drawn twice
            self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden, tp, sequence_dim=dim)
            self.positions = nn.Embedding(config.max_seq_len, config.hidden) if config.positions == "learned" else None
            self.blocks = nn.ModuleList(
                Block(norm(config), Attention(config, tp, dim), norm(config), MLP(config, tp, dim))
                for _ in range(config.layers)
            )
            self.norm = norm(config)
            self.head = None if config.tied else VocabParallelHead(config.vocab_size, config.hidden, tp)
        if self.sequence_parallel:
            for module in self.modules():
                if isinstance(module, NORMS):
                    applied_to_own_tokens(module, tp)
            if self.positions is not None:
                applied_to_own_tokens(self.positions, tp)
        self.to_empty(device=device)
        self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """As GPT-2: normal of init_std, by 1/√(2·layers) into the residual stream; biases zero, norms one."""
        table = shard_table(self, self.mesh.tp)
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(cut(self._draw(name, table[name].shape, seed), table[name], self.mesh.tp.rank))

    def _draw(self, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=torch.float32, device="cpu")
        if "norm" in name:
            return torch.ones(shape, dtype=torch.float32, device="cpu")
        into_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
        std = self.config.init_std / (math.sqrt(2 * self.config.layers) if into_residual else 1)
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0, std, generator=generator)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, reduction: str = "mean", z_loss: float = 0.0
    ) -> Tensor:
        """Logits `[b, s, V]` of tokens `[b, s]`; with targets `[b, s]`, the loss, whose logits never exist whole.

        reduction: "mean" over the targets that are not −100, or "sum", for who divides by the global batch's tokens
        z_loss: weight of (log-sum-exp)² in the loss
        Both are whole and equal on every tp rank. ValueError for sequences longer than config.max_seq_len.
        """
        batch, length = tokens.shape
        if length > self.config.max_seq_len:
            raise ValueError(
                f"a sequence of {length} tokens given; at most max_seq_len={self.config.max_seq_len} would do"
            )
        tokens, targets = self._padded(tokens, targets)
        x = self._hidden(tokens)
        weight = self.head.weight if self.head is not None else self.embedding.weight
        x = all_gather(x, self.mesh.tp, 0) if self.sequence_parallel else copy(x, self.mesh.tp)
        if targets is None:
            logits = gather(F.linear(x, weight), self.mesh.tp, -1)
            return logits.view(batch, -1, logits.shape[-1])[:, :length, : self.config.vocab_size]
        return vocab_parallel_linear_cross_entropy(
            x, weight, targets, self.mesh.tp, vocab_size=self.config.vocab_size, reduction=reduction, z_loss=z_loss
        )

    def _hidden(self, tokens: Tensor) -> Tensor:
        """What the head sees: `[b·s, d]`, or this rank's part of it."""
        batch, length = tokens.shape
        x = self.embedding(tokens.flatten())
        if self.positions is not None:
            last = self.config.max_seq_len - 1  # for padding beyond it, which nothing sees
            where = torch.arange(length, device=tokens.device).clamp_(max=last).repeat(batch)
            if self.sequence_parallel:
                where = where.view(self.mesh.tp.size, -1)[self.mesh.tp.rank]
            x = x + self.positions(where)
        turned = positions(self.config, length, like=x)
        for block in self.blocks:
            x = block(x, turned)
        return self.norm(x)

    def _padded(self, tokens: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Sequences lengthened on the right until their tokens divide over tp: no earlier token sees them."""
        batch, length = tokens.shape
        step = self.mesh.tp.size // math.gcd(batch, self.mesh.tp.size) if self.sequence_parallel else 1
        more = -length % step
        if not more:
            return tokens, targets
        return F.pad(tokens, (0, more)), None if targets is None else F.pad(targets, (0, more), value=IGNORE_INDEX)

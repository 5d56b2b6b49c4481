"""GPT(config, mesh): embedding, blocks, head, over a mesh; on the mesh of one an ordinary module.

    tokens [b, s] ─▶ embedding ─▶ blocks on [b·s, d] ─▶ norm ─▶ head ─▶ loss, or logits [b, s, V]

Between embedding and head, tokens are one dim, batch-major: everything but attention treats them alike, and a
collective over the leading dim needs no copy. With sequence parallelism (sequence.py) each tp rank holds
b·s / tp of them between the linears. Where the mesh has sp, s is what this rank holds of longer sequences: only
attention and the positions know (context.py).

Every parameter is drawn whole from (seed, name) and then cut, so that all meshes start from the same weights.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import Config, ModelConfig
from megalite.model.attention import Attention
from megalite.model.block import Block
from megalite.model.context import Context, context
from megalite.model.mlp import MLP
from megalite.model.norm import NORMS, norm
from megalite.parallel.collectives import all_gather, copy, gather
from megalite.parallel.mesh import Mesh
from megalite.parallel.parameters import cut, shard_table
from megalite.parallel.sequence import applied_to_own_tokens
from megalite.parallel.sharding import split_evenly
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
    layout, keep_kv: of the ring that sequences are cut over, see ring_attention

    Device and dtype are PyTorch's defaults at the time. Raises ValueError where heads, kv heads or ffn do not divide.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh | None = None,
        *,
        seed: int = 0,
        sequence_parallel: bool = True,
        layout: str = "zigzag",
        keep_kv: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh or Mesh()
        tp = self.mesh.tp
        self.layout, self.keep_kv = layout, keep_kv
        split_evenly(config.heads // tp.size, "ulysses", self.mesh.ulysses.size, "heads of a tp rank")
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

    @classmethod
    def of(cls, config: Config, mesh: Mesh) -> GPT:
        """The model that a whole config asks for."""
        sizes = config.mesh
        return cls(
            config.model,
            mesh,
            seed=config.train.seed,
            sequence_parallel=sizes.sequence_parallel,
            layout=sizes.layout,
            keep_kv=sizes.keep_kv,
        )

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
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        reduction: str = "mean",
        z_loss: float = 0.0,
        whole: bool = False,
    ) -> Tensor:
        """Logits `[b, s, V]` of tokens `[b, s]`; with targets `[b, s]`, the loss, whose logits never exist whole.

        On a mesh with sp all three are this rank's part of the sequences (`own_positions`), and so is the loss.

        documents: `[b, s]` of whole numbers, only tokens with equal ones see each other, negative ones none
        reduction: "mean" over the targets that are not −100, or "sum", for who divides by the global batch's tokens
        z_loss: weight of (log-sum-exp)² in the loss
        whole: the tokens are whole sequences although the mesh cuts them; every sp rank computes them alike
        Results are whole and equal on every tp rank. ValueError for sequences longer than config.max_seq_len.
        """
        batch, length = tokens.shape
        mesh = Mesh() if whole else self.mesh
        if length * mesh.sp.size > self.config.max_seq_len:
            raise ValueError(
                f"a sequence of {length * mesh.sp.size} tokens given; at most max_seq_len={self.config.max_seq_len} "
                f"would do"
            )
        dtype = self.embedding.weight.dtype
        about = context(self.config, mesh, tokens, documents, dtype, layout=self.layout, keep_kv=self.keep_kv)
        x = self._hidden(self._padded(tokens.flatten(), 0), about)
        weight = self.head.weight if self.head is not None else self.embedding.weight
        x = all_gather(x, self.mesh.tp, 0) if self.sequence_parallel else copy(x, self.mesh.tp)
        if targets is None:
            logits = gather(F.linear(x[: batch * length], weight), self.mesh.tp, -1)
            return logits.view(batch, length, -1)[:, :, : self.config.vocab_size]
        targets = self._padded(targets.flatten(), IGNORE_INDEX)
        return vocab_parallel_linear_cross_entropy(
            x, weight, targets, self.mesh.tp, vocab_size=self.config.vocab_size, reduction=reduction, z_loss=z_loss
        )

    def _hidden(self, tokens: Tensor, about: Context) -> Tensor:
        """What the head sees of the flat `tokens`: `[b·s, d]`, or this rank's part of it."""
        x = self.embedding(tokens)
        if self.positions is not None:
            where = self._padded(about.positions.repeat(about.batch), 0)
            if self.sequence_parallel:
                where = where.view(self.mesh.tp.size, -1)[self.mesh.tp.rank]
            x = x + self.positions(where)
        for block in self.blocks:
            x = block(x, about)
        return self.norm(x)

    def _padded(self, tokens: Tensor, value: int) -> Tensor:
        """Flat tokens and as many more that they divide over tp; attention leaves these out."""
        more = -len(tokens) % self.mesh.tp.size if self.sequence_parallel else 0
        return F.pad(tokens, (0, more), value=value) if more else tokens

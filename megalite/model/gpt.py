"""GPT(config, mesh): embedding, blocks, head, over a mesh; on the mesh of one an ordinary module.

    tokens [b, s] ─▶ embedding ─▶ blocks on [b·s, d] ─▶ norm ─▶ head ─▶ loss, or logits [b, s, V]

Between embedding and head, tokens are one dim, batch-major: everything but attention treats them alike, and a
collective over the leading dim needs no copy. With sequence parallelism (sequence.py) each tp rank holds
b·s / tp of them between the linears. Where the mesh has sp, s is what this rank holds of longer sequences: only
attention and the positions know (context.py).

Every parameter is drawn whole from (seed, name) and then cut, so that all meshes start from the same weights. A rank of
a pipeline has a Part of the model, or several, whose parameters have the same names and values as in the whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import Config, ModelConfig
from megalite.model.attention import Attention
from megalite.model.block import Block
from megalite.model.context import Context, context
from megalite.model.mlp import MLP
from megalite.model.norm import NORMS, norm
from megalite.model.recompute import Keeping, Recompute
from megalite.parallel.collectives import all_gather, copy, gather
from megalite.parallel.lookup import LookupTable
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


@dataclass(frozen=True)
class Part:
    """Some of the model: the numbers of its layers, and whether the embedding comes before and the head after them."""

    layers: range
    embedding: bool
    head: bool


class GPT(nn.Module):
    """A decoder-only transformer of the GPT-2 or Llama family.

    config: its sizes   mesh: where it is computed   seed: of the weights
    sequence_parallel: between the linears, split tokens over tp; the same mathematics, activations / tp
    layout, keep_kv: of the ring that sequences are cut over, see ring_attention
    recompute: "none", "selective" or "full" for every `recompute_every`-th block of a part, see recompute.py
    offload: what blocks keep for backward lies in the host's memory until then
    parts: what this rank holds of it, on a mesh with pp; by default all. A tied head without the embedding has an
        `embedding` of its own, of equal weights as long as their gradients are summed (train/gradients.py)

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
        recompute: Recompute = "none",
        recompute_every: int = 1,
        offload: bool = False,
        parts: Sequence[Part] = (),
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh or Mesh()
        tp = self.mesh.tp
        self.layout, self.keep_kv = layout, keep_kv
        self._recent: tuple[tuple, Context] | None = None
        split_evenly(config.heads // tp.size, "ulysses", self.mesh.ulysses.size, "heads of a tp rank")
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.parts = tuple(parts) or (Part(range(config.layers), True, True),)
        again, others = Keeping(recompute, offload), Keeping(offload=offload)
        held = {
            layer: others if number % recompute_every else again
            for part in self.parts
            for number, layer in enumerate(part.layers)
        }
        embeds, predicts = any(part.embedding for part in self.parts), any(part.head for part in self.parts)
        dim = 0 if self.sequence_parallel else None
        device = torch.get_default_device()
        with torch.device("meta"):  # nothing is drawn twice
            self.embedding = self.positions = self.norm = self.head = None
            if embeds or (predicts and config.tied):
                self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden, tp, sequence_dim=dim)
            if embeds and config.positions == "learned":
                self.positions = LookupTable(config.max_seq_len, config.hidden)
            self.blocks = nn.ModuleList()  # of all layers, None where another rank has it
            for layer in range(config.layers):
                keeping = held.get(layer, others)
                mlp = MLP(config, tp, dim, keeping)
                block = Block(norm(config), Attention(config, tp, dim), norm(config), mlp, keeping)
                self.blocks.append(block if layer in held else None)  # type: ignore[arg-type]
            if predicts:
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
    def of(cls, config: Config, mesh: Mesh, parts: Sequence[Part] = ()) -> GPT:
        """The model that a whole config asks for, or this rank's parts of it."""
        sizes = config.mesh
        return cls(
            config.model,
            mesh,
            seed=config.train.seed,
            sequence_parallel=sizes.sequence_parallel,
            layout=sizes.layout,
            keep_kv=sizes.keep_kv,
            recompute=config.train.recompute,
            recompute_every=config.train.recompute_every,
            offload=config.train.offload_activations,
            parts=parts,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of what goes from layer to layer."""
        return next(self.parameters()).dtype

    def parameters_of(self, part: Part) -> Iterator[nn.Parameter]:
        """The parameters that a part computes with; those of a tied embedding and head are of both parts."""
        before = [self.embedding, self.positions] if part.embedding else []
        after = [self.norm, self.embedding if self.head is None else self.head] if part.head else []
        for module in (*before, *(self.blocks[layer] for layer in part.layers), *after):
            if module is not None:
                yield from module.parameters()

    @property
    def has_copy_of_embedding(self) -> bool:
        """Whether another rank of the pipeline has the embedding that this rank's head is tied to."""
        return self.config.tied and not any(part.embedding for part in self.parts) and self.embedding is not None

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
        part: Part | None = None,
        x: Tensor | None = None,
        about: Context | None = None,
    ) -> Tensor:
        """Logits `[b, s, V]` of tokens `[b, s]`; with targets `[b, s]`, the loss, whose logits never exist whole.

        On a mesh with sp all three are this rank's part of the sequences (`own_positions`), and so is the loss.

        documents: `[b, s]` of whole numbers, only tokens with equal ones see each other, negative ones none
        reduction: "mean" over the targets that are not −100, or "sum", for who divides by the global batch's tokens
        z_loss: weight of (log-sum-exp)² in the loss
        whole: the tokens are whole sequences although the mesh cuts them; every sp rank computes them alike
        part: compute no more than this one of `parts`; without a head, what the next part takes as `x`, of `x_shape`
        about: the context, where the tokens follow others (kv_cache.py)
        Results are whole and equal on every tp rank. ValueError for sequences longer than config.max_seq_len.
        """
        part = part or self.parts[0]
        mesh = Mesh() if whole else self.mesh
        if tokens.shape[1] * mesh.sp.size > self.config.max_seq_len:
            raise ValueError(
                f"a sequence of {tokens.shape[1] * mesh.sp.size} tokens given; at most "
                f"max_seq_len={self.config.max_seq_len} would do"
            )
        if about is None:
            about = self._context(mesh, tokens, documents)
        if part.embedding:
            x = self._embedded(self._padded(tokens.flatten(), 0), about)
        for layer in part.layers:
            x = self.blocks[layer](x, about)
        assert x is not None, "a part without the embedding needs x"
        return self._predicted(x, tokens, targets, reduction, z_loss) if part.head else x

    def x_shape(self, tokens: Tensor) -> tuple[int, int]:
        """Shape of what goes from part to part for tokens `[b, s]`: `[b·s, d]`, or this tp rank's part of it."""
        split = self.mesh.tp.size if self.sequence_parallel else 1
        return -(-tokens.numel() // split), self.config.hidden

    def _context(self, mesh: Mesh, tokens: Tensor, documents: Tensor | None) -> Context:
        """The context of these tokens; that of the call before where it is the same, as for a step's microbatches."""
        about = partial(context, self.config, mesh, layout=self.layout, keep_kv=self.keep_kv)
        if documents is not None:
            return about(tokens, documents, self.dtype)
        kind = (tokens.shape, tokens.device, self.dtype, mesh.sizes)
        if self._recent is None or self._recent[0] != kind:
            self._recent = kind, about(tokens, None, self.dtype)
        return self._recent[1]

    def _embedded(self, tokens: Tensor, about: Context) -> Tensor:
        """What the first layer sees of the flat `tokens`: `[b·s, d]`, or this tp rank's part of it."""
        assert self.embedding is not None, "the embedding is on another rank"
        x = self.embedding(tokens)
        if self.positions is not None:
            where = self._padded(about.positions.repeat(about.batch), 0)
            if self.sequence_parallel:
                where = where.view(self.mesh.tp.size, -1)[self.mesh.tp.rank]
            x = x + self.positions(where)
        return x

    def _predicted(self, x: Tensor, tokens: Tensor, targets: Tensor | None, reduction: str, z_loss: float) -> Tensor:
        """Norm and head on what the last layer made: loss or logits."""
        head = self.embedding if self.head is None else self.head
        assert self.norm is not None and head is not None, "the head is on another rank"
        x = self.norm(x)
        x = all_gather(x, self.mesh.tp, 0) if self.sequence_parallel else copy(x, self.mesh.tp)
        if targets is None:
            logits = gather(F.linear(x[: tokens.numel()], head.weight), self.mesh.tp, -1)
            return logits.view(*tokens.shape, -1)[:, :, : self.config.vocab_size]
        targets = self._padded(targets.flatten(), IGNORE_INDEX)
        return vocab_parallel_linear_cross_entropy(
            x, head.weight, targets, self.mesh.tp, vocab_size=self.config.vocab_size, reduction=reduction, z_loss=z_loss
        )

    def _padded(self, tokens: Tensor, value: int) -> Tensor:
        """Flat tokens and as many more that they divide over tp; attention leaves these out."""
        more = -len(tokens) % self.mesh.tp.size if self.sequence_parallel else 0
        return F.pad(tokens, (0, more), value=value) if more else tokens

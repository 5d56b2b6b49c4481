"""Which tensor of Hugging Face's GPT-2 or Llama is which rows of which of ours.

    ours                            Llama                                       GPT-2, whose weights are [in, out]
    blocks.0.attention.qkv.weight   layers.0.self_attn.{q,k,v}_proj.weight      h.0.attn.c_attn.weight
    blocks.0.mlp.up.weight          layers.0.mlp.{gate,up}_proj.weight          h.0.mlp.c_fc.weight

Heads are laid out alike in all three, and rope turns the same pairs (i, i + e/2), so that no row changes its place.
No torch here: everything is names and integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megalite.checkpoint.boxes import Box
from megalite.config import ModelConfig

Family = Literal["gpt2", "llama"]
PREFIX: dict[Family, str] = {"gpt2": "transformer.", "llama": "model."}  # of all but the head, in a model with one
HEAD = "lm_head.weight"
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # that older files have beside the weights


@dataclass(frozen=True)
class Theirs:
    """A tensor of theirs: rows `start` to `start + shape[0]` of one of ours.

    shape: as in ours   transposed: theirs has its two dims exchanged
    """

    name: str
    start: int
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def box(self) -> Box:
        """Where it is in ours."""
        return Box((self.start, *(0 for _ in self.shape[1:])), self.shape)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """As it is in the file."""
        return self.shape[::-1] if self.transposed else self.shape


def tensors_of(config: ModelConfig, family: Family) -> dict[str, tuple[Theirs, ...]]:
    """All parameters by our names, and of which tensors each is made, the first rows first."""
    made: dict[str, tuple[Theirs, ...]] = {}
    for ours, parts, width in _gpt2(config) if family == "gpt2" else _llama(config):
        start, found = 0, []
        for name, rows in parts:
            shape = (rows,) if width is None else (rows, width)
            transposed = family == "gpt2" and width is not None and name.startswith("h.")
            prefix = "" if name == HEAD else PREFIX[family]
            found.append(Theirs(prefix + name, start, shape, transposed))
            start += rows
        made[ours] = tuple(found)
    return made


Row = tuple[str, list[tuple[str, int]], int | None]  # our name; theirs with their rows; columns, None of a vector


def _gpt2(config: ModelConfig) -> Iterator[Row]:
    hidden = config.hidden
    yield "embedding.weight", [("wte.weight", config.vocab_size)], hidden
    yield "positions.weight", [("wpe.weight", config.max_seq_len)], hidden
    for layer in range(config.layers):
        here, there = f"blocks.{layer}", f"h.{layer}"
        yield from _both(f"{here}.attention_norm", [(f"{there}.ln_1", hidden)])
        yield from _both(f"{here}.attention.qkv", [(f"{there}.attn.c_attn", 3 * hidden)], hidden)
        yield from _both(f"{here}.attention.out", [(f"{there}.attn.c_proj", hidden)], hidden)
        yield from _both(f"{here}.mlp_norm", [(f"{there}.ln_2", hidden)])
        yield from _both(f"{here}.mlp.up", [(f"{there}.mlp.c_fc", config.ffn)], hidden)
        yield from _both(f"{here}.mlp.down", [(f"{there}.mlp.c_proj", hidden)], config.ffn)
    yield from _both("norm", [("ln_f", hidden)])
    if not config.tied:
        yield "head.weight", [(HEAD, config.vocab_size)], hidden


def _llama(config: ModelConfig) -> Iterator[Row]:
    hidden, bias = config.hidden, config.bias
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "embedding.weight", [("embed_tokens.weight", config.vocab_size)], hidden
    for layer in range(config.layers):
        here, there = f"blocks.{layer}", f"layers.{layer}"
        heads = [(f"{there}.self_attn.{part}_proj", rows) for part, rows in (("q", q), ("k", kv), ("v", kv))]
        yield f"{here}.attention_norm.weight", [(f"{there}.input_layernorm.weight", hidden)], None
        yield from _both(f"{here}.attention.qkv", heads, hidden, bias)
        yield from _both(f"{here}.attention.out", [(f"{there}.self_attn.o_proj", hidden)], q, bias)
        yield f"{here}.mlp_norm.weight", [(f"{there}.post_attention_layernorm.weight", hidden)], None
        inner = [(f"{there}.mlp.{part}_proj", config.ffn) for part in ("gate", "up")]
        yield from _both(f"{here}.mlp.up", inner, hidden, bias)
        yield from _both(f"{here}.mlp.down", [(f"{there}.mlp.down_proj", hidden)], config.ffn, bias)
    yield "norm.weight", [("norm.weight", hidden)], None
    if not config.tied:
        yield "head.weight", [(HEAD, config.vocab_size)], hidden


def _both(ours: str, parts: list[tuple[str, int]], width: int | None = None, bias: bool = True) -> Iterator[Row]:
    """Weight and bias of a module."""
    yield f"{ours}.weight", [(f"{name}.weight", rows) for name, rows in parts], width
    if bias:
        yield f"{ours}.bias", [(f"{name}.bias", rows) for name, rows in parts], None

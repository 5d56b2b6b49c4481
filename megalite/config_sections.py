"""The sections of a Config, a frozen dataclass each: every setting with its default and what it means.

Imports nothing but the standard library, so that it loads in milliseconds.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from megalite.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """A GPT. Sizes are in elements; the defaults are a small Llama."""

    preset: str = ""  # a named size (model/presets.py) whose settings these override
    vocab_size: int = 4096
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 0  # fewer than heads: grouped-query attention; 0: as many as heads
    head_dim: int = 0  # 0: hidden / heads
    ffn: int = 0  # 0: 4·hidden, or 8/3·hidden rounded up to 64 where gated
    max_seq_len: int = 2048
    window: int = 0  # a token sees at most this many, itself included; 0: all before it
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: Literal["none", "linear", "llama3"] = "none"  # slower turns, for longer sequences (model/rope.py)
    rope_factor: float = 8.0  # how much slower
    rope_low: float = 1.0  # llama3: pairs of fewer turns than this within rope_original tokens are slowed all the way
    rope_high: float = 4.0  # llama3: pairs of more turns than this are not slowed
    rope_original: int = 8192  # llama3: tokens of the sequences before
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    bias: bool = False  # in the linears (and layernorm)
    tied: bool = False  # the head is the embedding
    init_std: float = 0.02
    init: str = ""  # a Hugging Face folder to start from instead of random weights

    def __post_init__(self) -> None:
        derive = {
            "kv_heads": self.kv_heads or self.heads,
            "head_dim": self.head_dim or (self.hidden // self.heads if self.heads > 0 else 0),
            "ffn": self.ffn or (-(-8 * self.hidden // 3 // 64) * 64 if self.gated else 4 * self.hidden),
        }
        for name, value in derive.items():
            object.__setattr__(self, name, value)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate beside its up-projection."""
        return self.activation == "swiglu"


@dataclass(frozen=True)
class MeshConfig:
    """dp × pp × sp × tp ranks, sp being ring × ulysses. dp = 0: what the number of ranks leaves over."""

    dp: int = 0
    pp: int = 1
    sp: int = 1
    tp: int = 1
    ulysses: int = 0  # ranks of sp that trade tokens for heads, the rest being a ring; 0: chosen from the kv heads
    layout: Literal["contiguous", "zigzag", "striped"] = "zigzag"  # order of the tokens over the ring
    keep_kv: bool = False  # the ring's k, v are kept for backward and not sent again: fewer bytes, more memory
    sequence_parallel: bool = True  # between the linears, tokens are split over tp (Megatron)
    bucket_mb: float = 25.0  # of gradients that travel together over dp × sp, in MiB
    schedule: str = "1f1b"  # of the pipeline: a published one's name, a text or CSV file, or FILE.py:function
    chunks: int = 0  # stages a rank, of interleaved-1f1b; 0: 2
    microbatches: int = 0  # of a step, on a dp rank; 0: train.micro_batch says, or it is chosen
    division: tuple[int, ...] = ()  # layers of each stage, the first first; empty: by estimated cost
    zero: int = 0  # dp × sp ranks divide among them: 1 the optimizer's state, 2 gradients too, 3 weights too
    shard: int = 0  # so many of them do, and the others likewise (HSDP); 0: all
    compress: Literal["none", "bfloat16", "int8", "powersgd"] = "none"  # gradients on their way over dp × sp
    compress_rank: int = 4  # of powersgd's factors

    @property
    def size(self) -> int:
        """How many ranks, once dp is known."""
        return self.dp * self.pp * self.sp * self.tp

    @property
    def ring(self) -> int:
        """What ulysses, once known, leaves of sp."""
        return self.sp // self.ulysses

    @property
    def sequence_divisor(self) -> int:
        """What a sequence must be a multiple of, once ulysses is known: zigzag cuts it in two pieces a ring rank."""
        return math.lcm(self.sp, 2 * self.ring if self.layout == "zigzag" and self.ring > 1 else 1)

    def chosen_ulysses(self, kv_heads: int) -> int:
        """The most ranks of sp over which the kv heads that a tp rank holds divide, of `kv_heads` in the model."""
        return math.gcd(self.sp, max(1, kv_heads // self.tp))

    def resolved(self, ranks: int) -> MeshConfig:
        """With dp filled in for `ranks` ranks; a ConfigError where the product is another."""
        others = self.pp * self.sp * self.tp
        dp = self.dp or max(1, ranks // others)
        if dp * others != ranks:
            raise ConfigError(
                f"mesh: dp {self.dp or 'free'} × pp {self.pp} × sp {self.sp} × tp {self.tp} cannot be {ranks} ranks; "
                f"start {dp * others}, or change a size so that the product is {ranks}"
            )
        return dataclasses.replace(self, dp=dp)


@dataclass(frozen=True)
class DataConfig:
    """Token folders (made by `megalite data`), blended by weight."""

    paths: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()  # empty: in proportion to their sizes
    validation: float = 0.01  # the last part of every source, in fractions of it
    corpus: Literal["", "stdlib"] = ""  # made in paths[0] where nothing is yet: this Python's standard library
    separate_documents: bool = False  # documents in one sequence do not see each other


@dataclass(frozen=True)
class TrainConfig:
    """How long and how much at a time."""

    steps: int = 100
    global_batch: int = 8  # sequences a step, over all ranks
    micro_batch: int = 0  # sequences a rank works on at once; 0: mesh.microbatches says, or it is chosen
    seq_len: int = 256  # tokens a sequence
    seed: int = 0
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"  # of weights; the last two: float32 masters
    recompute: Literal["none", "full", "selective"] = "none"  # what blocks make again in backward instead of keeping it
    recompute_every: int = 1  # blocks of which one is recomputed: 1 all, 2 every other
    offload_activations: bool = False  # what is kept for backward lies in the host's memory until then
    validate_every: int = 0  # steps; 0: at the end only
    validation_batches: int = 4  # global batches a validation
    z_loss: float = 0.0
    sample_tokens: int = 0  # generated at the end, from what was learned
    sample_prompt: str = ""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon, the learning-rate schedule, clipping."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: for matrices of blocks; adamw for the rest
    lr: float = 3e-4
    min_lr: float = 0.1  # of lr, at the end
    warmup: int = 10  # steps
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    decay: float = 0.2  # of the steps, the last part in which wsd comes down
    weight_decay: float = 0.1  # on matrices; vectors are never decayed
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    state_dtype: Literal["float32", "bfloat16"] = "float32"  # of AdamW's running means; float64's are float64
    offload: bool = False  # masters and AdamW's state lie in the host's memory, and are stepped there
    clip: float = 1.0  # global gradient norm; 0: never


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is kept, and from where it goes on."""

    every: int = 0  # steps; 0: at the end only
    at_end: bool = True  # after the last step, and where the run is asked to leave
    keep: int = 2  # the newest so many; 0: all
    keep_every: int = 0  # and each whose step is a multiple of it
    resume: str = "auto"  # the newest that is complete, of run.dir; "never": anew, what is there put aside; a folder
    asynchronous: bool = True  # written beside the steps that follow
    on_error: Literal["stop", "warn"] = "stop"  # where one cannot be written


@dataclass(frozen=True)
class RunConfig:
    """Where the run writes, and on what it runs."""

    dir: str = "runs/default"
    ranks: int = 1  # started on this machine where torchrun has not and mesh.dp is free
    timeout: float = 600.0  # seconds a collective may take

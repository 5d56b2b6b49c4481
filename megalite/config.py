"""Every setting: a Config of frozen dataclasses, one noun each (config_sections.py), checked once and resolved.

A mistake is a ConfigError of one line: the setting, what was given, what would do. `config_file` reads them from TOML.
Imports nothing but the standard library, so that it loads in milliseconds.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from megalite.config_sections import (
    CheckpointConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from megalite.errors import ConfigError

__all__ = [
    "BOUNDS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "TrainConfig",
    "check",
    "resolve",
]


@dataclass(frozen=True)
class Config:
    """All of it: what a TOML file holds."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)


INF = math.inf
BOUNDS: dict[str, tuple[float, float]] = {  # least and most, both allowed
    "model.vocab_size": (1, 2**32), "model.hidden": (1, INF), "model.layers": (1, INF), "model.heads": (1, INF),
    "model.kv_heads": (1, INF), "model.head_dim": (1, INF), "model.ffn": (1, INF), "model.max_seq_len": (1, INF),
    "model.window": (0, INF), "model.norm_eps": (0, 1), "model.init_std": (0, INF), "model.rope_theta": (1, INF),
    "model.rope_factor": (1, INF), "model.rope_low": (0, INF), "model.rope_high": (0, INF),
    "model.rope_original": (1, INF),
    "mesh.dp": (0, INF), "mesh.pp": (1, INF), "mesh.sp": (1, INF), "mesh.tp": (1, INF),
    "mesh.ulysses": (0, INF), "mesh.bucket_mb": (0.001, INF), "mesh.zero": (0, 3), "mesh.shard": (0, INF),
    "mesh.compress_rank": (1, INF), "mesh.chunks": (0, INF), "mesh.microbatches": (0, INF),
    "data.validation": (0, 0.9),
    "train.steps": (1, INF), "train.global_batch": (1, INF), "train.micro_batch": (0, INF), "train.seq_len": (1, INF),
    "train.seed": (0, 2**63 - 1), "train.validate_every": (0, INF), "train.validation_batches": (1, INF),
    "train.z_loss": (0, INF), "train.sample_tokens": (0, INF), "train.recompute_every": (1, INF),
    "optimizer.lr": (0, INF), "optimizer.min_lr": (0, 1), "optimizer.warmup": (0, INF), "optimizer.decay": (0, 1),
    "optimizer.weight_decay": (0, INF), "optimizer.beta1": (0, 0.9999999), "optimizer.beta2": (0, 0.9999999),
    "optimizer.eps": (0, 1), "optimizer.clip": (0, INF),
    "checkpoint.every": (0, INF), "checkpoint.keep": (0, INF), "checkpoint.keep_every": (0, INF),
    "run.ranks": (1, 2**20), "run.timeout": (1, 10**6),
}  # fmt: skip


def check(config: Config) -> Config:
    """The config itself, or a ConfigError that names the first setting that cannot work."""
    model, mesh, data, train = config.model, config.mesh, config.data, config.train
    if 0 < model.hidden < model.heads and not model.head_dim:
        raise ConfigError(f"model.hidden: {model.hidden} given; a multiple of model.heads={model.heads} would do")
    for name, (least, most) in BOUNDS.items():
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section), key)
        if not least <= value <= most:
            raise ConfigError(
                f"{name}: {value} given; {f'{least} to {most}' if most < INF else f'{least} or more'} would do"
            )
    if model.heads % model.kv_heads:
        raise ConfigError(f"model.kv_heads: {model.kv_heads} given; a divisor of model.heads={model.heads} would do")
    if model.hidden % model.heads and model.head_dim == model.hidden // model.heads:
        raise ConfigError(f"model.hidden: {model.hidden} given; a multiple of model.heads={model.heads} would do")
    if model.positions == "rope" and model.head_dim % 2:
        raise ConfigError(f"model.head_dim: {model.head_dim} given; an even number would do, since rope turns pairs")
    if model.rope_scaling == "llama3" and model.rope_high <= model.rope_low:
        raise ConfigError(
            f"model.rope_high: {model.rope_high} given; more than model.rope_low={model.rope_low} would do"
        )
    if train.seq_len > model.max_seq_len:
        raise ConfigError(
            f"train.seq_len: {train.seq_len} given; at most model.max_seq_len={model.max_seq_len} would do"
        )
    if mesh.pp > 1 and mesh.chunks and mesh.schedule != "interleaved-1f1b":
        raise ConfigError(
            f"mesh.chunks: {mesh.chunks} given; 0 would do with mesh.schedule={mesh.schedule!r}, or 'interleaved-1f1b' "
            "with chunks"
        )
    _check_model_states(config)
    if model.heads % mesh.tp:
        raise ConfigError(f"mesh.tp: {mesh.tp} given; a divisor of model.heads={model.heads} would do")
    if model.kv_heads % mesh.tp and mesh.tp % model.kv_heads:
        raise ConfigError(
            f"mesh.tp: {mesh.tp} given; a divisor or a multiple of model.kv_heads={model.kv_heads} would do"
        )
    if model.ffn % mesh.tp:
        raise ConfigError(f"mesh.tp: {mesh.tp} given; a divisor of model.ffn={model.ffn} would do")
    if data.weights and len(data.weights) != len(data.paths):
        raise ConfigError(
            f"data.weights: {len(data.weights)} given; one for each of the {len(data.paths)} data.paths would do"
        )
    if any(weight < 0 for weight in data.weights) or (data.weights and not sum(data.weights)):
        raise ConfigError(f"data.weights: {list(data.weights)} given; none negative and not all zero would do")
    if config.optimizer.warmup > train.steps:
        raise ConfigError(
            f"optimizer.warmup: {config.optimizer.warmup} given; at most train.steps={train.steps} would do"
        )
    return config


def _check_model_states(config: Config) -> None:
    """That gradients can be summed, and their optimizer's state kept, in the ways that are asked for."""
    mesh, optimizer, dtype = config.mesh, config.optimizer, config.train.dtype
    zero, offload = (mesh.zero > 0, f"mesh.zero={mesh.zero}"), (optimizer.offload, "optimizer.offload=true")
    narrow = dtype in ("bfloat16", "float16"), f"train.dtype={dtype!r}"
    if mesh.compress != "none":
        for clashes, setting in (zero, offload, narrow):
            if clashes:
                raise ConfigError(
                    f"mesh.compress: {mesh.compress!r} given; 'none' would do with {setting}, since it sums gradients "
                    "whole and in the dtype of the weights"
                )
    if optimizer.name == "muon":
        whole = "would do with optimizer.name='muon', which orthogonalises whole matrices"
        if mesh.zero:
            raise ConfigError(f"mesh.zero: {mesh.zero} given; 0 {whole}")
        if optimizer.offload:
            raise ConfigError(f"optimizer.offload: true given; false {whole}, not on the host")
    if optimizer.state_dtype == "bfloat16" and dtype == "float64":
        raise ConfigError("optimizer.state_dtype: 'bfloat16' given; 'float32' would do with train.dtype='float64'")


def resolve(config: Config, ranks: int | None = None) -> Config:
    """The config for `ranks` ranks (None: as many as it asks for).

    dp, ulysses, microbatches and micro_batch are filled in, and batch, sequence and heads are known to divide.
    """
    mesh = config.mesh
    others = mesh.pp * mesh.sp * mesh.tp
    mesh = mesh.resolved(ranks if ranks is not None else mesh.dp * others if mesh.dp else max(config.run.ranks, others))
    mesh = _sequence_cut(mesh, config.model, config.train.seq_len)
    batch = config.train.global_batch
    if batch % mesh.dp:
        raise ConfigError(f"train.global_batch: {batch} given; a multiple of mesh.dp={mesh.dp} would do")
    if mesh.shard and mesh.dp * mesh.sp % mesh.shard:
        raise ConfigError(f"mesh.shard: {mesh.shard} given; a divisor of dp × sp = {mesh.dp * mesh.sp} would do")
    share = batch // mesh.dp
    count = _microbatches(mesh, config.train.micro_batch, share)
    train = dataclasses.replace(config.train, micro_batch=share // count)
    return dataclasses.replace(config, mesh=dataclasses.replace(mesh, microbatches=count), train=train)


def _microbatches(mesh: MeshConfig, micro: int, share: int) -> int:
    """In how many a dp rank's `share` of the batch is cut; a ConfigError where what is given does not divide it.

    Where nothing is given: one; with a pipeline, which many keep busy, as many as divide the share up to 4 a rank.
    """
    of_share = f"{share}, a dp rank's share of the batch"
    if micro and share % micro:
        raise ConfigError(f"train.micro_batch: {micro} given; a divisor of {of_share}, would do")
    if mesh.microbatches and share % mesh.microbatches:
        raise ConfigError(f"mesh.microbatches: {mesh.microbatches} given; a divisor of {of_share}, would do")
    if micro and mesh.microbatches not in (0, share // micro):
        raise ConfigError(
            f"mesh.microbatches: {mesh.microbatches} given; {share // micro} would do with train.micro_batch={micro}, "
            f"of {of_share}; or 0 for one of the two"
        )
    if micro or mesh.microbatches:
        return mesh.microbatches or share // micro
    most = min(share, 4 * mesh.pp) if mesh.pp > 1 else 1
    return next(count for count in range(most, 0, -1) if share % count == 0)


def _sequence_cut(mesh: MeshConfig, model: ModelConfig, seq_len: int) -> MeshConfig:
    """With ulysses filled in; a ConfigError where it does not divide sp and heads, or the sequence does not divide."""
    if mesh.ulysses and mesh.sp % mesh.ulysses:
        raise ConfigError(f"mesh.ulysses: {mesh.ulysses} given; a divisor of mesh.sp={mesh.sp} would do")
    mesh = dataclasses.replace(mesh, ulysses=mesh.ulysses or mesh.chosen_ulysses(model.kv_heads))
    heads = model.heads // mesh.tp
    if heads % mesh.ulysses:
        most = math.gcd(mesh.sp, heads)
        raise ConfigError(
            f"mesh.ulysses: {mesh.ulysses} given; {f'a divisor of {most}' if most > 1 else 1} would do, since a tp "
            f"rank has {heads} heads: the rest of mesh.sp={mesh.sp} becomes a ring"
        )
    if seq_len % mesh.sequence_divisor:
        over = (
            f"a {mesh.layout} ring of {mesh.ring} × ulysses {mesh.ulysses}" if mesh.ring > 1 else f"mesh.sp={mesh.sp}"
        )
        raise ConfigError(f"train.seq_len: {seq_len} given; a multiple of {mesh.sequence_divisor} would do, for {over}")
    return mesh

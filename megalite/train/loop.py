"""The run, from top to bottom: data, model, steps, validation, metrics, a sample of what was learned."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from megalite.config import Config
from megalite.config_file import to_toml
from megalite.data import Sampler, TokenFile, load_tokenizer, unigram_entropy
from megalite.errors import ConfigError
from megalite.model.generate import generate
from megalite.model.gpt import GPT
from megalite.parallel.in_flight import issue_all_reduce
from megalite.parallel.mesh import Mesh
from megalite.train.lr import learning_rate
from megalite.train.metrics import MetricsFile, flops_per_token, peak_flops
from megalite.train.progress import TrainingProgress
from megalite.train.step import TrainStep


@dataclass(frozen=True)
class Batches:
    """The training and the validation order of a config's data; validation is None where its share is zero."""

    files: tuple[TokenFile, ...]
    train: Sampler
    validation: Sampler | None


def open_data(config: Config) -> Batches:
    """Open and check the data; a DataError or ConfigError here is the user's to mend. Needs no process group."""
    data, train, vocab = config.data, config.train, config.model.vocab_size
    if not data.paths:
        raise ConfigError("data.paths: none given; token folders made by `megalite data`, or data.corpus, would do")
    files = tuple(TokenFile(path) for path in data.paths)

    def sampler(split: Literal["train", "validation"]) -> Sampler:
        return Sampler(
            files, train.seq_len, train.seed, data.weights, split=split, validation=data.validation, vocab_size=vocab
        )

    return Batches(files, sampler("train"), sampler("validation") if data.validation else None)


def pretrain(config: Config, device: torch.device) -> None:
    """Train as `config` says, on this rank. The process group is up, and `config.mesh` is resolved for its size."""
    train, mesh = config.train, Mesh(config.mesh.dp, config.mesh.pp, config.mesh.sp, config.mesh.tp)
    speaks = mesh.rank == 0
    data = open_data(config)
    with device:
        torch.set_default_dtype(getattr(torch, train.dtype))
        model = GPT(config.model, mesh, seed=train.seed, sequence_parallel=config.mesh.sequence_parallel)
    step = TrainStep(
        model, config.optimizer, micro_batch=train.micro_batch, z_loss=train.z_loss, bucket_mb=config.mesh.bucket_mb
    )
    if dist.is_initialized():
        dist.barrier()
    peak = mesh.size * peak_flops(device, model.embedding.weight.dtype)
    flops = flops_per_token(config.model, train.seq_len)
    progress, metrics, entropy = TrainingProgress(train.steps, speaks), None, math.nan
    if speaks:
        folder = Path(config.run.dir)
        metrics = MetricsFile(folder / "metrics.jsonl")
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        entropy = unigram_entropy(data.train)
        progress.say(_opening(config, model, data, entropy, device))
    seen, started = 0, time.perf_counter()
    try:
        for index in range(train.steps):
            lr = learning_rate(index, train.steps, config.optimizer)
            tokens, targets = data.train.batch(index, train.global_batch, mesh.dp.rank, mesh.dp.size)
            result = step(tokens.to(device), targets.to(device), lr)
            seconds, started = time.perf_counter() - started, time.perf_counter()
            seen += result.tokens
            speed = result.tokens / seconds
            line = {
                "step": index + 1,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": lr,
                "tokens": seen,
                "step_seconds": seconds,
                "tokens_per_second": speed,
                "mfu": speed * flops / peak,
            }
            if data.validation is not None and _validates(index + 1, config):
                line["val_loss"] = validate(model, data.validation, config, device)
                started = time.perf_counter()
            if metrics is not None:
                metrics.write(line)
            progress.step(index + 1, result.loss, speed, speed * flops / peak, line.get("val_loss"))
        progress.close()
        if speaks:
            progress.say(_closing(line, entropy, config))
        if train.sample_tokens and mesh.dp.rank == 0:
            text = _sample(model, data, config, device)
            if speaks:
                progress.say(text)
    finally:
        progress.close()
        if metrics is not None:
            metrics.close()


def _validates(done: int, config: Config) -> bool:
    every = config.train.validate_every
    return done == config.train.steps or (every > 0 and done % every == 0)


@torch.no_grad()
def validate(model: GPT, sampler: Sampler, config: Config, device: torch.device) -> float:
    """Mean loss over the first validation batches, the same ones every time; each dp rank takes its share."""
    dp, batch = model.mesh.dp, config.train.global_batch
    total = torch.zeros((), dtype=torch.float64, device=device)
    for index in range(config.train.validation_batches):
        tokens, targets = sampler.batch(index, batch, dp.rank, dp.size)
        size = config.train.micro_batch or len(tokens)
        for part, part_targets in zip(tokens.split(size), targets.split(size), strict=True):
            total += model(part.to(device), part_targets.to(device), reduction="sum")
    if dp.size > 1:
        total = issue_all_reduce(total, dp).wait()
    return total.item() / (config.train.validation_batches * batch * config.train.seq_len)


def _opening(config: Config, model: GPT, data: Batches, entropy: float, device: torch.device) -> str:
    held = sum(parameter.numel() for parameter in model.parameters())
    size = config.mesh
    tokens = sum(len(file) for file in data.files)
    return (
        f"mesh dp {size.dp} × pp {size.pp} × sp {size.sp} × tp {size.tp} on {device.type}; "
        f"{held / 1e6:.2f} M parameters a rank; {tokens / 1e6:.2f} M tokens\n"
        f"a model that knows nothing: ln {config.model.vocab_size} = {math.log(config.model.vocab_size):.3f} nats a "
        f"token; one that knows word counts (unigram entropy): {entropy:.3f}"
    )


def _closing(line: dict[str, float], entropy: float, config: Config) -> str:
    last = f"loss {line['loss']:.3f}" + (f", validation loss {line['val_loss']:.3f}" if "val_loss" in line else "")
    return (
        f"{last} nats a token after {line['tokens'] / 1e6:.2f} M tokens; unigram entropy {entropy:.3f}\n"
        f"metrics in {Path(config.run.dir) / 'metrics.jsonl'}"
    )


def _sample(model: GPT, data: Batches, config: Config, device: torch.device) -> str:
    path = data.files[0].tokenizer_path
    if path is None:
        return "no tokenizer beside the tokens: nothing to print a sample with"
    tokenizer = load_tokenizer(path)
    start = tokenizer.encode(config.train.sample_prompt).ids or [data.files[0].end_of_text or 0]
    ids = generate(model, torch.tensor([start], device=device), config.train.sample_tokens, seed=config.train.seed)
    return f"what it writes:\n{tokenizer.decode(ids[0].tolist())}"

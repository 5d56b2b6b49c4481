"""The run, from top to bottom: data, model, steps, validation, metrics, a sample of what was learned."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.config import Config
from megalite.config_file import to_toml
from megalite.data import Sampler, TokenFile, load_tokenizer, unigram_entropy
from megalite.data.ledger import Ledger
from megalite.errors import ConfigError
from megalite.model.generate import generate
from megalite.parallel.in_flight import issue_all_reduce
from megalite.parallel.layout import own_positions
from megalite.parallel.mesh import Mesh
from megalite.parallel.pipeline.measured import Recorder
from megalite.parallel.pipeline.saved import TIMELINE
from megalite.parallel.world import usable_cores
from megalite.plan.measured_division import advice
from megalite.plan.stages import plan_stages
from megalite.train.checkpoints import Checkpoints
from megalite.train.control import Heard
from megalite.train.initial import initialise
from megalite.train.lr import learning_rate
from megalite.train.memory import MemoryAccount, account
from megalite.train.metrics import MetricsFile, flops_per_token, peak_flops
from megalite.train.opening import in_effect, opening
from megalite.train.pipelined import PipelinedGPT
from megalite.train.progress import TrainingProgress
from megalite.train.step import TrainStep, microbatches


@dataclass(frozen=True)
class Splits:
    """The training and the validation order of a config's data; validation is None where its share is zero."""

    files: tuple[TokenFile, ...]
    train: Sampler
    validation: Sampler | None


def open_data(config: Config) -> Splits:
    """Open and check the data; a DataError or ConfigError here is the user's to mend. Needs no process group."""
    data, train, vocab = config.data, config.train, config.model.vocab_size
    if not data.paths:
        raise ConfigError("data.paths: none given; token folders made by `megalite data`, or data.corpus, would do")
    files = tuple(TokenFile(path) for path in data.paths)

    def sampler(split: Literal["train", "validation"]) -> Sampler:
        return Sampler(
            files,
            train.seq_len,
            train.seed,
            data.weights,
            split=split,
            validation=data.validation,
            vocab_size=vocab,
            separate_documents=data.separate_documents,
        )

    return Splits(files, sampler("train"), sampler("validation") if data.validation else None)


def pretrain(
    config: Config,
    device: torch.device,
    local_ranks: int | None = None,
    heard: Heard | None = None,
    restarted: bool = False,
) -> None:
    """Train as `config` says, on this rank. The process group is up, and `config` is resolved for its size.

    local_ranks: how many ranks this machine has; None: all   heard: where signals to this rank are noted
    restarted: by a launcher, in the midst of the run
    """
    asked, config = config, in_effect(config, device.type)
    train, sizes = config.train, config.mesh
    mesh = Mesh(sizes.dp, sizes.pp, sizes.sp, sizes.tp, sizes.ulysses, sizes.shard or None)
    positions = own_positions(sizes.layout, mesh.ring.size, mesh.ulysses.size, mesh.sp.rank, train.seq_len)
    rows = train.global_batch // mesh.dp.size
    own_rows = slice(mesh.dp.rank * rows, (mesh.dp.rank + 1) * rows)
    speaks = mesh.rank == 0
    data = open_data(config)
    with device:
        torch.set_default_dtype(getattr(torch, train.dtype))
        step = TrainStep.of(config, mesh)
    model, pipelined, clock = step.model, step.pipelined, step.pipelined.clock
    checkpoints = Checkpoints(asked, step, data.files, heard)
    start = checkpoints.resume(restarted)
    if config.model.init and not start.done:
        initialise(step, config.model.init)
    if start.done >= train.steps:
        if speaks:
            print(
                f"{config.run.dir} is done, at step {start.done}: more train.steps would go on, "
                "checkpoint.resume='never' would begin anew"
            )
        return
    peak = mesh.size * peak_flops(device, model.dtype)
    flops = flops_per_token(config.model, train.seq_len)
    progress, metrics, entropy = TrainingProgress(train.steps, speaks, start.done), None, math.nan
    ledger = Ledger(Path(config.run.dir), mesh.dp.rank, start.attempt) if _keeps_the_ledger(mesh) else None
    folder, recorder = Path(config.run.dir), _recorder(config, pipelined, local_ranks or mesh.size)
    if speaks:
        checkpoints.say = progress.say
        metrics = MetricsFile(folder / "metrics.jsonl", start.done)
        (folder / "config.toml").write_text(to_toml(asked), encoding="utf-8")
        entropy = unigram_entropy(data.train)
        held, tokens = sum(p.numel() for p in model.parameters()), sum(len(file) for file in data.files)
        progress.say(opening(asked, held, tokens, entropy, device.type))
    seen, started = start.tokens, time.perf_counter()
    watched = min(start.done + 1, train.steps - 1)  # from the second step on, the optimizer has its state
    memory: MemoryAccount | None = None
    try:
        for index in range(start.done, train.steps):
            begin = clock.mark()
            lr = learning_rate(index, train.steps, config.optimizer)
            batch = data.train.batch(index, train.global_batch, mesh.dp.rank, mesh.dp.size, positions).to(device)
            trained = partial(step, batch.tokens, batch.targets, lr, documents=batch.documents)
            if index == watched:
                result, memory = account(config, step, trained)
            else:
                result = trained()
            bubble = recorder.add(*pipelined.measured(begin, clock.mark())) if recorder else None
            seconds, started = time.perf_counter() - started, time.perf_counter()
            seen += result.tokens
            speed = result.tokens / seconds
            line: dict[str, Any] = {
                "step": index + 1,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": lr,
                "tokens": seen,
                "step_seconds": seconds,
                "tokens_per_second": speed,
                "mfu": speed * flops / peak,
            }
            if step.scale.dynamic:
                line |= {"loss_scale": result.scale, "skipped": step.scale.skipped}
                if not result.taken:
                    line["grad_norm"] = None  # JSON has no infinity
            if bubble is not None:
                line |= {"bubble": bubble.measured, "bubble_predicted": bubble.predicted}
            if index == watched and memory is not None:
                line |= memory.metrics
            if data.validation is not None and _validates(index + 1, config):
                line["val_loss"] = validate(pipelined, data.validation, config, positions, device)
                started = time.perf_counter()
            if metrics is not None:
                metrics.write(line)
            progress.step(index + 1, result.loss, speed, speed * flops / peak, line.get("val_loss"), bubble)
            if ledger is not None:
                ledger.add(index + 1, data.train.ids(index, train.global_batch)[own_rows], batch.crc32)
            checkpoints.after(index + 1, seen)
        progress.close()
        if speaks:
            progress.say(f"{_closing(line, entropy, config, recorder)}\n{memory}")
        if train.sample_tokens:
            with step.gathered():  # every rank of dp has a slice of the weights, one of them samples
                text = _sample(pipelined, data, config, device) if mesh.dp.rank == 0 else ""
            if speaks:
                progress.say(text)
    finally:
        progress.close()
        if metrics is not None:
            metrics.close()
            if recorder is not None:
                recorder.save(folder / TIMELINE)


def _keeps_the_ledger(mesh: Mesh) -> bool:
    """Whether this rank is the first of those that read the same samples."""
    return mesh.pp.rank == mesh.sp.rank == mesh.tp.rank == 0


def _recorder(config: Config, pipelined: PipelinedGPT, local_ranks: int) -> Recorder | None:
    """What measures the bubble, where there can be one."""
    if pipelined.pp.size == 1:
        return None
    cores = None if pipelined.device.type == "cuda" else usable_cores()
    return Recorder(pipelined.schedule, local_ranks, cores, plan_stages(config).division)


def _validates(done: int, config: Config) -> bool:
    every = config.train.validate_every
    return done == config.train.steps or (every > 0 and done % every == 0)


@torch.no_grad()
def validate(
    pipelined: PipelinedGPT, sampler: Sampler, config: Config, positions: NDArray[np.integer], device: torch.device
) -> float:
    """Mean loss over the first validation batches, the same ones every time; each rank of dp × sp takes its share."""
    mesh, train = pipelined.model.mesh, config.train
    total = torch.zeros((), dtype=torch.float64, device=device)
    for index in range(train.validation_batches):
        batch = sampler.batch(index, train.global_batch, mesh.dp.rank, mesh.dp.size, positions).to(device)
        shares = microbatches(train.micro_batch, batch.tokens, batch.targets, batch.documents)
        total += pipelined.loss([{**one, "reduction": "sum"} for one in shares])
    for axis in (mesh.pp, mesh.replicas):
        if axis.size > 1:
            total = issue_all_reduce(total, axis).wait()
    return total.item() / (train.validation_batches * train.global_batch * train.seq_len)


def _closing(line: dict[str, float], entropy: float, config: Config, recorder: Recorder | None) -> str:
    last = f"loss {line['loss']:.3f}" + (f", validation loss {line['val_loss']:.3f}" if "val_loss" in line else "")
    better = advice(recorder.saved) if recorder and recorder.saved else ""
    return (
        f"{last} nats a token after {line['tokens'] / 1e6:.2f} M tokens; unigram entropy {entropy:.3f}\n"
        f"metrics in {Path(config.run.dir) / 'metrics.jsonl'}"
    ) + (f"\n{better}" if better else "")


def _sample(pipelined: PipelinedGPT, data: Splits, config: Config, device: torch.device) -> str:
    path = data.files[0].tokenizer_path
    if path is None:
        return "no tokenizer beside the tokens: nothing to print a sample with"
    tokenizer = load_tokenizer(path)
    start = tokenizer.encode(config.train.sample_prompt).ids or [data.files[0].end_of_text or 0]
    prompt, train = torch.tensor([start], device=device), config.train
    logits_of = pipelined.logits if pipelined.pp.size > 1 else None  # where it is whole, keys and values are kept
    ids = generate(pipelined.model, prompt, train.sample_tokens, seed=train.seed, logits_of=logits_of)
    return f"what it writes:\n{tokenizer.decode(ids[0].tolist())}"

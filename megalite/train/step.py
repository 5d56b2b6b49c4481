"""One training step: microbatches forward and backward, gradients finished, weights updated.

The loss, and so the gradient, is the mean over all tokens of the global batch that count, whatever the mesh, the
microbatching and the mask: each microbatch's sum is divided by the global count before its backward, and gradients
are summed from there on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite.config import Config, MeshConfig, OptimizerConfig
from megalite.errors import NumericError
from megalite.model.gpt import GPT, Part
from megalite.parallel.compression import Compressor, compressor
from megalite.parallel.ddp import GradientBuckets
from megalite.parallel.gathered import Unit
from megalite.parallel.in_flight import issue_all_gather, issue_all_reduce
from megalite.parallel.mesh import Axis, Mesh, coordinates, rank_at
from megalite.parallel.parameters import shard_table
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.vocab import IGNORE_INDEX
from megalite.parallel.zero import ShardedParameters
from megalite.plan.stages import plan_stages
from megalite.train.gradients import Buckets, finish_gradients, pieces_of
from megalite.train.optimizer import optimizer_of
from megalite.train.pipelined import Microbatch, PipelinedGPT, parts_of
from megalite.train.precision import LossScale


@dataclass(frozen=True)
class StepResult:
    """loss: mean in nats a token over the global batch   grad_norm: before clipping   tokens: that counted

    scale: of the loss, in float16   taken: whether weights changed
    """

    loss: float
    grad_norm: float
    tokens: int
    scale: float = 1.0
    taken: bool = True


class TrainStep:
    """A model with its optimizer and buckets: `step(tokens, targets, lr)` trains on this rank's share of a batch.

    The share is `[b, s]`: some rows of the batch (dp), and of each the tokens that parallel/layout.py says (sp).

    micro_batch: sequences at once; 0: the whole share   bucket_mb: see GradientBuckets
    schedule: of the mesh's pp ranks, whose stages the model's parts are; None without pp
    compress: how a bucket of gradients is summed, see GradientBuckets
    zero: 1 divides the optimizer's state over mesh.shards, 2 gradients too, 3 weights too (parallel/zero.py)
    """

    def __init__(
        self,
        model: GPT,
        config: OptimizerConfig,
        *,
        schedule: Schedule | None = None,
        micro_batch: int = 0,
        z_loss: float = 0.0,
        bucket_mb: float = 25.0,
        zero: int = 0,
        compress: Callable[[list[torch.Size]], Compressor] | None = None,
    ) -> None:
        self.model, self.mesh, self.config = model, model.mesh, config
        self.micro_batch, self.z_loss = micro_batch, z_loss
        self.table = shard_table(model, self.mesh.tp)
        self.buckets = _buckets(model, zero, bucket_mb, compress, config.offload)
        self.pipelined = PipelinedGPT(model, schedule, self.buckets)
        self.optimizer = optimizer_of(model, config, self.buckets, self.table)
        self.scale = LossScale(model.dtype)
        self.steps = 0

    @classmethod
    def of(cls, config: Config, mesh: Mesh) -> TrainStep:
        """This rank's model and its step, as a whole, resolved config asks for."""
        stages = plan_stages(config)
        return cls(
            GPT.of(config, mesh, parts_of(stages, mesh.pp.rank)),
            config.optimizer,
            schedule=stages.schedule,
            micro_batch=config.train.micro_batch,
            z_loss=config.train.z_loss,
            bucket_mb=config.mesh.bucket_mb,
            zero=config.mesh.zero,
            compress=_compress(config.mesh),
        )

    def __call__(
        self, tokens: Tensor, targets: Tensor, lr: float | None = None, *, documents: Tensor | None = None
    ) -> StepResult:
        """Train on this rank's share, `[b, s]` each; NumericError, before the update, where a number is none.

        In float16 a gradient that is none is a loss scale too large: the step is not taken, see precision.py.
        """
        scale = self.scale.value
        loss, count = self.backward(tokens, targets, documents)
        norm = self.finish_gradients(self.config.clip)
        if not (taken := self.scale.takes(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            self.steps += 1
            return StepResult(loss, norm, count, scale, taken)
        self._check_gradient(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr if lr is None else lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.buckets, ShardedParameters):
            self.buckets.publish()
        self.steps += 1
        return StepResult(loss, norm, count, scale)

    def backward(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> tuple[float, int]:
        """Gradients of this rank's share, on their way over dp × sp; the global loss and its number of tokens."""
        replicas = self.mesh.replicas
        count = int(_over(replicas, (targets != IGNORE_INDEX).sum()).sum())
        batch = list(microbatches(self.micro_batch, tokens, targets, documents))
        batch = [{**microbatch, "reduction": "sum", "z_loss": self.z_loss} for microbatch in batch]
        scale = self.scale.value
        own = self.pipelined.forward_backward(batch, max(count, 1) / scale) / scale
        if self.mesh.pp.size > 1:
            own = issue_all_reduce(own, self.mesh.pp).wait()
        shares = _over(replicas, own)
        self._check_loss(shares)
        return shares.sum().item(), count

    def finish_gradients(self, clip: float) -> float:
        """See gradients.py."""
        ends, scale = self.pipelined.ends, self.scale.value
        return finish_gradients(self.model, self.buckets, self.table, self.mesh, clip, ends, scale)

    def gathered(self) -> AbstractContextManager[None]:
        """Around reading weights outside a forward: those of the last step, whole; all ranks of dp × sp enter it."""
        return self.buckets.gathered() if isinstance(self.buckets, ShardedParameters) else nullcontext()

    def _check_loss(self, shares: Tensor) -> None:
        bad = (~shares.isfinite()).nonzero().flatten().tolist()
        if bad:
            where = coordinates(bad[0], {"dp": self.mesh.dp.size, "sp": self.mesh.sp.size})
            rank = rank_at({"pp": self.pipelined.ends[1], "tp": 0, **where}, self.mesh.sizes)
            raise NumericError(
                f"the loss is {shares[bad[0]].item()} at step {self.steps + 1} on rank {rank} (dp {where['dp']}, sp "
                f"{where['sp']}); the weights are those of step {self.steps}; a lower optimizer.lr or more "
                "optimizer.warmup may do"
            )

    def _check_gradient(self, norm: float) -> None:
        if math.isfinite(norm):
            return
        pieces = pieces_of(self.model, self.buckets)
        bad = next((piece.name for piece in pieces if not piece.grad.isfinite().all()), "none held by this rank")
        raise NumericError(
            f"the gradient is no number at step {self.steps + 1} on rank {self.mesh.rank}, first in {bad}; the weights "
            f"are those of step {self.steps}; a lower optimizer.lr or more optimizer.warmup may do"
        )


def _compress(mesh: MeshConfig) -> Callable[[list[torch.Size]], Compressor] | None:
    return None if mesh.compress == "none" else partial(compressor, mesh.compress, mesh.compress_rank)


def _buckets(
    model: GPT,
    zero: int,
    bucket_mb: float,
    compress: Callable[[list[torch.Size]], Compressor] | None,
    offload: bool,
) -> Buckets:
    """How gradients are summed over replicas: whole, or into slices, of which the weights are stepped."""
    mesh, half = model.mesh, model.dtype in (torch.float16, torch.bfloat16)
    tied = [model.embedding.weight] if model.config.tied and model.embedding is not None else []
    if not zero and not half and not offload:
        shared = tied if len(model.parts) > 1 else []
        return GradientBuckets(model.parameters(), mesh.replicas, bucket_mb, shared, compress)
    shards, copies = (mesh.shards, mesh.copies) if zero else (Axis(), mesh.replicas)
    shared = tied if len(model.parts) > 1 or mesh.pp.size > 1 else []
    units = [_units(model, part) for part in model.parts]
    sharded = ShardedParameters(
        model.parameters(),
        shards,
        copies,
        stage=max(1, zero),
        bucket_mb=bucket_mb,
        shared=shared,
        units=units,
        offload=offload,
    )
    for unit in (unit for part in units for unit in part):
        sharded.wait_before(unit.first, unit.parameters)
    return sharded


def _units(model: GPT, part: Part) -> list[Unit]:
    """The parameters that a part computes with, in turn."""
    embeds = [model.embedding, model.positions] if part.embedding else []
    units = [Unit(list(m.parameters()), m, m, again=False) for m in embeds if m is not None]
    units += [Unit(list(m.parameters()), m, m) for m in (model.blocks[layer] for layer in part.layers)]
    if part.head:  # the head's weight is read after the norm, and not by a module
        assert model.norm is not None
        last = Part(range(0), embedding=False, head=True)
        units.append(Unit(list(model.parameters_of(last)), model.norm, model))
    return units


def _over(axis: Axis, value: Tensor) -> Tensor:
    """Every rank's scalar: `[axis.size]`."""
    value = value.unsqueeze(0)
    return value if axis.size == 1 else issue_all_gather(value, axis, 0).wait()


def microbatches(size: int, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Iterator[Microbatch]:
    """What `GPT.forward` takes, `size` sequences at a time; 0: all of them at once."""
    given = {"tokens": tokens, "targets": targets} | ({} if documents is None else {"documents": documents})
    pieces = [x.split(size or len(tokens)) for x in given.values()]
    return (dict(zip(given, part, strict=True)) for part in zip(*pieces, strict=True))

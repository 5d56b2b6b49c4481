"""One training step: microbatches forward and backward, gradients finished, weights updated.

The loss, and so the gradient, is the mean over all tokens of the global batch that count, whatever the mesh, the
microbatching and the mask: each microbatch's sum is divided by the global count before its backward, and gradients
are summed from there on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.errors import NumericError
from megalite.model.gpt import GPT
from megalite.parallel.ddp import GradientBuckets
from megalite.parallel.in_flight import issue_all_gather
from megalite.parallel.mesh import Axis, rank_at
from megalite.parallel.parameters import shard_table
from megalite.parallel.vocab import IGNORE_INDEX
from megalite.train.gradients import finish_gradients
from megalite.train.optimizer import adamw


@dataclass(frozen=True)
class StepResult:
    """loss: mean in nats a token over the global batch   grad_norm: before clipping   tokens: that counted"""

    loss: float
    grad_norm: float
    tokens: int


class TrainStep:
    """A model with its optimizer and buckets: `step(tokens, targets, lr)` trains on this rank's share of a batch.

    micro_batch: sequences at once; 0: the whole share   bucket_mb: see GradientBuckets
    """

    def __init__(
        self, model: GPT, config: OptimizerConfig, *, micro_batch: int = 0, z_loss: float = 0.0, bucket_mb: float = 25.0
    ) -> None:
        self.model, self.mesh, self.config = model, model.mesh, config
        self.micro_batch, self.z_loss = micro_batch, z_loss
        self.table = shard_table(model, self.mesh.tp)
        self.buckets = GradientBuckets(model.parameters(), self.mesh.dp, bucket_mb)
        self.optimizer = adamw(model, config)
        self.steps = 0

    def __call__(self, tokens: Tensor, targets: Tensor, lr: float | None = None) -> StepResult:
        """Train on this dp rank's share, `[b, s]` each; NumericError, before the update, where a number is none."""
        loss, count = self.backward(tokens, targets)
        norm = finish_gradients(self.model, self.buckets, self.table, self.mesh, self.config.clip)
        self._check_gradient(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr if lr is None else lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return StepResult(loss, norm, count)

    def backward(self, tokens: Tensor, targets: Tensor) -> tuple[float, int]:
        """Gradients of this rank's share, on their way over dp; the global loss and its number of tokens."""
        count = int(_over(self.mesh.dp, (targets != IGNORE_INDEX).sum()).sum())
        size = self.micro_batch or len(tokens)
        parts = list(zip(tokens.split(size), targets.split(size), strict=True))
        own = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for i, (part, part_targets) in enumerate(parts):
            with self.buckets.accumulating(last=i == len(parts) - 1):
                loss = self.model(part, part_targets, reduction="sum", z_loss=self.z_loss) / max(count, 1)
                loss.backward()
                own += loss.detach()
        shares = _over(self.mesh.dp, own)
        self._check_loss(shares)
        return shares.sum().item(), count

    def _check_loss(self, shares: Tensor) -> None:
        bad = (~shares.isfinite()).nonzero().flatten().tolist()
        if bad:
            rank = rank_at({"dp": bad[0], "pp": 0, "sp": 0, "tp": 0}, self.mesh.sizes)
            raise NumericError(
                f"the loss is {shares[bad[0]].item()} at step {self.steps + 1} on rank {rank} (dp {bad[0]}); the "
                f"weights are those of step {self.steps}; a lower optimizer.lr or more optimizer.warmup may do"
            )

    def _check_gradient(self, norm: float) -> None:
        if math.isfinite(norm):
            return
        grads = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
        bad = next((name for name, grad in grads if not grad.isfinite().all()), "none held by this rank")
        raise NumericError(
            f"the gradient is no number at step {self.steps + 1} on rank {self.mesh.rank}, first in {bad}; the weights "
            f"are those of step {self.steps}; a lower optimizer.lr or more optimizer.warmup may do"
        )


def _over(axis: Axis, value: Tensor) -> Tensor:
    """Every rank's scalar: `[axis.size]`."""
    value = value.unsqueeze(0)
    return value if axis.size == 1 else issue_all_gather(value, axis, 0).wait()

"""A GPT as the stages of a pipeline: what training, validation and generation ask of it, on all ranks of pp at once.

On a mesh without pp it is the one stage of a pipeline of one, and the same code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.model.gpt import GPT, Part
from megalite.parallel.ddp import GradientBuckets
from megalite.parallel.in_flight import issue_all_reduce
from megalite.parallel.mesh import Axis
from megalite.parallel.pipeline.clock import Clock, Mark, gather, offset
from megalite.parallel.pipeline.executor import Pipeline
from megalite.parallel.pipeline.generators import one_after_another
from megalite.parallel.pipeline.schedule import Schedule
from megalite.plan.stages import Stages
from megalite.train.gradients import Buckets

ALIGN_EVERY = 60.0  # seconds; the clocks of two machines are then apart by less than a millisecond

Microbatch = Mapping[str, Any]  # what GPT.forward takes by these names


class Measured(NamedTuple):
    """A step's seconds: of each pp rank start and end of every action in turn, and of the whole step."""

    times: list[list[float]]
    begin: float
    finish: float


def parts_of(stages: Stages, rank: int) -> list[Part]:
    """What of the model a pp rank holds."""
    return [Part(stage.layers, stage.has_embedding, stage.has_head) for stage in stages.stages if stage.rank == rank]


class PipelinedGPT:
    """A model whose parts are the stages that `schedule` gives to this rank, and in that order.

    schedule: None on a mesh without pp   buckets: gradients that travel over dp × sp while the pipeline drains
    """

    def __init__(self, model: GPT, schedule: Schedule | None = None, buckets: Buckets | None = None) -> None:
        self.model, self.pp, self.buckets = model, model.mesh.pp, buckets or GradientBuckets((), Axis())
        self.schedule = schedule or one_after_another((0,), 1)
        stages = self.schedule.stages_of(self.pp.rank)
        if len(stages) != len(model.parts) or len(self.schedule.ranks) != self.pp.size:
            raise ValueError(
                f"schedule: {len(self.schedule.ranks)} ranks and here {len(stages)} stages given; one of "
                f"{self.pp.size} ranks with {len(model.parts)} stages here would do, as the mesh and the model have"
            )
        self.parts = dict(zip(stages, model.parts, strict=True))
        self.device = next(model.parameters()).device
        self.clock = Clock(self.device)
        self._pipelines: dict[int, Pipeline] = {}  # by the number of microbatches
        self.after_backward: Callable[[], None] | None = None  # of each microbatch and stage
        self._batch: Sequence[Microbatch] = ()
        self._count = 1.0
        self._offset, self._aligned, self._due = 0.0, 0.0, True

    @property
    def ends(self) -> tuple[int, int]:
        """The pp ranks of the first stage and of the last."""
        return self.schedule.rank_of[0], self.schedule.rank_of[-1]

    def forward_backward(self, batch: Sequence[Microbatch], count: float) -> Tensor:
        """Add the gradients of the batch's loss, which is the sum over its tokens by `count`.

        Returns that loss, float64, on the last stage's rank and zero on the others. ValueError for another number of
        microbatches than the schedule's.
        """
        if self.pp.size > 1 and len(batch) != self.schedule.microbatches:
            raise ValueError(
                f"{len(batch)} microbatches given; {self.schedule.microbatches} would do, as schedule "
                f"{self.schedule.name} has"
            )
        self._batch, self._count = batch, count
        return self._sum(self._pipeline(len(batch)).step(self._shape, self.model.dtype))

    def loss(self, batch: Sequence[Microbatch]) -> Tensor:
        """The sum of the losses of all tokens, float64, on the last stage's rank; zero on the others."""
        self._batch, self._count = batch, 1
        return self._sum(self._pipeline(len(batch)).evaluate(self._shape, self.model.dtype))

    def logits(self, tokens: Tensor) -> Tensor:
        """Of the word that follows `tokens` `[b, s]`, whole sequences: `[b, V]`, on every rank."""
        self._batch, self._count = [{"tokens": tokens, "whole": True}], 1
        made = self._pipeline(1).evaluate(self._shape, self.model.dtype)
        if self.pp.size == 1:
            return made[0][:, -1]
        nothing = torch.zeros(len(tokens), self.model.config.vocab_size, dtype=self.model.dtype, device=self.device)
        return issue_all_reduce(made[0][:, -1] if made else nothing, self.pp).wait()

    def measured(self, begin: Mark, finish: Mark) -> Measured:
        """The last step on the clock of pp rank 0, on every rank of pp: by one small all-gather.

        begin, finish: marks of `clock`, when the step began to wait for its data, and when its optimizer was done
        """
        marks = self._pipelines[self.schedule.microbatches].marks
        times = self.clock.read([begin, *(mark for pair in marks for mark in pair), finish])
        if self._due:
            self._offset, self._aligned = offset(self.pp), times[-1]
        lengths = [2 * len(actions) + 2 for actions in self.schedule.ranks]
        rows = gather(self.pp, [moment + self._offset for moment in times], lengths)
        self._due = rows[0][-1] - self._aligned > ALIGN_EVERY  # the same on every rank
        return Measured([row[1:-1] for row in rows], min(row[0] for row in rows), max(row[-1] for row in rows))

    def _pipeline(self, microbatches: int) -> Pipeline:
        if microbatches not in self._pipelines:
            schedule = self.schedule
            if microbatches != schedule.microbatches:
                schedule = one_after_another(schedule.rank_of, microbatches)
            self._pipelines[microbatches] = Pipeline(
                schedule,
                self.pp,
                {stage: partial(self._compute, part) for stage, part in self.parts.items()},
                self.device,
                accumulating=self.buckets.accumulating,
                complete=self._complete,
            )
        return self._pipelines[microbatches]

    def _compute(self, part: Part, x: Tensor | None, microbatch: int) -> Tensor:
        y = self.model(**self._batch[microbatch], part=part, x=x)
        return y / self._count if part.head else y

    def _complete(self, stage: int, last: bool) -> None:
        self.buckets.complete(self.model.parameters_of(self.parts[stage]), last)
        if self.after_backward is not None:
            self.after_backward()

    def _shape(self, stage: int, microbatch: int) -> tuple[int, int]:
        return self.model.x_shape(self._batch[microbatch]["tokens"])

    def _sum(self, losses: Mapping[int, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for microbatch in sorted(losses):
            total += losses[microbatch]
        return total

"""One rank's part of a schedule, run: receive, compute, send.

    pipeline = Pipeline(one_f_one_b(4, 8), mesh.pp, {mesh.pp.rank: stage}, device)
    losses = pipeline.step(lambda stage, microbatch: (tokens, hidden), torch.float32)

A stage is any function of a microbatch and of what the stage before made of it:

    F    y = stage(x, microbatch)           y goes to the next stage; of the last stage it is the loss
    BW   the gradients of x and of the weights from y's gradient; x's goes to the stage before
    B    the same, except that the weight gradients of linears are put off (weight_gradients.py)
    W    those

After F only x and the graph are kept, and after B only what W needs. What comes has its place before it is needed, and
what goes is on its way beside the next action (wire.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.parallel import weight_gradients
from megalite.parallel.mesh import Axis
from megalite.parallel.pipeline.check import check
from megalite.parallel.pipeline.clock import Clock, Mark
from megalite.parallel.pipeline.schedule import Action, Schedule, forward_only
from megalite.parallel.pipeline.wire import Shapes, Wire
from megalite.parallel.traffic import traffic
from megalite.parallel.weight_gradients import Factors

Stage = Callable[[Tensor | None, int], Tensor]


class PipelineError(RuntimeError):
    """A stage raised, or what it needs did not come: one message that names rank, stage and action."""


class Pipeline:
    """This rank's stages of a schedule, and the steps that it runs of them together with the other ranks of `axis`.

    schedule: one that passes `check`, of as many ranks as `axis`
    stages: of every stage that the schedule gives to this rank, what computes it. `x`, None for the first stage, is
        what the stage before made; `y` has the shape and dtype that `step` is told, and is one number of the last stage
    accumulating: a context around each backward; `True` where it is the last that reaches the stage's weights, as
        GradientBuckets.accumulating wants to know
    complete: is told a stage after each microbatch's last backward, and whether it was the stage's last of the step

    All ranks of the process group make it at the same time. Raises ValueError of one line where these do not fit.
    """

    def __init__(
        self,
        schedule: Schedule,
        axis: Axis,
        stages: Mapping[int, Stage],
        device: torch.device,
        *,
        accumulating: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext(),
        complete: Callable[[int, bool], None] = lambda stage, last: None,
    ) -> None:
        check(schedule)
        if len(schedule.ranks) != axis.size:
            raise ValueError(f"schedule {schedule.name} of {len(schedule.ranks)} ranks on an axis of {axis.size}")
        if sorted(stages) != schedule.stages_of(axis.rank):
            raise ValueError(f"stages {sorted(stages)} given; {schedule.stages_of(axis.rank)} would do on this rank")
        self.schedule, self.axis, self.stages, self.device = schedule, axis, stages, device
        self.marks: list[tuple[Mark, Mark]] = []
        self._clock = Clock(device)
        self._accumulating, self._complete = accumulating, complete
        backwards = [action for action in schedule.ranks[axis.rank] if action.kind != "F"]
        self._final = {action.stage: action for action in backwards}  # the last one of each stage
        self._takes = schedule.microbatches > 1 or any(action.kind == "W" for action in backwards)
        self._wire = Wire(schedule, axis, device)
        self._forward_wire = Wire(forward_only(schedule), axis, device)

    def step(self, shapes: Shapes, dtype: torch.dtype) -> dict[int, Tensor]:
        """Run every action once; the losses by microbatch, on the rank of the last stage.

        shapes: of what a stage makes of a microbatch, by (stage, microbatch); they may differ from step to step
        Gradients are added to `.grad`. The times are in `marks`, one pair an action. Raises PipelineError.
        """
        run = _Run(self, self._wire, shapes, dtype)
        taking = weight_gradients.taking if self._takes else nullcontext
        with taking():
            for action in self.schedule.ranks[self.axis.rank]:
                run.compute(action)
        self._wire.finish()
        traffic.at(None)
        self.marks = run.marks
        return run.made_last

    @torch.no_grad()
    def evaluate(self, shapes: Shapes, dtype: torch.dtype) -> dict[int, Tensor]:
        """Run the forwards alone: what the last stage makes of each microbatch, on its rank."""
        run = _Run(self, self._forward_wire, shapes, dtype)
        for action in self.schedule.ranks[self.axis.rank]:
            if action.kind == "F":
                run.compute(action)
        self._forward_wire.finish()
        traffic.at(None)
        return run.made_last


class _Run:
    """One step: what is between the actions."""

    def __init__(self, pipeline: Pipeline, wire: Wire, shapes: Shapes, dtype: torch.dtype) -> None:
        self.pipeline, self.wire, self.shapes, self.dtype = pipeline, wire, shapes, dtype
        self.marks: list[tuple[Mark, Mark]] = []
        self.made_last: dict[int, Tensor] = {}
        self._here: dict[Action, Tensor] = {}  # made on this rank and needed on it
        self._graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge | None]] = {}
        self._put_off: dict[tuple[int, int], list[Factors]] = {}
        wire.begin(shapes, dtype)

    def compute(self, action: Action) -> None:
        pipeline, kind = self.pipeline, action.kind
        traffic.at(action)
        if kind == "W":
            with self._measured(action):
                weight_gradients.add(self._put_off.pop(action[1:]))
        elif kind == "F":
            self._forward(action)
        else:
            self._backward(action)
        if kind in ("W", "BW"):
            pipeline._complete(action.stage, pipeline._final[action.stage] == action)

    def _forward(self, action: Action) -> None:
        _, stage, microbatch = action
        x = self._made(Action("F", stage - 1, microbatch), action) if stage else None
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()
        with self._measured(action):
            y = self.pipeline.stages[stage](x, microbatch)
            self._require_shape(y, stage, microbatch)
        if stage == self.pipeline.schedule.stages - 1:
            self.made_last[microbatch] = y.detach()
            kept: Tensor | GradientEdge | None = y
        else:
            kept = get_gradient_edge(y) if y.requires_grad else None  # a frozen stage
            self._hand_on(action, y.detach(), stage + 1)
        if torch.is_grad_enabled():
            self._graphs[action[1:]] = x, kept

    def _backward(self, action: Action) -> None:
        kind, stage, microbatch = action
        last = stage == self.pipeline.schedule.stages - 1
        gradient = None if last else self._made(Action("B", stage + 1, microbatch), action)
        x, y = self._graphs.pop(action[1:])
        final = self.pipeline._final[stage] == action
        with self._measured(action), self.pipeline._accumulating(final):
            if kind == "BW":
                _differentiate(y, gradient)
            else:
                with weight_gradients.taking(later=True) as put_off:
                    _differentiate(y, gradient)
                self._put_off[action[1:]] = put_off
        if x is not None:
            self._hand_on(action, x.grad if x.grad is not None else torch.zeros_like(x), stage - 1)

    def _require_shape(self, y: Tensor, stage: int, microbatch: int) -> None:
        """Before it is sent: gloo ends the receiving process where another number of bytes comes than it expects."""
        if stage == self.pipeline.schedule.stages - 1:
            return
        shape = list(self.shapes(stage, microbatch))
        if list(y.shape) != shape or y.dtype != self.dtype:
            raise ValueError(
                f"{y.dtype} {list(y.shape)} made; {self.dtype} {shape} would do, as this step's shapes say"
            )

    def _made(self, made: Action, wanted: Action) -> Tensor:
        """What a neighbouring stage made; of a B or BW it is named B."""
        holder = self.pipeline.schedule.rank_of[made.stage]
        if holder == self.pipeline.axis.rank:
            return self._here.pop(made)
        traffic.at(wanted, (made, holder))
        try:
            taken = self.wire.take(made, holder)
        except RuntimeError as error:
            raise PipelineError(
                f"rank {_rank()}, at {wanted}: {made} did not come from pp rank {holder}: {error}"
            ) from error
        traffic.at(wanted)
        return taken

    def _hand_on(self, action: Action, x: Tensor, stage: int) -> None:
        holder = self.pipeline.schedule.rank_of[stage]
        if holder == self.pipeline.axis.rank:
            self._here[action.made] = x
        else:
            self.wire.send(action.made, x, holder)

    @contextmanager
    def _measured(self, action: Action) -> Iterator[None]:
        clock = self.pipeline._clock
        start = clock.mark()
        try:
            yield
        except Exception as error:
            raise PipelineError(
                f"rank {_rank()}, stage {action.stage}, {action}: {type(error).__name__}: {error}"
            ) from error
        self.marks.append((start, clock.mark()))


def _differentiate(y: Tensor | GradientEdge | None, gradient: Tensor | None) -> None:
    if y is not None:
        torch.autograd.backward(y, gradient)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0

"""When every action of a step was computed, and why the ranks were idle for the rest: simulated or measured alike.

What each rank is idle for is divided in four, and the parts add up to its idle time exactly:

    communication   by how much the step is longer than a replay of the same actions with free sends
    imbalance       of that replay: by how much less this rank has to compute than the one with most
    fill            the rest before the rank's first backward: the pipeline fills
    drain           the rest after the last forward of the first stage: nothing enters any more
    order           the rest in between: waits that the schedule has with equal stages and free sends too

What is left after communication and imbalance is the same time on every rank. Imbalance is taken from the
waits in between first, and what these do not hold from fill and drain in proportion. Of a measured step, communication
is also what a rank does between two actions. Where ranks' clocks differ by so much that an action seems to begin before
what it needs has ended, there is no communication, and the other parts are shortened alike.

All this is of the pipeline's own window, from the first start to the last end, as published formulas mean it. Waiting
for data before it and the optimizer's step after it stand beside it.
Plain values, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megalite.parallel.pipeline.replay import begin_times
from megalite.parallel.pipeline.schedule import Action, Schedule


class Span(NamedTuple):
    """An action and its time, in seconds after any moment that is the same for all ranks."""

    action: Action
    start: float
    end: float


class Idle(NamedTuple):
    """A rank's idle seconds in a step, by cause."""

    fill: float
    drain: float
    order: float
    imbalance: float
    communication: float


@dataclass(frozen=True)
class Bubble:
    """The account of a step. Two conventions are in use, so that a bare "bubble" says little.

    step: seconds from the first start to the last end   busy: seconds that each rank computes
    idle: of each rank by cause; busy and idle of a rank add up to the step
    own: seconds from each rank's own first start to its own last end
    data, optimizer: seconds before the first start and after the last end, outside the step and alike on all ranks;
        0 where they are not known
    """

    step: float
    busy: list[float]
    idle: list[Idle]
    own: list[float]
    data: float = 0.0
    optimizer: float = 0.0

    @property
    def whole(self) -> float:
        """Seconds of the training step: waiting for data, the pipeline's step, the optimizer."""
        return self.data + self.step + self.optimizer

    @property
    def over_total(self) -> float:
        """Idle share of the step, mean over the ranks: (p−1)/(m+p−1) of 1F1B. Neither data nor optimizer are in it."""
        return _ratio(self._idle, self._idle + sum(self.busy))

    @property
    def over_ideal(self) -> float:
        """Idle time over the time computing, mean over the ranks: (p−1)/m of 1F1B (SC21, Llama 3)."""
        return _ratio(self._idle, sum(self.busy))

    @property
    def over_own(self) -> float:
        """Idle share of the longest rank's own time: what Zero Bubble's Table 5 calls the bubble rate.

        For steps that follow one another without a barrier: a rank that ends early begins the next step early.
        """
        mean = sum(self.busy) / max(1, len(self.busy))
        return _ratio(max(self.own, default=0.0) - mean, max(self.own, default=0.0))

    @property
    def causes(self) -> dict[str, float]:
        """Each cause's share of the total time; they add up to `over_total`."""
        total = self._idle + sum(self.busy)
        return {cause: _ratio(sum(getattr(idle, cause) for idle in self.idle), total) for cause in Idle._fields}

    @property
    def _idle(self) -> float:
        return max(0.0, self.step * len(self.busy) - sum(self.busy))


@dataclass(frozen=True)
class Timeline:
    """The spans of one step.

    ranks: of each its spans, in the order of the schedule's actions; none begins before the one before it has ended
    begin: when the step began, with waiting for data   finish: when its optimizer had stepped; None: not known
    """

    schedule: Schedule
    ranks: list[list[Span]]
    begin: float | None = None
    finish: float | None = None

    @property
    def start(self) -> float:
        """When the first action begins."""
        return min((spans[0].start for spans in self.ranks if spans), default=0.0)

    @property
    def end(self) -> float:
        """When the last action ends."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def extent(self) -> tuple[float, float]:
        """From when to when the training step was, with waiting for data and the optimizer where they are known."""
        known = [moment for moment in (self.begin, self.finish) if moment is not None]
        return min(self.start, *known, self.end), max(self.start, *known, self.end)

    @property
    def over_total(self) -> float:
        """What `bubble().over_total` is, without the account of causes, which takes longer."""
        total = (self.end - self.start) * len(self.ranks)
        return _ratio(total - sum(end - start for spans in self.ranks for _, start, end in spans), total)

    def bubble(self) -> Bubble:
        """The account of idle time: its shares and its causes."""
        step = self.end - self.start
        busy = [sum(span.end - span.start for span in spans) for spans in self.ranks]
        own = [spans[-1].end - spans[0].start if spans else 0.0 for spans in self.ranks]
        free = self._with_free_sends()
        most = max(busy, default=0.0)
        entering = (span.end for spans in free.ranks for span in spans if span.action[:2] == ("F", 0))
        closing = max(entering, default=0.0)
        idle = []
        for spans, computing in zip(free.ranks, busy, strict=True):
            fill, order, drain = _phases(spans, closing, free.end)
            imbalance = most - computing
            from_order = min(order, imbalance)
            within = step - computing, free.end - computing  # the second is longer where clocks differ, or by rounding
            share = _ratio(*within) if within[1] > within[0] else 1.0
            left = share * (1 - _ratio(imbalance - from_order, fill + drain))
            parts = fill * left, drain * left, share * (order - from_order), share * imbalance, step - free.end
            idle.append(Idle(*(part if part > 1e-12 * step else 0.0 for part in parts)))
        data = max(0.0, self.start - self.begin) if self.begin is not None else 0.0
        optimizer = max(0.0, self.finish - self.end) if self.finish is not None else 0.0
        return Bubble(step, busy, idle, own, data, optimizer)

    def _with_free_sends(self) -> Timeline:
        """The same actions, each as long as here, as early as they could be if sends took no time; it begins at 0."""
        schedule = self.schedule
        order = [[span.action for span in spans] for spans in self.ranks]
        seconds = [[span.end - span.start for span in spans] for spans in self.ranks]
        free = [0.0] * schedule.stages
        begin, end = begin_times(order, schedule.rank_of, schedule.microbatches, seconds, free)
        return Timeline(schedule, [list(map(Span, *lists)) for lists in zip(order, begin, end, strict=True)])


def _phases(spans: list[Span], closing: float, end: float) -> tuple[float, float, float]:
    """Idle seconds of a rank before its first backward, then before `closing`, and after it; a step from 0 to `end`."""
    fill = order = drain = before = 0.0
    filling = True
    for action, start, stop in [*spans, Span(Action("W", 0, 0), end, end)]:
        if start > before:
            late = max(0.0, start - max(before, closing))
            if filling:
                fill += start - before
            else:
                order += start - before - late
                drain += late
        filling = filling and action.kind == "F"
        before = stop
    return fill, order, drain


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0

"""Measured steps: what actions cost in them, and what the simulator makes of these costs.

    recorder = Recorder(schedule, ranks=8)
    measured, predicted = recorder.add(times, begin, finish)     after each step: its bubble, and the simulator's
    recorder.save(folder / TIMELINE)                             `megalite draw` shows both

The prediction is made of nothing but the schedule and the medians of each stage's times: where it differs from the
measurement, something else was at work. No torch.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.parallel.pipeline.replay import needed
from megalite.parallel.pipeline.saved import Saved, Times, expected, timeline, write
from megalite.parallel.pipeline.schedule import KINDS, Schedule
from megalite.parallel.pipeline.simulate import Costs, simulate
from megalite.parallel.pipeline.timeline import Timeline

KEPT = 20  # steps; their medians are the costs, and the one with the median bubble is saved
OFTEN = 1_000  # actions of a schedule that is simulated again at each step; of more, every second step, every third ...


def costs(timelines: Sequence[Timeline]) -> Costs:
    """What each stage's actions took, in seconds: of each step the median over its microbatches, and their median.

    A send is what lies between the end of an action and the start of the one that needs it, of the messages that were
    made when the receiver had nothing to do; 0 where there was none. A stage with BW alone has it as `backward_input`.
    """
    places = _Places(timelines[0].schedule)
    return _costs([places.medians(_flat(timeline)) for timeline in timelines])


def predicted(timelines: Sequence[Timeline]) -> Timeline:
    """What the simulator makes of measured steps: from their costs, with the medians of their data and optimizer."""
    around = [_around(step.begin, step.start, step.end, step.finish) for step in timelines]
    data, optimizer = (_median(moments) for moments in zip(*around, strict=True))
    return expected(timelines[0].schedule, costs(timelines), data, optimizer)


class Shares(NamedTuple):
    """A step's bubble over total time, as measured, and as simulated with the medians of the last steps."""

    measured: float
    predicted: float


class Recorder:
    """The last steps of a run.

    ranks, cores: how many processes of this machine compute on how many cores; cores None where each has a GPU
    layers: how many each stage has, where it is a model's; empty: not known
    """

    def __init__(
        self, schedule: Schedule, ranks: int = 1, cores: int | None = None, layers: Sequence[int] = ()
    ) -> None:
        self.schedule, self.ranks, self.cores, self.layers = schedule, ranks, cores, tuple(layers)
        self._places = _Places(schedule)
        self._steps: deque[_Step] = deque(maxlen=KEPT)
        self._count = 0
        self._predicted = 0.0

    def add(self, times: Times, begin: float | None = None, finish: float | None = None) -> Shares:
        """Take a step, whose `begin` and `finish` are as of Timeline.

        One of 4,000 actions takes half a millisecond, and every fifth, when it is simulated again, 5 ms.
        """
        flat = np.concatenate([np.maximum.accumulate(row) for row in times if len(row)]).reshape(-1, 2)
        start, end = float(flat[:, 0].min()), float(flat[:, 1].max())
        total = (end - start) * len(self.schedule.ranks)
        share = 1 - float((flat[:, 1] - flat[:, 0]).sum()) / total if total > 0 else 0.0
        around = _around(begin, start, end, finish)
        self._steps.append(_Step(share, times, begin, finish, self._places.medians(flat), around))
        if self._count % math.ceil(self._places.number / OFTEN) == 0:
            self._predicted = simulate(self.schedule, self.costs).over_total
        self._count += 1
        return Shares(share, self._predicted)

    @property
    def costs(self) -> Costs:
        """Those of the steps that are kept."""
        return _costs([step.medians for step in self._steps])

    @property
    def saved(self) -> Saved | None:
        """The kept step with the median bubble, and what it is predicted from; None where there was no step."""
        if not self._steps:
            return None
        middle = sorted(self._steps, key=lambda step: step.bubble)[len(self._steps) // 2]
        step = timeline(self.schedule, middle.times, middle.begin, middle.finish)
        data, optimizer = (_median(moments) for moments in zip(*(step.around for step in self._steps), strict=True))
        return Saved(step, self.costs, data, optimizer, len(self._steps), self.ranks, self.cores, self.layers)

    def save(self, path: Path) -> None:
        """Write what is `saved`, so that the file is whole whenever it is there; without a step, nothing."""
        if (saved := self.saved) is not None:
            write(path, saved)


# --- medians ------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    bubble: float
    times: Times
    begin: float | None
    finish: float | None
    medians: NDArray[np.float64]
    around: tuple[float | None, float | None]


class _Places:
    """Where in a step's flat array of times each stage's actions and messages are."""

    def __init__(self, schedule: Schedule) -> None:
        self.stages, rank_of = schedule.stages, schedule.rank_of
        flat = [action for actions in schedule.ranks for action in actions]
        self.number = len(flat)
        where = {action.made: i for i, action in enumerate(flat) if action.kind != "W"}
        groups: list[list[int]] = [[] for _ in range(len(KINDS) * self.stages)]
        sends: list[list[int]] = [[] for _ in range(self.stages)]
        messages: list[tuple[int, int, int]] = []  # sender, receiver, what is before it on its rank (`number`: nothing)
        for i, action in enumerate(flat):
            groups[KINDS.index(action.kind) * self.stages + action.stage].append(i)
            for need in needed(action, self.stages):
                if rank_of[need.stage] != rank_of[action.stage]:
                    first = i == 0 or rank_of[flat[i - 1].stage] != rank_of[action.stage]
                    sends[need.stage].append(len(messages))
                    messages.append((where[need], i, self.number if first else i - 1))
        self._messages = np.array(messages, dtype=np.intp).reshape(-1, 3).T
        self._groups, self._sends = _padded(groups), _padded(sends)

    def medians(self, flat: NDArray[np.float64]) -> NDArray[np.float64]:
        """`[5, stages]`: of one step those of F, B, W, BW and sends; NaN where there is none. flat: `[actions, 2]`"""
        sender, receiver, before = self._messages
        start, end = np.append(flat, [[-np.inf, -np.inf]], axis=0).T
        took = np.where(end[sender] >= end[before], start[receiver] - end[sender], np.nan)
        both = _medians(flat[:, 1] - flat[:, 0], self._groups), _medians(took, self._sends)
        return np.concatenate(both).reshape(-1, self.stages)


def _flat(timeline: Timeline) -> NDArray[np.float64]:
    """`[actions, 2]`: start and end of all actions, rank after rank."""
    times = [time for spans in timeline.ranks for _, *times in spans for time in times]
    return np.array(times, dtype=np.float64).reshape(-1, 2)


def _padded(groups: Sequence[Sequence[int]]) -> NDArray[np.intp]:
    """Lists of places as one array, filled up with −1."""
    longest = max(map(len, groups), default=0)
    return np.array([[*group, *[-1] * (longest - len(group))] for group in groups], dtype=np.intp)


def _medians(values: NDArray[np.float64], groups: NDArray[np.intp]) -> NDArray[np.float64]:
    """`[groups]`: of each, leaving out NaN; NaN where nothing is left."""
    values = np.append(values, np.nan)[groups]
    ordered = np.sort(np.append(values, np.full((len(values), 1), np.nan), axis=1), axis=1)  # NaN comes last
    there = np.count_nonzero(~np.isnan(ordered), axis=1)
    row = np.arange(len(ordered))
    return (ordered[row, np.maximum(there - 1, 0) // 2] + ordered[row, there // 2]) / 2


def _costs(steps: Sequence[NDArray[np.float64]]) -> Costs:
    values = np.stack(steps)
    index = np.arange(values[0].size).reshape(-1, 1) + values[0].size * np.arange(len(steps))
    f, b, w, bw, send = _medians(values.ravel(), index).reshape(values[0].shape)
    b, w = np.where(np.isnan(b), bw, b), np.nan_to_num(w)
    bw, send = np.where(np.isnan(bw), b + w, bw), np.maximum(0, np.nan_to_num(send))
    return Costs(*(tuple(cost.tolist()) for cost in (f, b, w, send, bw)))


def _around(begin: float | None, start: float, end: float, finish: float | None) -> tuple[float | None, float | None]:
    """Seconds of data and of the optimizer; None where they are not known."""
    data = None if begin is None else max(0.0, start - begin)
    return data, None if finish is None else max(0.0, finish - end)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

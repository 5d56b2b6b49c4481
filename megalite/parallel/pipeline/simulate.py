"""What a schedule will take: costs of a stage's actions and of a send -> Timeline. No processes, no torch.

    simulate(one_f_one_b(4, 8), Costs(1.0, 1.0, 1.0)).bubble().over_total    0.2727…, which is (p−1)/(m+p−1)

An action begins as soon as its rank is free and what it needs has come; sending takes none of the rank's time, and
messages do not wait for one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megalite.parallel.pipeline.generators import GENERATORS
from megalite.parallel.pipeline.replay import begin_times
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.pipeline.timeline import Span, Timeline

Cost = float | Sequence[float] | Callable[[int], float]


@dataclass(frozen=True)
class Costs:
    """Seconds, or any other unit of time, each a number, a list with one for each stage, or a function of the stage.

    forward, backward_input, backward_weight: F, B and W of one microbatch
    send: from the end of an action until the rank of the next stage has what this stage made; between stages of one
        rank there is no send
    backward: BW; None: both backwards, which take less time where they are computed at once
    """

    forward: Cost
    backward_input: Cost
    backward_weight: Cost
    send: Cost = 0.0
    backward: Cost | None = None

    def of(self, name: str, stages: int) -> list[float]:
        """One of the five for each stage; ValueError for a time that is none."""
        cost = getattr(self, name)
        if cost is None:
            parts = self.of("backward_input", stages), self.of("backward_weight", stages)
            return [b + w for b, w in zip(*parts, strict=True)]
        if isinstance(cost, Sequence):
            if len(cost) != stages:
                raise ValueError(f"{name}: {len(cost)} given; {stages} would do, one for each stage")
            cost = cost.__getitem__
        times = [float(cost(stage)) if callable(cost) else float(cost) for stage in range(stages)]
        for stage, time in enumerate(times):
            if not (math.isfinite(time) and time >= 0):
                raise ValueError(f"{name} of stage {stage}: {time:g} given; a time of 0 or more would do")
        return times


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The Timeline of a schedule that passes `check`; half a million actions take a few seconds.

    Raises ValueError of one line for a deadlock and for a cost that is no time.
    """
    names = {"F": "forward", "B": "backward_input", "W": "backward_weight", "BW": "backward"}
    table = {kind: costs.of(name, schedule.stages) for kind, name in names.items()}
    send = costs.of("send", schedule.stages)
    seconds = [[table[kind][stage] for kind, stage, _ in actions] for actions in schedule.ranks]
    begin, end = begin_times(schedule.ranks, schedule.rank_of, schedule.microbatches, seconds, send)
    ranks = [list(map(Span, *lists)) for lists in zip(schedule.ranks, begin, end, strict=True)]
    return Timeline(schedule, ranks)


def by_formula(schedule: Schedule, costs: Costs) -> dict[str, float]:
    """The bubble by the papers' formulas for the mean of the ranks' costs, by the name that `Bubble` has for it.

    GPipe, 1F1B and interleaved 1F1B (SC21 §2.2), ZB-H1 (Zero Bubble, Table 2): over_total and over_ideal; ZB-H2 (same
    table): over_own. Empty for other schedules, and where a formula's assumptions do not hold.
    """
    p, m, chunks = len(schedule.ranks), schedule.microbatches, schedule.stages // len(schedule.ranks)
    name = next((name for name, known in _NAMES.items() if known == schedule.name), "")
    if not name or m < p or schedule != GENERATORS[name](p, m, *([chunks] if name == "interleaved-1f1b" else [])):
        return {}
    names = "forward", "backward", "backward_input", "backward_weight"
    f, bw, b, w = (sum(costs.of(name, schedule.stages)) / p for name in names)
    idle, computing = (p - 1) * (f + bw) / chunks, m * (f + bw)
    if name in ("zb-h1", "zb-h2"):
        idle, computing = (p - 1) * (f + b - (w if name == "zb-h1" else 2 * w)), m * (f + b + w)
        if w > min(f, b) or m < 2 * p:
            return {}
    if not computing:
        return {}
    if name == "zb-h2":
        return {"over_own": idle / (computing + idle)}
    return {"over_total": idle / (computing + idle), "over_ideal": idle / computing}


_NAMES = {  # of the generators with a formula, and of the schedules that they make
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
}

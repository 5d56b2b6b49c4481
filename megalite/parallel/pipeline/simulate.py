"""What a schedule will take: costs of a stage's actions and of a send -> Timeline. No processes, no torch.

    simulate(one_f_one_b(4, 8), Costs(1.0, 1.0, 1.0)).bubble().over_total    0.2727…, which is (p−1)/(m+p−1)

An action begins as soon as its rank is free and what it needs has come; sending takes none of the rank's time, and
messages do not wait for one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megalite.parallel.pipeline.replay import begin_times
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.pipeline.timeline import Span, Timeline

Cost = float | Callable[[int], float]


@dataclass(frozen=True)
class Costs:
    """Seconds, or any other unit of time, each a number or a function of the stage.

    forward, backward_input, backward_weight: F, B and W of one microbatch; BW is both backwards
    send: from the end of an action until the rank of the next stage has what this stage made; between stages of one
        rank there is no send
    """

    forward: Cost
    backward_input: Cost
    backward_weight: Cost
    send: Cost = 0.0

    def of(self, name: str, stages: int) -> list[float]:
        """One of the four for each stage; ValueError for a time that is none."""
        cost = getattr(self, name)
        times = [float(cost(stage)) if callable(cost) else float(cost) for stage in range(stages)]
        for stage, time in enumerate(times):
            if not (math.isfinite(time) and time >= 0):
                raise ValueError(f"{name} of stage {stage}: {time:g} given; a time of 0 or more would do")
        return times


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The Timeline of a schedule that passes `check`; half a million actions take a few seconds.

    Raises ValueError of one line for a deadlock and for a cost that is no time.
    """
    names = ("forward", "backward_input", "backward_weight", "send")
    forward, backward, weight, send = (costs.of(name, schedule.stages) for name in names)
    both = [b + w for b, w in zip(backward, weight, strict=True)]
    table = {"F": forward, "B": backward, "W": weight, "BW": both}
    seconds = [[table[kind][stage] for kind, stage, _ in actions] for actions in schedule.ranks]
    begin, end = begin_times(schedule.ranks, schedule.rank_of, schedule.microbatches, seconds, send)
    ranks = [list(map(Span, *lists)) for lists in zip(schedule.ranks, begin, end, strict=True)]
    return Timeline(schedule, ranks)

"""The division of the layers that a run's own times ask for.

    advice(saved)    "by the times measured, mesh.division=[4, 2] would make the pipeline 7 % faster", or nothing

A stage is layers, all alike, beside them the embedding on the first one and the head on the last one. What the three
take is found by least squares, none below 0. From two stages not all can be told: either the embedding is then free or,
where layers on the last one take less than on the first, the head. A stage with a layer more takes a layer's time more,
and whatever else it takes stays as measured, as sends do. Memory is not looked at. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megalite.parallel.pipeline.saved import Saved
from megalite.parallel.pipeline.schedule import Schedule
from megalite.parallel.pipeline.simulate import Costs, simulate
from megalite.plan.stages import divide

WORTH = 0.02  # by how much faster a division has to be before it is spoken of
TRIED = 300_000  # actions that are simulated while divisions are tried: half a second to two


class Parts(NamedTuple):
    """Seconds of one layer, of the embedding and of the head."""

    layer: float
    embedding: float
    head: float


def parts(layers: Sequence[int], seconds: Sequence[float]) -> Parts | None:
    """What explains the seconds of stages of so many layers best; None where only the last stage has layers.

    An end whose embedding or head is not fixed at 0 is met exactly, so that the other stages alone say what a layer is.
    """
    found: list[tuple[float, Parts]] = []
    stages = list(zip(layers, seconds, strict=True))
    for has_embedding, has_head in ((True, True), (False, True), (True, False), (False, False)):
        fitted = stages[int(has_embedding) : len(stages) - has_head]
        squares = sum(n * n for n, _ in fitted)
        if not squares or not any(layers[:-1]):
            continue
        layer = sum(n * time for n, time in fitted) / squares
        embedding = has_embedding * (seconds[0] - layers[0] * layer)
        head = has_head * (seconds[-1] - layers[-1] * layer)
        if embedding >= 0 and head >= 0:
            missed = [time - n * layer for n, time in fitted]
            found.append((sum(time * time for time in missed), Parts(layer, embedding, head)))
    return min(found, key=lambda fit: fit[0])[1] if found else None


class Division(NamedTuple):
    """Layers of each stage, and how much faster than now the pipeline would be: 0.07 for 7 % more steps in a time."""

    layers: tuple[int, ...]
    faster: float


def best_division(schedule: Schedule, layers: Sequence[int], costs: Costs) -> Division:
    """That of the shortest step that the simulator finds, from `divide` on by one layer at a time; maybe the same.

    layers, costs: of each stage now, as measured
    """
    now = tuple(layers)
    kinds = _by_kind(costs, len(now))
    seconds = [f + backward for f, backward in zip(kinds["forward"], kinds["backward"], strict=True)]
    whole = parts(now, seconds)
    of_layer = {name: fit.layer for name, times in kinds.items() if (fit := parts(now, times))}
    if whole is None or not whole.layer or len(of_layer) < len(kinds):  # the last: times that overflow when added
        return Division(now, 0.0)

    def grown(times: Sequence[float], division: Sequence[int], layer: float) -> list[float]:
        return [max(0.0, time + (new - n) * layer) for time, new, n in zip(times, division, now, strict=True)]

    def step(division: tuple[int, ...]) -> float:
        changed = {name: grown(costs.of(name, len(now)), division, layer) for name, layer in of_layer.items()}
        timeline = simulate(schedule, Costs(**changed, send=costs.send))
        return timeline.end - timeline.start

    def neighbours(division: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """A layer from one stage to another, and first from one that takes long to one that does not."""
        takes = grown(seconds, division, whole.layer)
        givers = [stage for stage, n in enumerate(division) if n > (0 < stage < len(now) - 1)]
        pairs = [(giver, taker) for giver in givers for taker in range(len(now)) if giver != taker]
        for giver, taker in sorted(pairs, key=lambda pair: takes[pair[1]] - takes[pair[0]]):
            yield tuple(n - (stage == giver) + (stage == taker) for stage, n in enumerate(division))

    most = max(2, TRIED // sum(map(len, schedule.ranks)))
    best, tried = now, {now: step(now)}
    following = [divide(sum(now), schedule.rank_of, whole.layer, whole.head)]
    while following and len(tried) < most:
        tried |= {division: step(division) for division in following[: most - len(tried)]}
        best = min(tried, key=tried.__getitem__)
        following = [division for division in neighbours(best) if division not in tried]
    return Division(best, tried[now] / tried[best] - 1 if tried[best] else 0.0)


def advice(saved: Saved) -> str:
    """A line where another division would be faster by `WORTH`; empty otherwise, and where the times say too little.

    They do where ranks took turns on cores, and where the layers of the stages are not known.
    """
    if not saved.layers or saved.remark:
        return ""
    layers, faster = best_division(saved.measured.schedule, saved.layers, saved.costs)
    if faster < WORTH:
        return ""
    return f"by the times measured, mesh.division={list(layers)} would make the pipeline {100 * faster:.0f} % faster"


def _by_kind(costs: Costs, stages: int) -> dict[str, list[float]]:
    """Each stage's seconds, without sends. Where some stages compute B and W apart, the others' BW is cut as theirs."""
    f, b, w, bw = (costs.of(name, stages) for name in ("forward", "backward_input", "backward_weight", "backward"))
    if apart := [stage for stage in range(stages) if w[stage]]:
        share = sum(b[stage] for stage in apart) / sum(b[stage] + w[stage] for stage in apart)
        b = [b[stage] if w[stage] else share * bw[stage] for stage in range(stages)]
        w = [w[stage] or (1 - share) * bw[stage] for stage in range(stages)]
    return {"forward": f, "backward_input": b, "backward_weight": w, "backward": bw}

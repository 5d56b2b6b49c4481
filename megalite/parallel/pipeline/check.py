"""What has to be true of a schedule before any process starts, and how much memory it asks for.

Complete: every stage computes F and BW, or F, B and W, once on every microbatch. In order: on its rank an action stands
after what it needs there. Free of deadlock: some order in time satisfies all ranks at once. There is one exactly where
a replay comes to its end, whatever actions cost, because only the action that needs a message waits for it.
Plain values, no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megalite.parallel.pipeline.replay import begin_times
from megalite.parallel.pipeline.schedule import KINDS, Action, Schedule


def check(schedule: Schedule) -> list[float]:
    """The activations in flight on each rank, as `activations` counts them, of a schedule that can be executed.

    Raises ValueError for any other, with one line that names rank and action, or the cycle of ranks that wait.
    """
    places = _places(schedule)
    forward, backward, weight, whole = (places[kind] for kind in KINDS)
    for place, found in enumerate(zip(forward, backward, weight, whole, strict=True)):
        f, b, w, bw = found
        if not ((0 <= f < bw and b == w == -1) or (0 <= f < b < w and bw == -1)):
            stage, microbatch = divmod(place, schedule.microbatches)
            raise ValueError(f"rank {schedule.rank_of[stage]}: {_fault(stage, microbatch, found)}")
    seconds = [[1.0] * len(actions) for actions in schedule.ranks]
    begin_times(schedule.ranks, schedule.rank_of, schedule.microbatches, seconds, [0.0] * schedule.stages)
    return activations(schedule)


def activations(schedule: Schedule, kept: float = 1.0) -> list[float]:
    """The most activations that each rank holds at one time.

    The unit is what one microbatch leaves on the rank in all its stages, M_B of Zero Bubble, Table 1. A stage holds its
    part from F to the end of BW or W; `kept` is the share of it that W still needs after B, their M_W / M_B.
    """
    change = {"F": 1.0, "B": kept - 1, "W": -kept, "BW": -1.0}
    return [
        _peak([change[action.kind] for action in actions]) / max(1, len(schedule.stages_of(rank)))
        for rank, actions in enumerate(schedule.ranks)
    ]


def _peak(changes: Sequence[float]) -> float:
    most = held = 0.0
    for change in changes:
        held += change
        most = max(most, held)
    return most


def _places(schedule: Schedule) -> dict[str, list[int]]:
    """By kind, and then by stage · microbatches + microbatch: where on its rank's list an action stands, −1: nowhere.

    ValueError for an action that stands twice, or where it cannot be.
    """
    stages, microbatches = schedule.stages, schedule.microbatches
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < len(schedule.ranks):
            raise ValueError(f"stage {stage} is on rank {rank}; there are {len(schedule.ranks)} ranks")
    places: dict[str, list[int]] = {kind: [-1] * (stages * microbatches) for kind in KINDS}
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            kind, stage, microbatch = action
            if kind not in places:
                raise ValueError(f"rank {rank}: {action} is of kind {kind!r}; one of {', '.join(KINDS)} would do")
            if not 0 <= stage < stages:
                raise ValueError(f"rank {rank}: {action} is of stage {stage}; there are {stages}")
            if not 0 <= microbatch < microbatches:
                raise ValueError(f"rank {rank}: {action} is of microbatch {microbatch}; there are {microbatches}")
            if schedule.rank_of[stage] != rank:
                raise ValueError(f"rank {rank}: {action} is of a stage that rank {schedule.rank_of[stage]} holds")
            if places[kind][stage * microbatches + microbatch] != -1:
                raise ValueError(f"rank {rank}: {action} stands there twice")
            places[kind][stage * microbatches + microbatch] = index
    return places


def _fault(stage: int, microbatch: int, found: Sequence[int]) -> str:
    """What is wrong with the actions of a stage on a microbatch, which stand at these places in the order of KINDS."""
    there = {kind: place for kind, place in zip(KINDS, found, strict=True) if place >= 0}
    name = {kind: str(Action(kind, stage, microbatch)) for kind in KINDS}
    if "F" not in there:
        return f"{name['F']} is missing"
    if "BW" in there and len(there) > 2:
        extra = next(kind for kind in ("B", "W") if kind in there)
        return f"{name['BW']} is both gradients, and {name[extra]} stands beside it"
    if "BW" not in there and len(there) < 3:
        missing = " and ".join(name[kind] for kind in ("B", "W") if kind not in there)
        return f"{missing} missing; {name['BW']} would be both gradients in one action"
    order = [kind for kind in KINDS if kind in there]
    early, late = next((b, a) for a, b in itertools.pairwise(order) if there[a] > there[b])
    return f"{name[early]} stands before {name[late]}, which it needs"

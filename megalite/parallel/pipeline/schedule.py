"""A pipeline schedule as a plain value: for each rank the list of actions that it computes, in order.

    one_f_one_b(2, 3)   rank 0   0F0 0F1 0BW0 0F2 0BW1 0BW2
                        rank 1   1F0 1BW0 1F1 1BW1 1F2 1BW2

Stages number the parts of the model from its first layers to its last, and a rank holds one or several of them.

    F   forward               of a stage needs the F of the stage before it
    B   input gradient        needs the B or BW of the stage after it, and the stage's own F
    W   weight gradient       needs the stage's own B; nobody waits for it
    BW  both, in one action   where B and W are not computed apart

B and W are the names of Zero Bubble Pipeline Parallelism (Qi et al., ICLR 2024), which cut the backward pass in two.
Sends are not in the list: what an action needs from another rank follows from it. Plain values, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W", "BW"]
KINDS: tuple[Kind, ...] = ("F", "B", "W", "BW")
_ACTION = re.compile(r"(\d+)(F|BW|B|W)(\d+)")


class Action(NamedTuple):
    """One computation of a stage on a microbatch, `2F0`: the forward of stage 2 on microbatch 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that prints as `text`; ValueError where none does."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} given; an action like 2F0, 2B0, 2W0 or 2BW0 would do")
        return Action(match[2], int(match[1]), int(match[3]))  # type: ignore[arg-type]

    @property
    def made(self) -> Action:
        """The name of what others need of it: an F, or a B also of a BW, since both make the input gradient."""
        return self._replace(kind="B") if self.kind == "BW" else self


@dataclass(frozen=True)
class Schedule:
    """Who computes what, in which order.

    name: for titles and messages   ranks: of each the actions, in order   microbatches: of one step
    rank_of: for each stage the rank that holds it

    Nothing is checked here: see `check`.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]
    microbatches: int

    @property
    def stages(self) -> int:
        """How many parts the model is cut into; several of them may be on one rank."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, the first first."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)


def schedule_of(rows: Iterable[str | Iterable[str | Action]], name: str = "own", microbatches: int = 0) -> Schedule:
    """A schedule from a row of actions for each rank, as `["0F0 0BW0 …", "1F0 1BW0 …"]` or lists of actions.

    A stage is held by the rank that computes it, and there are as many microbatches as are named unless `microbatches`
    says more. Spaces, commas and semicolons separate. Raises ValueError of one line, as `check` does, which has to be
    called on the result as on every schedule.
    """
    ranks = []
    for rank, row in enumerate(rows):
        cells: Iterable[str | Action] = re.split(r"[\s,;]+", row) if isinstance(row, str) else row
        try:
            ranks.append(tuple(Action.parse(cell) if isinstance(cell, str) else cell for cell in cells if cell))
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}") from None
    if not any(ranks):
        raise ValueError(f"{name}: no action given; a row for each rank would do, as 0F0 0BW0")
    held: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if held.setdefault(action.stage, rank) != rank:
                raise ValueError(f"stage {action.stage} is computed on rank {held[action.stage]} and on rank {rank}")
    if missing := sorted(set(range(max(held) + 1)) - set(held)):
        raise ValueError(f"stage {missing[0]} is computed nowhere, but stage {max(held)} is")
    most = 1 + max(action.microbatch for actions in ranks for action in actions)
    return Schedule(name, tuple(ranks), tuple(held[stage] for stage in range(len(held))), max(most, microbatches))


def without_microbatches(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule of the first `microbatches`: actions of the others are left out, and the order is kept.

    What is left waits for nothing that was left out, so that there is no deadlock where there was none.
    """
    if microbatches >= schedule.microbatches:
        return schedule
    kept = tuple(tuple(a for a in actions if a.microbatch < microbatches) for actions in schedule.ranks)
    return Schedule(schedule.name, kept, schedule.rank_of, microbatches)


def forward_only(schedule: Schedule) -> Schedule:
    """The same without backward, for validation: forwards wait for forwards alone."""
    kept = tuple(tuple(a for a in actions if a.kind == "F") for actions in schedule.ranks)
    return Schedule(schedule.name, kept, schedule.rank_of, schedule.microbatches)


def messages(schedule: Schedule) -> dict[tuple[int, int], list[tuple[Action, Action]]]:
    """What each rank sends to each other one: by (sender, receiver) the pairs (`made`, used by), in order of making.

    An F is sent to the stage after it, the input gradient of a B or BW to the stage before, unless the same rank holds
    both. What nobody on the list uses is not sent.
    """
    used_by: dict[tuple[bool, int, int], Action] = {}  # (is a forward, stage, microbatch) -> what computes it
    for actions in schedule.ranks:
        for action in actions:
            if action.kind != "W":
                used_by[action.kind == "F", action.stage, action.microbatch] = action
    sent: dict[tuple[int, int], list[tuple[Action, Action]]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind == "W":
                continue
            forward = action.kind == "F"
            used = used_by.get((forward, action.stage + (1 if forward else -1), action.microbatch))
            if used is not None and schedule.rank_of[used.stage] != rank:
                sent.setdefault((rank, schedule.rank_of[used.stage]), []).append((action.made, used))
    return sent


def contiguous(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """`rank_of` where stages go round the ranks `chunks` times: rank 0 holds the stages 0, ranks, 2·ranks …"""
    return tuple(range(ranks)) * chunks


def vee(ranks: int) -> tuple[int, ...]:
    """`rank_of` of a V: down the ranks and up again, so that rank 0 holds the first stage and the last."""
    return (*range(ranks), *reversed(range(ranks)))


def require_sizes(**sizes: int) -> None:
    """ValueError of one line for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: {size} given; 1 or more would do")

"""Which rank the others wait for, from what each says of itself: no rank can know it alone.

    rank 0   waits in tp#20          ┐
    rank 1   tp#19 is its last call  ┴▶ rank 1 did not enter tp#20, and waits for nobody: it is the one

A rank waits for those of its group that have not yet issued the oldest call that is not everywhere, or for what a stage
of the pipeline has not sent. Who waits for nobody is to blame; before that, who does not answer, and who issued another
collective than the others under the same number. No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

Peers = Callable[[int], Mapping[str, Sequence[int]]]  # rank -> for each axis, the ranks of its group, itself included


@dataclass(frozen=True)
class Issued:
    """A collective that a rank issued: `tp#20`, what it is (operation, dtype, shape), from where."""

    axis: str
    sequence: int
    what: str
    caller: str = ""

    def __str__(self) -> str:
        return f"{self.axis}#{self.sequence} {self.what}" + (f" of {self.caller}" if self.caller else "")


@dataclass(frozen=True)
class Report:
    """Where a rank stands.

    step: done so far   numbers: its last call's number on each axis   calls: the last ones, oldest first
    action, awaits: of a pipeline, what it does, and (what it waits for, from which pp rank)
    where: the innermost lines of its main thread   in_call: whether that is within a collective
    idle: seconds since it last got on   finished: it has left the run
    """

    step: int = 0
    numbers: Mapping[str, int] = field(default_factory=dict)
    calls: Sequence[Issued] = ()
    action: str = ""
    awaits: tuple[str, int] | None = None
    where: str = ""
    in_call: bool = False
    idle: float = 0.0
    finished: bool = False


@dataclass(frozen=True)
class Verdict:
    """The rank to blame, how many steps it had done, and one line that says so."""

    rank: int
    step: int
    message: str


def blame(reports: Mapping[int, Report], silent: Mapping[int, Report], size: int, peers: Peers) -> Verdict:
    """The verdict on `size` ranks.

    reports: of those that answered   silent: of the others, what they said last
    """
    known = {**silent, **reports}
    waits = {rank: _waits(rank, known, peers) for rank in reports}
    if silent:
        rank = next((r for r in sorted(silent) if _waiter(r, waits)), min(silent))
        last, step = known[rank], max((report.step for report in reports.values()), default=0)
        if last.step < step:  # it said so before the others finished their steps, which they cannot without it
            last = replace(last, step=step, action="", where="", calls=())
        return _verdict(rank, last, size, "does not answer: it was ended or stopped", waits)
    other = _other_call(reports, peers, lambda call: call.what)
    guilty = [rank for rank, (_, whom) in waits.items() if not whom and not reports[rank].finished]
    if not other and not guilty:  # everyone waits: one of them left out a collective like its neighbours
        other = _other_call(reports, peers, str)
    if other:
        rank, mine, than, theirs = other
        how = f"took another way: its {mine} stands against {theirs} of rank {than}"
        return _verdict(rank, known[rank], size, how, {})
    guilty = guilty or list(reports)
    for preferred in (
        [rank for rank in guilty if _waiter(rank, waits)],
        [rank for rank in guilty if not reports[rank].in_call],
    ):
        guilty = [rank for rank in guilty if rank in preferred] or guilty
    rank = min(guilty, key=lambda rank: (known[rank].step, rank))
    return _verdict(rank, known[rank], size, "hangs", waits)


Waits = Mapping[int, tuple[str, list[int]]]


def _waits(rank: int, known: Mapping[int, Report], peers: Peers) -> tuple[str, list[int]]:
    """For what a rank waits, and for which others; for nobody, where all have issued what it has."""
    report = known[rank]
    if report.awaits is not None:
        what, place = report.awaits
        return what, [peers(rank)["pp"][place]]
    for call in report.calls:
        group = peers(rank).get(call.axis, ())
        behind = [
            other
            for other in group
            if other in known and not known[other].finished and known[other].numbers.get(call.axis, 0) < call.sequence
        ]
        if behind:
            return str(call), behind
    return "", []


def _waiter(rank: int, waits: Waits) -> int | None:
    return next((other for other, (_, whom) in sorted(waits.items()) if rank in whom), None)


def _other_call(
    reports: Mapping[int, Report], peers: Peers, of: Callable[[Issued], str]
) -> tuple[int, Issued, int, Issued] | None:
    """The first call under whose number a group issued different ones: (rank, its call, another rank, its call)."""
    calls = {rank: {(call.axis, call.sequence): call for call in report.calls} for rank, report in reports.items()}
    seen = set()
    for rank, report in reports.items():
        for call in report.calls:
            key = call.axis, call.sequence
            group = tuple(peers(rank).get(call.axis, ()))
            if (group, key) in seen:
                continue
            seen.add((group, key))
            issued = {other: calls[other][key] for other in group if key in calls.get(other, {})}
            said = Counter(of(each) for each in issued.values())
            if len(said) > 1:
                return _minority(issued, said, of, calls)
    return None


def _minority(
    issued: Mapping[int, Issued],
    said: Counter[str],
    of: Callable[[Issued], str],
    calls: Mapping[int, Mapping[tuple[str, int], Issued]],
) -> tuple[int, Issued, int, Issued]:
    """Who is alone with its call; among equals, who issued what the others issued one number later."""

    def early(rank: int) -> bool:
        mine = issued[rank]
        after = [calls[other].get((mine.axis, mine.sequence + 1)) for other in issued if other != rank]
        return any(call is not None and (call.what, call.caller) == (mine.what, mine.caller) for call in after)

    rank = min(issued, key=lambda rank: (said[of(issued[rank])], not early(rank), rank))
    than = next(other for other in issued if of(issued[other]) != of(issued[rank]))
    return rank, issued[rank], than, issued[than]


def _verdict(rank: int, report: Report, size: int, how: str, waits: Waits) -> Verdict:
    parts = [f"rank {rank} of {size} {how}, in step {report.step + 1}"]
    if report.action:
        parts[0] += f" at {report.action}"
    if report.where:
        parts[0] += f" in {report.where}"
    if (other := _waiter(rank, waits)) is not None:
        parts.append(f"rank {other} waits for it in {waits[other][0]}")
    elif report.calls:
        parts.append(f"its last collective was {report.calls[-1]}")
    return Verdict(rank, report.step, "; ".join(parts))

"""The published schedules, each as a table: a phase is a phrase of actions and how often it is repeated.

    1F1B on rank r of p    F × (p−1−r)    F BW × (m−p+1+r)    BW × (p−1−r)

The n-th F of a stage is that of microbatch n. Where a table needs a least number of microbatches and is given fewer, it
is laid out for that number and the microbatches that are not there are left out of it.

`stages` is the number of ranks in every generator, as in the papers: with one stage a rank the two are the same.
Plain values, no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from megalite.parallel.pipeline.schedule import (
    Action,
    Kind,
    Schedule,
    contiguous,
    require_sizes,
    vee,
    without_microbatches,
)

Phase = tuple[str, int]  # "F BW", 3: three times an F and a BW


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: m activations in flight (Huang et al. 2019; SC21 §2.2.1)."""
    return _from_table("GPipe", stages, microbatches, 1, lambda p, m, r: [("F", m), ("BW", m)])


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """A backward as soon as there is one: the bubble of GPipe with min(p, m) activations in flight (SC21 §2.2.1)."""
    return _from_table(
        "1F1B",
        stages,
        microbatches,
        stages,
        lambda p, m, r: [("F", p - 1 - r), ("F BW", m - p + 1 + r), ("BW", p - 1 - r)],
    )


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B with W put off to where 1F1B drains: idle (p−1)(F+B−W), the memory of 1F1B (Zero Bubble §2.1, Table 2)."""
    return _from_table(
        "ZB-H1",
        stages,
        microbatches,
        stages,
        lambda p, m, r: [("F", p - 1 - r), ("F B", r), ("F B W", m - p + 1), ("B W", p - 1 - r), ("W", r)],
    )


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """More forwards before the first B fill what H1 leaves: idle (p−1)(F+B−2W) from each rank's own first action to
    its last, 2p−1 activations in flight (Zero Bubble §2.2, Table 2).
    """
    return _from_table(
        "ZB-H2",
        stages,
        microbatches,
        2 * stages,
        lambda p, m, r: [
            ("F", 2 * (p - 1 - r)),
            ("F B", 2 * r),
            ("F B W", m - 2 * p + 2),
            ("B W", 2 * (p - 1 - r)),
            ("W", 2 * r),
        ],
    )


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Two stages a rank in a V, a the first half of the model and z the second: no idle time from a rank's own first
    action to its last where F, B and W take equally long, with the memory of 1F1B (Zero Bubble §6).
    """
    return _from_table(
        "ZB-V",
        stages,
        microbatches,
        2 * stages,
        lambda p, m, r: [
            ("Fa", 2 * (p - r) - 1),
            ("Fz Fa", r),
            ("Fz Bz Wz", p - r),
            ("Fa Ba Wa Fz Bz Wz", m - 2 * p + 1 + r),
            ("Ba Wa Fz Bz Wz", p - 1 - r),
            ("Ba Bz", r),
            ("Ba Wa", p - r),
            ("Wz", r),
            ("Wa", r),
        ],
    )


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipe's order folded into a V, so that the weights are held once (DeepSeek-V3 §3.2.1; DualPipe's README).

    DualPipe means a forward and a backward that stand side by side to be computed at once, so that one's communication
    hides behind the other. Here they are two actions, one after the other.
    """

    def table(p: int, m: int, r: int) -> list[Phase]:
        last, half = divmod(r + 1, 2)  # of the 2(r+1) backwards of the ebb the first half is whole, the other cut
        return [
            ("Fa", 2 * (p - 1 - r)),
            ("Fa Fz", r + 1),
            ("Bz W Fz", p - 1 - r),
            ("Fa BWz Fz BWa", m - 2 * p + 1 + r),
            ("BWz Fz BWa", p - 1 - r),
            ("BWz BWa", last),
            ("BWz Ba", half),
            ("Bz Ba", last),
            ("W Ba", p - 1 - r),
            ("W", r + 1),
        ]

    return _from_table("DualPipeV", stages, microbatches, 2 * stages, table)


def interleaved_1f1b(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over `chunks` stages a rank: the bubble is divided by them, messages are multiplied (SC21 §2.2.2).

    Microbatches go through the chunks in groups: of p where p divides their number, of a few more where it does not.
    So the bubble is (p−1)/(v·m) of the ideal time for every m ≥ p. In flight are p(1 + (p−1)/(p·v)) activations, with
    larger groups (v−1)/v more for each microbatch that the largest has beyond p.
    """
    require_sizes(stages=stages, microbatches=microbatches, chunks=chunks)
    p, v = stages, chunks
    groups = max(1, microbatches // p)
    sizes = [max(p, len(range(group, microbatches, groups))) for group in range(groups)]  # fewer than p would deadlock
    firsts = [sum(sizes[:group]) for group in range(groups)]
    order = [
        (chunk, first + i) for first, size in zip(firsts, sizes, strict=True) for chunk in range(v) for i in range(size)
    ]
    ranks = []
    for rank in range(p):
        forwards = [Action("F", chunk * p + rank, microbatch) for chunk, microbatch in order]
        backwards = [Action("BW", (v - 1 - chunk) * p + rank, microbatch) for chunk, microbatch in order]
        ahead = min(len(order), 2 * (p - 1 - rank) + (v - 1) * sizes[0] if v > 1 else p - 1 - rank)
        actions = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            actions += (forward, backward)
        ranks.append((*actions, *backwards[len(order) - ahead :]))
    return without_microbatches(Schedule("interleaved 1F1B", tuple(ranks), contiguous(p, v), sum(sizes)), microbatches)


# --- from a table to a schedule -----------------------------------------------------------------------------------


def _from_table(
    name: str, stages: int, microbatches: int, least: int, table: Callable[[int, int, int], list[Phase]]
) -> Schedule:
    """Lay out `table(ranks, microbatches, rank)` on every rank, for at least `least` microbatches."""
    require_sizes(stages=stages, microbatches=microbatches)
    laid_out = max(microbatches, least)
    tables = [table(stages, laid_out, rank) for rank in range(stages)]
    folded = any(word.endswith(("a", "z")) for word, _ in tables[0])
    rank_of = vee(stages) if folded else contiguous(stages)
    ranks = []
    for rank, phases in enumerate(tables):
        held = {"a": rank, "z": 2 * stages - 1 - rank} if folded else {"": rank}
        ranks.append(tuple(_actions(phases, held)))
    return without_microbatches(Schedule(name, tuple(ranks), rank_of, laid_out), microbatches)


def _actions(phases: Iterable[Phase], held: dict[str, int]) -> Iterator[Action]:
    """The actions of one rank. A bare W of a folded table is the weight gradient that has waited longest."""
    forwards, backwards = dict.fromkeys(held.values(), 0), dict.fromkeys(held.values(), 0)
    waiting: deque[tuple[int, int]] = deque()  # (stage, microbatch) of every B whose W is still to come
    for phrase, times in phases:
        words = [(word.rstrip("az"), held.get(word.lstrip("FBW"))) for word in phrase.split()]
        for _ in range(times):
            for kind, stage in words:
                if kind == "W":
                    place = next(pair for pair in waiting if stage in (None, pair[0]))
                    waiting.remove(place)
                    yield Action("W", *place)
                    continue
                assert stage is not None
                counter = forwards if kind == "F" else backwards
                microbatch = counter[stage]
                counter[stage] += 1
                if kind == "B":
                    waiting.append((stage, microbatch))
                yield Action(_kind(kind), stage, microbatch)


def _kind(word: str) -> Kind:
    assert word in ("F", "B", "BW")
    return word  # type: ignore[return-value]


def one_after_another(rank_of: Sequence[int], microbatches: int) -> Schedule:
    """Each microbatch forward and backward before the next one: for any placing of stages, with the least memory."""
    ranks = []
    for rank in range(max(rank_of) + 1):
        held = [stage for stage, holder in enumerate(rank_of) if holder == rank]
        way: list[tuple[Kind, int]] = [("F", stage) for stage in held] + [("BW", stage) for stage in reversed(held)]
        ranks.append(tuple(Action(kind, stage, m) for m in range(microbatches) for kind, stage in way))
    return Schedule("one after another", tuple(ranks), tuple(rank_of), microbatches)


GENERATORS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved_1f1b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}

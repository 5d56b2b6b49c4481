"""A Timeline for the terminal and for Perfetto; `svg.py` draws it for paper and slides.

    rank 0 │F0F1    BW0-F2BW1-  BW2-      without colours a cell says its kind,
    rank 1 │  F0BW0-F1BW1-F2BW2-          with them it has the microbatch alone

Plain values, no torch.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from megalite.parallel.pipeline.replay import needed
from megalite.parallel.pipeline.schedule import KINDS, Action
from megalite.parallel.pipeline.timeline import Bubble, Span, Timeline

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MEANING = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "backward"}
COLOURS = {"F": (47, 111, 206), "B": (18, 140, 126), "W": (232, 146, 38), "BW": (46, 145, 74)}
LIGHTEST = 0.55  # the last of a rank's stages is this far on the way to white

RGB = tuple[int, int, int]


def colour(kind: str, chunk: int = 0, chunks: int = 1) -> RGB:
    """Of an action, red, green and blue: the kind's colour, the lighter the later the stage is among its rank's."""
    share = LIGHTEST * chunk / max(1, chunks - 1)
    red, green, blue = (round(part + (255 - part) * share) for part in COLOURS[kind])
    return red, green, blue


def ink(background: RGB) -> str:
    """Near black or white, whichever has more contrast on a colour, by WCAG's relative luminance."""
    red, green, blue = (((part / 255 + 0.055) / 1.055) ** 2.4 for part in background)
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.215 else "#1d2430"


def chunk_of(timeline: Timeline) -> dict[int, tuple[int, int]]:
    """For each stage which of its rank's stages it is, and how many the rank has."""
    schedule = timeline.schedule
    held = [schedule.stages_of(rank) for rank in range(len(schedule.ranks))]
    return {stage: (chunk, len(stages)) for stages in held for chunk, stage in enumerate(stages)}


def kinds_of(timeline: Timeline) -> list[str]:
    """The kinds of action that occur, in the order of a legend."""
    there = {span.action.kind for spans in timeline.ranks for span in spans}
    return [kind for kind in KINDS if kind in there]


# --- text ---------------------------------------------------------------------------------------------------------


def text(timeline: Timeline, width: int = 110, colours: bool = True) -> Text:
    """A line a rank, of at most `width` columns, and a legend; time runs to the right, a blank is idle.

    A label that does not fit its cell is shortened, and left out where nothing fits.
    """
    from rich.text import Text

    names = [f"rank {rank} " for rank in range(len(timeline.ranks))]
    margin = max(map(len, names)) + 1
    spans = [span for spans in timeline.ranks for span in spans if span.end > span.start]
    if not spans:
        return Text("nothing to draw")
    wanted = max((len(_label(span.action, 99, colours)) + colours) / (span.end - span.start) for span in spans)
    scale = min(wanted, (width - margin) / (timeline.end - timeline.start))
    shortest = min(span.end - span.start for span in spans)
    scale = max(1, int(scale * shortest)) / shortest if scale * shortest >= 1 else scale  # whole columns look even
    chunks = chunk_of(timeline)
    drawn = Text(no_wrap=True)
    for name, row in zip(names, timeline.ranks, strict=True):
        drawn.append(name.rjust(margin - 1) + "│", "dim" if colours else "")
        column = 0
        for span in row:
            start, end = (round((moment - timeline.start) * scale) for moment in (span.start, span.end))
            drawn.append(" " * (start - column))
            drawn.append(*_cell(span, end - start, colours, chunks[span.action.stage]))
            column = end
        drawn.append("\n")
    drawn.append(" " * margin)
    for kind in kinds_of(timeline):
        if colours:
            drawn.append("  ", f"on rgb({','.join(map(str, colour(kind)))})")
        drawn.append(f" {MEANING[kind]}   " if colours else f"{kind} {MEANING[kind]}   ")
    if colours and max(count for _, count in chunks.values()) > 1:
        drawn.append("lighter: a later stage of the rank")
    return drawn


def _cell(span: Span, columns: int, colours: bool, chunk: tuple[int, int]) -> tuple[str, str]:
    label = _label(span.action, columns, colours)
    if not colours:
        return label.ljust(columns, "-"), ""
    background = colour(span.action.kind, *chunk)
    if span.action.microbatch % 2:  # neighbours of one kind are told apart by their shade
        background = (int(background[0] * 0.86), int(background[1] * 0.86), int(background[2] * 0.86))
    return label.center(columns), f"{ink(background)} on rgb({','.join(map(str, background))})"


def _label(action: Action, columns: int, colours: bool) -> str:
    names = [str(action.microbatch)] if colours else [f"{action.kind}{action.microbatch}", action.kind, action.kind[0]]
    return next((name for name in names if len(name) <= columns), "")


def account(bubble: Bubble) -> str:
    """The bubble in one line, by each convention that says something else, and its causes."""
    causes = ", ".join(f"{cause} {share:.1%}" for cause, share in bubble.causes.items() if share >= 0.00005)
    parts = [f"bubble {bubble.over_total:.1%} of total time" + (f" ({causes})" if causes else "")]
    parts.append(f"{bubble.over_ideal:.1%} over ideal time")
    if abs(bubble.over_own - bubble.over_total) >= 0.0005:
        parts.append(f"{bubble.over_own:.1%} without a barrier between steps")
    return ", ".join(parts)


def table(bubble: Bubble, in_flight: list[float]) -> Table:
    """The account of every rank, in the unit of the costs, and its activations in flight."""
    from rich.table import Table

    made = Table(caption=f"step {bubble.step:.4g}; activations in flight: microbatches, of all that a rank holds")
    made.add_column("rank", justify="right")
    for name in ("computing", *(bubble.idle[0]._fields if bubble.idle else ()), "in flight"):
        made.add_column(name, justify="right")
    for rank, (busy, idle, held) in enumerate(zip(bubble.busy, bubble.idle, in_flight, strict=True)):
        made.add_row(str(rank), f"{busy:.4g}", *(f"{part:.4g}" if part else "·" for part in idle), f"{held:.4g}")
    return made


# --- trace --------------------------------------------------------------------------------------------------------


def trace(timeline: Timeline) -> str:
    """JSON in Chrome's trace event format, for ui.perfetto.dev: a thread a rank, an arrow a message.

    Seconds of the Timeline become the format's microseconds.
    """
    events: list[dict] = []
    where = {
        span.action._replace(kind="B") if span.action.kind == "BW" else span.action: (rank, span)
        for rank, spans in enumerate(timeline.ranks)
        for span in spans
    }
    for rank, spans in enumerate(timeline.ranks):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        for span in spans:
            action, begin = span.action, _microseconds(span.start - timeline.start)
            length = _microseconds(span.end - timeline.start) - begin
            more = {"stage": action.stage, "microbatch": action.microbatch}
            event = {"ph": "X", "pid": 0, "tid": rank, "ts": begin, "dur": length, "args": more}
            events.append({"name": str(action), "cat": MEANING[action.kind], **event})
            for need in needed(action, timeline.schedule.stages):
                sender, made = where[need]
                if sender != rank:
                    arrow = {"name": "send", "cat": "send", "id": str(action), "pid": 0}
                    sent = _microseconds(made.end - timeline.start)
                    events.append({"ph": "s", "tid": sender, "ts": sent, **arrow})
                    events.append({"ph": "f", "bp": "e", "tid": rank, "ts": begin, **arrow})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)

"""A Timeline for the terminal and for Perfetto; `svg.py` draws it for paper and slides.

    rank 0 │F0F1    BW0-F2BW1-  BW2-      without colours a cell says its kind,
    rank 1 │  F0BW0-F1BW1-F2BW2-          with them it has the microbatch alone

Plain values, no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megalite.parallel.pipeline.replay import needed
from megalite.parallel.pipeline.schedule import KINDS, Action
from megalite.parallel.pipeline.timeline import Bubble, Idle, Span, Timeline

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MEANING = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "backward"}
COLOURS = {"F": (47, 111, 206), "B": (18, 140, 126), "W": (232, 146, 38), "BW": (46, 145, 74)}
AROUND = {"data": (168, 176, 190), "optimizer": (134, 100, 178)}  # what is around the pipeline's own window
PLAIN = {"data": ".", "optimizer": "="}
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


def around(timeline: Timeline) -> list[tuple[str, float, float]]:
    """Waiting for data and the optimizer's step, where they are known: name, start and end, alike on all ranks."""
    begin, finish = timeline.extent
    parts = [("data", begin, timeline.start), ("optimizer", timeline.end, finish)]
    return [(name, start, end) for name, start, end in parts if end > start]


def unit_of(seconds: float) -> tuple[float, str]:
    """The unit that makes times like this one readable, and how many of it are in a second."""
    return next((unit for unit in ((1.0, "s"), (1e3, "ms")) if seconds * unit[0] >= 1), (1e6, "µs"))


# --- text ---------------------------------------------------------------------------------------------------------


def text(timeline: Timeline, width: int = 110, colours: bool = True) -> Text:
    """A line a rank, of at most `width` columns, and a legend; time runs to the right, a blank is idle.

    A label that does not fit its cell is shortened, and left out where nothing fits.
    """
    return texts([timeline], [""], width, colours)


def texts(timelines: Sequence[Timeline], titles: Sequence[str], width: int = 110, colours: bool = True) -> Text:
    """Several such pictures one under the other, each below its title, on one scale of time and with one legend."""
    from rich.text import Text

    margin = max(len(f"rank {rank} ") for timeline in timelines for rank in range(len(timeline.ranks))) + 1
    scale = _columns_a_second(timelines, width - margin, colours)
    if not scale:
        return Text("nothing to draw")
    drawn = Text(no_wrap=True)
    for timeline, title in zip(timelines, titles, strict=True):
        if title:
            drawn.append(f"{title}\n", "bold" if colours else "")
        _rows(drawn, timeline, margin, scale, colours)
    drawn.append(" " * margin)
    for kind in MEANING:
        if not any(kind in kinds_of(timeline) for timeline in timelines):
            continue
        if colours:
            drawn.append("  ", f"on rgb({','.join(map(str, colour(kind)))})")
        drawn.append(f" {MEANING[kind]}   " if colours else f"{kind} {MEANING[kind]}   ")
    for name in AROUND:
        if any(name == part for timeline in timelines for part, _, _ in around(timeline)):
            drawn.append(*_filled(name, 2 if colours else 1, colours))
            drawn.append(f" {name}   ")
    if colours and max(count for timeline in timelines for _, count in chunk_of(timeline).values()) > 1:
        drawn.append("lighter: a later stage of the rank")
    return drawn


def _columns_a_second(timelines: Sequence[Timeline], width: int, colours: bool) -> float:
    """So many that all labels are there, if the width allows it; 0 where no time passes."""
    spans = [span for timeline in timelines for spans in timeline.ranks for span in spans if span.end > span.start]
    if not spans:
        return 0.0
    wanted = max((len(_label(span.action, 99, colours)) + colours) / (span.end - span.start) for span in spans)
    scale = min(wanted, width / max(end - begin for begin, end in (timeline.extent for timeline in timelines)))
    shortest = min(span.end - span.start for span in spans)
    if len(timelines) == 1 and scale * shortest >= 1:
        scale = int(scale * shortest) / shortest  # whole columns look even
    return scale


def _rows(drawn: Text, timeline: Timeline, margin: int, scale: float, colours: bool) -> None:
    chunks, (begin, _) = chunk_of(timeline), timeline.extent
    for rank, spans in enumerate(timeline.ranks):
        drawn.append(f"rank {rank} ".rjust(margin - 1) + "│", "dim" if colours else "")
        column = 0
        cells: list[tuple[str | Span, float, float]] = [(span, span.start, span.end) for span in spans]
        for what, *moments in sorted([*cells, *around(timeline)], key=lambda cell: cell[1:]):
            start, end = (round((moment - begin) * scale) for moment in moments)
            drawn.append(" " * (start - column))
            if isinstance(what, str):
                drawn.append(*_filled(what, end - start, colours))
            else:
                drawn.append(*_cell(what, end - start, colours, chunks[what.action.stage]))
            column = end
        drawn.append("\n")


def _filled(name: str, columns: int, colours: bool) -> tuple[str, str]:
    return (" " * columns, f"on rgb({','.join(map(str, AROUND[name]))})") if colours else (PLAIN[name] * columns, "")


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
    return ", ".join(parts) + _around_share(bubble)


def _around_share(bubble: Bubble) -> str:
    """`; of the whole step data 0.1%, optimizer 7.9%`, of what is known of them."""
    known = [(name, getattr(bubble, name)) for name in AROUND if getattr(bubble, name)]
    shares = ", ".join(f"{name} {seconds / bubble.whole:.1%}" for name, seconds in known)
    return f"; of the whole step {shares}" if shares else ""


def table(bubble: Bubble, in_flight: list[float], unit: str = "") -> Table:
    """The account of every rank and its activations in flight.

    unit: "s" where times are seconds, which are then in a readable unit
    """
    from rich.table import Table

    many, unit = unit_of(bubble.whole) if unit == "s" else (1.0, unit)
    step = f"{f'in {unit}: ' if unit else ''}step {many * bubble.step:.4g}{_around_share(bubble)}"
    made = Table(caption=f"{step}; activations in flight: microbatches, of all that a rank holds")
    made.add_column("rank", justify="right")
    for name in ("computing", *(bubble.idle[0]._fields if bubble.idle else ()), "in flight"):
        made.add_column(name, justify="right")
    for rank, (busy, idle, held) in enumerate(zip(bubble.busy, bubble.idle, in_flight, strict=True)):
        times = [f"{many * part:.4g}" if part else "·" for part in idle]
        made.add_row(str(rank), f"{many * busy:.4g}", *times, f"{held:.4g}")
    return made


def comparison(formula: Mapping[str, float], simulated: Bubble, measured: Bubble) -> Table:
    """Formula, simulation and measurement of a step in seconds, side by side, and the bubble of the last two by cause.

    formula: shares by the name that Bubble has for them, as `simulate.by_formula` returns them
    """
    from rich.table import Table

    made = Table()
    made.add_column("")
    for name in (("formula",) if formula else ()) + ("simulation", "measurement"):
        made.add_column(name, justify="right")
    bubbles = simulated, measured

    def add(name: str, cells: Sequence[str], by_formula: str = "") -> None:
        made.add_row(name, *([by_formula] if formula else []), *cells)

    for convention, name in CONVENTIONS.items():
        if convention == "over_own" not in formula and all(abs(b.over_own - b.over_total) < 0.0005 for b in bubbles):
            continue
        cells = [f"{getattr(bubble, convention):.1%}" for bubble in bubbles]
        add(f"bubble {name}", cells, f"{formula[convention]:.1%}" if convention in formula else "")
        for cause in Idle._fields if convention == "over_total" else ():
            add(f"  {cause}", [f"{bubble.causes[cause]:.1%}" for bubble in bubbles])
    many, unit = unit_of(measured.whole)
    for name in ("data", "step", "optimizer", "whole"):
        seconds = [getattr(bubble, name) for bubble in bubbles]
        if any(seconds) and (name != "whole" or measured.whole > measured.step):
            add(f"{PARTS[name]}, {unit}", [f"{many * time:.4g}" for time in seconds])
    return made


CONVENTIONS = {
    "over_total": "of total time",
    "over_ideal": "over ideal time",
    "over_own": "without a barrier between steps",
}
PARTS = {"data": "waiting for data", "step": "pipeline", "optimizer": "optimizer", "whole": "whole step"}


# --- trace --------------------------------------------------------------------------------------------------------


def trace(*timelines: Timeline, titles: Sequence[str] = ()) -> str:
    """JSON in Chrome's trace event format, for ui.perfetto.dev: a thread a rank, an arrow a message.

    Of several timelines each is a process, called by its title. Seconds become the format's microseconds.
    """
    events: list[dict] = []
    for process, title in enumerate(titles):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}})
    for process, timeline in enumerate(timelines):
        _add_events(events, timeline, process)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _add_events(events: list[dict], timeline: Timeline, process: int) -> None:
    where = {span.action.made: (rank, span) for rank, spans in enumerate(timeline.ranks) for span in spans}
    origin, _ = timeline.extent

    def since(moment: float) -> float:
        return round((moment - origin) * 1e6, 3)

    for rank, spans in enumerate(timeline.ranks):
        row = {"pid": process, "tid": rank}
        events.append({"ph": "M", "name": "thread_name", **row, "args": {"name": f"rank {rank}"}})
        for name, start, end in around(timeline):
            events.append(
                {"ph": "X", "name": name, "cat": name, **row, "ts": since(start), "dur": since(end) - since(start)}
            )
        for action, start, end in spans:
            begin = since(start)
            more = {"stage": action.stage, "microbatch": action.microbatch}
            event = {"ph": "X", **row, "ts": begin, "dur": since(end) - begin, "args": more}
            events.append({"name": str(action), "cat": MEANING[action.kind], **event})
            for need in needed(action, timeline.schedule.stages):
                sender, made = where[need]
                if sender != rank:
                    arrow = {"name": "send", "cat": "send", "id": f"{process} {action}", "pid": process}
                    events.append({"ph": "s", "tid": sender, "ts": since(made.end), **arrow})
                    events.append({"ph": "f", "bp": "e", "tid": rank, "ts": begin, **arrow})

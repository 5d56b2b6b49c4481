"""A Timeline as an SVG, for paper and slides: a row a rank, a cell an action with its microbatch, grey where idle.

Plain values, no torch.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from xml.sax.saxutils import escape

from megalite.parallel.pipeline.draw import (
    AROUND,
    LIGHTEST,
    MEANING,
    account,
    around,
    chunk_of,
    colour,
    ink,
    kinds_of,
    unit_of,
)
from megalite.parallel.pipeline.timeline import Timeline

WIDTH = 1280  # of the picture, in its own units; it scales
MARGIN, NAMES = 32, 72  # around it, and for the ranks' names
ROW, GAP = 38, 4
FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
TEXT, FAINT, IDLE = "#1d2430", "#667080", "#edf0f4"
REMARK = "#9a5b00"
LINE = 140  # characters of a line of 15 pixels, in the widest of the fonts
WIDEST_CELL = 56.0  # a short step is drawn no wider than this for its shortest action


def svg(timelines: Sequence[Timeline], titles: Sequence[str] | None = None, unit: str = "", remark: str = "") -> str:
    """The timelines one under the other, on one scale of time: an SVG document.

    titles: of each; by default the schedule's name and sizes. Under it stands the bubble account.
    unit: "s" where times are seconds, which are then marked in a readable unit   remark: a line at the foot
    """
    length = max((end - begin for begin, end in (timeline.extent for timeline in timelines)), default=0.0)
    shortest = min(
        (s.end - s.start for t in timelines for spans in t.ranks for s in spans if s.end > s.start), default=0
    )
    if length <= 0 or shortest <= 0:
        raise ValueError("svg: no time passes in what is to be drawn")
    scale = min((WIDTH - 2 * MARGIN - NAMES) / length, WIDEST_CELL / shortest)
    parts: list[str] = []
    y = MARGIN
    for index, timeline in enumerate(timelines):
        title = titles[index] if titles else _title(timeline)
        parts.append(_text(MARGIN, y + 18, title, 22, weight=600))
        lines = _wrapped(account(timeline.bubble()))
        for i, line in enumerate(lines):
            parts.append(_text(MARGIN, y + 44 + 20 * i, line, 15, FAINT))
        y = _rows(parts, timeline, y + 42 + 20 * len(lines), scale)
        y = _axis(parts, y, scale, length, unit) + 18
    y = _legend(parts, timelines, y)
    if remark:
        parts.append(_text(MARGIN + NAMES, y + 27, remark, 15, REMARK))
        y += 32
    height = y + MARGIN - 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    body = "\n".join(
        [f'{head} font-family="{FONT}">', f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', *parts]
    )
    return f"{body}\n</svg>\n"


def _wrapped(words: str) -> list[str]:
    """In lines that fit: a new one after each semicolon, and after a comma where need be."""
    lines = [""]
    for part in re.split(r"(?<=[,;]) ", words):
        if lines[-1].endswith(";") or len(lines[-1]) + 1 + len(part) > LINE:
            lines.append(part)
        else:
            lines[-1] = f"{lines[-1]} {part}".strip()
    return lines


def _title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    chunks = (
        f", {schedule.stages // len(schedule.ranks)} stages a rank" if schedule.stages > len(schedule.ranks) else ""
    )
    return f"{schedule.name}: {len(schedule.ranks)} ranks, {schedule.microbatches} microbatches{chunks}"


def _rows(parts: list[str], timeline: Timeline, y: int, scale: float) -> int:
    """A row for each rank, and beside them what is around the pipeline; the y below them."""
    chunks, (origin, _) = chunk_of(timeline), timeline.extent

    def place(start: float, end: float) -> tuple[float, float]:
        return MARGIN + NAMES + (start - origin) * scale, (end - start) * scale

    for name, *moments in around(timeline):
        x, wide = place(*moments)
        high = len(timeline.ranks) * (ROW + GAP) - GAP
        parts.append(_rect(x, y, _seamed(wide), high, _hex(AROUND[name])))
    sizes = _number_sizes(timeline, scale)
    for rank, spans in enumerate(timeline.ranks):
        parts.append(_text(MARGIN + NAMES - 12, y + ROW / 2 + 5, f"rank {rank}", 15, anchor="end"))
        x, wide = place(timeline.start, timeline.end)
        parts.append(_rect(x, y, wide, ROW, IDLE))
        for action, start, end in spans:
            x, wide = place(start, end)
            fill = colour(action.kind, *chunks[action.stage])
            parts.append(_rect(x, y, _seamed(wide), ROW, _hex(fill)))
            label, size = str(action.microbatch), sizes[action.kind]
            if 7 <= size <= (wide - 2) / (0.6 * len(label)):
                middle = x + wide / 2 - 0.6
                parts.append(_text(middle, y + ROW / 2 + size * 0.36, label, size, ink(fill), "middle"))
        y += ROW + GAP
    return y


def _number_sizes(timeline: Timeline, scale: float) -> dict[str, float]:
    """Of the microbatches' numbers in the cells of each kind: what most of the cells have room for."""
    digits = len(str(timeline.schedule.microbatches - 1))
    wide: dict[str, list[float]] = {}
    for (kind, _, _), start, end in (span for spans in timeline.ranks for span in spans):
        wide.setdefault(kind, []).append((end - start) * scale)
    return {kind: min(15.0, (statistics.quantiles([*w, *w], n=4)[0] - 3) / (0.6 * digits)) for kind, w in wide.items()}


def _seamed(wide: float) -> float:
    """With a white seam between cells, as long as it leaves something to be seen."""
    return max(wide - 1.2, wide * 0.7)


def _axis(parts: list[str], y: int, scale: float, length: float, unit: str) -> int:
    """Marks of time, at round numbers; the last one has the unit."""
    many, unit = unit_of(length) if unit == "s" else (1.0, unit)
    rough = length * many / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    marks = math.floor(length * many / step * (1 + 1e-9))
    for i in range(marks + 1):
        x = MARGIN + NAMES + i * step * scale / many
        parts.append(f'<path d="M{x:.2f} {y}v5" stroke="{FAINT}"/>')
        label = f"{i * step:g} {unit}".strip() if i == marks else f"{i * step:g}"
        parts.append(_text(x, y + 20, label, 13, FAINT, "middle"))
    return y + 26


def _legend(parts: list[str], timelines: Sequence[Timeline], y: int) -> int:
    """A swatch for each kind of action that occurs, in its rank's shades."""
    x = float(MARGIN + NAMES)
    most = max(count for timeline in timelines for _, count in chunk_of(timeline).values())
    kinds = [kind for kind in MEANING if any(kind in kinds_of(timeline) for timeline in timelines)]
    for kind in kinds:
        for chunk in range(most):
            parts.append(_rect(x, y, 20, 16, _hex(colour(kind, chunk, most))))
            x += 20
        parts.append(_text(x + 8, y + 13, MEANING[kind], 15))
        x += 8 + 8.2 * len(MEANING[kind]) + 24
    there = {name for timeline in timelines for name, _, _ in around(timeline)}
    for name, fill in {"idle": IDLE, **{name: _hex(AROUND[name]) for name in AROUND if name in there}}.items():
        parts.append(_rect(x, y, 20, 16, fill))
        parts.append(_text(x + 28, y + 13, name, 15))
        x += 28 + 8.2 * len(name) + 24
    if most > 1 and LIGHTEST:
        words = "lighter: a later stage of the rank"
        if x + 8.2 * len(words) > WIDTH - MARGIN:
            x, y = MARGIN + NAMES, y + 27
        parts.append(_text(x, y + 13, words, 15, FAINT))
    return y + 16


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{fill}"/>'


def _text(
    x: float, y: float, words: str, size: float, fill: str = TEXT, anchor: str = "start", weight: int = 400
) -> str:
    look = f'font-size="{size:.3g}" fill="{fill}" text-anchor="{anchor}"'
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    return f'<text x="{x:.2f}" y="{y:.1f}" {look}{bold}>{escape(words)}</text>'


def _hex(rgb: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*rgb)

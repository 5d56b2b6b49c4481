"""A Timeline as an SVG, for paper and slides: a row a rank, a cell an action with its microbatch, grey where idle.

Plain values, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from megalite.parallel.pipeline.draw import LIGHTEST, MEANING, account, chunk_of, colour, ink, kinds_of
from megalite.parallel.pipeline.timeline import Timeline

WIDTH = 1280  # of the picture, in its own units; it scales
MARGIN, NAMES = 32, 72  # around it, and for the ranks' names
ROW, GAP = 38, 4
FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
TEXT, FAINT, IDLE = "#1d2430", "#667080", "#edf0f4"
WIDEST_CELL = 56.0  # a short step is drawn no wider than this for its shortest action


def svg(timelines: Sequence[Timeline], titles: Sequence[str] | None = None) -> str:
    """The timelines one under the other, on one scale of time: an SVG document.

    titles: of each; by default the schedule's name and sizes. Under it stands the bubble account.
    """
    length = max((timeline.end - timeline.start for timeline in timelines), default=0.0)
    if length <= 0:
        raise ValueError("svg: no time passes in what is to be drawn")
    shortest = min(s.end - s.start for t in timelines for spans in t.ranks for s in spans if s.end > s.start)
    scale = min((WIDTH - 2 * MARGIN - NAMES) / length, WIDEST_CELL / shortest)
    parts: list[str] = []
    y = MARGIN
    for index, timeline in enumerate(timelines):
        title = titles[index] if titles else _title(timeline)
        parts.append(_text(MARGIN, y + 18, title, 22, weight=600))
        parts.append(_text(MARGIN, y + 44, account(timeline.bubble()), 15, FAINT))
        y = _rows(parts, timeline, y + 62, scale, length)
        y = _axis(parts, y, scale, length) + 18
    y = _legend(parts, timelines, y)
    height = y + MARGIN - 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    body = "\n".join(
        [f'{head} font-family="{FONT}">', f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', *parts]
    )
    return f"{body}\n</svg>\n"


def _title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    chunks = (
        f", {schedule.stages // len(schedule.ranks)} stages a rank" if schedule.stages > len(schedule.ranks) else ""
    )
    return f"{schedule.name}: {len(schedule.ranks)} ranks, {schedule.microbatches} microbatches{chunks}"


def _rows(parts: list[str], timeline: Timeline, y: int, scale: float, length: float) -> int:
    """A row for each rank; the y below them."""
    chunks, left = chunk_of(timeline), MARGIN + NAMES
    digits = len(str(timeline.schedule.microbatches - 1))  # all numbers of one kind are there, or none
    for rank, spans in enumerate(timeline.ranks):
        parts.append(_text(left - 12, y + ROW / 2 + 5, f"rank {rank}", 15, anchor="end"))
        parts.append(_rect(left, y, length * scale, ROW, IDLE))
        for action, start, end in spans:
            x, wide = left + (start - timeline.start) * scale, (end - start) * scale
            fill = colour(action.kind, *chunks[action.stage])
            label = str(action.microbatch)
            # a white seam between cells, as long as it leaves something to be seen
            parts.append(_rect(x, y, max(wide - 1.2, wide * 0.7), ROW, _hex(fill)))
            size = min(15.0, (wide - 3) / (0.6 * digits))
            if size >= 7:
                parts.append(_text(x + wide / 2 - 0.6, y + ROW / 2 + size * 0.36, label, size, ink(fill), "middle"))
        y += ROW + GAP
    return y


def _axis(parts: list[str], y: int, scale: float, length: float) -> int:
    """Marks of time, at round numbers."""
    rough = length / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    for i in range(math.floor(length / step * (1 + 1e-9)) + 1):
        x = MARGIN + NAMES + i * step * scale
        parts.append(f'<path d="M{x:.2f} {y}v5" stroke="{FAINT}"/>')
        parts.append(_text(x, y + 20, f"{i * step:g}", 13, FAINT, "middle"))
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
    parts.append(_rect(x, y, 20, 16, IDLE))
    parts.append(_text(x + 28, y + 13, "idle", 15))
    if most > 1 and LIGHTEST:
        parts.append(_text(x + 90, y + 13, "lighter: a later stage of the rank", 15, FAINT))
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

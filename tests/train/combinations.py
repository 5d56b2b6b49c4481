"""What was trained together, and equalled what it should: the record in docs/combinations.csv, and tables made of it.

A test marked `combination` is of a Way. Where it passes under `pytest --record-combinations FILE`, its Combination is
added to FILE; record and page are written by

    python -m pytest -m 'not gpu' --record-combinations docs/combinations.csv tests/train
    python tests/train/combinations.py
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from trajectory import Way

DOCS = Path(__file__).parents[2] / "docs"
RECORD, PAGE = DOCS / "combinations.csv", DOCS / "combinations.md"
BEGIN, END = "<!-- made by tests/train/combinations.py -->", "<!-- made until here -->"


class Combination(NamedTuple):
    """As a line of the record."""

    dp: int
    pp: int
    sp: int
    tp: int
    zero: int
    shard: int
    recompute: str
    schedule: str  # "" without pp
    dtype: str
    optimizer: str


def combination(mark: Mapping[str, str], parameters: Mapping[str, Any]) -> Combination:
    """Of a test with these arguments of its mark and these parameters, of which those that are none of it are ignored.

    mark: dtype and optimizer, where they are no parameters; float64 and adamw where nothing says
    """
    values = [*parameters.values(), *(x for value in parameters.values() if isinstance(value, tuple) for x in value)]
    (way,) = (value for value in values if isinstance(value, Way))
    dtype = str(parameters.get("dtype", mark.get("dtype", "float64"))).removeprefix("torch.")
    optimizer = mark.get("optimizer", "adamw")
    if parameters.get("state_dtype") == "bfloat16":
        optimizer += ", bfloat16 state"
    schedule = way.schedule + (f" × {way.chunks}" if way.chunks else "") if way.pp > 1 else ""
    zero = parameters.get("zero", way.zero)
    return Combination(way.dp, way.pp, way.sp, way.tp, zero, way.shard, way.recompute, schedule, dtype, optimizer)


def declared(module: ModuleType) -> Iterator[Combination]:
    """Of all marked tests of a module, as their parameters say."""
    for test in vars(module).values():
        marks = getattr(test, "pytestmark", [])
        own = [mark for mark in marks if mark.name == "combination"]
        if not own:
            continue
        choices = [_chosen(mark.args[0], mark.args[1]) for mark in marks if mark.name == "parametrize"]
        for chosen in itertools.product(*choices):
            yield combination(own[0].kwargs, {name: value for part in chosen for name, value in part.items()})


def _chosen(names: str | tuple[str, ...], rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Values by name of each row of a parametrize mark."""
    if isinstance(names, str):  # of one parameter
        return [{names: row.values[0] if hasattr(row, "marks") else row} for row in rows]
    return [dict(zip(names, getattr(row, "values", row), strict=True)) for row in rows]


def read(path: Path) -> set[Combination]:
    """A record; empty where there is none."""
    if not path.exists():
        return set()
    with path.open(newline="", encoding="utf-8") as file:
        return {Combination(*(int(x) if x.isdigit() else x for x in row)) for row in list(csv.reader(file))[1:]}


def write(path: Path, found: Iterable[Combination]) -> None:
    """A record, in order."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([Combination._fields, *sorted(found)])


def tables(found: Iterable[Combination]) -> str:
    """Markdown: how many combinations passed, by what the user chooses."""
    found = set(found)
    exact = {one for one in found if one.dtype == "float64" and one.optimizer == "adamw"}
    parts = [
        ("axes larger than 1", axes, exact),
        ("pipeline schedule", lambda one: one.schedule or "none: pp = 1", exact),
        ("`train.recompute`", lambda one: one.recompute, exact),
        ("`mesh.shard`", _divides, exact),
        ("dtype and optimizer", lambda one: f"{one.dtype}, {one.optimizer}", found),
    ]
    return "\n\n".join(_table(title, of, among) for title, of, among in parts)


def axes(one: Combination) -> str:
    """For example dp × tp."""
    names = [name for name in ("dp", "pp", "sp", "tp") if getattr(one, name) > 1]
    return " × ".join(names) or "none: one rank"


def _divides(one: Combination) -> str:
    return "fewer than dp × sp" if 0 < one.shard < one.dp * one.sp else "all of dp × sp"


def _table(title: str, of: Callable[[Combination], str], found: Iterable[Combination]) -> str:
    found = list(found)
    rows = [f"| {title} | zero 0 | zero 1 | zero 2 | zero 3 |", "|---|---|---|---|---|"]
    for name in sorted({of(one) for one in found}, key=lambda name: (name.count("×"), name)):
        counts = [sum(of(one) == name and one.zero == zero for one in found) for zero in range(4)]
        rows.append(f"| {name} | " + " | ".join(str(count or "") for count in counts) + " |")
    return "\n".join(rows)


def page(text: str, found: Iterable[Combination]) -> str:
    """The page with its tables made anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(found)}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read(RECORD)), encoding="utf-8")

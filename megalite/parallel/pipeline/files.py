"""A schedule of one's own: from a text or CSV file, or from a Python function.

A file has a row of actions for each rank, with spaces, commas or semicolons between them and nothing where a rank waits
a slot; what follows a # is a comment. PyTorch's compute-only CSV files are of this form, with other words: its I is B
here, and its B is BW.

A function is called with the numbers of ranks and of microbatches, and returns such rows or a `Schedule`:

    def schedule(stages, microbatches):
        return [[f"{stage}F{i}" for i in ...] + [f"{stage}BW{i}" for i in ...] for stage in range(stages)]
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from operator import index
from pathlib import Path
from reprlib import repr

from megalite.parallel.pipeline.generators import GENERATORS
from megalite.parallel.pipeline.schedule import Action, Schedule, require_sizes, schedule_of


def load(source: str, stages: int | None, microbatches: int | None, chunks: int | None = None) -> Schedule:
    """The schedule called `source`: a generator's name, a file, or `FILE.py:function`.

    stages: ranks   microbatches: of a step   chunks: stages a rank, of interleaved-1f1b only

    A file says its own numbers, and the generators and functions need them. Raises ValueError of one line. The schedule
    is not checked yet.
    """
    path, colon, name = source.rpartition(":")
    if source in GENERATORS or (colon and path.endswith(".py")):
        if stages is None or microbatches is None:
            raise ValueError(f"{source}: needs the numbers of stages and of microbatches")
        require_sizes(stages=stages, microbatches=microbatches)
    if source in GENERATORS:
        if chunks is not None and source != "interleaved-1f1b":
            raise ValueError(f"chunks: {chunks} given; only interleaved-1f1b has them")
        more = (chunks or 2,) if source == "interleaved-1f1b" else ()
        return GENERATORS[source](stages, microbatches, *more)
    if chunks is not None:
        raise ValueError(f"chunks: {chunks} given; only interleaved-1f1b has them")
    if colon and path.endswith(".py"):
        assert stages is not None and microbatches is not None
        return _called(_function(Path(path), name), name, stages, microbatches)
    return read(Path(source))


def read(path: Path) -> Schedule:
    """The schedule of a text or CSV file; ValueError of one line that names the file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        if not path.exists():
            known = ", ".join(GENERATORS)
            raise ValueError(f"{path}: no such schedule and no such file; {known} would do") from None
        raise ValueError(f"{path}: {error}") from None
    rows = [line.partition("#")[0] for line in lines]
    try:
        return schedule_of([row for row in rows if row.strip(" \t,;")], path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _function(path: Path, name: str) -> Callable:
    try:
        found = runpy.run_path(str(path)).get(name)
    except OSError:
        raise ValueError(f"{path}: no such file") from None
    except Exception as error:
        raise ValueError(f"{path}: {_line(error)}") from error
    if not callable(found):
        raise ValueError(f"{path}: no function {name}")
    return found


def _called(function: Callable, name: str, stages: int, microbatches: int) -> Schedule:
    try:
        made = function(stages, microbatches)
    except Exception as error:
        raise ValueError(f"{name}: {_line(error)}") from error
    try:
        if isinstance(made, Schedule):
            ranks = tuple(tuple(Action.parse(str(action)) for action in actions) for actions in made.ranks)
            return Schedule(str(made.name), ranks, tuple(map(index, made.rank_of)), index(made.microbatches))
        if isinstance(made, str):
            raise TypeError("one text")
        rows = [row if isinstance(row, str) else [str(cell) for cell in row if cell] for row in made]
    except Exception as error:
        would = 'a Schedule, or a row of actions for each rank, as ["0F0 0BW0", "1F0 1BW0"], would do'
        raise ValueError(f"{name}: {repr(made)} returned, {_line(error)}; {would}") from error
    return schedule_of(rows, name, microbatches)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())

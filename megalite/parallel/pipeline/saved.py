"""A measured step in a file, beside the costs that its prediction is made of: timeline.json of a run.

JSON, with all times in seconds after the begin of the step. Plain values, no torch.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megalite.parallel.pipeline.check import check
from megalite.parallel.pipeline.schedule import Action, Schedule
from megalite.parallel.pipeline.simulate import Costs, simulate
from megalite.parallel.pipeline.timeline import Span, Timeline

TIMELINE = "timeline.json"  # in a run's folder
FORMAT, VERSION = "megalite timeline", 1
MOST_LAYERS = 10_000  # that a stage of a file may have
COSTS = ("forward", "backward_input", "backward_weight", "backward", "send")

Times = Sequence[Sequence[float]]  # of each rank: start and end of each action in turn, in seconds on one clock


def timeline(schedule: Schedule, times: Times, begin: float | None = None, finish: float | None = None) -> Timeline:
    """The Timeline of a step, from what `clock.gather` returns; where a rank's times run backwards they stand still."""
    ranks = []
    for actions, row in zip(schedule.ranks, times, strict=True):
        forwards = list(itertools.accumulate(row, max))
        ranks.append(list(map(Span, actions, forwards[::2], forwards[1::2])))
    return Timeline(schedule, ranks, begin, finish)


def expected(schedule: Schedule, costs: Costs, data: float | None, optimizer: float | None) -> Timeline:
    """What the simulator makes of costs, with seconds of waiting for data before and of the optimizer after it."""
    made = simulate(schedule, costs)
    begin = None if data is None else made.start - data
    return Timeline(schedule, made.ranks, begin, None if optimizer is None else made.end + optimizer)


@dataclass(frozen=True)
class Saved:
    """A measured step and what it was to be expected from.

    costs, data, optimizer: medians of `steps` steps, in seconds; None: not known
    ranks, cores: how many processes of the machine computed on how many cores; cores None where each had a GPU
    layers: how many each stage had; empty: not known
    """

    measured: Timeline
    costs: Costs
    data: float | None
    optimizer: float | None
    steps: int
    ranks: int
    cores: int | None
    layers: tuple[int, ...] = ()

    @cached_property
    def predicted(self) -> Timeline:
        """The same schedule simulated with the costs."""
        return expected(self.measured.schedule, self.costs, self.data, self.optimizer)

    @property
    def titles(self) -> tuple[str, str]:
        """Of the predicted picture and of the measured one."""
        schedule, of = self.measured.schedule, f"of {self.steps} steps" if self.steps > 1 else "of one step"
        sizes = f"{len(schedule.ranks)} ranks, {schedule.microbatches} microbatches"
        more = f", {schedule.stages} stages" if schedule.stages > len(schedule.ranks) else ""
        return (
            f"{schedule.name}: {sizes}{more}, simulated from medians {of}",
            f"measured: the step with the median bubble, {of}",
        )

    @property
    def remark(self) -> str:
        """What is to be known before a measured bubble is believed; empty where there is nothing."""
        if self.cores is None or self.ranks <= self.cores:
            return ""
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return (
            f"{self.ranks} ranks took turns on {cores}: a measured bubble says little where cores are fewer than ranks"
        )


def write(path: Path, saved: Saved) -> None:
    """Write the file, so that it is whole whenever it is there."""
    step, schedule = saved.measured, saved.measured.schedule
    origin, _ = step.extent
    medians = {name: saved.costs.of(name, schedule.stages) for name in COSTS}
    written = {
        "format": FORMAT,
        "version": VERSION,
        "schedule": {"name": schedule.name, "rows": str(schedule).split("\n"), "rank_of": schedule.rank_of},
        "ranks": saved.ranks,
        "cores": saved.cores,
        "times": [[_since(origin, time) for span in spans for time in span[1:]] for spans in step.ranks],
        "begin": _since(origin, step.begin),
        "finish": _since(origin, step.finish),
        "steps": saved.steps,
        "medians": medians | {"data": saved.data, "optimizer": saved.optimizer},
        "layers": saved.layers,
    }
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(written, file, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load(path: Path) -> Saved:
    """What `write` has written; `path` is the file, or the run's folder.

    Raises ValueError of one line that names the file.
    """
    if path.is_dir():
        path = path / TIMELINE
        if not path.exists():
            raise ValueError(f"{path.parent}: no {TIMELINE} in it; a run with mesh.pp > 1 writes one")
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(read, dict) or read.get("format") != FORMAT or read.get("version") != VERSION:
            raise ValueError(f"not a {FORMAT} of version {VERSION}")
        return _saved(read)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path}: damaged or of another kind: {type(error).__name__}: {error}") from None


def _saved(read: dict[str, Any]) -> Saved:
    given, medians = read["schedule"], read["medians"]
    rows = tuple(tuple(map(Action.parse, row.split())) for row in given["rows"])
    rank_of = tuple(map(int, given["rank_of"]))
    forwards = sum(action.kind == "F" for actions in rows for action in actions)
    schedule = Schedule(str(given["name"]), rows, rank_of, forwards // len(rank_of))
    check(schedule)
    times = [[_seconds(time) for time in row] for row in read["times"]]
    if [len(row) for row in times] != [2 * len(actions) for actions in schedule.ranks]:
        raise ValueError("not a start and an end for each action")
    around = (read["begin"], read["finish"], medians["data"], medians["optimizer"])
    begin, finish, data, optimizer = (None if time is None else _seconds(time) for time in around)
    costs = Costs(**{name: tuple(map(_seconds, medians[name])) for name in COSTS})
    measured = timeline(schedule, times, begin, finish)
    cores = None if read["cores"] is None else int(read["cores"])
    layers = tuple(map(_layers, read.get("layers", ())))  # files of before do not have it
    if layers and (len(layers) != schedule.stages or not all(layers[1:-1])):
        raise ValueError(f"layers of {schedule.stages} stages cannot be {layers}")
    found = Saved(measured, costs, data, optimizer, int(read["steps"]), int(read["ranks"]), cores, layers)
    found.predicted.bubble()
    return found


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _layers(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_LAYERS:
        raise ValueError(f"{value!r} is no number of layers")
    return value


def _since(origin: float, time: float | None) -> float | None:
    return None if time is None else round(time - origin, 9)

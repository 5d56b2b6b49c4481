"""Which samples a run consumed, written as it does so, and the proof that none was lost or repeated.

    RUN/samples/attempts.jsonl    {"attempt", "done"}: a line whenever the run starts or goes on, after `done` steps
    RUN/samples/dp-0003.jsonl     {"attempt", "step", "first", "count", "crc32"}: a line a step that the rank took

A rank of dp consumes `count` global samples from number `first` on; crc32 is of the tokens that it read. Where a run
goes on from a checkpoint, steps that were taken after it are taken again: of each step the last attempt counts. What
`Sampler` says is not asked: `audit` finds the samples of every step in the lines, and reads their tokens once more.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.data.sampler import Sampler
from megalite.errors import DataError, SaveError

FOLDER = "samples"
ATTEMPTS = "attempts.jsonl"


class Ledger:
    """A dp rank's page. A line reaches the file whole and at once, so that only a lost machine loses any."""

    def __init__(self, run: Path, rank: int, attempt: int) -> None:
        self.attempt = attempt
        (run / FOLDER).mkdir(parents=True, exist_ok=True)
        self._path = run / FOLDER / f"dp-{rank:04}.jsonl"

    def add(self, step: int, samples: range, crc32: int) -> None:
        """This rank consumed `samples` in `step`, counted from 1."""
        line = {"attempt": self.attempt, "step": step, "first": samples.start, "count": len(samples), "crc32": crc32}
        _append(self._path, line)


def begin_attempt(run: Path, done: int) -> int:
    """Note that a run goes on after `done` steps; the attempt's number, from 1."""
    path = run / FOLDER / ATTEMPTS
    path.parent.mkdir(parents=True, exist_ok=True)
    attempt = 1 + max((line["attempt"] for line in _lines(path)), default=0)
    _append(path, {"attempt": attempt, "done": done})
    return attempt


@dataclass(frozen=True)
class Audit:
    """What the record of a run proves: its steps, in how many attempts, and what is wrong, a line each.

    repeated: steps that were taken again and count once   torn: the step after the last, begun by some ranks alone
    """

    steps: int
    samples: int
    attempts: int
    repeated: int
    torn: bool
    problems: tuple[str, ...]


def audit(run: Path, sampler: Sampler, global_batch: int) -> Audit:
    """Whether the run consumed samples 0, 1, 2, ... each once, `global_batch` a step, and the tokens that they are.

    DataError where there is no record.
    """
    folder = run / FOLDER
    attempts = {line["attempt"]: line["done"] for line in _lines(folder / ATTEMPTS)}
    if not attempts:
        raise DataError(f"{folder}: no record of samples; the folder of a run that was trained would do")
    taken: dict[int, list[dict[str, Any]]] = {}
    for path in folder.glob("dp-*.jsonl"):
        for line in _lines(path):
            taken.setdefault(line["step"], []).append(line)
    repeated = sum(len({line["attempt"] for line in lines}) > 1 for lines in taken.values())
    for step, lines in taken.items():  # the last attempt that began before a step counts
        counts = max((attempt for attempt, done in attempts.items() if done < step), default=0)
        taken[step] = [line for line in lines if line["attempt"] == counts]
    last = max((step for step, lines in taken.items() if lines), default=0)
    torn = last > 0 and sum(line["count"] for line in taken[last]) < global_batch
    steps = last - torn
    problems: list[str] = []
    for step in range(1, steps + 1):
        lines = taken.get(step, [])
        problems += [*_wrong(step, lines, global_batch), *_foreign(lines, sampler)]
    problems += _uneven(sampler, steps * global_batch)
    return Audit(steps, steps * global_batch, len(attempts), repeated, torn, tuple(problems))


def _wrong(step: int, lines: list[dict[str, Any]], global_batch: int) -> Iterator[str]:
    """Samples of a step that nobody consumed, or more than one rank."""
    counts = Counter(sample for line in lines for sample in range(line["first"], line["first"] + line["count"]))
    asked = range((step - 1) * global_batch, step * global_batch)
    for word, samples in (
        ("lost", [sample for sample in asked if not counts[sample]]),
        ("repeated", [sample for sample, count in counts.items() if count > 1]),
        ("of another step", [sample for sample in counts if sample not in asked]),
    ):
        if samples:
            yield f"step {step}: {len(samples)} samples {word}, the first is {min(samples)}"


def _foreign(lines: list[dict[str, Any]], sampler: Sampler) -> Iterator[str]:
    """Samples whose tokens are not those of the data as it is now."""
    for line in lines:
        found = sampler.checksum(range(line["first"], line["first"] + line["count"]))
        if found != line["crc32"]:
            yield f"step {line['step']}: samples from {line['first']} on were other tokens than the data has now"


def _uneven(sampler: Sampler, samples: int) -> Iterator[str]:
    """Windows of a source that came twice more often than others: an epoch has each once."""
    seen: dict[Path, Counter[int]] = {source.file.path: Counter() for source in sampler.sources}
    for sample in range(samples):
        file, first = sampler.locate(sample)
        seen[file.path][first] += 1
    for source in sampler.sources:
        counts = seen[source.file.path]
        most, least = max(counts.values(), default=0), min(counts.values(), default=0) * (len(counts) == source.windows)
        if most > least + 1:
            yield f"{source.file.path}: one window was seen {most} times, another {least}"


def _append(path: Path, line: dict[str, Any]) -> None:
    try:
        with path.open("ab", buffering=0) as file:
            file.write((json.dumps(line) + "\n").encode())
    except OSError as error:
        raise SaveError(f"{path}: {error.strerror or error}; a disk with space would do, and starting again") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; a last one that a power cut tore is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

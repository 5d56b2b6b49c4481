"""Every collective that this rank issued: bytes counted by axis and operation, the last few as lines, and when it was.

Bytes are those that a bandwidth-optimal algorithm sends from each rank (nccl-tests, PERFORMANCE.md), S being the
bytes of the full buffer and n the ranks of the axis:

    all_reduce      2 (n-1)/n · S
    all_gather, reduce_scatter, all_to_all      (n-1)/n · S
    send, shift (to one other rank)             S, being what this rank sends

The lines tell which rank hangs in which call: ranks agree on sequence numbers per axis until one stops. Sends, of which
each rank of a pipeline has its own, are numbered apart. A watchdog reads when this rank last got on, and in which step.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


@dataclass(frozen=True)
class Call:
    """One collective: its number on its axis, the operation, the full buffer's shape, bytes sent, who asked."""

    sequence: int
    axis: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    caller: str

    def __str__(self) -> str:
        return (
            f"{self.axis}#{self.sequence} {self.operation} {self.dtype}{list(self.shape)} {self.bytes} B {self.caller}"
        )


class Traffic:
    """Totals since `reset`, the last `lines` calls, and how far this rank is.

    marked: when it last got on, by time.monotonic   step: how many steps it has done
    action, awaits: of a pipeline, what it does, and (what it waits for, from which pp rank)
    """

    def __init__(self, lines: int = 256) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()  # (axis, operation) -> bytes sent
        self.calls: Counter[tuple[str, str]] = Counter()
        self.recent: deque[Call] = deque(maxlen=lines)
        self.marked, self.step = time.monotonic(), 0
        self.action: Any = None
        self.awaits: tuple[Any, int] | None = None
        self._sequence: Counter[tuple[str, bool]] = Counter()  # (axis, whether a send)

    def record(
        self, axis: str, ranks: int, operation: str, shape: tuple[int, ...], dtype: str, full_bytes: int
    ) -> None:
        """Count one collective whose full buffer has `full_bytes` bytes, over `ranks` ranks."""
        sent = PASSES[operation] * (ranks - 1) * full_bytes // ranks if operation in PASSES else full_bytes
        self.bytes[axis, operation] += sent
        self.calls[axis, operation] += 1
        numbered = axis, operation == "send"
        self._sequence[numbered] += 1
        self.recent.append(Call(self._sequence[numbered], axis, operation, shape, dtype, sent, _caller()))
        self.marked = time.monotonic()

    def at(self, action: Any, awaits: tuple[Any, int] | None = None) -> None:
        """Note which action of a pipeline this rank does, or waits to do until something comes."""
        self.action, self.awaits, self.marked = action, awaits, time.monotonic()

    def did_step(self, steps: int) -> None:
        """Note that so many steps are done."""
        self.step, self.marked = steps, time.monotonic()

    def numbers(self) -> dict[str, int]:
        """The number of the last collective on each axis, sends left out."""
        return {axis: number for (axis, send), number in list(self._sequence.items()) if not send}

    def on(self, axis: str) -> int:
        """Bytes sent on one axis by all operations."""
        return sum(sent for (name, _), sent in self.bytes.items() if name == axis)

    def __reduce__(self) -> str:
        return "traffic"  # a function sent to another process counts there, not in a copy of this one

    def reset(self) -> None:
        """Start counting anew; sequence numbers go on, since they must agree between ranks."""
        self.bytes.clear()
        self.calls.clear()


traffic = Traffic()  # this process's own: one rank is one process


def _caller() -> str:
    """file:line of the nearest frame outside collectives and PyTorch; in backward, the engine has no such frame."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch", "megalite.parallel.collectives", "megalite.parallel.in_flight")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "backward"

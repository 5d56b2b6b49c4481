"""What the console shows of a run: a live bar on a terminal, plain lines where there is none."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megalite.parallel.pipeline.measured import Shares

LINE_EVERY = 5.0  # seconds between plain lines


class TrainingProgress:
    """Steps of `steps`, `done` of them before; loss, tokens/s, MFU, the time left. Silent on every rank but one."""

    def __init__(self, steps: int, speaks: bool, done: int = 0) -> None:
        self.steps, self.speaks = steps, speaks
        self._started = self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if speaks and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=Console(),
            )
            self._task = self._bar.add_task("train", total=steps, completed=done, numbers="")
            self._bar.start()

    def step(
        self,
        step: int,
        loss: float,
        tokens_per_second: float,
        mfu: float,
        val_loss: float | None,
        bubble: Shares | None = None,
    ) -> None:
        """After step `step`, counted from 1."""
        if not self.speaks:
            return
        numbers = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  MFU {mfu:.0%}"
        if bubble is not None:
            numbers += f"  bubble {bubble.measured:.1%} ({bubble.predicted:.1%} predicted)"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
            if val_loss is not None:
                self.say(f"step {step}  validation loss {val_loss:.4f}")
            return
        now = time.monotonic()
        if step in (1, self.steps) or val_loss is not None or now - self._last_line >= LINE_EVERY:
            self._last_line = now
            left = (now - self._started) / step * (self.steps - step)
            validated = "" if val_loss is None else f"  validation loss {val_loss:.4f}"
            print(f"step {step}/{self.steps}  {numbers}  {left:.0f} s left{validated}", flush=True)

    def say(self, line: str) -> None:
        """One line of text, above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        elif self.speaks:
            print(line, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

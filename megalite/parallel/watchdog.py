"""A thread beside each rank that notices when the rank gets on no longer, and asks the others who is to blame.

    traffic.marked is older than the timeout, on one rank ─▶ "asked" in the store
    every rank's watchdog, also while its main thread hangs ─▶ "answer/RANK": where it stands (blame.py)
    one of them, when all have answered or had the time to  ─▶ "verdict", which ends every rank

They meet in a store, by no collective. A rank that is stopped does not answer: what it last said of itself, a few times
in a timeout, is what the others have.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from megalite.parallel.blame import Issued, Peers, Report, Verdict, blame
from megalite.parallel.traffic import traffic

POLL = 0.25  # seconds between two looks at the store
GRACE = 1.5  # seconds that a living rank has to answer where one is known to be lost
PATIENCE = 10.0  # at most so many where none is: a twentieth of the timeout
CALLS = 64  # the last ones of a rank, which are compared
WAITING = ("torch.distributed", "torch._ops", "megalite.parallel.in_flight", "megalite.parallel.pipeline.wire")


class Watchdog:
    """The watchdog of this rank, of `size`; all ranks have one.

    store: one that all ranks share, and no other thread of this rank uses
    timeout: seconds without a collective, an action of a pipeline or the end of a step, after which a rank hangs
    peers: the ranks of each axis, for every rank   end: is given the verdict, in the watchdog's thread
    stacks: a folder for the stacks of all threads of the ranks that answer; None: they are not written
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float,
        peers: Peers,
        end: Callable[[Verdict], object],
        stacks: Path | None = None,
    ) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.peers, self.end, self.stacks = peers, end, stacks
        self._main = threading.main_thread().ident or 0
        self._stopped, self._lock, self._answered = threading.Event(), threading.RLock(), False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch: from now on the rank has to get on."""
        traffic.marked = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End watching, and tell the others that this rank has left the run."""
        self._stopped.set()
        self._thread.join(GRACE)
        with suppress(RuntimeError):  # the store may have gone before
            self._say("answer", replace(self.report(), finished=True))

    def verdict(self, grace: float = GRACE) -> Verdict:
        """Ask every rank where it stands, and find out whom the others wait for; who is silent has `grace` seconds."""
        with self._lock:
            self.store.set("asked", b"1")
            self._answer()
            found = self._ask(grace)
            return Verdict(**json.loads(self.store.compare_set("verdict", "", json.dumps(asdict(found)))))

    def report(self) -> Report:
        """Where this rank stands."""
        where, in_call = _where(sys._current_frames().get(self._main))
        calls = [call for call in list(traffic.recent) if call.operation != "send"]
        issued = [
            Issued(c.axis, c.sequence, f"{c.operation} {c.dtype}{list(c.shape)}", c.caller) for c in calls[-CALLS:]
        ]
        awaits = traffic.awaits
        return Report(
            traffic.step,
            traffic.numbers(),
            issued,
            str(traffic.action) if traffic.action is not None else "",
            (str(awaits[0]), awaits[1]) if awaits is not None else None,
            where,
            in_call or awaits is not None,
            time.monotonic() - traffic.marked,
        )

    def _watch(self) -> None:
        beat = time.monotonic()
        while not self._stopped.wait(min(POLL, self.timeout / 8)):
            with suppress(RuntimeError), self._lock:  # without the store, this rank has only its own timeout
                if time.monotonic() > beat:
                    beat = time.monotonic() + self.timeout / 4
                    self._say("beat", replace(self.report(), calls=[*self.report().calls[-1:]]))
                if self.store.check(["asked"]):
                    self._answer()
                    if self.store.check(["verdict"]):
                        self.end(Verdict(**json.loads(self.store.get("verdict"))))
                        return
            if time.monotonic() - traffic.marked > self.timeout:
                self.end(self._late())
                return

    def _late(self) -> Verdict:
        try:
            return self.verdict(max(GRACE, min(PATIENCE, self.timeout / 20)))
        except RuntimeError as error:
            why = f"no progress for {self.timeout:g} s, and the ranks' store is gone: {error}"
            return Verdict(self.rank, traffic.step, f"rank {self.rank} of {self.size}: {why.splitlines()[0]}")

    def _answer(self) -> None:
        if self._answered:
            return
        self._answered = True
        self._say("answer", self.report())
        if self.stacks is not None:
            with suppress(OSError):
                self.stacks.mkdir(parents=True, exist_ok=True)
                with (self.stacks / f"rank-{self.rank:05}.txt").open("w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)

    def _ask(self, grace: float) -> Verdict:
        """Wait for the answers, and judge."""
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + grace
        while len(reports) < self.size and time.monotonic() < deadline:
            reports |= self._said("answer", [rank for rank in range(self.size) if rank not in reports])
            if len(reports) < self.size:
                time.sleep(POLL / 10)
        missing = [rank for rank in range(self.size) if rank not in reports]
        last = self._said("beat", missing)
        verdict = blame(reports, {rank: last.get(rank, Report()) for rank in missing}, self.size, self.peers)
        where = f"; stacks: {self.stacks}{os.sep}" if self.stacks is not None else ""
        return replace(verdict, message=verdict.message + where)

    def _say(self, what: str, report: Report) -> None:
        self.store.set(f"{what}/{self.rank}", json.dumps(asdict(report)))

    def _said(self, what: str, ranks: list[int]) -> dict[int, Report]:
        keys = {rank: f"{what}/{rank}" for rank in ranks}
        return {rank: _report(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}


def _report(text: bytes) -> Report:
    said = json.loads(text)
    said["calls"] = [Issued(**call) for call in said["calls"]]
    said["awaits"] = tuple(said["awaits"]) if said["awaits"] else None
    return Report(**said)


def _where(frame: FrameType | None) -> tuple[str, bool]:
    """Where a thread is, in the words of a person who looks for it, and whether it waits for other ranks there."""
    lines = []
    while frame is not None:
        lines.append((frame.f_globals.get("__name__", ""), frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    if not lines:
        return "", False
    in_call = any(name.startswith(WAITING) for name, _, _ in lines[:4])
    name, function, line = next((one for one in lines if not one[0].startswith(("torch", "threading"))), lines[0])
    return f"{name}:{line} {function}", in_call

"""Starting the ranks of one machine without torchrun.

    parent ─┬─ rank 0   has the terminal
            ├─ rank 1
            └─ ...      each reports once, done or failed, and holds still until the parent lets it go

Because a failed rank keeps its connections open, no other rank fails of it, and the first report is the cause. The
parent then ends every rank by SIGKILL, wherever it hangs. The ranks find each other through a file: no port is taken.

SIGTERM and SIGUSR1 are handed on to the ranks, which may have a use for them: whoever is preempted saves first. A
second SIGTERM, or Ctrl-C, ends everything at once.
"""

import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import FrameType
from typing import NoReturn

import cloudpickle

from megalite.errors import MegaliteError, RankLost
from megalite.launch.torchrun import World
from megalite.parallel import forkserver

SETTLE = 0.3  # seconds; a killed rank breaks the others' connections, and their reports can arrive before its death
SHOW_CURSOR = "\x1b[?25h"

Ranks = dict[int, tuple[ForkServerProcess, Connection]]


@dataclass(frozen=True)
class Crash:
    """A mistake of ours on a rank: the stack trace, its last line, how many steps were done."""

    stack: str
    message: str
    step: int


Report = MegaliteError | Crash | None  # None is success


class Crashed(SystemExit):
    """A rank raised what is a mistake of ours, and its stack trace has been printed."""

    exit_code = MegaliteError.exit_code

    def __init__(self, rank: int, crash: Crash) -> None:
        super().__init__(self.exit_code)
        self.rank, self.step, self.message = rank, crash.step, crash.message


def warm() -> None:
    """Begin to import PyTorch for the ranks, in the background; `run_local` would otherwise do so and wait."""
    forkserver.warm()


def run_local(function: Callable[..., object], size: int, args: Sequence[object] = (), timeout: float = 600.0) -> None:
    """Call `function(World, *args)` on `size` ranks of this machine and return when all of them have.

    The process group is up when `function` begins; a collective that waits longer than `timeout` seconds fails.
    `function` and `args` are pickled, by value what comes from `__main__`. When one rank fails, all are ended.

    Raises the MegaliteError that a rank raised; RankLost where a rank was killed; Crashed, a SystemExit with code 70,
    where a rank raised anything else, after printing its stack trace; SystemExit 130 or 143 upon Ctrl-C or SIGTERM.
    """
    ranks: Ranks = {}
    with _signals(ranks):
        try:
            task = cloudpickle.dumps((function, args, timeout))
            store = os.path.join(tempfile.mkdtemp(dir=forkserver.folder()), "store")
            for rank in range(size):
                ranks[rank] = forkserver.start(_rank, rank, size, store, task)
            _wait(ranks)
            for _, pipe in ranks.values():
                pipe.send(None)
        except BaseException:
            for process, _ in ranks.values():
                process.kill()
            if sys.stdout.isatty():  # the progress bar that hid it is gone
                print(end=SHOW_CURSOR, flush=True)
            raise
        finally:
            for process, _ in ranks.values():
                process.join()


def _wait(ranks: Ranks) -> None:
    """Return when all ranks are done; raise for the one that failed first."""
    running = ranks
    while running:
        connection.wait([end for process, pipe in running.values() for end in (process.sentinel, pipe)])
        reports = _reports(running)
        if any(reports.values()):
            time.sleep(SETTLE)
            reports |= _reports({rank: running[rank] for rank in running if rank not in reports})
            rank, failure = min(
                ((rank, report) for rank, report in reports.items() if report is not None),
                key=lambda failed: _far_from_the_cause(failed[1]),
            )
            if isinstance(failure, Crash):
                print(f"rank {rank} of {len(ranks)} failed:\n{failure.stack}", file=sys.stderr)
                raise Crashed(rank, failure)
            raise failure
        running = {rank: running[rank] for rank in running if rank not in reports}


def _far_from_the_cause(failure: MegaliteError | Crash) -> int:
    """Of failures that come together, the least is the cause: whoever lost another rank follows from what it lost."""
    return 0 if isinstance(failure, RankLost) and failure.seen else 2 if isinstance(failure, RankLost) else 1


def _reports(running: Ranks) -> dict[int, Report]:
    """What those ranks that have reported, or died, by now have to say."""
    reports: dict[int, Report] = {}
    for rank, (process, pipe) in running.items():
        with suppress(EOFError, ConnectionResetError):  # both mean that it died
            if pipe.poll():
                reports[rank] = pickle.loads(pipe.recv_bytes())
            if rank in reports or process.is_alive():
                continue
        died = RankLost(f"rank {rank} {forkserver.how_it_ended(process)}")
        died.rank, died.seen = rank, True
        reports[rank] = died
    return reports


@contextmanager
def _signals(ranks: Ranks) -> Iterator[None]:
    """Hand SIGUSR1 and the first SIGTERM on; turn SIGINT and the second into the SystemExit that shells expect.

    A rank that dies of the SIGTERM that it is handed had nothing to do first: that is the end of all, with 143.
    """
    told = False

    def stop(number: int) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # an impatient second Ctrl-C must not cut the cleaning short
        raise SystemExit(128 + number)

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if number == signal.SIGINT or (number == signal.SIGTERM and (told or not ranks)):
            stop(number)
        told = told or number == signal.SIGTERM
        for process, _ in ranks.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread is given signals
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    for number in before:
        signal.signal(number, hear)
    try:
        yield
    except RankLost as error:
        if told and error.seen:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Reporter:
    """Tells the parent how this rank ended, once: its main thread or its watchdog."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock, self._told = pipe, threading.Lock(), False

    def __call__(self, report: Report) -> None:
        with self._lock:
            if not self._told:
                self._told = True
                self._pipe.send_bytes(cloudpickle.dumps(report))


def _rank(pipe: Connection, rank: int, size: int, store: str, task: bytes) -> None:
    """The life of one rank."""
    import torch.distributed as dist  # here, so that the parent can do without

    from megalite.parallel import world
    from megalite.parallel.traffic import traffic

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the function has a use for it
    tell = _Reporter(pipe)
    report: Report = None
    try:
        function, args, timeout = pickle.loads(task)
        device, threads = world.local_device(rank, size), world.local_threads(size)
        world.join(rank, size, dist.FileStore(store, size), device, threads, timeout)
        guards = dist.FileStore(f"{store}-guards", size)
        function(World(rank, size, rank, size, store=guards, job=guards, end=tell), *args)
    except MegaliteError as error:
        report = error
    except Exception as error:
        message = "".join(traceback.format_exception_only(error)).strip()
        report = Crash(traceback.format_exc(), message, traffic.step)
    tell(report)
    pipe.recv()
    world.leave()

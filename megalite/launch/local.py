"""Starting the ranks of one machine without torchrun.

    parent ─┬─ rank 0   has the terminal
            ├─ rank 1
            └─ ...      each reports once, done or failed, and holds still until the parent lets it go

Because a failed rank keeps its connections open, no other rank fails of it, and the first report is the cause. The
parent then ends every rank by SIGKILL, wherever it hangs. The ranks find each other through a file: no port is taken.
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
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import FrameType

import cloudpickle

from megalite.errors import MegaliteError
from megalite.launch.torchrun import World
from megalite.parallel import forkserver

SETTLE = 0.3  # seconds; a killed rank breaks the others' connections, and their reports can arrive before its death
SHOW_CURSOR = "\x1b[?25h"

Ranks = dict[int, tuple[ForkServerProcess, Connection]]
Report = MegaliteError | str | None  # a stack trace where it is text; None is success


class RankLost(MegaliteError):
    """A rank ended without a report: killed, out of memory, crashed in native code."""

    exit_code = 69  # os.EX_UNAVAILABLE


def warm() -> None:
    """Begin to import PyTorch for the ranks, in the background; `run_local` would otherwise do so and wait."""
    forkserver.warm()


def run_local(function: Callable[..., object], size: int, args: Sequence[object] = (), timeout: float = 600.0) -> None:
    """Call `function(World, *args)` on `size` ranks of this machine and return when all of them have.

    The process group is up when `function` begins; a collective that waits longer than `timeout` seconds fails.
    `function` and `args` are pickled, by value what comes from `__main__`. When one rank fails, all are ended.

    Raises the MegaliteError that a rank raised; RankLost where a rank was killed; SystemExit with code 70 where a rank
    raised anything else, after printing its stack trace, and with 130 or 143 upon Ctrl-C or SIGTERM.
    """
    ranks: Ranks = {}
    with _signals_raise_exit():
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
            failures = [(rank, report) for rank, report in reports.items() if report is not None]
            rank, failure = next((lost for lost in failures if isinstance(lost[1], RankLost)), failures[0])
            if isinstance(failure, MegaliteError):
                raise failure
            print(f"rank {rank} of {len(ranks)} failed:\n{failure}", file=sys.stderr)
            raise SystemExit(MegaliteError.exit_code)
        running = {rank: running[rank] for rank in running if rank not in reports}


def _reports(running: Ranks) -> dict[int, Report]:
    """What those ranks that have reported, or died, by now have to say."""
    reports: dict[int, Report] = {}
    for rank, (process, pipe) in running.items():
        with suppress(EOFError, ConnectionResetError):  # both mean that it died
            if pipe.poll():
                reports[rank] = pickle.loads(pipe.recv_bytes())
            if rank in reports or process.is_alive():
                continue
        reports[rank] = RankLost(f"rank {rank} {forkserver.how_it_ended(process)}")
    return reports


@contextmanager
def _signals_raise_exit() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into SystemExit with the code that shells give to them."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # an impatient second Ctrl-C must not cut the cleaning short
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread is given signals
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _rank(pipe: Connection, rank: int, size: int, store: str, task: bytes) -> None:
    """The life of one rank."""
    import torch.distributed as dist  # here, so that the parent can do without

    from megalite.parallel import world

    report: Report = None
    try:
        function, args, timeout = pickle.loads(task)
        device, threads = world.local_device(rank, size), world.local_threads(size)
        world.join(rank, size, dist.FileStore(store, size), device, threads, timeout)
        function(World(rank, size, rank, size), *args)
    except MegaliteError as error:
        report = error
    except Exception:
        report = traceback.format_exc()
    pipe.send_bytes(cloudpickle.dumps(report))
    pipe.recv()
    world.leave()

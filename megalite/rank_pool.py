"""Warm ranks for `megalite.testing`: processes kept between calls, and what a call on them came to.

    idle ──call──▶ joined ──function──▶ answered ──all have answered──▶ idle
     ▲                         └── one raises, dies or hangs: all are ended; the next pool begins with new ones
     └── one that dies here is replaced

Each call has a process group of its own, met through a file, and finds the processes as the first call did: one thread,
float32, gradients on, generators seeded alike. A rank that failed answers and then holds still with its connections
open, so that no other rank fails of it.
"""

import atexit
import faulthandler
import gc
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from megalite.parallel import forkserver, world

GRACE = 2.0  # seconds that the other ranks have to finish after the first failure
STACK = 1.0  # seconds that a rank has to write down its stack
GUILT = ("died", "raised", "hung")  # a rank that died makes others raise, one that raised makes others hang
OUTCOMES = ("skip", "xfail")  # what a test can ask of pytest from within


@dataclass(frozen=True)
class Returned:
    """The function returned on this rank."""

    value: Any


@dataclass(frozen=True)
class Failed:
    """It did not. kind: one of GUILT; how: the rest of a sentence that begins with "rank 3"; stack: where.

    Where the function called pytest.skip or pytest.xfail, kind is one of OUTCOMES and how is the reason.
    """

    kind: str
    how: str
    stack: str = ""


class Worker:
    """One process of the pool, as the parent sees it."""

    def __init__(self, folder: Path, number: int) -> None:
        self.output, self.stack = folder / f"{number}.output", folder / f"{number}.stack"
        self.output.write_text("")  # also where this one follows a process that died
        self.stack.write_text("")
        self.process, self.pipe = forkserver.start(_serve, str(self.output), str(self.stack))

    def answer(self) -> Returned | Failed | None:
        """What the call came to; None while it runs."""
        with suppress(EOFError, ConnectionResetError):  # both mean that it died
            if self.pipe.poll():
                return pickle.loads(self.pipe.recv_bytes())
            if self.process.is_alive():
                return None
        return Failed("died", forkserver.how_it_ended(self.process), _function_frames(self.stack.read_text()))

    def stack_now(self) -> str:
        """Where the function stands, latest call first; also when it waits in C++, where Python code cannot run."""
        os.kill(self.process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + STACK
        while not (frames := _function_frames(self.stack.read_text())) and time.monotonic() < deadline:
            time.sleep(0.01)
        return frames or "  it does not answer\n"

    def take_output(self) -> list[str]:
        """The lines that it has written to stdout and stderr since the last time."""
        text = self.output.read_text(errors="replace")
        os.truncate(self.output, 0)
        return text.splitlines()


class RankPool:
    """Processes that wait to be called, as many as the largest call needed."""

    def __init__(self) -> None:
        # The assertions that pytest rewrites call pytest, in the ranks too.
        forkserver.warm(*{"pytest"} & sys.modules.keys())
        self.folder = Path(tempfile.mkdtemp(dir=forkserver.folder()))
        self.workers: list[Worker] = []
        self.calls = 0
        self.closed = False
        atexit.register(self.close)  # before multiprocessing's own, which would wait for the workers

    def call(self, task: bytes, size: int, timeout: float) -> list[Returned | Failed]:
        """Call the pickled (function, args, kwargs) on `size` ranks, for `timeout` seconds at most; outcomes by rank.

        Prints what the ranks print, when they are through. Closes the pool unless all of them return.
        """
        self._replace_dead()
        while len(self.workers) < size:
            self.workers.append(Worker(self.folder, len(self.workers)))
        workers = self.workers[:size]
        outcomes: dict[int, Returned | Failed] = {}
        try:
            store = str(self.folder / f"{self.calls}.store")
            self.calls += 1
            for rank, worker in enumerate(workers):
                with suppress(ConnectionError):  # it has just died, as its answer will say
                    worker.pipe.send((rank, size, store, timeout, sys.path, os.getcwd(), task))
            self._gather(workers, outcomes, timeout)
        finally:
            for rank, worker in enumerate(workers):
                for line in worker.take_output():
                    print(f"rank {rank}: {line}")
            if all(isinstance(outcomes.get(rank), Returned) for rank in range(size)):
                for worker in workers:
                    with suppress(ConnectionError):  # died since its answer; the next call replaces it
                        worker.pipe.send(None)
            else:
                self.close()
        return [outcomes[rank] for rank in range(size)]

    def _replace_dead(self) -> None:
        """Put a new process in the place of each that died between two calls; a line on stderr says so."""
        for rank, worker in enumerate(self.workers):
            # An idle worker says nothing: what there is to read is the end, which is_alive learns a little later.
            if worker.pipe.poll() or not worker.process.is_alive():
                how, last = forkserver.how_it_ended(worker.process), worker.take_output()[-1:]
                print(f"rank {rank} {': '.join([how, *last])} (between two calls; started anew)", file=sys.stderr)
                worker.pipe.close()
                self.workers[rank] = Worker(self.folder, rank)

    @staticmethod
    def _gather(workers: list[Worker], outcomes: dict[int, Returned | Failed], timeout: float) -> None:
        late = f"did not finish within {timeout:g} s; latest call first:"
        deadline = time.monotonic() + timeout
        while running := [rank for rank in range(len(workers)) if rank not in outcomes]:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            connection.wait([end for r in running for end in (workers[r].pipe, workers[r].process.sentinel)], left)
            for rank in running:
                outcome = workers[rank].answer()
                if outcome is not None:
                    outcomes[rank] = outcome
            failed = any(isinstance(outcome, Failed) for outcome in outcomes.values())
            if failed and time.monotonic() + GRACE < deadline:
                late = f"did not finish in the next {GRACE:g} s; latest call first:"
                deadline = time.monotonic() + GRACE
        for rank in running:
            outcomes[rank] = Failed("hung", late, workers[rank].stack_now())

    def close(self) -> None:
        """End the processes, whatever they do."""
        self.closed = True
        atexit.unregister(self.close)
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


# --- in the worker ------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, output: str, stack: str) -> None:
    """The life of a worker: answer calls until the parent ends it."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a rank that is killed cannot flush
    with open(stack, "w") as dump:
        faulthandler.enable(dump)
        faulthandler.register(signal.SIGUSR1, dump)
        gc.freeze()
        while True:
            pipe.send_bytes(_answer(*pipe.recv()))
            pipe.recv()
            _leave()


def _leave() -> None:
    """Leave the world without waiting for gloo's threads, which look every ten milliseconds whether they shall end."""
    groups = list(dist.distributed_c10d._world.pg_map)
    world.leave()
    gc.collect()  # a group that is still referred to keeps three threads, which wake a hundred times a second
    gc.freeze()  # what is left is imported modules, which the next collection need not look through again
    threading.Thread(target=groups.clear).start()


def _answer(rank: int, size: int, store: str, timeout: float, path: list[str], folder: str, task: bytes) -> bytes:
    try:
        sys.path[:] = path
        os.chdir(folder)
        function, args, kwargs = pickle.loads(task)
        _reset()
        # The pool's time limit shall be met first: it tells the stacks.
        world.join(rank, size, dist.FileStore(store, size), timeout=timeout + GRACE + STACK * size)
        return cloudpickle.dumps(Returned(function(*args, **kwargs)))
    except BaseException as error:  # also SystemExit, and pytest's outcomes
        return cloudpickle.dumps(_failure(error))


def _failure(error: BaseException) -> Failed:
    pytest = sys.modules.get("pytest")
    for kind in OUTCOMES:
        if pytest and isinstance(error, getattr(pytest, kind).Exception):
            return Failed(kind, str(error))
    head = traceback.format_exception_only(error)[0].strip()
    inner = error.__traceback__ and error.__traceback__.tb_next  # without the frame of _answer
    return Failed("raised", f"raised {head}", "".join(traceback.format_exception(type(error), error, inner)))


def _reset() -> None:
    """Undo what an earlier call may have left."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.compiler.reset()  # or compiled code of an earlier call counts towards the limit of recompilations
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


def _function_frames(dump: str) -> str:
    """Of what faulthandler has written about all threads, the frames of the called function; "" before it is there."""
    for thread in dump.split("\n\n"):
        frames, end, _ = thread.partition(f" in {_answer.__name__}\n")
        if end:
            return "".join(f"{line}\n" for line in frames.splitlines()[:-1] if line.startswith("  File"))
    return ""

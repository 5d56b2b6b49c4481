"""Processes that begin with PyTorch already imported.

Importing PyTorch takes a second or more, and each of N ranks would pay it. Here one server process imports it once
and every rank is forked from that server, in milliseconds:

    parent ── starts, early ──▶ server (imports torch) ── forks on request ──▶ rank 0, rank 1, ...

The server is the standard library's `multiprocessing.forkserver`; what this file adds is how a family ends. The parent
alone decides: ranks and server ignore Ctrl-C, which a terminal sends to all of them at once. A parent that dies without
a word, even by SIGKILL, takes all of them along, and the folder of temporary files with them.
"""

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection, forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any

# The optimizers import torch._dynamo at their first step: as long as torch itself takes, and in every rank.
PRELOAD = ("torch.distributed", "torch._dynamo", "cloudpickle", "megalite.parallel.world")

BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}  # in the server

_context = multiprocessing.get_context("forkserver")


def warm(*modules: str) -> None:
    """Start the server unless it runs, and return at once: it imports PyTorch and `modules` while the caller goes on.

    The server inherits the caller's terminal, and ends with the caller.
    """
    _context.set_forkserver_preload([*PRELOAD, *modules])
    resource_tracker.ensure_running()  # here, because it would unblock SIGINT below
    # Born with SIGINT blocked: a Ctrl-C that met the server before it had its handlers would print a stack trace. With
    # SIGTERM and SIGUSR1 too, which a batch system sends to all processes: the ranks' ends are told by the server.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start(target: Callable[..., None], *args: object) -> tuple[ForkServerProcess, Connection]:
    """Start a process that calls `target(pipe, *args)`; return it and this end of the two-way pipe.

    `target` is named, not copied: it lies in an importable module. `args` are pickled.
    """
    warm()
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_child, args=(target, theirs, args))
    # Children usually import the parent's __main__ again. Ours need nothing from it, and a script that starts ranks
    # can thus do without `if __name__ == "__main__"`.
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
    theirs.close()
    return process, ours


@atexit.register
def stop() -> None:
    """End the server at once, also while it still imports; the next `start` begins another."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def folder() -> str:
    """The folder for temporary files of parent and ranks; it goes when the parent ends, however it ends."""
    return util.get_temp_dir()


def how_it_ended(process: ForkServerProcess) -> str:
    """What became of an ended process, in words: "died of SIGKILL", "exited with code 3"."""
    process.join()
    code = process.exitcode or 0
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _child(target: Callable[..., None], pipe: Connection, args: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target(pipe, *args)


def _end_with_parent() -> None:
    """Wait in a thread of its own, because the main thread may hang in a collective for as long as its timeout."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    shutil.rmtree(folder(), ignore_errors=True)
    os._exit(1)

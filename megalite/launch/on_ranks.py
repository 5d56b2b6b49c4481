"""From a config to its function on every rank, and from there to an exit code and a status file.

    megalite ─▶ config checked ─▶ before(config) ─┬─▶ local.run_local ─────▶ rank_main(world, config) on its ranks
    torchrun ─▶ the same on each rank ────────────┴─▶ join_torchrun ───────▶ rank_main(world, config)

Of ranks that fail together, one says why: the first whose error is not that another rank was lost.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from megalite.config import Config, resolve
from megalite.config_file import load
from megalite.errors import MegaliteError, RankLost
from megalite.launch import status
from megalite.launch.status import Status
from megalite.launch.torchrun import World, join_torchrun
from megalite.model.presets import PRESETS
from megalite.plan import plan_stages

# Every rank of a machine finds the same mistake, and its first rank says so. torchrun ends all ranks when one leaves:
# the others stay this many seconds.
FIRST_WORD = 2.0
LATER = 10.0  # seconds that a collective may take beyond run.timeout, so that the watchdog, which names ranks, is first

RankMain = Callable[[World, Config], None]


def on_ranks(
    file: Path,
    overrides: list[str],
    world: World | None,
    rank_main: RankMain,
    before: Callable[[Config], None] | None = None,
) -> int:
    """Load the config, do what comes `before` on one process a machine, and call `rank_main` on every rank.

    With `before` it is a run, which has a folder, and in it a status file. Returns the exit code; raises MegaliteError
    where one process speaks for all.
    """
    folder = None
    try:
        config = load(file, overrides, PRESETS)
        folder = Path(config.run.dir) if before is not None else None
        config = resolve(config, world.size if world else None)
        plan_stages(config)  # what cannot run is refused before anything starts
        if world is None:
            from megalite.launch import local

            local.warm()
        if before is not None and (world is None or world.local_rank == 0):
            before(config)
    except MegaliteError as error:
        if world is not None and world.local_rank:
            time.sleep(FIRST_WORD)
            return error.exit_code
        _write(folder, Status.of(error))
        raise
    if world is None:
        return _local(config, rank_main, folder)
    return _of_torchrun(world, config, rank_main, folder)


def _local(config: Config, rank_main: RankMain, folder: Path | None) -> int:
    from megalite.launch import local

    if folder is not None:
        status.clear(folder)
    try:
        local.run_local(rank_main, config.mesh.size, (config,), timeout=config.run.timeout + LATER)
    except MegaliteError as error:
        _write(folder, Status.of(error))
        raise
    except local.Crashed as crash:
        _write(folder, Status(local.Crashed.exit_code, crash.rank, crash.step, 0, crash.message, True))
        raise
    except SystemExit as end:
        code = int(end.code or 0)
        _write(folder, Status(code, None, None, 0, f"ended by {signal.Signals(code - 128).name}", True))
        raise
    _write(folder, _done(config, 0))
    return 0


def _of_torchrun(here: World, config: Config, rank_main: RankMain, folder: Path | None) -> int:
    if here.rank == 0 and folder is not None:
        status.clear(folder)
    try:
        world = join_torchrun(config.run.timeout, LATER)
    except RankLost as error:
        _write(folder, Status.of(error))
        raise

    def end(error: MegaliteError) -> NoReturn:
        os._exit(_settled(world, folder, error))

    try:
        if world.job.check(["fatal"]):  # of an earlier attempt of this job, which torchrun could not know
            raise Status(**json.loads(world.job.get("fatal"))).error()
        rank_main(replace(world, end=end), config)
    except Exception as error:
        return _settled(world, folder, error)
    if world.rank == 0 and not world.store.check(["cause"]):
        _write(folder, _done(config, world.attempt))
    from megalite.parallel.world import leave

    leave()
    return 0


def _settled(world: World, folder: Path | None, error: Exception) -> int:
    """The exit code of a rank of torchrun's that has failed; says why where no other rank has."""
    from megalite.parallel.traffic import traffic

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks when one leaves: not before the word
    if isinstance(error, MegaliteError):
        found = Status.of(error, world.attempt)
    else:
        stack = "".join(traceback.format_exception(error))
        print(f"rank {world.rank} of {world.size} failed:\n{stack}", end="", file=sys.stderr, flush=True)
        message = "".join(traceback.format_exception_only(error)).strip()
        found = Status(MegaliteError.exit_code, world.rank, traffic.step, world.attempt, message, True)
    if _is_the_cause(world, found):
        if isinstance(error, MegaliteError):
            print(f"megalite: error: {error}", file=sys.stderr, flush=True)
        _write(folder, found)
    return found.code


def _is_the_cause(world: World, found: Status) -> bool:
    """Whether this rank was the first to say why the attempt ended, or the first whom no other has brought down."""
    mine = json.dumps([world.rank, asdict(found)])
    try:
        said = world.store.compare_set("cause", "", mine).decode()
        if said != mine and found.code != RankLost.exit_code and json.loads(said)[1]["code"] == RankLost.exit_code:
            said = world.store.compare_set("cause", said, mine).decode()
        if said == mine and not found.retryable:
            world.job.set("fatal", json.dumps(asdict(found)))
    except RuntimeError:  # the store has gone with the launcher
        return True
    return said == mine


def _done(config: Config, attempt: int) -> Status:
    return Status(0, None, config.train.steps, attempt, "done", False)


def _write(folder: Path | None, found: Status) -> None:
    if folder is not None:
        status.write(folder, found)

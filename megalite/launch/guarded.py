"""Around the run of one rank: ranks that differ are refused, signals noted, hanging and lost ranks named.

with guarded(world, config) as heard:
    pretrain(config, device, heard=heard)
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from megalite.config import Config
from megalite.errors import MegaliteError, Preempted, RankLost
from megalite.launch import fingerprint
from megalite.launch.torchrun import World
from megalite.parallel.blame import Verdict
from megalite.parallel.peers import peers
from megalite.parallel.traffic import traffic
from megalite.parallel.watchdog import Watchdog
from megalite.parallel.world import local_device
from megalite.train.control import Heard

STACKS = "stacks"
# What gloo and NCCL say, in a RuntimeError, when it is another rank that is to blame.
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Socket closed"),
    *("Timed out waiting", "timed out", "Timeout", "ncclRemoteError", "ncclSystemError", "communicator was aborted"),
)
LEAVING = 30.0  # seconds that ranks which leave together wait for each other


@contextmanager
def guarded(world: World, config: Config) -> Iterator[Heard]:
    """`heard` says what signals have asked of this rank. Raises MeshMismatch before, and RankLost instead of gloo."""
    with _listening() as heard:
        watchdog = _watchdog(world, config) if world.size > 1 else None
        try:
            yield heard
        except MegaliteError as error:
            error.step = traffic.step if error.step is None else error.step
            if isinstance(error, Preempted) and world.size > 1:
                _leave_together(world)
            raise
        except RuntimeError as error:
            if watchdog is None or not peer_is_lost(error):
                raise
            raise _why(watchdog, world, error) from None
        finally:
            if watchdog is not None:
                watchdog.stop()


def _watchdog(world: World, config: Config) -> Watchdog:
    """All ranks run the same, and each has its watchdog from here on."""
    device = local_device(world.local_rank, world.local_size).type
    mine = fingerprint.fingerprint(config, torch.get_num_threads(), device)
    fingerprint.compare(world.store, world.rank, world.size, mine, config.run.timeout)
    mesh = config.mesh
    sizes = {"dp": mesh.dp, "pp": mesh.pp, "sp": mesh.sp, "tp": mesh.tp}
    watchdog = Watchdog(
        world.store,
        world.rank,
        world.size,
        config.run.timeout,
        peers(sizes, mesh.ulysses, mesh.shard or mesh.dp * mesh.sp).__getitem__,
        lambda verdict: world.end(_lost(verdict)),
        Path(config.run.dir) / STACKS,
    )
    watchdog.start()
    return watchdog


def peer_is_lost(error: BaseException) -> bool:
    """Whether an error, or what caused it, is that of a collective whose other end has gone."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RuntimeError) and any(words in str(cause) for words in LOST):
            return True
        cause = cause.__cause__
    return False


def _why(watchdog: Watchdog, world: World, error: RuntimeError) -> RankLost:
    """Who was lost, where that can still be found out."""
    try:
        if world.store.check(["cause"]):  # a rank that could say why it leaves has done so
            return RankLost("another rank has ended the run")
        return _lost(watchdog.verdict())
    except RuntimeError:
        lost = RankLost(f"the connection to another rank is lost: {str(error).splitlines()[0]}")
        lost.rank, lost.step = world.rank, traffic.step
        return lost


def _lost(verdict: Verdict) -> RankLost:
    error = RankLost(verdict.message)
    error.rank, error.step = verdict.rank, verdict.step
    return error


def _leave_together(world: World) -> None:
    """The first rank that leaves has torchrun end the others: not before all have saved."""
    world.store.add("leaving", 1)
    deadline = time.monotonic() + LEAVING
    while world.store.add("leaving", 0) < world.size and time.monotonic() < deadline:
        time.sleep(0.02)


@contextmanager
def _listening() -> Iterator[Heard]:
    """SIGTERM and SIGUSR1 are noted, until the rank has ended: torchrun sends SIGTERM to all when one has left."""
    heard = Heard()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            heard.terminate = True
        else:
            heard.save = True

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, note)
    yield heard

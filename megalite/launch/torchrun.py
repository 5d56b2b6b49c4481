"""Joining a world that torchrun, or anything that sets its environment variables, has started.

The only file that reads the environment. It imports without PyTorch, so that the command line can ask who started it
before it loads anything.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from megalite.errors import ConfigError, MegaliteError, RankLost
from megalite.launch.attempt import agree_on_attempt


@dataclass(frozen=True)
class World:
    """Where a process stands: its rank among all ranks, and its place among the ranks of its machine.

    attempt: how often torchrun has restarted the ranks   end: ends this rank with an error, from any of its threads
    store: through which the ranks of this attempt meet without a collective   job: the same of all attempts
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    attempt: int = field(default=0, repr=False)
    store: Any = field(default=None, repr=False, compare=False)
    job: Any = field(default=None, repr=False, compare=False)
    end: Callable[[MegaliteError], object] = field(default=print, repr=False, compare=False)


def launched() -> World | None:
    """The place that torchrun has given to this process; None where torchrun did not start it.

    Raises ConfigError where only some of the variables are set, as under launchers that speak another dialect.
    """
    if "RANK" not in os.environ:
        return None
    here = World(_integer("RANK"), _integer("WORLD_SIZE"), _integer("LOCAL_RANK"), _integer("LOCAL_WORLD_SIZE"))
    if here.rank >= here.size:
        raise ConfigError(f"RANK={here.rank} in the environment: needs a number below WORLD_SIZE={here.size}")
    return here


def join_torchrun(timeout: float = 600.0, later: float = 0.0) -> World:
    """Join the world that torchrun has started; `timeout`, in seconds, holds for joining and for every collective.

    later: seconds more for collectives
    Raises ConfigError where torchrun did not start this process, RankLost where not all ranks come.
    """
    from megalite.parallel import world

    here = launched()
    if here is None:
        raise ConfigError("RANK is not set: start this with torchrun")
    # Python's own handler would wait until a collective in C++ returns; the default one ends the rank at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    hosts = here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = _store(hosts, timeout)
        # torchrun keeps one store over all its restarts, and an unprefixed one still holds the addresses of dead ranks.
        attempt = agree_on_attempt(store, here.rank, here.size, timeout)
        own = _store(False, timeout)  # a client waits for one answer at a time, and the watchdog must not
        import torch.distributed as dist

        world.join(
            here.rank,
            here.size,
            dist.PrefixStore(f"attempt-{attempt}", store),
            device=world.local_device(here.local_rank, here.local_size),
            threads=world.local_threads(here.local_size),
            timeout=timeout + later,
        )
    except RuntimeError as error:
        raise _lost(here, str(error).splitlines()[0]) from error
    return replace(here, attempt=attempt, store=dist.PrefixStore(f"guards-{attempt}", own), job=own)


def _store(hosts: bool, timeout: float) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(
        _text("MASTER_ADDR"),
        _integer("MASTER_PORT"),
        is_master=hosts,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


def _lost(here: World, how: str) -> RankLost:
    error = RankLost(
        f"rank {here.rank} of {here.size} could not join at {_text('MASTER_ADDR')}:{_text('MASTER_PORT')}: {how}"
    )
    error.rank = here.rank
    return error


def _text(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise ConfigError(f"RANK is set but {name} is not: start this with torchrun, or set both") from None


def _integer(name: str) -> int:
    text = _text(name)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} in the environment: needs a number")
    return int(text)

"""Joining a world that torchrun, or anything that sets its environment variables, has started.

The only file that reads the environment. It imports without PyTorch, so that the command line can ask who started it
before it loads anything.
"""

import os
import signal
from dataclasses import dataclass
from datetime import timedelta

from megalite.errors import ConfigError


@dataclass(frozen=True)
class World:
    """Where a process stands: its rank among all ranks, and its place among the ranks of its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def launched() -> World | None:
    """The place that torchrun has given to this process; None where torchrun did not start it.

    Raises ConfigError where only some of the variables are set, as under launchers that speak another dialect.
    """
    if "RANK" not in os.environ:
        return None
    return World(_integer("RANK"), _integer("WORLD_SIZE"), _integer("LOCAL_RANK"), _integer("LOCAL_WORLD_SIZE"))


def join_torchrun(timeout: float = 600.0) -> World:
    """Join the world that torchrun has started; `timeout`, in seconds, holds for joining and for every collective.

    Raises ConfigError where torchrun did not start this process.
    """
    import torch.distributed as dist

    from megalite.parallel import world

    here = launched()
    if here is None:
        raise ConfigError("RANK is not set: start this with torchrun")
    # Python's own handler would wait until a collective in C++ returns; the default one ends the rank at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    store = dist.TCPStore(
        _text("MASTER_ADDR"),
        _integer("MASTER_PORT"),
        here.size,
        is_master=here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        timeout=timedelta(seconds=timeout),
    )
    # torchrun keeps one store over all its restarts, and an unprefixed one still holds the addresses of dead ranks.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    world.join(
        here.rank,
        here.size,
        dist.PrefixStore(f"attempt-{attempt}", store),
        device=world.local_device(here.local_rank, here.local_size),
        threads=world.local_threads(here.local_size),
        timeout=timeout,
    )
    return here


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

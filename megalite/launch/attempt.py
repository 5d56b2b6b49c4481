"""The ranks of one attempt find each other, and none of an earlier one, in a store that torchrun keeps over restarts.

An attempt has a number that rank 0 draws, and keys of its own. TORCHELASTIC_RESTART_COUNT is no such number: each
machine's agent counts by itself.

    rank r                            rank 0
    hello/r = a word of its own  ──▶  draws the number, and answers each word that it has not seen:
    here/NUMBER/r  ◀────────────────  welcome/WORD = NUMBER
                                      complete/NUMBER, once all are here

What a dead rank has left under hello/r is answered too, and nobody reads it.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from megalite.errors import RankLost

POLL = 0.02  # seconds


def agree_on_attempt(store: Any, rank: int, size: int, timeout: float) -> int:
    """The number of this attempt, counted from 0, the same on all ranks, when all of them are there.

    RankLost, which names the missing ranks, where they are not within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    if rank == 0:
        attempt = store.add("attempts", 1) - 1
        _welcome(store, attempt, size, deadline, timeout)
        store.set(f"complete/{attempt}", "1")
        return attempt
    word = secrets.token_hex(8)
    store.set(f"hello/{rank}", word)
    attempt = int(_wait(store, f"welcome/{word}", rank, size, deadline, timeout))
    store.set(f"here/{attempt}/{rank}", "1")
    _wait(store, f"complete/{attempt}", rank, size, deadline, timeout)
    return attempt


def _welcome(store: Any, attempt: int, size: int, deadline: float, timeout: float) -> None:
    missing, seen = set(range(1, size)), set()
    while missing:
        for rank in sorted(missing):
            if store.check([f"here/{attempt}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"hello/{rank}"]) and (word := store.get(f"hello/{rank}").decode()) not in seen:
                seen.add(word)
                store.set(f"welcome/{word}", str(attempt))
        if missing and time.monotonic() > deadline:
            who = ", ".join(map(str, sorted(missing)))
            raise _late(f"rank{'s' * (len(missing) > 1)} {who}", size, timeout, min(missing))
        time.sleep(POLL if missing else 0)


def _wait(store: Any, key: str, rank: int, size: int, deadline: float, timeout: float) -> bytes:
    while not store.check([key]):
        if time.monotonic() > deadline + POLL * 10:  # rank 0 knows who is missing: it speaks first
            raise _late(f"rank {rank}: rank 0 or another", size, timeout, 0)
        time.sleep(POLL)
    return store.get(key)


def _late(who: str, size: int, timeout: float, rank: int) -> RankLost:
    error = RankLost(f"{who} of {size} did not join within {timeout:g} s")
    error.rank = rank
    return error

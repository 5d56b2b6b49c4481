"""When every action begins, if each begins as soon as its rank is free and what it needs is there.

Given are the lists of actions, how long each takes, and how long a message is on its way. `check` asks whether there is
an answer at all, `simulate` makes a Timeline of it, and a Timeline asks how long the step would be without sends.
A rank computes one action at a time and sends while it computes. Plain values, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.parallel.pipeline.schedule import Action

_NEVER = -1.0


def begin_times(
    ranks: Sequence[Sequence[Action]],
    rank_of: Sequence[int],
    microbatches: int,
    seconds: Sequence[Sequence[float]],
    delay: Sequence[float],
) -> tuple[list[list[float]], list[list[float]]]:
    """For each rank when its actions begin and when they end, in seconds after the first.

    seconds: of each rank, how long each of its actions takes
    delay: of each stage, how long after an action's end another rank has what it made; the same rank has it at once

    Raises ValueError, one line that names the cycle, where ranks wait for one another.
    """
    last = len(rank_of) - 1
    forward_end = [_NEVER] * (len(rank_of) * microbatches)  # by stage and microbatch
    backward_end = list(forward_end)
    begin: list[list[float]] = [[] for _ in ranks]
    end: list[list[float]] = [[] for _ in ranks]
    free = [0.0] * len(ranks)
    waiting: dict[tuple[bool, int], int] = {}  # (is a forward, place) of what is missing -> the rank that waits for it
    runnable = list(range(len(ranks)))
    while runnable:
        rank = runnable.pop()
        actions, takes, begins, ends, now = ranks[rank], seconds[rank], begin[rank], end[rank], free[rank]
        for index in range(len(begins), len(actions)):
            kind, stage, microbatch = actions[index]
            place = stage * microbatches + microbatch
            is_forward = kind == "F"
            ready = now
            if (is_forward and stage) or (not is_forward and kind != "W" and stage < last):
                other = stage - 1 if is_forward else stage + 1
                there = other * microbatches + microbatch
                made = (forward_end if is_forward else backward_end)[there]
                if made == _NEVER:
                    waiting[is_forward, there] = rank
                    break
                if rank_of[other] != rank:
                    made += delay[other]
                if made > ready:
                    ready = made
            if not is_forward and (forward_end if kind != "W" else backward_end)[place] == _NEVER:
                break  # on its own rank, so later in its list: for ever
            begins.append(ready)
            now = ready + takes[index]
            ends.append(now)
            if kind != "W":
                (forward_end if is_forward else backward_end)[place] = now
                if (is_forward, place) in waiting:
                    runnable.append(waiting.pop((is_forward, place)))
        free[rank] = now
    if any(len(ends) < len(actions) for ends, actions in zip(end, ranks, strict=True)):
        raise ValueError(_deadlock(ranks, rank_of, [len(ends) for ends in end]))
    return begin, end


def needed(action: Action, stages: int) -> tuple[Action, ...]:
    """What has to be computed before, of a B or BW under either name: `1B0` may be a `1BW0`."""
    kind, stage, microbatch = action
    if kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Action("B", stage, microbatch),)
    after = (Action("B", stage + 1, microbatch),) if stage < stages - 1 else ()
    return (Action("F", stage, microbatch), *after)


def _deadlock(ranks: Sequence[Sequence[Action]], rank_of: Sequence[int], done: Sequence[int]) -> str:
    """The cycle of ranks that wait for one another, in one line."""
    computed = {action.made for actions, n in zip(ranks, done, strict=True) for action in actions[:n]}
    to_come = {action.made: action for actions, n in zip(ranks, done, strict=True) for action in actions[n:]}
    rank = next(rank for rank, actions in enumerate(ranks) if done[rank] < len(actions))
    chain: list[tuple[int, str]] = []
    while rank not in [place for place, _ in chain]:
        stuck = ranks[rank][done[rank]]
        missing = next(need for need in needed(stuck, len(rank_of)) if need.made not in computed)
        holder = rank_of[missing.stage]
        if missing.made not in to_come:
            return f"rank {rank} waits at {stuck} for {missing}, which is on no list"
        chain.append((rank, f"rank {rank} waits at {stuck} for {to_come[missing.made]} of rank {holder}"))
        rank = holder
    cycle = [text for _, text in chain[[place for place, _ in chain].index(rank) :]]
    return "deadlock: " + ", and ".join(cycle)

"""Messages between the ranks of a pipeline: sent as soon as they are made, their places laid out before they come.

Between two ranks messages are matched by their order alone, on every backend; which there are, and in which order,
follows from the schedule. No send waits for its receiver, so that two neighbours never wait on each other.

gloo    a send goes when its receiver has laid out a place; tensors on GPUs go by way of the host
NCCL    a communicator does in turn what it is given, and would not send while it waits for what is to come: so there
        are several, in each of which a rank has one neighbour and one direction (`lanes`)

gloo does not tell whether a send is over, and until it is the tensor must stay as it is. But once something comes back
that was made after the message was used, it is over: so a stage's output goes when its gradient comes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.mesh import Axis
from megalite.parallel.pipeline.schedule import Action, Schedule, messages
from megalite.parallel.traffic import traffic

AHEAD = 2  # places laid out for what another rank sends next, beyond what is needed now

Shapes = Callable[[int, int], Sequence[int]]  # (stage, microbatch) -> shape of what the stage makes of it


@dataclass
class _Peer:
    """Another rank, as this one sees it."""

    coming: list[Action]  # what it sends, in order: the actions that make it
    order: dict[Action, int]  # where an action stands on its list
    laid_out: int = 0  # how many of `coming` have a place
    places: dict[Action, tuple[Tensor, dist.Work]] = field(default_factory=dict)
    reading: list[tuple[int, dist.Work, Tensor]] = field(default_factory=list)  # what was sent, and when it is used


class Wire:
    """All messages of one rank in the steps of a schedule over `axis`, each named by the action that makes it.

    Every rank of the process group makes it at the same time. `axis` has as many ranks as the schedule.
    """

    def __init__(self, schedule: Schedule, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        self._routes = messages(schedule)
        self._order = [{action.made: i for i, action in enumerate(actions)} for actions in schedule.ranks]
        self._used_by = {made: used for route in self._routes.values() for made, used in route}
        self._peers: dict[int, _Peer] = {}
        self._staged = axis.group is not None and device.type == "cuda" and dist.get_backend(axis.group) == "gloo"
        self._lanes: dict[tuple[int, int], int] = lanes(self._routes) if axis.overlaps else {}
        self._groups = _groups(axis.group, 1 + max(self._lanes.values())) if axis.group and self._lanes else []
        self._connect()

    def begin(self, shapes: Shapes, dtype: torch.dtype) -> None:
        """Lay out the first places of a step whose messages have these shapes; both ends know them."""
        self._shapes, self._dtype = shapes, dtype
        here = self.axis.rank
        peers = {a + b - here for a, b in self._routes if here in (a, b)}
        self._peers = {
            rank: _Peer([made for made, _ in self._routes.get((rank, here), [])], self._order[rank]) for rank in peers
        }
        for rank in peers:
            self._lay_out(rank, AHEAD)

    def send(self, made: Action, x: Tensor, to: int) -> None:
        """Start sending; `x` must not be written to any more."""
        x = x.cpu() if self._staged else x.contiguous()
        size = x.numel() * x.element_size()
        traffic.record(self.axis.name, self.axis.size, "send", tuple(x.shape), str(x.dtype), size)
        work = dist.isend(x, group=self._group(self.axis.rank, to), group_dst=to)
        peer = self._peers[to]
        peer.reading.append((peer.order[self._used_by[made].made], _there(work), x))

    def take(self, made: Action, source: int) -> Tensor:
        """Wait for what another rank made. RuntimeError where that rank is lost."""
        peer = self._peers[source]
        while made not in peer.places:
            self._lay_out(source, 1)
        x, work = peer.places.pop(made)
        self._lay_out(source, AHEAD - len(peer.places))
        work.wait()
        now, reading = peer.order[made], peer.reading
        peer.reading = [sent for sent in reading if sent[0] > now]
        for used, sending, _ in reading:
            if used <= now:
                sending.wait()
        return x.to(self.device)

    def finish(self) -> None:
        """Wait until everything that was sent has been read."""
        for peer in self._peers.values():
            for _, work, _ in peer.reading:
                work.wait()
        self._peers = {}

    def _lay_out(self, source: int, more: int) -> None:
        peer = self._peers[source]
        for made in peer.coming[peer.laid_out : peer.laid_out + max(0, more)]:
            stage = made.stage if made.kind == "F" else made.stage - 1  # a gradient is that of an output
            place = torch.empty(
                tuple(self._shapes(stage, made.microbatch)),
                dtype=self._dtype,
                device="cpu" if self._staged else self.device,
            )
            work = dist.irecv(place, group=self._group(source, self.axis.rank), group_src=source)
            peer.places[made] = place, _there(work)
            peer.laid_out += 1

    def _connect(self) -> None:
        """Use every lane once, one after the other: a communicator's first use may wait for the other end's."""
        word = torch.zeros(1, device=self.device)
        for source, to in sorted(self._lanes):
            if source == self.axis.rank:
                dist.send(word, group=self._group(source, to), group_dst=to)
            elif to == self.axis.rank:
                dist.recv(word, group=self._group(source, to), group_src=source)

    def _group(self, source: int, to: int) -> dist.ProcessGroup | None:
        return self._groups[self._lanes[source, to]] if self._lanes else self.axis.group


def _there(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


def lanes(routes: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """A number for each (sender, receiver), such that in none a rank has more than one of them; few numbers."""
    found: dict[tuple[int, int], int] = {}
    for route in sorted(routes):
        taken = {lane for other, lane in found.items() if set(route) & set(other)}
        found[route] = next(lane for lane in itertools.count() if lane not in taken)
    return found


@cache
def _groups(group: dist.ProcessGroup, number: int) -> list[dist.ProcessGroup]:
    """So many more groups of the same ranks; all ranks of the process group take part, each with its own `group`."""
    rows: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(group))
    every = [list(row) for row in sorted({tuple(row) for row in rows})]
    return [dist.new_subgroups_by_enumeration(every)[0] for _ in range(number)]

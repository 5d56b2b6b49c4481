"""When actions began and ended, on one clock for all ranks of a pipeline.

A mark costs microseconds: the host's clock on a CPU, and on a GPU an event in the stream, which nobody waits for until
the marks are read after the step. Processes of one machine share their clock; between machines `offset` asks how far
the clocks are apart, by round trips, and such clocks drift apart by some 10 µs a second: ask again every minute or so.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.in_flight import issue_all_gather
from megalite.parallel.mesh import Axis

ROUND_TRIPS = 16

Mark = float | torch.cuda.Event


class Clock:
    """Marks moments in what a device computes.

    clock = Clock(device); marks = [clock.mark(), …]; and after the step: seconds = clock.read(marks)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        """Now; on a GPU: when the current stream has done all that it was given so far."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def read(self, marks: Sequence[Mark]) -> list[float]:
        """The marks as seconds on this process's `time.perf_counter`; waits for a GPU to reach them.

        A GPU's times are counted back from one event whose moment the host knows, to within the time of a launch.
        """
        if self.device.type != "cuda":
            return [mark for mark in marks if isinstance(mark, float)]
        torch.cuda.synchronize(self.device)
        before = time.perf_counter()
        base = self.mark()
        assert isinstance(base, torch.cuda.Event)
        base.synchronize()
        now = (before + time.perf_counter()) / 2
        # elapsed_time is a float32 of milliseconds: from a base in the same step it is good to microseconds
        return [now - mark.elapsed_time(base) / 1e3 for mark in marks if not isinstance(mark, float)]


def offset(axis: Axis, host: str | None = None) -> float:
    """What to add to this rank's `perf_counter` to have that of the axis's rank 0, in seconds. All ranks call it.

    Zero where all are on one machine. Else from round trips to rank 0, of which the fastest counts; the error is less
    than half of it. Among 2 and 4 gloo ranks of one machine, told that they are on several, it was 1 to 8 µs (median).
    host: what ranks with one clock have in common; by default this machine since it was started
    """
    if axis.size == 1:
        return 0.0
    mine = torch.tensor([zlib.crc32((host or _host()).encode())], device=_device(axis))
    hosts = issue_all_gather(mine, axis, 0).wait().tolist()
    return 0.0 if len(set(hosts)) == 1 else _by_round_trips(axis)


def gather(axis: Axis, times: Sequence[float], lengths: Sequence[int]) -> list[list[float]]:
    """Every rank's `times` at every rank of the axis, by one all-gather. lengths: how many each rank has.

    Raises ValueError where this rank has another number than the others expect.
    """
    if len(times) != lengths[axis.rank]:
        raise ValueError(f"gather: {len(times)} times on rank {axis.rank}, where {lengths[axis.rank]} are expected")
    if axis.size == 1:
        return [list(times)]
    padded = torch.zeros(max(lengths), dtype=torch.float64)
    padded[: len(times)] = torch.tensor(times, dtype=torch.float64)
    rows = issue_all_gather(padded.to(_device(axis)), axis, 0).wait().view(axis.size, -1).tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _by_round_trips(axis: Axis) -> float:
    """Rank 0 answers each other rank in turn with its time, which was read in the middle of the round trip."""
    box = torch.zeros(1, dtype=torch.float64, device=_device(axis))
    if axis.rank == 0:
        for other in range(1, axis.size):
            for _ in range(ROUND_TRIPS):
                _receive(box, axis, other)
                _send(box.fill_(time.perf_counter()), axis, other)
        return 0.0
    trips = []
    for _ in range(ROUND_TRIPS):
        sent = time.perf_counter()
        _send(box, axis, 0)
        theirs = _receive(box, axis, 0)
        back = time.perf_counter()
        trips.append((back - sent, theirs - (sent + back) / 2))
    return min(trips)[1]


def _send(box: Tensor, axis: Axis, to: int) -> None:
    dist.send(box, group=axis.group, group_dst=to)


def _receive(box: Tensor, axis: Axis, come_from: int) -> float:
    dist.recv(box, group=axis.group, group_src=come_from)
    return box.item()  # waits for a GPU


def _device(axis: Axis) -> str:
    """gloo sends no GPU's tensors from rank to rank, and NCCL no others."""
    return "cuda" if dist.get_backend(axis.group) == "nccl" else "cpu"


def _host() -> str:
    """The same for all processes that read the same clock: a machine since it was started, and its time namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/time")
    except OSError:
        return f"process {os.getpid()}"  # not Linux

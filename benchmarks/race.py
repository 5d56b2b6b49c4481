"""How contenders are raced: in the same processes, turn by turn, each turn preceded by a short sgemm.

Cores are shared and their speed changes; the sgemm tells the speed of the moment. A run's cost is its seconds over
those of the sgemm before it, and a ratio is that of the medians of these costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.traffic import traffic

Run = Callable[[], object]
Step = Callable[[Tensor, Tensor], float]  # takes tokens and targets, returns the loss
Times = dict[str, list[float]]  # wall: seconds until all ranks are done, cpu: seconds of this rank, cost: in sgemms
WARM = 2  # rounds that are not counted: the first ones allocate


def take_turns(contenders: Mapping[str, Run], rounds: int) -> dict[str, Times]:
    """All of them, round by round, each round begun by another one."""
    a, names = torch.randn(512, 512), list(contenders)
    seen: dict[str, Times] = {name: {"wall": [], "cpu": [], "cost": []} for name in names}
    for number in range(rounds + WARM):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(10):
                torch.mm(a, a)
            sgemm = time.perf_counter() - begin
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            contenders[name]()
            dist.barrier()
            wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
            if number >= WARM:
                for what, value in (("wall", wall), ("cpu", cpu), ("cost", wall / sgemm)):
                    seen[name][what].append(value)
    return seen


class Training:
    """A contender that trains on the next batch whenever it is called; losses: of all steps   bytes: of the last"""

    def __init__(self, step: Step, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._step, self._batches = step, iter(batches)
        self.losses: list[float] = []
        self.bytes: dict[str, int] = {}

    def __call__(self) -> None:
        traffic.reset()
        self.losses.append(self._step(*next(self._batches)))
        self.bytes = {f"{axis} {operation}": sent for (axis, operation), sent in traffic.bytes.items()}


def medians(seen: Mapping[str, Times]) -> dict[str, dict[str, float]]:
    """Of each contender's wall, cpu and cost."""
    return {name: {what: statistics.median(values) for what, values in of.items()} for name, of in seen.items()}


def print_ratios(seen: Mapping[str, Times], against: str) -> None:
    """Medians, and how many times faster than `against`; `paired` is the median over rounds of the ratio in a round."""
    median = medians(seen)
    for name, of in median.items():
        ratio = {what: median[against][what] / of[what] for what in ("wall", "cost")}
        pairs = zip(seen[against]["wall"], seen[name]["wall"], strict=True)
        paired = statistics.median(theirs / ours for theirs, ours in pairs)
        print(
            f"  {name:20} wall {of['wall']:.3f} s  CPU {of['cpu']:.3f} s   × {against}: wall {ratio['wall']:.2f}, "
            f"paired {paired:.2f}, in sgemms {ratio['cost']:.2f}"
        )

"""What all ranks agree on at the end of each step: whether to leave, to save, and how far a save is.

A signal reaches one rank, or all of them at different moments, and each rank's files are written in its own time. A few
integers, of which every rank learns the largest, make one decision at one step of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

from megalite.parallel.mesh import Axis
from megalite.parallel.traffic import traffic


@dataclass
class Heard:
    """What this rank has been asked for since it last told the others; signal handlers set it."""

    terminate: bool = False  # SIGTERM: save and leave
    save: bool = False  # SIGUSR1: save and go on


class Saving(IntEnum):
    """How far this rank's part of a save is; the largest is that of all ranks, which begin saves together."""

    IDLE = 0
    WRITTEN = 1
    WRITING = 2
    FAILED = 3


@dataclass(frozen=True)
class Agreement:
    """The same on every rank, at the same step.

    stop: some rank was told to leave   save: some rank was told to save   saving: the least that all have done
    """

    stop: bool
    save: bool
    saving: Saving

    @property
    def written(self) -> bool:
        """Every rank has written its part."""
        return self.saving == Saving.WRITTEN

    @property
    def failed(self) -> bool:
        """Some rank could not write its part."""
        return self.saving == Saving.FAILED


class Control:
    """The end of a step over all ranks of `world`; `heard` is where this rank's signals are noted."""

    def __init__(self, world: Axis, device: torch.device, heard: Heard | None = None) -> None:
        self.world, self.device = world, device
        self.heard = heard if heard is not None else Heard()

    def agree(self, step: int, saving: Saving = Saving.IDLE) -> Agreement:
        """Note that `step` steps are done, and learn what any rank has heard. All ranks call it with the same `step`.

        A request to save is told once; one to leave, at every call from then on.
        """
        heard = self.heard
        save, heard.save = heard.save, False
        words = [int(heard.terminate), int(save), int(saving)]
        if self.world.size > 1:
            word = torch.tensor(words, dtype=torch.int32, device=self.device)
            traffic.record(self.world.name, self.world.size, "all_reduce", (3,), "torch.int32", 12)
            dist.all_reduce(word, dist.ReduceOp.MAX, group=self.world.group)
            words = word.tolist()
        traffic.did_step(step)
        return Agreement(bool(words[0]), bool(words[1]), Saving(words[2]))

"""Where weights come from: load(held, source) fills what a rank holds, and reads no more than it needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from megalite.checkpoint.boxes import Box
from megalite.checkpoint.held import Held
from megalite.errors import CheckpointError


class WeightSource(Protocol):
    """Named tensors of which boxes can be read: a checkpoint, or a folder of Hugging Face's.

    Errors of either method are CheckpointErrors that name file and tensor.
    """

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole; CheckpointError where there is no such tensor."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """A box of it, of the box's shape, on the CPU; it may be a view of what was read."""
        ...


@torch.no_grad()
def load(held: Iterable[Held], source: WeightSource) -> None:
    """Fill the values of all that is held, by their names.

    CheckpointError where the source lacks a tensor or has it in another shape, before anything is written; and where
    what is read is damaged, when some may be.
    """
    held = list(held)
    for each in held:
        if (shape := source.shape(each.name)) != each.shard.shape:
            raise CheckpointError(
                f"{each.name}: shape {list(shape)} there, {list(each.shard.shape)} in this model; the settings of "
                "[model] that it was saved with would do"
            )
    for each in held:
        for place in each.places:
            each.view(place).copy_(source.read(each.name, place.box))

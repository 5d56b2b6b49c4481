"""Held: what a rank holds of one tensor that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.checkpoint.boxes import Place, places_of, share
from megalite.parallel.sharding import Shard

DTYPES = {  # as safetensors calls them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, eq=False)
class Held:
    """Elements `start` to `start + len(values)` of what `rank` holds of a tensor, flattened.

    name: in the checkpoint, "model/blocks.0.mlp.up.weight"   shard: how the whole is laid over the ranks of an axis
    values: a flat view, contiguous, that is read to be saved and written to be loaded
    copy, copies: which of how many this is that hold it alike, beside those that the shard speaks of
    """

    name: str
    shard: Shard
    rank: int
    start: int
    values: Tensor
    copy: int = 0
    copies: int = 1

    @property
    def places(self) -> list[Place]:
        """Where it lies in the whole."""
        return places_of(self.shard, self.rank, self.start, len(self.values))

    def view(self, place: Place) -> Tensor:
        """The values of one of its places, in the shape of its box."""
        return self.values.as_strided(place.box.shape, place.strides, self.values.storage_offset() + place.first)


def written_by_this_rank(held: Sequence[Held]) -> list[tuple[Held, Place]]:
    """Of what it holds, what it writes: ranks that hold the same share it evenly, and need not talk about it.

    Ranks that share something list all that they share in the same order.
    """
    alike: dict[tuple[int, int], list[tuple[Held, Place]]] = {}
    for each in held:
        for place in each.places:
            alike.setdefault((each.copies, place.copies), []).append((each, place))
    written = []
    for (copies, inner), places in alike.items():
        each, place = places[0]
        number = each.copy * inner + place.copy
        boxes = [(place.box, each.values.element_size()) for each, place in places]
        for i, box in share(boxes, number, copies * inner):
            written.append((places[i][0], places[i][1].of(box)))
    return written

"""Boxes of a whole tensor: what of it a rank holds, and which part of that it writes.

A rank holds a flat range of its local tensor (all of it, or ZeRO's slice), and the local tensor is laid over the whole
in blocks (parallel/sharding.py). In the whole that is a few boxes:

    local [4, 3], elements 2 to 10     . . a        a box of the last part of a row,
                                       b b b        one of whole rows,
                                       b b b
                                       c . .        and one of the first part of a row

No torch here: everything is arithmetic on integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megalite.parallel.sharding import Shard

GRAIN = 2**16  # bytes below which a box is not cut in order to share the writing


@dataclass(frozen=True)
class Box:
    """Some of a whole tensor: from `offset` on, `shape` elements in each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Where it ends, in each dim."""
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """What a tensor is indexed with."""
        return tuple(slice(start, end) for start, end in zip(self.offset, self.end, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """What two have in common; None where that is nothing."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(e - s for s, e in zip(start, map(min, self.end, other.end), strict=True))
        return None if any(size <= 0 for size in shape) else Box(start, shape)

    def within(self, other: Box) -> Box:
        """The same as seen from where another begins."""
        return Box(tuple(a - b for a, b in zip(self.offset, other.offset, strict=True)), self.shape)

    def range(self, start: int, stop: int) -> list[Box]:
        """Its elements number `start` to `stop`, row by row, as boxes in that order."""
        found = boxes_of_range(self.shape, start, stop)
        return [Box(tuple(map(int.__add__, box.offset, self.offset)), box.shape) for box in found]

    def at_most(self, elements: int) -> list[Box]:
        """Cut into boxes of no more elements, whole rows where they are smaller."""
        dim = next((i for i, size in enumerate(self.shape) if size > 1), None)
        if dim is None or self.size <= elements:
            return [self]
        rows = max(1, elements // (self.size // self.shape[dim]))
        found = []
        for start in range(0, self.shape[dim], rows):
            shape = (*self.shape[:dim], min(rows, self.shape[dim] - start), *self.shape[dim + 1 :])
            offset = (*self.offset[:dim], self.offset[dim] + start, *self.offset[dim + 1 :])
            found += Box(offset, shape).at_most(elements)
        return found


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class Place:
    """A box of the whole that a rank holds in a flat range of its local tensor.

    first: of the range, the element that is the box's first   strides: of the local tensor
    copy, copies: which of how many ranks this is that hold the same
    """

    box: Box
    first: int
    strides: tuple[int, ...]
    copy: int = 0
    copies: int = 1

    def of(self, box: Box) -> Place:
        """Of a box within this one."""
        further = sum(o * stride for o, stride in zip(box.within(self.box).offset, self.strides, strict=True))
        return Place(box, self.first + further, self.strides, self.copy, self.copies)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements `start` to `stop` of a tensor of this shape, row by row, as boxes in that order."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    (first, skipped), (last, rest) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, shape, skipped, rest)
    found = []
    if skipped:
        found += _in_row(first, shape, skipped, row)
        first += 1
    if first < last:
        found.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + _in_row(last, shape, 0, rest)


def _in_row(row: int, shape: Sequence[int], start: int, stop: int) -> list[Box]:
    inner = boxes_of_range(shape[1:], start, stop)
    return [Box((row, *box.offset), (1, *box.shape)) for box in inner]


def places_of(shard: Shard, rank: int, start: int, length: int) -> list[Place]:
    """What of the whole lies in elements `start` to `start + length` of what `rank` holds; padding does not."""
    local = shard.local_shape
    strides = tuple(math.prod(local[dim + 1 :]) for dim in range(len(local)))
    places = []
    for held in boxes_of_range(local, start, start + length):
        for piece in shard.pieces(rank):
            if not local:
                places.append(Place(held, 0, (), rank % piece.copies, piece.copies))
                continue
            rows = _moved(whole(local), shard.dim, piece.local, piece.rows)
            if (box := held.intersection(rows)) is not None:
                first = sum(map(int.__mul__, box.offset, strides)) - start
                row = box.offset[shard.dim] - piece.local + piece.whole
                there = _moved(box, shard.dim, row, box.shape[shard.dim])
                places.append(Place(there, first, strides, rank % piece.copies, piece.copies))
    return places


def _moved(box: Box, dim: int, start: int, rows: int) -> Box:
    return Box((*box.offset[:dim], start, *box.offset[dim + 1 :]), (*box.shape[:dim], rows, *box.shape[dim + 1 :]))


def share(boxes: Sequence[tuple[Box, int]], rank: int, ranks: int) -> Iterator[tuple[int, Box]]:
    """Of boxes that `ranks` ranks hold alike, what one of them writes: (number of the box, box within it).

    boxes: with the bytes of an element. Laid one behind the other they are cut in parts of equal bytes, to within
    GRAIN, so that each rank works out its own part and all parts together are everything, once.
    """
    total = sum(box.size * bytes_ for box, bytes_ in boxes)
    begin, end = (total * number // ranks for number in (rank, rank + 1))
    passed = 0
    for number, (box, bytes_) in enumerate(boxes):
        first, last = (_cut(box, bytes_, position - passed) for position in (begin, end))
        for part in box.range(first, last):
            yield number, part
        passed += box.size * bytes_


def _cut(box: Box, bytes_: int, position: int) -> int:
    """The element at which to cut a box near this byte of it."""
    grain = 1
    for size in reversed(box.shape):
        if grain * size * bytes_ > GRAIN:
            break
        grain *= size
    grain = max(grain, 1)
    return min(max((position + grain * bytes_ // 2) // (grain * bytes_) * grain, 0), box.size)

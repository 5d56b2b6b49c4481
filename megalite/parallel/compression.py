"""Sums of gradients in fewer bytes, for slow links between replicas. What is left out is kept and added the next time.

            sent for each number of 4 bytes, of 2 (n−1)/n times as many in an exact sum
bfloat16    2 bytes
int8        1 byte, and a scale for every 256 of them
powersgd    of a matrix of r × c rank · (r + c) numbers, of anything else all

The first two cut the buffer in a slice a rank: slices travel to their ranks, are summed there in full, and the sums
travel back, both ways rounded. PowerSGD sends a factor of the matrices, makes it orthonormal, and sends the other.
Every rank ends with the same numbers, bit by bit. What a rank left out of its own gradient it adds to its next one
(error feedback), so that in the sum over steps nothing is lost: that takes a buffer of the gradient's size.

Source: Seide et al., 1-Bit SGD (2014): error feedback; Tang et al., 1-bit Adam (2021), §3.1: both ways; Vogels et al.,
PowerSGD (2019), algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.parallel.in_flight import issue_all_gather, issue_all_reduce, issue_all_to_all
from megalite.parallel.mesh import Axis

Compression = Literal["none", "bfloat16", "int8", "powersgd"]
SCALED_TOGETHER = 256  # numbers that share a scale in int8


class Sum(Protocol):
    """A sum on its way."""

    def wait(self) -> object:
        """Until it is in the buffer that it was issued for."""
        ...


class Compressor(Protocol):
    """How one bucket of gradients is summed over an axis, with what it left out last time."""

    def issue(self, buffer: Tensor, axis: Axis) -> Sum:
        """Start summing the flat `buffer`, into which the sum goes."""
        ...


def compressor(kind: Compression, rank: int, shapes: Sequence[torch.Size]) -> Compressor:
    """For a bucket of gradients of these shapes. rank: of powersgd"""
    if kind == "powersgd":
        return PowerSGD(shapes, rank)
    return Rounded({"bfloat16": (_to_bfloat16, _from_bfloat16), "int8": (_to_int8, _from_int8)}[kind])


class _Later:
    def __init__(self, finish: Callable[[], None]) -> None:
        self.wait = finish


class Rounded:
    """Slices to their ranks and sums back, both rounded. code: from numbers `[k, 256 m]` to what travels, and back"""

    def __init__(self, code: tuple[Callable[[Tensor], list[Tensor]], Callable[[list[Tensor], Tensor], Tensor]]) -> None:
        self._to, self._from = code
        self._lost: Tensor | None = None  # of this rank's gradient
        self._lost_of_sum: Tensor | None = None  # of the slice that this rank sums

    def issue(self, buffer: Tensor, axis: Axis) -> Sum:
        more = -len(buffer) % (axis.size * SCALED_TOGETHER)
        slices = F.pad(buffer, (0, more)).view(axis.size, -1)
        if self._lost is not None:
            slices += self._lost
        sent = self._to(slices)
        self._lost = slices - self._from(sent, slices)
        pending = [issue_all_to_all(x, axis, 0, 0) for x in sent]

        def finish() -> None:
            own = self._from([x.wait() for x in pending], slices).sum(0, keepdim=True)
            if self._lost_of_sum is not None:
                own += self._lost_of_sum
            sent = self._to(own)
            self._lost_of_sum = own - self._from(sent, own)
            whole = [issue_all_gather(x, axis, 0) for x in sent]
            buffer.copy_(self._from([x.wait() for x in whole], slices).view(-1)[: len(buffer)])

        return _Later(finish)


def _to_bfloat16(x: Tensor) -> list[Tensor]:
    return [x.bfloat16()]


def _from_bfloat16(sent: list[Tensor], like: Tensor) -> Tensor:
    return sent[0].to(like.dtype)


def _to_int8(x: Tensor) -> list[Tensor]:
    groups = x.view(len(x), -1, SCALED_TOGETHER)
    scale = (groups.abs().amax(2, keepdim=True) / 127).float()
    return [(groups / scale.clamp(min=torch.finfo(scale.dtype).tiny)).round().to(torch.int8), scale]


def _from_int8(sent: list[Tensor], like: Tensor) -> Tensor:
    values, scale = sent
    return (values.to(like.dtype) * scale.to(like.dtype)).flatten(1)


class PowerSGD:
    """Matrices by two thin factors, found by one step of power iteration from the factor of the step before."""

    def __init__(self, shapes: Sequence[torch.Size], rank: int) -> None:
        self.shapes, self.rank = shapes, rank
        self._factors: dict[int, Tensor] = {}  # by the place in `shapes`: [columns, rank]
        self._lost: dict[int, Tensor] = {}

    def issue(self, buffer: Tensor, axis: Axis) -> Sum:
        places = list(buffer.split([math.prod(shape) for shape in self.shapes]))
        matrices = {
            i: x.view(s[0], -1) for i, (x, s) in enumerate(zip(places, self.shapes, strict=True)) if self._thin(s)
        }
        for i, matrix in matrices.items():
            if i in self._lost:
                matrix += self._lost[i]
            else:
                generator = torch.Generator().manual_seed(i)  # the same on every rank
                start = torch.randn(matrix.shape[1], self.rank, generator=generator)
                self._factors[i] = start.to(matrix)
        rest = [x for i, x in enumerate(places) if i not in matrices]
        first = _Together([m @ self._factors[i] for i, m in matrices.items()] + rest, axis)

        def finish() -> None:
            left, others = first.wait(len(matrices))
            for x, total in zip(rest, others, strict=True):
                x.copy_(total)
            left = [torch.linalg.qr(p.double()).Q.to(p.dtype) for p in left]
            second = _Together([m.T @ p for m, p in zip(matrices.values(), left, strict=True)], axis)
            right, _ = second.wait(len(matrices))
            for (i, matrix), p, q in zip(matrices.items(), left, right, strict=True):
                total = p @ q.T
                self._lost[i] = matrix - total / axis.size
                self._factors[i] = q
                matrix.copy_(total)

        return _Later(finish)

    def _thin(self, shape: torch.Size) -> bool:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, 1)
        return self.rank * (rows + columns) < rows * columns


class _Together:
    """Tensors that are summed in one all_reduce."""

    def __init__(self, tensors: list[Tensor], axis: Axis) -> None:
        self.shapes = [x.shape for x in tensors]
        self.pending = issue_all_reduce(torch.cat([x.flatten() for x in tensors]), axis) if tensors else None

    def wait(self, first: int) -> tuple[list[Tensor], list[Tensor]]:
        """The sums: the first so many, and the others."""
        if self.pending is None:
            return [], []
        flat = self.pending.wait().split([math.prod(shape) for shape in self.shapes])
        sums = [x.view(shape) for x, shape in zip(flat, self.shapes, strict=True)]
        return sums[:first], sums[first:]

"""How far a parallel computation is from the dense one: rows of (name, relative error, bound), worst over all ranks.

The error of a tensor is max|actual − expected| / max|expected|. Some gradients are zero in exact arithmetic (a key's
bias: softmax does not see it), where both sides are rounding noise: `least` is the size below which a tensor is taken
for zero, so that noise is not compared with noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

NOISE = 1e-6  # a gradient smaller than this share of the largest gradient is taken for zero


@dataclass(frozen=True)
class Row:
    """One compared tensor or number: its name, the largest relative error on any rank, and the error allowed."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound

    def __str__(self) -> str:
        return f"{self.name}: relative error {self.error:.2e}, allowed {self.bound:.0e}"


class Comparison:
    """Rows in the order in which they were added; every rank must add the same names."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def add(
        self, name: str, actual: Tensor | float, expected: Tensor | float, bound: float, least: float = 0.0
    ) -> None:
        """Compare this rank's `actual` with what it should be; another shape, or a NaN, is an infinite error."""
        actual, expected = torch.as_tensor(actual).detach(), torch.as_tensor(expected).detach()
        self._rows.append(Row(name, _relative_error(actual, expected, least), bound))

    def held_elsewhere(self, name: str, bound: float) -> None:
        """A row of which this rank has nothing, for another that has: where none has, its error is infinite."""
        self._rows.append(Row(name, -math.inf, bound))

    def over_ranks(self) -> list[Row]:
        """The rows with the largest error of any rank: the same list on every rank."""
        if not dist.is_initialized():
            return self._seen(self._rows)
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        errors = torch.tensor([row.error for row in self._rows], dtype=torch.float64, device=device)
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        largest = zip(self._rows, errors.tolist(), strict=True)
        return self._seen([Row(row.name, error, row.bound) for row, error in largest])

    @staticmethod
    def _seen(rows: list[Row]) -> list[Row]:
        return [row if row.error >= 0 else Row(row.name, math.inf, row.bound) for row in rows]


def _relative_error(actual: Tensor, expected: Tensor, least: float) -> float:
    if actual.shape != expected.shape or not actual.isfinite().all():
        return math.inf
    if actual.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max().item()
    size = max(expected.double().abs().max().item(), least)
    return difference / size if size else (0.0 if difference == 0 else math.inf)

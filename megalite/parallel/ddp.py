"""Data parallelism: every rank has its share of the batch; gradients are summed over them in flat buckets.

    backward ─▶  head  block₁₁ … block₆  │  block₅ … block₀  embedding
                 └──── bucket 0 ───────┘    └──── bucket 1 ─────────┘
                        all_reduce ────────────▶ beside the backward of the rest

Buckets are filled in the reverse order of the parameters, which is about the order in which backward reaches them, and
leave in that order, so that all ranks issue the same collectives. A bucket exists from the first gradient that
enters it to the optimizer's step: afterwards `parameter.grad` is a view into it.

Where sequences are cut over sp, its ranks hold the same weights as well, and the axis is dp × sp (`mesh.replicas`).
Gradients are summed, not averaged: the loss is divided by the tokens of the global batch before (train/step.py).
Source: Li et al., PyTorch Distributed (2020), §3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megalite.parallel.compression import Compressor, Sum
from megalite.parallel.in_flight import issue_all_reduce_in_place
from megalite.parallel.mesh import Axis
from megalite.parallel.parameters import after_gradient


class GradientBuckets:
    """Sums the gradients of `parameters` over `axis` while backward runs.

    parameters: equal on all ranks of the axis, and in the same order   bucket_mb: MiB of gradients that travel together
    shared: those of them whose gradient comes in several backwards of a microbatch; it travels in `finish`
    compress: how a bucket of gradients of given shapes is summed, see compression.py; None: exactly

        for i, microbatch in enumerate(microbatches):
            with buckets.accumulating(last=i == len(microbatches) - 1):
                loss(microbatch).backward()
        buckets.finish()
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        axis: Axis,
        bucket_mb: float = 25.0,
        shared: Collection[nn.Parameter] = (),
        compress: Callable[[list[torch.Size]], Compressor] | None = None,
    ) -> None:
        self.axis = axis
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, _Bucket] = {}  # but for shared ones
        self._issued = 0
        self._sending = False
        if axis.size == 1:
            return
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            bucket = self._buckets[-1] if self._buckets else None
            if bucket is None or not bucket.takes(parameter, int(bucket_mb * 2**20)):
                bucket = _Bucket()
                self._buckets.append(bucket)
            bucket.add(parameter)
            if not any(parameter is other for other in shared):
                self._bucket_of[parameter] = bucket
                after_gradient(parameter, self._arrived)
        if compress is not None:
            for bucket in self._buckets:
                bucket.compressor = compress([parameter.shape for parameter in bucket.places])

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Around one microbatch's backward; only in the `last` one do gradients travel."""
        self._sending = last
        try:
            yield
        finally:
            self._sending = False

    def complete(self, parameters: Iterable[nn.Parameter], last: bool = True) -> None:
        """A microbatch's backward is at its end for these; after the `last` those travel that have not yet."""
        with self.accumulating(last):
            for parameter in parameters if last else ():
                if parameter.grad is not None and parameter in self._bucket_of:
                    self._arrived(parameter)

    def finish(self) -> None:
        """Wait until every gradient is the sum over the axis; a parameter that got none counts as zero."""
        for bucket in self._buckets[self._issued :]:
            bucket.fill_up()
        self._issue_full()
        for bucket in self._buckets:
            bucket.settle()
        self._issued = 0

    def _arrived(self, parameter: Tensor) -> None:
        """Hook of a parameter to whose gradient a backward added."""
        if self._sending and parameter.grad is not None:  # PyTorch 2.13 calls hooks of undefined gradients too
            self._bucket_of[parameter].arrived(parameter)
            self._issue_full()

    def _issue_full(self) -> None:
        while self._issued < len(self._buckets) and self._buckets[self._issued].full:
            self._buckets[self._issued].issue(self.axis)
            self._issued += 1


class _Bucket:
    """Parameters whose gradients share one flat buffer, each with its place in it."""

    def __init__(self) -> None:
        self.places: dict[nn.Parameter, int] = {}
        self.size = 0
        self._buffer: Tensor | None = None
        self._arrived: set[nn.Parameter] = set()
        self._pending: Sum | None = None
        self.compressor: Compressor | None = None

    def takes(self, parameter: nn.Parameter, limit: int) -> bool:
        first = next(iter(self.places))
        alike = first.dtype == parameter.dtype and first.device == parameter.device
        return alike and (self.size + parameter.numel()) * parameter.element_size() <= limit

    def add(self, parameter: nn.Parameter) -> None:
        self.places[parameter] = self.size
        self.size += parameter.numel()

    @property
    def full(self) -> bool:
        return len(self._arrived) == len(self.places)

    def arrived(self, parameter: Tensor) -> None:
        """A parameter whose gradient is complete: move it into the buffer."""
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        if parameter in self._arrived:
            return
        place = self._place(parameter)
        place.copy_(parameter.grad)
        parameter.grad = place
        self._arrived.add(parameter)

    def fill_up(self) -> None:
        """Zeros for the parameters that the loss did not reach in the last microbatch, or what earlier ones left."""
        for parameter in self.places.keys() - self._arrived:
            place = self._place(parameter)
            place.zero_() if parameter.grad is None else place.copy_(parameter.grad)
            parameter.grad = place
            self._arrived.add(parameter)

    def issue(self, axis: Axis) -> None:
        assert self._buffer is not None
        issue = self.compressor.issue if self.compressor else issue_all_reduce_in_place
        self._pending = issue(self._buffer, axis)

    def settle(self) -> None:
        if self._pending is not None:
            self._pending.wait()
        self._pending, self._buffer = None, None
        self._arrived.clear()

    def _place(self, parameter: nn.Parameter) -> Tensor:
        if self._buffer is None:
            self._buffer = parameter.new_empty(self.size)
        start = self.places[parameter]
        return self._buffer[start : start + parameter.numel()].view_as(parameter)

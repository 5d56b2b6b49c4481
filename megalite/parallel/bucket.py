"""A bucket of ZeRO: parameters in one flat buffer, of which this rank owns and steps a slice.

    parameters   │ weight of a │ weight of b          │ … │ padding │   one behind the other
    slices       │ rank 0          │ rank 1          │ rank 2       │   equal, wherever a parameter ends

What is stepped is the master: the own slice itself, or a copy of it, in float32 where weights are narrower and in the
host's memory where the optimizer is offloaded. Gradients are summed in the master's dtype, beside the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from megalite.parallel.gathered import Flat
from megalite.parallel.in_flight import Pending, issue_all_gather_into, issue_reduce_scatter, own_slice
from megalite.parallel.mesh import Axis


class Bucket:
    """Parameters that lie one behind the other in a flat buffer, and padding, so that it divides over the shards."""

    def __init__(self, first: nn.Parameter) -> None:
        self.matrices, self.half = first.ndim >= 2, first.dtype in (torch.float16, torch.bfloat16)
        self.places: dict[nn.Parameter, int] = {}
        self.size = 0
        self.apart = False  # travels in `finish`
        self.arrived: dict[Tensor, bool] = {}  # what is in the buffer, and whether it may be sent
        self.coming: Pending | None = None
        self.flat: Flat | None = None  # where weights are gathered to be read
        self.buffer: Tensor | None = None  # of gradients, while they come
        self._pending: Pending | None = None

    def add(self, parameter: nn.Parameter) -> None:
        self.places[parameter] = self.size
        self.size += parameter.numel()

    @torch.no_grad()
    def lay_out(self, shards: Axis, *, gathered: bool, offload: bool) -> None:
        """Lay the parameters into one buffer, and make the master of this rank's slice.

        gathered: the slice is all that stays   offload: the master lies in the host's memory
        """
        first = next(iter(self.places))
        self._whole = first.new_zeros(-(-self.size // shards.size) * shards.size)
        for parameter, start in self.places.items():
            place = self._whole[start : start + parameter.numel()].view_as(parameter)
            place.copy_(parameter)
            parameter.data = place
        self.slice = own_slice(self._whole, shards, 0)
        if gathered:
            self.slice = self.slice.clone()
            self.flat = Flat(self._whole, self.slice, shards)
        self.start = shards.rank * len(self.slice)
        dtype = torch.float32 if self.half else self.slice.dtype
        if offload:
            self.master = nn.Parameter(on_host(self.slice, dtype))
            self._summed = nn.Parameter(self.slice.new_zeros(1, dtype=dtype).expand(len(self.slice)))  # takes a .grad
        else:
            self.master = self._summed = nn.Parameter(self.slice.to(dtype))

    @property
    def gradient(self) -> Tensor:
        """Of the master, beside the weights: an offloaded master's own is the optimizer's to copy."""
        assert self._summed.grad is not None, "before finish"
        return self._summed.grad

    @property
    def has_gradient(self) -> bool:
        """Whether it has one."""
        return self._summed.grad is not None

    def zero_grad(self) -> None:
        """Let go of the gradient."""
        self.master.grad = self._summed.grad = None

    def take(self, parameter: Tensor, complete: bool = True) -> None:
        """Move a parameter's gradient, if it has one, into the buffer."""
        if parameter.grad is None:
            return
        assert isinstance(parameter, nn.Parameter)
        place = self._place(parameter)
        place.add_(parameter.grad) if parameter in self.arrived else place.copy_(parameter.grad)
        parameter.grad = None
        self.arrived[parameter] = complete

    def send(self, shards: Axis) -> None:
        """Start summing over the shards."""
        for parameter in self.places.keys() - self.arrived.keys():
            self._place(parameter).zero_()
        assert self.buffer is not None
        self.buffer[self.size :] = 0
        alone = shards.size == 1
        self._pending = Pending(self.buffer) if alone else issue_reduce_scatter(self.buffer, shards, 0)
        self.buffer = None
        self.arrived.clear()

    def settle(self) -> None:
        """Add what was sent to the master's gradient, once it is there."""
        assert self._pending is not None
        total, self._pending = self._pending.wait(), None
        if self._summed.grad is None:
            self._summed.grad = total
        else:
            self._summed.grad += total

    @torch.no_grad()
    def publish(self, shards: Axis) -> None:
        if self.master.data_ptr() != self.slice.data_ptr():
            self.slice.copy_(self.master, non_blocking=True)
        if shards.size > 1 and self.flat is None:
            self.coming = issue_all_gather_into(self._whole, self.slice, shards)

    def pieces(self, shards: Axis) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        end = self.start + len(self.slice)
        for parameter, place in self.places.items():
            start, stop = max(place, self.start), min(place + parameter.numel(), end)
            if start < stop:
                yield parameter, start - place, self.gradient[start - self.start : stop - self.start]

    def _place(self, parameter: nn.Parameter) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.empty_like(self._whole, dtype=self.master.dtype)
        start = self.places[parameter]
        return self.buffer[start : start + parameter.numel()].view_as(parameter)


def laid_out(
    parameters: list[nn.Parameter], limit: int, apart: Collection[int], readers: Mapping[nn.Parameter, list[int]]
) -> list[Bucket]:
    """Buckets of parameters that are alike, in the order in which backward is done with them.

    limit: bytes of gradients, float32 where weights are narrower   apart: ids of those that are alone in a bucket
    readers: the units of stage 3 that read a parameter; what the same ones read is together, however much it is
    """
    done: list[Bucket] = []
    filling: dict[tuple, Bucket] = {}
    for parameter in reversed(parameters):
        units = tuple(readers.get(parameter, ()))
        alone = id(parameter) * (id(parameter) in apart)
        kind = parameter.dtype, parameter.device, parameter.ndim >= 2, alone, units
        bucket = filling.get(kind)
        full = bucket is not None and (bucket.size + parameter.numel()) * max(4, parameter.element_size()) > limit
        if full and not units:
            done.append(filling.pop(kind))
            bucket = None
        if bucket is None:
            bucket = filling[kind] = Bucket(parameter)
        bucket.add(parameter)
    return [*done, *filling.values()]


def on_host(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in the host's memory, which a GPU reads and writes without the CPU's help (pinned)."""
    return torch.empty(x.shape, dtype=dtype, device="cpu", pin_memory=x.is_cuda).copy_(x)

"""One collective in flight: `issue_*` starts it and returns a `Pending`, so that a layer can compute meanwhile.

They are operators of PyTorch's dispatcher: torch.compile takes them without a graph break, and each counts its bytes
whenever it runs (traffic.py), compiled or not. They have no gradient; collectives.py builds the differentiable ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.parallel.mesh import Axis
from megalite.parallel.traffic import traffic


@dataclass
class Pending:
    """A collective in flight: `buffer` may be read only after `wait`, which also brings it into the asked layout.

    join: the dim along which the leading dim (one entry a rank) is joined; None where there is none
    summed: whether the leading dim (one summand a rank) is still to be summed
    shape: what a flat buffer is seen as; None: it is not flat
    """

    buffer: Tensor
    join: int | None = None
    summed: bool = False
    shape: tuple[int, ...] | None = None

    def wait(self) -> Tensor:
        x = torch.ops._c10d_functional.wait_tensor(self.buffer)
        if self.summed:
            return x.sum(0)
        if self.shape is not None:
            return x.view(self.shape)
        if self.join is None:
            return x
        return x.movedim(0, self.join).flatten(self.join, self.join + 1)


def issue_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Start the sum of `x` over the axis."""
    return Pending(torch.ops.megalite.all_reduce(x.contiguous(), axis.name, axis.size, _group(axis)))


def issue_all_reduce_in_place(buffer: Tensor, axis: Axis) -> Pending:
    """Start the sum of a contiguous buffer that no caller sees, such as a bucket of gradients, without a second one."""
    _record(axis.name, axis.size, "all_reduce", buffer)
    return Pending(_c10d.all_reduce_(buffer, "sum", _group(axis)))


def issue_all_gather(x: Tensor, axis: Axis, dim: int) -> Pending:
    """Start joining every rank's `x` along `dim`; free of copies for dim 0."""
    return Pending(torch.ops.megalite.all_gather(x.contiguous(), axis.name, axis.size, _group(axis)), join=dim)


def issue_all_gather_into(whole: Tensor, own: Tensor, axis: Axis) -> Pending:
    """Start filling `whole` with every rank's `own`, which may be this rank's slice of it, without a second buffer."""
    _record(axis.name, axis.size, "all_gather", whole)
    return Pending(_c10d.all_gather_into_tensor_out(own, axis.size, _group(axis), out=whole))


def issue_reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Pending:
    """Start summing `x` over the axis, to keep this rank's slice along `dim`; free of copies for dim 0."""
    slices = _stack(x, axis, dim)
    if _is_gloo(axis):
        # gloo's own is a clone, a whole all_reduce and a cut: twice the bytes. Summing what arrives is also in rank
        # order, so the result does not depend on the algorithm.
        return Pending(_swap(slices, axis, "reduce_scatter"), summed=True)
    return Pending(torch.ops.megalite.reduce_scatter(slices, axis.name, axis.size, _group(axis)))


def issue_all_to_all(x: Tensor, axis: Axis, dim: int, concat_dim: int) -> Pending:
    """Start sending slice i along `dim` to rank i, to join what arrives along `concat_dim`."""
    return Pending(_swap(_stack(x, axis, dim), axis, "all_to_all"), join=concat_dim)


def issue_shift(x: Tensor, axis: Axis, by: int, arriving: tuple[int, ...]) -> Pending:
    """Start sending `x` to the rank `by` places on, and receiving from as many back a tensor of shape `arriving`.

    Every rank of the axis takes part, with an empty tensor where it has nothing to send.
    """
    to, come_from = (axis.rank + by) % axis.size, (axis.rank - by) % axis.size
    size = math.prod(arriving)
    buffer = torch.ops.megalite.shift(x.flatten(), axis.name, axis.size, _group(axis), to, come_from, size)
    return Pending(buffer, shape=arriving)


def issue_swap(x: Tensor, axis: Axis, other: int) -> Pending:
    """Start sending `x` to rank `other` and receiving as much from it.

    Every rank of the axis takes part, with an empty tensor and itself where it has nothing to swap.
    """
    arrived = torch.ops.megalite.shift(x.flatten(), axis.name, axis.size, _group(axis), other, other, x.numel())
    return Pending(arrived, shape=tuple(x.shape))


def own_slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice of a whole, as a view."""
    size = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * size, size)


def _stack(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Slices along `dim` as a new leading dim, contiguous: `[n, ...]`."""
    divided(x, axis, dim)
    return x.unflatten(dim, (axis.size, x.shape[dim] // axis.size)).movedim(dim, 0).contiguous()


def _swap(slices: Tensor, axis: Axis, counted_as: str) -> Tensor:
    return torch.ops.megalite.all_to_all(slices, axis.name, axis.size, _group(axis), counted_as)


def divided(x: Tensor, axis: Axis, dim: int) -> int:
    """`dim` counted from 0, or a ValueError where the axis does not divide it."""
    dim = dim % x.ndim
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of a tensor of shape {list(x.shape)} does not divide over the {axis.size} ranks of axis "
            f"{axis.name}; a multiple of {axis.size} would do"
        )
    return dim


def _group(axis: Axis) -> str:
    assert axis.group is not None, "an axis of one needs no collective"
    return axis.group.group_name


def _is_gloo(axis: Axis) -> bool:
    return not axis.overlaps and dist.get_backend(axis.group) == "gloo"


# --- operators of the dispatcher ----------------------------------------------------------------------------------
# Each counts itself and hands on to PyTorch's functional collective; the leading dim has one entry a rank.

_library = torch.library.Library("megalite", "DEF")
_c10d = torch.ops._c10d_functional


def _operator(schema: str, fake: Any) -> Any:
    def register(kernel: Any) -> Any:
        name = schema.partition("(")[0]
        _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"megalite::{name}", fake, lib=_library)
        return kernel

    return register


def _record(axis: str, size: int, operation: str, full: Tensor, copies: int = 1) -> None:
    shape = tuple(full.shape) if copies == 1 else (copies, *full.shape)
    traffic.record(axis, size, operation, shape, str(full.dtype), copies * full.numel() * full.element_size())


@_operator(
    "all_reduce(Tensor x, str axis, int size, str group) -> Tensor", lambda x, axis, size, group: x.new_empty(x.shape)
)
def _all_reduce(x: Tensor, axis: str, size: int, group: str) -> Tensor:
    _record(axis, size, "all_reduce", x)
    return _c10d.all_reduce(x, "sum", group)


@_operator(
    "all_gather(Tensor x, str axis, int size, str group) -> Tensor",
    lambda x, axis, size, group: x.new_empty((size, *x.shape)),
)
def _all_gather(x: Tensor, axis: str, size: int, group: str) -> Tensor:
    _record(axis, size, "all_gather", x, copies=size)
    # Not all_gather_into_tensor: on gloo its name is ALLGATHER_COALESCED. The two threads of a gloo group note the name
    # of the last collective without a lock (PyTorch 2.13, ProcessGroupGloo::runLoop). A std::string keeps 15 letters
    # within itself; a longer name lies on the heap, and two threads at once both free the one before.
    whole = x.new_empty((size, *x.shape))
    return _c10d.all_gather_into_tensor_out(x.unsqueeze(0), size, group, out=whole)


@_operator(
    "reduce_scatter(Tensor x, str axis, int size, str group) -> Tensor",
    lambda x, axis, size, group: x.new_empty(x.shape[1:]),
)
def _reduce_scatter(x: Tensor, axis: str, size: int, group: str) -> Tensor:
    _record(axis, size, "reduce_scatter", x)
    return _c10d.reduce_scatter_tensor(x.flatten(0, 1), "sum", size, group)


@_operator(
    "all_to_all(Tensor x, str axis, int size, str group, str counted_as) -> Tensor",
    lambda x, axis, size, group, counted_as: x.new_empty(x.shape),
)
def _all_to_all(x: Tensor, axis: str, size: int, group: str, counted_as: str) -> Tensor:
    _record(axis, size, counted_as, x)
    return _c10d.all_to_all_single(x, [1] * size, [1] * size, group)


@_operator(
    "shift(Tensor x, str axis, int size, str group, int to, int come_from, SymInt arriving) -> Tensor",
    lambda x, axis, size, group, to, come_from, arriving: x.new_empty(arriving),
)
def _shift(x: Tensor, axis: str, size: int, group: str, to: int, come_from: int, arriving: int) -> Tensor:
    # not send and recv: this runs on every backend, gloo's with CUDA tensors included, and cannot deadlock
    _record(axis, size, "shift", x)
    received, sent = (
        [number if rank == other else 0 for rank in range(size)]
        for other, number in ((come_from, arriving), (to, x.numel()))
    )
    return _c10d.all_to_all_single(x, received, sent, group)

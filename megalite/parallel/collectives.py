"""Collectives as arrows between three states of a tensor on an axis, in conjugate pairs.

    replicated   every rank holds the whole
    split        every rank holds one slice along a dim
    partial      every rank holds a summand of the whole

    function         forward                          backward is
    copy             replicated ─▶ replicated         reduce           (Megatron's f)
    reduce           partial    ─▶ replicated         copy             (Megatron's g)
    scatter          replicated ─▶ split              gather
    gather           split      ─▶ replicated         scatter
    all_gather       split      ─▶ replicated         reduce_scatter
    reduce_scatter   partial    ─▶ split              all_gather
    all_to_all       split      ─▶ split elsewhere    all_to_all

`gather` is for what every rank goes on to compute alike, so its gradient arrives whole and is cut; `all_gather` is for
what each rank uses for a part of the result, so its gradient arrives partial and is summed.

Every pair is adjoint: ⟨Ax, y⟩ = ⟨x, A*y⟩. None writes into its input; any strides will do; an axis of one is the
identity. What starts and counts them is in_flight.py.

Source: Shoeybi et al., Megatron-LM (2019), §3; Korthikanti et al. (2022), §4.2.2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from megalite.parallel.in_flight import (
    divided,
    issue_all_gather,
    issue_all_reduce,
    issue_all_to_all,
    issue_reduce_scatter,
    own_slice,
)
from megalite.parallel.mesh import Axis


def copy(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Replicated to replicated: the input itself; the gradient is summed over the axis. `dim` plays no part."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Partial to replicated: the sum over the axis; the gradient passes as it is. `dim` plays no part."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Replicated to split: this rank's slice along `dim`; the gradient is gathered. ValueError if that is uneven."""
    return x if axis.size == 1 else _Scatter.apply(x, axis, divided(x, axis, dim))


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Split to replicated: all slices joined along `dim`; of the (whole, equal) gradient each rank takes its slice."""
    return x if axis.size == 1 else _Gather.apply(x, axis, dim % x.ndim)


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Split to replicated: all slices joined along `dim`; the (partial) gradient is summed and cut: reduce_scatter."""
    return x if axis.size == 1 else _AllGather.apply(x, axis, dim % x.ndim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Partial to split: this rank's slice of the sum; the gradient is gathered. ValueError if it does not divide."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, dim % x.ndim)


def all_to_all(x: Tensor, axis: Axis, dim: int, concat_dim: int | None = None) -> Tensor:
    """Split to split: cut along `dim`, send slice i to rank i, join what arrives along `concat_dim` (default: `dim`).

    Splits what was whole along `dim` and makes whole what was split along `concat_dim`; the gradient goes back.
    """
    concat_dim = dim if concat_dim is None else concat_dim
    return x if axis.size == 1 else _AllToAll.apply(x, axis, dim % x.ndim, concat_dim % x.ndim)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return issue_all_reduce(grad, ctx.axis).wait(), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return issue_all_reduce(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return own_slice(x, axis, dim).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return issue_all_gather(grad, ctx.axis, ctx.dim).wait(), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return issue_all_gather(x, axis, dim).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return own_slice(grad, ctx.axis, ctx.dim), None, None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return issue_all_gather(x, axis, dim).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return issue_reduce_scatter(grad, ctx.axis, ctx.dim).wait(), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return issue_reduce_scatter(x, axis, dim).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return issue_all_gather(grad, ctx.axis, ctx.dim).wait(), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, concat_dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.concat_dim = axis, dim, concat_dim
        return issue_all_to_all(x, axis, dim, concat_dim).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return issue_all_to_all(grad, ctx.axis, ctx.concat_dim, ctx.dim).wait(), None, None, None

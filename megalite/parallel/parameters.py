"""Parameters and the Shard table: cut a whole into what this rank holds, and sum gradients that are partial.

A layer states its parameters' Shards in an attribute `shards: dict[str, Shard]`; `shard_table` collects them over a
module. What no layer claims is replicated, and every rank's gradient of it is already the whole one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalite.parallel.in_flight import issue_all_reduce
from megalite.parallel.mesh import Axis
from megalite.parallel.sharding import Shard


class Piece(NamedTuple):
    """Of a parameter's gradient what a rank has: where it begins in the flattened parameter, and a view of it."""

    name: str
    start: int
    grad: Tensor


def shard_table(module: nn.Module, axis: Axis) -> dict[str, Shard]:
    """The Shard of every parameter of `module`, by name; a shared (tied) parameter stands under its first name.

    ValueError where a parameter is declared over another axis: its gradient would be summed over the wrong ranks.
    """
    claimed: dict[str, Shard] = {}
    for prefix, part in module.named_modules():
        for name, shard in getattr(part, "shards", {}).items():
            full_name = f"{prefix}.{name}" if prefix else name
            if shard.ranks > 1 and shard.axis != axis.name:
                raise ValueError(
                    f"{full_name} is declared over axis {shard.axis}, and the table is of axis {axis.name}; declared "
                    f"over {axis.name} it would do, or not at all where GradientBuckets sum over {shard.axis}"
                )
            claimed.setdefault(full_name, shard)
    return {
        name: claimed.get(name) or Shard(tuple(parameter.shape), axis.name, axis.size)
        for name, parameter in module.named_parameters()
    }


def cut(whole: Tensor, shard: Shard, rank: int) -> Tensor:
    """What `rank` holds of `whole`: a new tensor of shape `shard.local_shape`, zeros where it is padding."""
    if tuple(whole.shape) != shard.shape:
        raise ValueError(f"a tensor of shape {list(whole.shape)} given for a Shard of {list(shard.shape)}")
    if shard.replicated:
        return whole.clone()
    local = whole.new_zeros(shard.local_shape)
    for piece in shard.pieces(rank):
        local.narrow(shard.dim, piece.local, piece.rows).copy_(whole.narrow(shard.dim, piece.whole, piece.rows))
    return local


def join(parts: list[Tensor], shard: Shard) -> Tensor:
    """The whole from every rank's part, in rank order: the inverse of `cut`."""
    if shard.replicated:
        return parts[0].clone()
    whole = parts[0].new_empty(shard.shape)
    for rank, part in enumerate(parts):
        for piece in shard.pieces(rank):
            whole.narrow(shard.dim, piece.whole, piece.rows).copy_(part.narrow(shard.dim, piece.local, piece.rows))
    return whole


@torch.no_grad()
def fill(parameter: Tensor, shard: Shard, rank: int, draw: Callable[[Tensor], Tensor]) -> None:
    """Draw the whole parameter and keep this rank's part, so that all layouts start from the same weights.

    `draw` fills a whole tensor in place, e.g. `nn.init.xavier_uniform_`. Nothing is drawn on the meta device.
    """
    if parameter.is_meta:
        return
    parameter.copy_(cut(draw(torch.empty(shard.shape, dtype=parameter.dtype, device=parameter.device)), shard, rank))


def after_gradient(parameter: Tensor, method: Callable[[Tensor], None]) -> None:
    """Call `method(parameter)` whenever a backward has added to the gradient, as long as the method's object is there.

    PyTorch keeps a hook as long as the parameter, and garbage collection does not see through: process groups that the
    object has would never end.
    """
    reference = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if (method := reference()) is not None:
            method(parameter)

    parameter.register_post_accumulate_grad_hook(hook)


@torch.no_grad()
def sum_partial_gradients(parameters: Iterable[tuple[str, Tensor]], table: Mapping[str, Shard], axis: Axis) -> None:
    """Sum over `axis` the gradients of which each rank holds only a summand, all in one all_reduce.

    The parts that several ranks hold of a parameter whose Shard is `partial` are laid in one flat buffer, each part in
    a place of its own, so that a norm's weight (one part) and replicated kv heads (a part a head) take the same way.
    """
    if axis.size > 1:
        sum_partial_pieces(whole_pieces(parameters), table, axis)


def whole_pieces(parameters: Iterable[tuple[str, Tensor]]) -> list[Piece]:
    """The gradients of parameters that have one, each in one piece."""
    pieces = []
    for name, parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.contiguous()
            pieces.append(Piece(name, 0, parameter.grad.view(-1)))
    return pieces


@torch.no_grad()
def sum_partial_pieces(pieces: Iterable[Piece], table: Mapping[str, Shard], axis: Axis) -> None:
    """`sum_partial_gradients` of what a rank has of gradients that are cut, alike on all ranks of the axis."""
    places: list[tuple[Tensor, int]] = []  # a view of a gradient, and where it goes in the buffer
    end = 0
    for name, start, grad in pieces:
        for first, last, parts in table[name].partial_ranges():
            values = grad[max(0, first - start) : max(0, last - start)]
            if len(values):
                places.append((values, end + axis.rank * parts // axis.size * len(values)))
                end += parts * len(values)
    if not places:
        return
    buffer = places[0][0].new_zeros(end)
    for values, start in places:
        buffer[start : start + len(values)].copy_(values)
    buffer = issue_all_reduce(buffer, axis).wait()
    for values, start in places:
        values.copy_(buffer[start : start + len(values)])

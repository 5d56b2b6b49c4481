"""Everything that happens between backward and the optimizer's step, in order.

1. over dp × sp   sum: each rank saw its share of the batch, of each sequence        ddp.py (begun during backward)
2. over tp        sum what is partial: norms, biases, positions under sequence
                  parallelism, replicated kv heads                                   parameters.py
3. over pp        sum the embedding's of the first stage and of a head tied to it
4. norm           of the whole gradient, every weight counted once
5. clip               and, in float16, divide by the loss scale                     precision.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megalite.model.gpt import GPT
from megalite.parallel.ddp import GradientBuckets
from megalite.parallel.in_flight import issue_all_reduce, issue_swap
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.parameters import Piece, sum_partial_pieces, whole_pieces
from megalite.parallel.sharding import Shard
from megalite.parallel.zero import ShardedParameters

Buckets = GradientBuckets | ShardedParameters


def finish_gradients(
    model: GPT,
    buckets: Buckets,
    table: Mapping[str, Shard],
    mesh: Mesh,
    clip: float,
    ends: tuple[int, int] = (0, 0),
    scale: float = 1.0,
) -> float:
    """Make every rank's gradients those of the global batch, clip them, and return their norm before clipping.

    ends: the pp ranks of the first stage and of the last   scale: of the loss that backward was given
    """
    buckets.finish()
    if model.config.tied and ends[0] != ends[1]:
        sum_tied_gradients(model, mesh.pp, ends, buckets)
    pieces = pieces_of(model, buckets)
    if mesh.tp.size > 1:
        sum_partial_pieces(pieces, table, mesh.tp)
    norm = gradient_norm(model, table, mesh, buckets) / scale
    factor = 1 / scale
    if clip and norm > clip:  # false for NaN, which the caller refuses
        factor *= clip / (norm + 1e-6)
    if factor != 1:
        torch._foreach_mul_([piece.grad for piece in pieces], factor)
    return norm


def pieces_of(model: GPT, buckets: Buckets | None) -> list[Piece]:
    """What this rank has of the gradients of its parameters: all, or its slices."""
    if not isinstance(buckets, ShardedParameters):
        return whole_pieces(model.named_parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [Piece(names[parameter], start, grad) for parameter, start, grad in buckets.pieces()]


@torch.no_grad()
def sum_tied_gradients(model: GPT, pp: Axis, ends: tuple[int, int], buckets: Buckets | None = None) -> None:
    """Sum the gradients of the embedding over the two ranks that hold it; every rank of pp calls it."""
    if pp.rank not in ends:
        issue_swap(torch.empty(0, dtype=model.dtype, device=next(model.parameters()).device), pp, pp.rank).wait()
        return
    assert model.embedding is not None
    weight = model.embedding.weight
    if isinstance(buckets, ShardedParameters):  # it is alone in its bucket, so that slices are alike at both ends
        grad = buckets.gradient_of(weight)
    else:
        grad = weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    grad += issue_swap(grad, pp, sum(ends) - pp.rank).wait()


@torch.no_grad()
def gradient_norm(model: GPT, table: Mapping[str, Shard], mesh: Mesh, buckets: Buckets | None = None) -> float:
    """The 2-norm of the whole model's gradient: a part that several ranks hold counts once."""
    slices: list[Tensor] = []
    copies: list[int] = []
    for name, start, grad in pieces_of(model, buckets):
        if name == "embedding.weight" and model.has_copy_of_embedding:
            continue
        for first, last, held in table[name].ranges(mesh.tp.rank):
            slices.append(grad[max(0, first - start) : max(0, last - start)])
            copies.append(held)
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    if slices:
        norms = torch.stack(torch._foreach_norm(slices)).double()
        total += (norms.square() / torch.tensor(copies, device=norms.device)).sum()
    shards = (buckets.shards,) if isinstance(buckets, ShardedParameters) else ()
    for axis in (*shards, mesh.tp, mesh.pp):
        if axis.size > 1:
            total = issue_all_reduce(total, axis).wait()
    return math.sqrt(total.item()) if total.isfinite() else math.nan

"""Everything that happens between backward and the optimizer's step, in order.

1. over dp × sp   sum: each rank saw its share of the batch, of each sequence        ddp.py (begun during backward)
2. over tp        sum what is partial: norms, biases, positions under sequence
                  parallelism, replicated kv heads                                   parameters.py
3. over pp        sum the embedding's of the first stage and of a head tied to it
4. norm           of the whole gradient, every weight counted once
5. clip
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
from megalite.parallel.parameters import sum_partial_gradients
from megalite.parallel.sharding import Shard


def finish_gradients(
    model: GPT,
    buckets: GradientBuckets,
    table: Mapping[str, Shard],
    mesh: Mesh,
    clip: float,
    ends: tuple[int, int] = (0, 0),
) -> float:
    """Make every rank's gradients those of the global batch, clip them, and return their norm before clipping.

    ends: the pp ranks of the first stage and of the last
    """
    buckets.finish()
    sum_partial_gradients(model.named_parameters(), table, mesh.tp)
    if model.config.tied and ends[0] != ends[1]:
        sum_tied_gradients(model, mesh.pp, ends)
    norm = gradient_norm(model, table, mesh)
    if clip and norm > clip:  # false for NaN, which the caller refuses
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], clip / (norm + 1e-6))
    return norm


@torch.no_grad()
def sum_tied_gradients(model: GPT, pp: Axis, ends: tuple[int, int]) -> None:
    """Sum the gradients of the embedding over the two ranks that hold it; every rank of pp calls it."""
    if pp.rank not in ends:
        issue_swap(torch.empty(0, dtype=model.dtype, device=next(model.parameters()).device), pp, pp.rank).wait()
        return
    assert model.embedding is not None
    weight = model.embedding.weight
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    weight.grad += issue_swap(weight.grad, pp, sum(ends) - pp.rank).wait()


@torch.no_grad()
def gradient_norm(model: GPT, table: Mapping[str, Shard], mesh: Mesh) -> float:
    """The 2-norm of the whole model's gradient: a part that several ranks hold counts once."""
    slices: list[Tensor] = []
    copies: list[int] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None or (name == "embedding.weight" and model.has_copy_of_embedding):
            continue
        shard = table[name]
        pieces = shard.pieces(mesh.tp.rank)
        if len({piece.copies for piece in pieces}) == 1:  # all alike: the padding's gradient is zero
            slices.append(parameter.grad)
            copies.append(pieces[0].copies)
        else:
            slices += [parameter.grad.narrow(shard.dim, piece.local, piece.rows) for piece in pieces]
            copies += [piece.copies for piece in pieces]
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    if slices:
        norms = torch.stack(torch._foreach_norm(slices)).double()
        total += (norms.square() / torch.tensor(copies, device=norms.device)).sum()
    for axis in (mesh.tp, mesh.pp):
        if axis.size > 1:
            total = issue_all_reduce(total, axis).wait()
    return math.sqrt(total.item()) if total.isfinite() else math.nan

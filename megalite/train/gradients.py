"""Everything that happens between backward and the optimizer's step, in order.

1. over dp × sp   sum: each rank saw its share of the batch, of each sequence        ddp.py (begun during backward)
2. over tp        sum what is partial: norms, biases, positions under sequence
                  parallelism, replicated kv heads                                   parameters.py
3. norm           of the whole gradient, every weight counted once
4. clip
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megalite.parallel.ddp import GradientBuckets
from megalite.parallel.in_flight import issue_all_reduce
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.parameters import sum_partial_gradients
from megalite.parallel.sharding import Shard


def finish_gradients(
    model: nn.Module, buckets: GradientBuckets, table: Mapping[str, Shard], mesh: Mesh, clip: float
) -> float:
    """Make every rank's gradients those of the global batch, clip them, and return their norm before clipping."""
    buckets.finish()
    sum_partial_gradients(model.named_parameters(), table, mesh.tp)
    norm = gradient_norm(model, table, mesh.tp)
    if clip and norm > clip:  # false for NaN, which the caller refuses
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], clip / (norm + 1e-6))
    return norm


@torch.no_grad()
def gradient_norm(model: nn.Module, table: Mapping[str, Shard], tp: Axis) -> float:
    """The 2-norm of the whole model's gradient: a part that several ranks hold counts once."""
    slices: list[Tensor] = []
    copies: list[int] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        shard = table[name]
        pieces = shard.pieces(tp.rank)
        if len({piece.copies for piece in pieces}) == 1:  # all alike: the padding's gradient is zero
            slices.append(parameter.grad)
            copies.append(pieces[0].copies)
        else:
            slices += [parameter.grad.narrow(shard.dim, piece.local, piece.rows) for piece in pieces]
            copies += [piece.copies for piece in pieces]
    if not slices:
        return 0.0
    norms = torch.stack(torch._foreach_norm(slices)).double()
    total = (norms.square() / torch.tensor(copies, device=norms.device)).sum()
    if tp.size > 1:
        total = issue_all_reduce(total, tp).wait()
    return math.sqrt(total.item()) if total.isfinite() else math.nan

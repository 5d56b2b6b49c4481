"""Megatron sequence parallelism: between the linears the *tokens* are split over tp.

Not to be confused with ulysses.py and ring.py, which attend where sequences are cut over sp, for the whole model.

    tokens whole                                      tokens split: residual stream, norms
    qkv ─▶ attention ─▶ o    reduce_scatter ─▶        x + ...  ─▶ norm        ─▶ all_gather    gate_up ─▶ f ─▶ down

What tensor parallelism alone would compute on every rank alike, each rank computes for its own tokens: activation
memory falls by tp, and the bytes moved stay the same, since an all_reduce is a reduce_scatter and an all_gather.

The price is one trap: a replicated parameter that is applied between the linears (a norm's weight, a
row-parallel bias, position embeddings) has seen only this rank's tokens, so that its gradient is a summand.
`applied_to_own_tokens` says so in the Shard table; `parameters.sum_partial_gradients` sums it.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), §4.2.2.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from megalite.parallel.collectives import gather, scatter
from megalite.parallel.mesh import Axis
from megalite.parallel.sharding import Shard

Module = TypeVar("Module", bound=nn.Module)


def split_tokens(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Keep this rank's tokens: `[tokens, d]` ─▶ `[tokens / axis.size, d]`. Backward gathers."""
    return scatter(x, axis, dim)


def join_tokens(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """All ranks' tokens, for what every rank then computes alike. Backward keeps this rank's slice."""
    return gather(x, axis, dim)


def applied_to_own_tokens(module: Module, axis: Axis) -> Module:
    """Declare that `module` (its parameters replicated) sees only this rank's tokens: its gradients are partial."""
    module.shards = {  # type: ignore[assignment]
        name: Shard(tuple(parameter.shape), axis.name, axis.size, partial=True)
        for name, parameter in module.named_parameters()
    }
    return module

"""Tensor parallelism: linears whose weight is cut over an axis, by columns or by rows of the product.

    column   Y = X [A₁ A₂]       X replicated ─▶ Y split on its last dim          backward of X: one all_reduce
    row      Y = [X₁ X₂] [B₁;B₂]  X split      ─▶ Y partial, summed by one all_reduce

    x ─▶ Column ─▶ f ─▶ Row ─▶ y          one collective forward, one backward, for any elementwise (or headwise) f

With `sequence_dim` the tokens outside the pair are split too (sequence.py): Column gathers its input along that dim and
Row scatters its sum, which moves the same bytes as the all_reduce. Collectives run beside the matrix products where
the backend can: in backward the input's gradient travels while the weight's is computed; in forward, over NCCL, the
tokens are worked off in chunks so that one chunk travels while another is multiplied.

Source: Shoeybi et al., Megatron-LM (2019), §3; Korthikanti et al., Reducing Activation Recomputation (2022), §4.2.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megalite.parallel import weight_gradients
from megalite.parallel.collectives import gather, scatter
from megalite.parallel.in_flight import issue_all_gather, issue_all_reduce, issue_reduce_scatter
from megalite.parallel.mesh import Axis
from megalite.parallel.parameters import fill
from megalite.parallel.sharding import Block, Shard, split_evenly

CHUNKS_IN_FLIGHT = 4  # of the forward, where collectives overlap with compute


class _ParallelLinear(nn.Module):
    """What both have: weight `[out, in]` and bias `[out]`, cut as their Shards say, drawn whole like nn.Linear's."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        weight: Shard,
        bias: Shard | None,
        sequence_dim: int | None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.axis, self.sequence_dim = (
            in_features,
            out_features,
            axis,
            sequence_dim,
        )
        self.chunks = CHUNKS_IN_FLIGHT if axis.overlaps else 1
        self.shards = {"weight": weight} | ({"bias": bias} if bias else {})
        self.weight = nn.Parameter(torch.empty(weight.local_shape))
        self.bias = nn.Parameter(torch.empty(bias.local_shape)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch.nn.Linear: with the same random state on every rank, the whole equals nn.Linear's."""
        bound = 1 / math.sqrt(self.in_features)
        fill(self.weight, self.shards["weight"], self.axis.rank, lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)))
        if self.bias is not None:
            fill(self.bias, self.shards["bias"], self.axis.rank, lambda b: nn.init.uniform_(b, -bound, bound))

    def extra_repr(self) -> str:
        held = list(self.weight.shape)
        split = "" if self.sequence_dim is None else f", tokens split on dim {self.sequence_dim}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"weight {held} on rank {self.axis.rank} of {self.axis.size} ({self.axis.name}){split}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """`y = x Wᵀ + b`, the outputs split over `axis`.

    x: `[..., in_features]`, replicated; with `sequence_dim`, split along that dim and gathered first
    y: `[..., out_features / axis.size]`, or `[..., out_features]` with `gather_output`
    blocks: a fused projection's parts, each cut for itself (`sharding.fused`); a block in fewer parts than ranks is
            replicated, and its gradient is summed by `sum_partial_gradients`

    Raises ValueError where out_features does not divide. Source: Megatron-LM §3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        bias: bool = True,
        gather_output: bool = False,
        *,
        blocks: Sequence[Block] | None = None,
        sequence_dim: int | None = None,
    ) -> None:
        if blocks is None:
            split_evenly(out_features, axis.name, axis.size, "out_features")
            blocks = (Block(out_features, axis.size),)
        elif gather_output:
            raise ValueError(
                "gather_output: a projection fused from blocks cannot be gathered in the order of the whole"
            )
        blocks = tuple(blocks)
        shard = Shard((out_features, in_features), axis.name, axis.size, 0, blocks, partial=True)
        bias_shard = Shard((out_features,), axis.name, axis.size, 0, blocks, partial=True) if bias else None
        super().__init__(in_features, out_features, axis, shard, bias_shard, sequence_dim)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1:
            return weight_gradients.linear(x, self.weight, self.bias)
        y = _ColumnLinear.apply(x, self.weight, self.bias, self.axis, self.sequence_dim, self.chunks)
        return gather(y, self.axis, -1) if self.gather_output else y


class RowParallelLinear(_ParallelLinear):
    """`y = x Wᵀ + b`, the inputs split over `axis`, the products summed, the bias added once.

    x: `[..., in_features / axis.size]`, or `[..., in_features]` without `input_is_parallel`
    y: `[..., out_features]`, replicated; with `sequence_dim`, split along that dim, and the bias' gradient
       is then partial: `sum_partial_gradients` sums it

    Raises ValueError where in_features does not divide. Source: Megatron-LM §3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        bias: bool = True,
        input_is_parallel: bool = True,
        *,
        sequence_dim: int | None = None,
    ) -> None:
        split_evenly(in_features, axis.name, axis.size, "in_features")
        shard = Shard((out_features, in_features), axis.name, axis.size, 1, (Block(in_features, axis.size),))
        partial = sequence_dim is not None
        bias_shard = Shard((out_features,), axis.name, axis.size, partial=partial) if bias else None
        super().__init__(in_features, out_features, axis, shard, bias_shard, sequence_dim)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1:
            return weight_gradients.linear(x, self.weight, self.bias)
        if not self.input_is_parallel:
            x = scatter(x, self.axis, -1)
        return _RowLinear.apply(x, self.weight, self.bias, self.axis, self.sequence_dim, self.chunks)


class _ColumnLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, dim: int | None, chunks: int
    ) -> Tensor:
        ctx.axis, ctx.dim, ctx.has_bias = axis, dim, bias is not None
        if dim is None:
            y = F.linear(x, weight, bias)
        else:
            x, y = _gathered_linear(x, weight, bias, axis, dim % x.ndim, chunks)
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        travelling = None
        if ctx.needs_input_grad[0]:
            partial = grad @ weight
            if ctx.dim is None:
                travelling = issue_all_reduce(partial, ctx.axis)
            else:
                travelling = issue_reduce_scatter(partial, ctx.axis, ctx.dim % x.ndim)
        grad_weight, grad_bias = _weight_gradients(ctx, weight, grad, x)
        return travelling.wait() if travelling else None, grad_weight, grad_bias, None, None, None


class _RowLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, dim: int | None, chunks: int
    ) -> Tensor:
        ctx.axis, ctx.dim, ctx.has_bias = axis, dim, bias is not None
        ctx.save_for_backward(x, weight)
        y = _summed_linear(x, weight, axis, dim if dim is None else dim % x.ndim, chunks)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        own = grad  # the bias was added to these tokens only
        if ctx.dim is not None:
            grad = issue_all_gather(grad, ctx.axis, ctx.dim % x.ndim).wait()
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight, grad_bias = _weight_gradients(ctx, weight, grad, x, own)
        return grad_x, grad_weight, grad_bias, None, None, None


def _weight_gradients(
    ctx: Any, weight: Tensor, grad: Tensor, x: Tensor, biased: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    grad_weight = weight_gradients.give(weight, grad, x) if ctx.needs_input_grad[1] else None
    if not (ctx.has_bias and ctx.needs_input_grad[2]):
        return grad_weight, None
    return grad_weight, (grad if biased is None else biased).flatten(0, -2).sum(0)


def _gathered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, dim: int, chunks: int
) -> tuple[Tensor, Tensor]:
    """The gathered input and its product; chunk by chunk, all on their way before the first is multiplied."""
    if chunks == 1:
        x = issue_all_gather(x, axis, dim).wait()
        return x, F.linear(x, weight, bias)
    parts = x.tensor_split(min(chunks, x.shape[dim]), dim)
    pending = [issue_all_gather(part, axis, dim) for part in parts]
    apart = (*x.shape[:dim], axis.size, *x.shape[dim:])  # a dim for the rank a token comes from, before its own
    whole, y = x.new_empty(apart), x.new_empty(*apart[:-1], weight.shape[0])
    start = 0
    for part, gathering in zip(parts, pending, strict=True):
        rows = part.shape[dim]
        arrived = gathering.wait().unflatten(dim, (axis.size, rows))
        whole.narrow(dim + 1, start, rows).copy_(arrived)
        y.narrow(dim + 1, start, rows).copy_(F.linear(arrived, weight, bias))
        start += rows
    return whole.flatten(dim, dim + 1), y.flatten(dim, dim + 1)


def _summed_linear(x: Tensor, weight: Tensor, axis: Axis, dim: int | None, chunks: int) -> Tensor:
    """The product summed over the axis; chunk by chunk, each on its way while the next is multiplied."""
    if dim is None:
        if chunks == 1:
            return issue_all_reduce(F.linear(x, weight), axis).wait()
        pending = [issue_all_reduce(F.linear(part, weight), axis) for part in x.tensor_split(min(chunks, x.shape[0]))]
        return torch.cat([one.wait() for one in pending])
    if chunks == 1:
        return issue_reduce_scatter(F.linear(x, weight), axis, dim).wait()
    by_rank = x.unflatten(dim, (axis.size, split_evenly(x.shape[dim], axis.name, axis.size, "tokens")))
    parts = [part.flatten(dim, dim + 1) for part in by_rank.tensor_split(min(chunks, by_rank.shape[dim + 1]), dim + 1)]
    pending = [issue_reduce_scatter(F.linear(part, weight), axis, dim) for part in parts]
    return torch.cat([one.wait() for one in pending], dim)

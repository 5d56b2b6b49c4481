"""The vocabulary split over an axis: embedding, and cross entropy that never gathers the logits.

    rank r holds the words  [r·n, (r+1)·n),  n = ⌈V / ranks⌉;  the last ranks' rows beyond V are padding

Each rank looks up the tokens it holds (others give zeros, and the sum is the embedding), and computes the logits of its
own words. The loss of a token needs three numbers of each rank, the largest logit, the sum of exponentials and the
target's logit: they are gathered, not the logits. Padding enters as −inf: it has neither probability nor gradient.

`vocab_parallel_linear_cross_entropy` fuses the head's product: tokens are worked off in chunks whose logits take no
more memory than all activations, and the gradient takes the place of the logits, so that the full logits never exist.

Source: Shoeybi et al., Megatron-LM (2019), §3. z-loss: Chowdhery et al., PaLM (2022), §5. Gradient in place of the
logits, chunks: Hsu et al., Liger Kernel (2024), §3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megalite.parallel import weight_gradients
from megalite.parallel.collectives import reduce, reduce_scatter
from megalite.parallel.in_flight import issue_all_gather
from megalite.parallel.lookup import lookup
from megalite.parallel.mesh import Axis
from megalite.parallel.parameters import fill
from megalite.parallel.sharding import Block, Shard

IGNORE_INDEX = -100  # as torch.nn.functional.cross_entropy


class _VocabTable(nn.Module):
    """A weight `[V, d]` whose rows are split over an axis, zero rows behind them where they do not divide."""

    def __init__(self, words: int, size: int, axis: Axis) -> None:
        super().__init__()
        self.words, self.axis = words, axis
        shard = Shard((words, size), axis.name, axis.size, 0, (Block(words, axis.size),))
        self.shards = {"weight": shard}
        self.weight = nn.Parameter(torch.empty(shard.local_shape))
        fill(self.weight, shard, axis.rank, nn.init.normal_)  # as torch.nn.Embedding: drawn whole and cut

    def extra_repr(self) -> str:
        held, where = list(self.weight.shape), f"rank {self.axis.rank} of {self.axis.size} ({self.axis.name})"
        return f"{self.words} words, weight {held} on {where}"


class VocabParallelEmbedding(_VocabTable):
    """Rows of the embedding table split over `axis`; a vocabulary that does not divide is padded with zero rows.

    tokens: integers `[...]`, replicated
    output: `[..., embedding_dim]`, replicated; with `sequence_dim`, split along that dim
    weight: `[⌈num_embeddings / axis.size⌉, embedding_dim]`

    Ids outside [0, num_embeddings) raise IndexError on CPU; on other devices they must be checked before, since
    reading them back would stall the device. Source: Megatron-LM §3.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, axis: Axis, *, sequence_dim: int | None = None) -> None:
        super().__init__(num_embeddings, embedding_dim, axis)
        self.sequence_dim = sequence_dim

    def forward(self, tokens: Tensor) -> Tensor:
        _check_range(tokens, self.words, "token ids")
        if self.axis.size == 1:
            return lookup(self.weight, tokens)
        rows = self.weight.shape[0]
        own = tokens - self.axis.rank * rows
        elsewhere = (own < 0) | (own >= rows)
        y = lookup(self.weight, own.masked_fill(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(-1), 0)
        if self.sequence_dim is None:
            return reduce(y, self.axis)
        return reduce_scatter(y, self.axis, self.sequence_dim)


class VocabParallelHead(_VocabTable):
    """Logits of this rank's words: x `[..., d]`, replicated ─▶ `[..., ⌈V / axis.size⌉]`; words beyond V have logit 0.

    The gradient of x is partial: take x from `copy` or `all_gather`.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """`F.cross_entropy` of logits whose last dim is split over `axis`; the same value on every rank.

    logits: `[..., V_local]`, this rank's words, in rank order; with `vocab_size`, columns beyond it are padding
    targets: integers `[...]`, replicated; tokens equal to `ignore_index` count neither in the sum nor in the mean
    z_loss: weight of (log-sum-exp)², added to each token's loss (PaLM §5)
    reduction: "mean" over the tokens that count, "sum", or "none" (`[...]`)
    """
    words = _own_words(logits.shape[-1], axis, vocab_size, logits.device)
    flat = targets.flatten()
    losses = _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), flat, axis, words, ignore_index, z_loss)
    if reduction == "none":
        return losses.view(targets.shape)
    return _reduced(losses.sum(), flat, ignore_index, reduction)


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    vocab_size: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """`vocab_parallel_cross_entropy(x @ weight.T, ...)` whose logits never exist whole, neither do their gradients.

    x: `[..., d]`, replicated; its gradient is partial (take x from `copy` or `all_gather`)
    weight: `[V_local, d]`, this rank's words      targets: integers `[...]`
    chunk: tokens whose logits are alive at once; by default as many as make the logits no larger than x
    Logits and reductions are float32, or float64 for float64 input. reduction: "mean" or "sum".

    Where weight gradients are taken (weight_gradients.py), few tokens keep their logits' gradient instead of the
    weight's, which is larger from as many tokens on as x is wide: so that backward is three products like any linear's.
    """
    x, flat = x.reshape(-1, x.shape[-1]), targets.flatten()
    if weight_gradients.taken() and chunk is None and len(x) <= x.shape[1]:
        logits = weight_gradients.linear(x, weight)
        return vocab_parallel_cross_entropy(
            logits, flat, axis, vocab_size=vocab_size, ignore_index=ignore_index, z_loss=z_loss, reduction=reduction
        )
    words = _own_words(weight.shape[0], axis, vocab_size, weight.device)
    if chunk is None:
        chunk = max(1, x.numel() // weight.shape[0])
    with_gradient = torch.is_grad_enabled()
    total = _LinearCrossEntropy.apply(x, weight, flat, axis, words, ignore_index, z_loss, chunk, with_gradient)
    return _reduced(total, flat, ignore_index, reduction)


@dataclass(frozen=True)
class _Words:
    """Which words this rank's columns are: `real` columns from word `start` on, and padding behind them."""

    start: int | Tensor
    real: int
    vocabulary: int | Tensor  # of all ranks


def _own_words(columns: int, axis: Axis, vocab_size: int | None, device: torch.device) -> _Words:
    if axis.size == 1 and vocab_size is None:
        vocab_size = columns
    if vocab_size is not None:
        start = axis.rank * columns
        return _Words(start, min(columns, max(0, vocab_size - start)), vocab_size)
    # The cut is the caller's: where this rank's words start is the sum of the widths before it.
    widths = issue_all_gather(torch.tensor([columns], device=device), axis, 0).wait()
    return _Words(widths[: axis.rank].sum(), columns, widths.sum())


def _reduced(total: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "sum":
        return total
    if reduction != "mean":
        raise ValueError(f"reduction: {reduction!r} given; mean, sum or none would do")
    return total / (targets != ignore_index).sum()


def _losses(
    logits: Tensor, targets: Tensor, axis: Axis, words: _Words, ignore_index: int, z_loss: float, with_gradient: bool
) -> Tensor:
    """Each token's loss `[n]`; `logits` `[n, V_local]` is used up, and with_gradient holds d loss / d logits after."""
    if words.real < logits.shape[1]:
        logits[:, words.real :] = -torch.inf
    counts = targets != ignore_index
    _check_range(targets.masked_fill(~counts, 0), words.vocabulary, "targets")
    column = targets - words.start
    here = counts & (column >= 0) & (column < words.real)
    column = torch.where(here, column, 0).unsqueeze(1)
    target = torch.where(here, logits.gather(1, column).squeeze(1), 0)

    # A rank of padding alone has the maximum −inf; a finite stand-in keeps −inf − (−inf) out. Maximum and sum stay
    # apart until the end: in their log-sum-exp a large maximum would round the sum away.
    peak = logits.amax(1).clamp_(min=torch.finfo(logits.dtype).min)
    exponentials = logits.sub_(peak.unsqueeze(1)).exp_()
    total, top = exponentials.sum(1), peak
    if axis.size > 1:
        every = issue_all_gather(torch.stack([peak, total, target]), axis, 0).wait().view(axis.size, 3, -1)
        top = every[:, 0].amax(0)
        total = (every[:, 1] * (every[:, 0] - top).exp_()).sum(0)
        target = every[:, 2].sum(0)
    losses = total.log() + (top - target)
    weight = (peak - top).exp_() / total  # exp(l − peak) times this is the softmax
    if z_loss:
        lse = total.log() + top
        losses, weight = losses + z_loss * lse.square(), weight * (1 + 2 * z_loss * lse)
    losses = torch.where(counts, losses, 0)
    if with_gradient:  # softmax − onehot, which takes the place of the logits
        scale = torch.where(counts, weight, 0).unsqueeze(1)
        exponentials.mul_(scale).scatter_add_(1, column, -here.to(logits.dtype).unsqueeze(1))
    return losses


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, words: _Words, ignore_index: int, z_loss: float
    ) -> Tensor:
        gradient = logits.to(_accumulation_dtype(logits.dtype), copy=True)
        losses = _losses(gradient, targets, axis, words, ignore_index, z_loss, ctx.needs_input_grad[0])
        ctx.dtype = logits.dtype
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad.unsqueeze(1)).to(ctx.dtype), None, None, None, None, None


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        axis: Axis,
        words: _Words,
        ignore_index: int,
        z_loss: float,
        chunk: int,
        with_gradient: bool,
    ) -> Tensor:
        dtype = _accumulation_dtype(x.dtype)
        total = torch.zeros((), dtype=dtype, device=x.device)
        grad_x = torch.empty_like(x if with_gradient else x[:0])
        grad_weight = torch.zeros_like(weight if with_gradient else weight[:0], dtype=dtype)
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = (x[part] @ weight.T).to(dtype)
            total += _losses(logits, targets[part], axis, words, ignore_index, z_loss, with_gradient).sum()
            if with_gradient:
                logits = logits.to(x.dtype)
                torch.mm(logits, weight, out=grad_x[part])
                grad_weight.addmm_(logits.T, x[part]) if dtype == x.dtype else grad_weight.add_(logits.T @ x[part])
        if with_gradient:
            if weight.dtype != torch.float16:  # which ends at 65504, and this is a sum over tokens, not their mean
                grad_weight = grad_weight.to(weight.dtype)
            ctx.dtype = weight.dtype
            ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        return (grad_x * grad).to(grad_x.dtype), (grad_weight * grad).to(ctx.dtype), *(None,) * 7


def _check_range(ids: Tensor, size: int | Tensor, what: str) -> None:
    """Where reading them back is free; a rank would otherwise take an id that no rank holds for a zero, silently."""
    if ids.device.type != "cpu" or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    low, high = torch.aminmax(ids)
    if low < 0 or high >= size:
        raise IndexError(f"{what} from {low.item()} to {high.item()} given; 0 to {int(size) - 1} would do")

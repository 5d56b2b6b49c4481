"""Weight gradients of linears apart from the rest of backward: added in place, at once or later.

Autograd makes every weight's gradient in a tensor of its own and then adds it to `weight.grad`. With several
microbatches a step, that is another pass over all weights for each. Within `taking()` the linears of tensor.py hand
their two factors over instead, and the product is added to `weight.grad` as it is made:

    weight.grad += gradᵀ x          grad [n, out], x [n, in]

Nobody waits for a weight's gradient, so that it can also be put off: the factors are kept, and `add` computes what is
left when there is time. That is what splits a backward into B and W, see pipeline/schedule.py.

Source: Qi et al., Zero Bubble Pipeline Parallelism (2024), §2. In place: Megatron-LM's gradient accumulation fusion.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge


class Factors(NamedTuple):
    """A weight and what its gradient is the product of: grad `[n, out]`, x `[n, in]`."""

    weight: Tensor
    grad: Tensor
    x: Tensor


_taken: list[Factors] | None = None  # None: nobody takes; one backward at a time runs in a process
_later = False


@contextmanager
def taking(later: bool = False) -> Iterator[list[Factors]]:
    """Around forward and backward of linears: `weight.grad` is added to in place, or with `later` by `add` afterwards.

    Yields the list of what was put off. A forward within may have its backward in another `taking()`, never outside.
    Hooks on the gradients of these weights are not called.
    """
    global _taken, _later
    before = _taken, _later
    _taken, _later = [], later
    try:
        yield _taken
    finally:
        _taken, _later = before


def taken() -> bool:
    """Whether a linear has to hand its factors over."""
    return _taken is not None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, whose weight gradient goes by way of `give` within `taking()`."""
    return F.linear(x, weight, bias) if _taken is None else _Linear.apply(x, weight, bias)


def give(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """From a linear's backward: the gradient of its weight, or None where that is added elsewhere.

    grad: `[..., out]`, of the output   x: `[..., in]`, the input
    """
    grad, x = grad.flatten(0, -2), x.detach().flatten(0, -2)  # x itself would keep the graph that made it
    leaf = None if _taken is None else _leaf(weight)
    if _taken is None or leaf is None:
        return grad.T @ x
    if _later:
        _taken.append(Factors(leaf, grad, x))
    else:
        add([Factors(leaf, grad, x)])
    return None


def _leaf(weight: Tensor) -> Tensor | None:
    """The tensor to whose `.grad` autograd adds; None of a weight that is itself computed.

    It is another object than `weight` where saved tensors are packed, as on recomputation (torch.utils.checkpoint).
    """
    return getattr(get_gradient_edge(weight).node, "variable", None)


@torch.no_grad()
def add(factors: list[Factors]) -> None:
    """Add to every weight's gradient what was put off."""
    for weight, grad, x in factors:
        if weight.grad is None:
            weight.grad = grad.T @ x
        else:
            weight.grad.addmm_(grad.T, x)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_x = grad @ weight if of_x else None
        grad_weight = give(weight, grad, x) if of_weight else None
        return grad_x, grad_weight, grad.flatten(0, -2).sum(0) if of_bias else None

"""Rows looked up in a table, whose gradients are summed exactly enough in half precision too.

A word or a position that comes often adds as often to the gradient of its row. On CPUs PyTorch adds half precision up
in half precision, where a sum stops growing at some hundred times its summands.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


class LookupTable(nn.Embedding):
    """`nn.Embedding` by `lookup`: held whole by every rank."""

    def forward(self, input: Tensor) -> Tensor:
        return lookup(self.weight, input)


def lookup(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table `[V, d]`: `[...]` ─▶ `[..., d]`. Gradients of equal ids are summed in float32 or float64."""
    summed_narrow = table.device.type == "cpu" and table.dtype in (torch.float16, torch.bfloat16)  # by PyTorch there
    return _Lookup.apply(table, ids) if summed_narrow else F.embedding(ids, table)


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        whole = torch.ops.aten.embedding_dense_backward(grad.float(), ids, ctx.rows, -1, False)
        return whole.to(grad.dtype), None

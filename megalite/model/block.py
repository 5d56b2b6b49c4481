"""The residual pattern: `x + attention(norm(x))`, then `x + mlp(norm(x))`; recomputation."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megalite.model.context import Context
from megalite.model.recompute import Keeping


class Block(nn.Module):
    """One layer of a pre-norm transformer, made of what it is given. Tokens `[n, d]` ─▶ `[n, d]`."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        keeping: Keeping = Keeping(),  # noqa: B008  frozen
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.keeping = keeping

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.keeping.around(self, self._forward, x, context)

    def _forward(self, x: Tensor, context: Context) -> Tensor:
        through, attention = self.keeping.through, partial(self.attention, context=context)
        x = x + through(self.attention_norm, x, attention)
        return x + through(self.mlp_norm, x, self.mlp)

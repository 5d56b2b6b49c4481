"""The residual pattern: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

from __future__ import annotations

from torch import Tensor, nn

from megalite.model.context import Context


class Block(nn.Module):
    """One layer of a pre-norm transformer, made of what it is given. Tokens `[n, d]` ─▶ `[n, d]`."""

    def __init__(self, attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.mlp(self.mlp_norm(x))

"""AdamW, fused where the device has it; matrices decay, vectors (norms, biases) do not.

Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019); groups as in Brown et al., GPT-3 (2020), B.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megalite.config import OptimizerConfig


def matrices_of(model: nn.Module) -> list[tuple[nn.Parameter, bool]]:
    """The trainable parameters of a model, and which of them are matrices."""
    return [(p, p.ndim >= 2) for p in model.parameters() if p.requires_grad]


def adamw(stepped: Iterable[tuple[nn.Parameter, bool]], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over what is stepped, in two groups. stepped: parameters, or flat slices of some, and whether they decay"""
    stepped = list(stepped)
    groups = [
        {"params": [p for p, decays in stepped if decays], "weight_decay": config.weight_decay},
        {"params": [p for p, decays in stepped if not decays], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p, _ in stepped)
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
    )

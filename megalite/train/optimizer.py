"""AdamW, fused where the device has it; matrices decay, vectors (norms, biases) do not.

Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019); groups as in Brown et al., GPT-3 (2020), B.
"""

from __future__ import annotations

import torch
from torch import nn

from megalite.config import OptimizerConfig


def adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of `model`, in two groups."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
    )

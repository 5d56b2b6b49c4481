"""The learning rate as a pure function of the step.

cosine    warm-up ╱ then half a cosine down to min_lr · lr                Loshchilov & Hutter, SGDR (2017)
wsd       warm-up ╱ stable ─ then linearly down over the last `decay`     Hu et al., MiniCPM (2024), §4
constant  warm-up ╱ stable ─
"""

from __future__ import annotations

import math

from megalite.config import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Of step `step`, counted from 0, of `steps` in all."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    low = config.lr * config.min_lr
    if config.schedule == "cosine":
        done = (step - config.warmup) / max(1, steps - 1 - config.warmup)
        return low + (config.lr - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    falling = round(steps * config.decay) if config.schedule == "wsd" else 0
    left = steps - 1 - step
    return config.lr if left >= falling else low + (config.lr - low) * left / falling

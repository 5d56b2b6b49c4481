"""The loss scale of float16, whose smallest numbers are larger than many gradients.

    loss · scale ─▶ backward in float16 ─▶ float32 sums ─▶ / scale ─▶ norm, clip, step

A scale too large makes an infinity somewhere: that step is skipped and the scale halved. After a while without one it
is doubled. Powers of two alone, so that scaling and unscaling round nothing. bfloat16 reaches as far as float32 and
needs none of it.

Source: Micikevicius et al., Mixed Precision Training (2018), §3.2 and §4; the numbers are torch.amp.GradScaler's.
"""

from __future__ import annotations

import math

import torch

FIRST = 2.0**16
GROWS_AFTER = 2000  # steps without an infinity
LEAST = 2.0**-4  # of gradients that are still no numbers below it, the scale is not the cause


class LossScale:
    """What the loss is multiplied with: `value`, 1 forever but for float16. skipped: steps that were not taken."""

    def __init__(self, dtype: torch.dtype, first: float = FIRST, grows_after: int = GROWS_AFTER) -> None:
        self.dynamic = dtype == torch.float16
        self.value = first if self.dynamic else 1.0
        self.grows_after, self.skipped, self.good = grows_after, 0, 0

    def takes(self, norm: float) -> bool:
        """After a backward, whether to take the step: not where the gradient's norm is none and a lower scale may do.

        The norm, and so the answer, is the same on every rank.
        """
        if not self.dynamic:
            return True
        if math.isfinite(norm):
            self.good += 1
            if self.good % self.grows_after == 0:
                self.value *= 2
            return True
        self.good = 0
        if self.value / 2 < LEAST:
            return True
        self.value /= 2
        self.skipped += 1
        return False

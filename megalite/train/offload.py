"""AdamW in the host's memory: what a GPU keeps are weights and gradients.

    GPU    gradients, summed and clipped ─┐                        ┌─▶ weights ─ all_gather, as ever
    host                                  └─▶ copies ─ AdamW ─▶ masters

What is stepped are the slices of parallel/zero.py, by each rank for itself. Of a weight the host has its master, two
moments and the gradient's copy, 16 bytes; 4 travel there every step and as many back, or 2 of half-precision weights.

Source: Ren et al., ZeRO-Offload (2021), §4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megalite.parallel.bucket import on_host
from megalite.parallel.zero import ShardedParameters


class Offloaded:
    """The optimizer of `buckets.masters`, which lie on the host, to be used as if they lay beside the weights."""

    def __init__(self, buckets: ShardedParameters, optimizer: torch.optim.Optimizer) -> None:
        self._buckets, self.optimizer = buckets.buckets, optimizer
        self.copies: list[Tensor] = []  # of gradients, on the host

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As of an optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """As of an optimizer."""
        return self.optimizer.state

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """As of an optimizer."""
        return self.optimizer.register_step_pre_hook(hook)

    def step(self) -> None:
        """One update of all of them; `publish` brings it to the weights."""
        if not self.copies:
            self.copies = [on_host(bucket.gradient, bucket.master.dtype) for bucket in self._buckets]
        for bucket, gradient in zip(self._buckets, self.copies, strict=True):
            bucket.master.grad = gradient.copy_(bucket.gradient, non_blocking=True)
        if self._buckets[0].gradient.is_cuda:
            torch.cuda.current_stream().synchronize()  # weights of the step before have left by then, too
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients; the memory of their copies stays."""
        for bucket in self._buckets:
            bucket.zero_grad()

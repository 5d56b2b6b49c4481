"""AdamW, fused where the device has it, alone or beside Muon; matrices decay, vectors (norms, biases) do not.

Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019); groups as in Brown et al., GPT-3 (2020), B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megalite.config import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.parallel.sharding import Shard
from megalite.parallel.zero import ShardedParameters
from megalite.train.gradients import Buckets
from megalite.train.muon import Muon
from megalite.train.offload import Offloaded
from megalite.train.small_state import AdamWOfSmallState


def optimizer_of(model: GPT, config: OptimizerConfig, buckets: Buckets, table: Mapping[str, Shard]) -> Optimizer:
    """What steps the weights of a model, or their masters."""
    if config.name == "muon":
        return MuonAndAdamW(model, config, buckets, table)
    if not isinstance(buckets, ShardedParameters):
        return adamw(matrices_of(model), config)
    optimizer = adamw(buckets.masters, config)
    return Offloaded(buckets, optimizer) if buckets.offload else optimizer


def matrices_of(model: nn.Module) -> list[tuple[nn.Parameter, bool]]:
    """The trainable parameters of a model, and which of them are matrices."""
    return [(p, p.ndim >= 2) for p in model.parameters() if p.requires_grad]


def adamw(
    stepped: Iterable[tuple[nn.Parameter, bool]], config: OptimizerConfig
) -> torch.optim.AdamW | AdamWOfSmallState:
    """AdamW over what is stepped, in two groups. stepped: parameters, or flat slices of some, and whether they decay"""
    stepped = list(stepped)
    groups = [
        {"params": [p for p, decays in stepped if decays], "weight_decay": config.weight_decay},
        {"params": [p for p, decays in stepped if not decays], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = config.beta1, config.beta2
    if config.state_dtype == "bfloat16":
        return AdamWOfSmallState(groups, lr=config.lr, betas=betas, eps=config.eps)
    fused = all(p.device.type in ("cpu", "cuda") for p, _ in stepped)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)


def begin_state(optimizer: Optimizer, updates: int) -> None:
    """Give what is stepped the state that `updates` updates leave, zeros where there is none; after none, none."""
    if isinstance(optimizer, MuonAndAdamW):
        for part in optimizer.optimizers:
            begin_state(part, updates)
    elif isinstance(optimizer, Offloaded):
        begin_state(optimizer.optimizer, updates)
    elif not updates:
        optimizer.state.clear()
    else:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _begin_state(optimizer, parameter, updates)


def _begin_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, updates: int) -> None:
    state, small = optimizer.state[parameter], isinstance(optimizer, AdamWOfSmallState)
    for name in ("momentum_buffer",) if isinstance(optimizer, Muon) else ("exp_avg", "exp_avg_sq"):
        if name not in state:
            like = parameter.detach()
            state[name] = torch.zeros_like(like, dtype=torch.bfloat16 if small else like.dtype)
    if small:
        state["step"] = updates
    elif not isinstance(optimizer, Muon):  # the fused AdamW of PyTorch has it in a tensor
        state["step"] = torch.tensor(float(updates), dtype=torch.float32, device=parameter.device)


class MuonAndAdamW:
    """Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases; to be used as one optimizer.

    Masters of half-precision weights must be whole: ValueError where they are divided (ZeRO).
    """

    def __init__(self, model: GPT, config: OptimizerConfig, buckets: Buckets, table: Mapping[str, Shard]) -> None:
        self._views: list[tuple[nn.Parameter, nn.Parameter, int]] = []  # of masters, and where they start
        stepped = {parameter: parameter for parameter in model.parameters()}
        if isinstance(buckets, ShardedParameters):
            if buckets.shards.size > 1:
                raise ValueError("zero given; 0 would do with Muon, which orthogonalises whole matrices")
            for bucket in buckets.buckets:
                for parameter, start in bucket.places.items():
                    view = _part(bucket.master.detach(), start, parameter)
                    stepped[parameter] = nn.Parameter(view)
                    self._views.append((stepped[parameter], bucket.master, start))
        self.stepped = stepped  # of each parameter, what has its state
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = {stepped[p]: table[name] for name, p in named if name.startswith("blocks.") and p.ndim == 2}
        others = [(stepped[p], p.ndim >= 2) for _, p in named if stepped[p] not in matrices]
        muon = Muon(matrices, model.mesh.tp, lr=config.lr, weight_decay=config.weight_decay) if matrices else None
        self.optimizers = [*([muon] if muon else []), *([adamw(others, config)] if others else [])]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of both."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """Of both."""
        return {key: value for optimizer in self.optimizers for key, value in optimizer.state.items()}

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """As of an optimizer."""
        return self.optimizers[0].register_step_pre_hook(hook)

    def step(self) -> None:
        """One update of all that have a gradient."""
        for view, master, start in self._views:
            view.grad = None if master.grad is None else _part(master.grad, start, view)
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of gradients, masters' included."""
        for _, master, _ in self._views:
            master.grad = None
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def _part(flat: Tensor, start: int, like: Tensor) -> Tensor:
    return flat[start : start + like.numel()].view_as(like)


Optimizer = torch.optim.Optimizer | MuonAndAdamW | Offloaded

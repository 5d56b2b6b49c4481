"""What a run says before its first step: how it is cut, what it will need, and what of the settings has no effect."""

from __future__ import annotations

import math
from dataclasses import replace

from megalite.config import Config
from megalite.plan.rank_memory import predicted_memory
from megalite.plan.stages import plan_stages


def opening(config: Config, held: int, tokens: int, entropy: float, device: str) -> str:
    """Lines for the console. config: resolved   held: parameters of rank 0   tokens: of the data

    entropy: of the words' counts, in nats   device: "cpu" or "cuda"
    """
    mesh, vocabulary = config.mesh, config.model.vocab_size
    of_whom = "on rank 0" if mesh.pp > 1 else "a rank"
    most = max(memory.peak for memory in predicted_memory(in_effect(config, device)))
    return "\n".join(
        [
            f"mesh dp {mesh.dp} × pp {mesh.pp} × sp {mesh.sp} × tp {mesh.tp} on {device}; "
            f"{held / 1e6:.2f} M parameters {of_whom}; {tokens / 1e6:.2f} M tokens",
            *([_sequence_cut(config)] if mesh.sp > 1 else []),
            *([str(plan_stages(config))] if mesh.pp > 1 else []),
            *model_states(config, device),
            f"memory of the rank that needs most: {most / 2**20:,.0f} MiB predicted",
            f"a model that knows nothing: ln {vocabulary} = {math.log(vocabulary):.3f} nats a token; "
            f"one that knows word counts (unigram entropy): {entropy:.3f}",
        ]
    )


def in_effect(config: Config, device: str) -> Config:
    """Without what has no effect on a device of this kind: nothing is offloaded from a CPU."""
    if device != "cpu" or not config.optimizer.offload:
        return config
    return replace(config, optimizer=replace(config.optimizer, offload=False))


def model_states(config: Config, device: str) -> list[str]:
    """Where gradients and the optimizer's state are, or that a setting changes nothing about it."""
    mesh, replicas = config.mesh, config.mesh.dp * config.mesh.sp
    shards = mesh.shard or replicas
    lines = []
    if mesh.zero and shards == 1:
        alone = "mesh.shard=1" if mesh.shard else "dp × sp = 1"
        lines.append(f"mesh.zero={mesh.zero} has no effect: {alone} divides nothing")
    elif mesh.zero:
        copies = replicas // shards
        groups = f", in {copies} groups that do likewise" if copies > 1 else ""
        lines.append(f"zero {mesh.zero} over {shards} ranks{groups}")
    elif mesh.shard:
        lines.append(f"mesh.shard={mesh.shard} has no effect: mesh.zero=0 divides nothing")
    if mesh.compress != "none" and replicas == 1:
        lines.append(f"mesh.compress={mesh.compress!r} has no effect: with dp × sp = 1 no gradients travel")
    if config.optimizer.offload and device == "cpu":
        lines.append("optimizer.offload=true has no effect: a CPU's memory is the host's")
    elif config.optimizer.offload:
        lines.append("masters and the optimizer's state are in the host's memory")
    return lines


def _sequence_cut(config: Config) -> str:
    """How sp is divided, and by what where that is what `mesh.ulysses=0` chooses."""
    mesh, kv_heads = config.mesh, config.model.kv_heads
    each = max(1, kv_heads // mesh.tp)
    reason = f" (by {each} kv head{'s' * (each > 1)} a rank)" if mesh.ulysses == mesh.chosen_ulysses(kv_heads) else ""
    layout = f", {mesh.layout}" if mesh.ring > 1 else ""
    return f"sp {mesh.sp} = ring {mesh.ring} × ulysses {mesh.ulysses}{reason}{layout}"

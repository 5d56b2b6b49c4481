"""The state of a run: all that a step leaves for the next, as tensors by name and a few plain numbers.

    model/NAME                            weights; in half precision their float32 masters
    exp_avg/NAME  exp_avg_sq/NAME         of AdamW
    momentum_buffer/NAME                  of Muon

NAME is the parameter's in the whole model, and so no name knows of a mesh. What a rank holds of each is a list of
`Held` (checkpoint/held.py), the same to save from and to load into.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalite.checkpoint.folder import STATE, Checkpoint
from megalite.checkpoint.held import Held
from megalite.checkpoint.source import Source, load
from megalite.errors import CheckpointError
from megalite.parallel.in_flight import issue_all_reduce
from megalite.parallel.mesh import Axis
from megalite.parallel.words import first_of
from megalite.parallel.zero import ShardedParameters
from megalite.train.optimizer import MuonAndAdamW, begin_state
from megalite.train.step import TrainStep

WEIGHTS = "model/"
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class _Part(NamedTuple):
    """What this rank has of a parameter: where it begins in the flattened parameter, the weights that are stepped, and
    by what the optimizer knows them: from element `first` of `key`."""

    name: str
    start: int
    weights: Tensor
    key: nn.Parameter
    first: int


def held(step: TrainStep) -> list[Held]:
    """What this rank holds of weights and optimizer state; views, so that loading into them changes the run."""
    updates, found = step.steps - step.scale.skipped, []
    begin_state(step.optimizer, updates)
    sharded = isinstance(step.buckets, ShardedParameters)
    replicas = step.buckets.copies if isinstance(step.buckets, ShardedParameters) else step.mesh.replicas
    first_stage, last_stage = step.pipelined.ends
    state = step.optimizer.state
    for part in _parts(step):
        axis = replicas if not sharded or part.key.requires_grad else step.mesh.replicas
        copy, copies = axis.rank, axis.size
        if part.name == "embedding.weight" and step.model.config.tied and first_stage != last_stage:
            copy, copies = 2 * copy + (step.mesh.pp.rank == last_stage), 2 * copies
        tensors = {"model": part.weights}
        if updates and part.key in state:
            stop = part.first + len(part.weights)
            kept = {kind: state[part.key][kind] for kind in STATES if kind in state[part.key]}
            tensors |= {kind: tensor.view(-1)[part.first : stop] for kind, tensor in kept.items()}
        shard = step.table[part.name]
        for kind, values in tensors.items():
            found.append(Held(f"{kind}/{part.name}", shard, step.mesh.tp.rank, part.start, values, copy, copies))
    return found


def _parts(step: TrainStep) -> Iterator[_Part]:
    named, buckets = dict(step.model.named_parameters()), step.buckets
    if isinstance(buckets, ShardedParameters):
        names = {parameter: name for name, parameter in named.items()}
        stepped = step.optimizer.stepped if isinstance(step.optimizer, MuonAndAdamW) else {}
        for bucket in buckets.buckets:
            end = bucket.start + len(bucket.slice)
            for parameter, place in bucket.places.items():
                start, stop = max(place, bucket.start), min(place + parameter.numel(), end)
                if start < stop:
                    first = start - bucket.start
                    weights = bucket.master.detach()[first : first + stop - start]
                    key, first = (stepped[parameter], 0) if stepped else (bucket.master, first)
                    yield _Part(names[parameter], start - place, weights, key, first)
        named = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
    for name, parameter in named.items():
        yield _Part(name, 0, parameter.detach().view(-1), parameter, 0)


def numbers(step: TrainStep) -> dict[str, Any]:
    """The plain numbers: updates taken, the loss scale and its counters."""
    scale = step.scale
    return {
        "updates": step.steps - scale.skipped,
        "loss_scale": {"value": scale.value, "good": scale.good, "skipped": scale.skipped},
    }


def restore(step: TrainStep, checkpoint: Checkpoint) -> int:
    """Bring a step to the state of a checkpoint, whose state.json has among others the step's `numbers`.

    All ranks call it at once; returns how many bytes this one read. CheckpointError on all of them where one cannot
    read what it needs, or where the checkpoint has weights that no rank takes; some weights may be changed by then.
    """
    _set(step, checkpoint)
    if isinstance(step.buckets, ShardedParameters):
        step.buckets.wait()  # weights on their way would arrive over those that are read
    mine, bytes_read, error = held(step), 0, ""
    try:
        with Source(checkpoint) as source:
            _check_dtypes(mine, source)
            load(mine, source)
            bytes_read = source.bytes_read
    except CheckpointError as caught:
        error = str(caught)
    world = step.mesh.world
    if error := first_of(error, world):
        raise CheckpointError(error)
    _check_all_taken(mine, checkpoint, world, step.pipelined.device)
    if isinstance(step.buckets, ShardedParameters):
        step.buckets.publish()
    return bytes_read


def _set(step: TrainStep, checkpoint: Checkpoint) -> None:
    """The plain numbers. Every rank reads the same file, and so fails alike."""
    try:
        updates, scale = int(checkpoint.state["updates"]), checkpoint.state["loss_scale"]
        value, good = float(scale["value"]), int(scale["good"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{checkpoint.path / STATE}: updates or loss_scale is missing, or no number") from None
    step.steps, step.scale.skipped = checkpoint.step, checkpoint.step - updates
    if step.scale.dynamic:
        step.scale.value, step.scale.good = value, good


def _check_dtypes(mine: list[Held], source: Source) -> None:
    for each in mine:
        if (dtype := source.dtype(each.name)) != each.values.dtype:
            raise CheckpointError(f"{source.path}: {each.name} is {dtype} there, and {each.values.dtype} in this run")


def _check_all_taken(mine: list[Held], checkpoint: Checkpoint, world: Axis, device: torch.device) -> None:
    """CheckpointError where the checkpoint has weights that no rank has loaded: a deeper model's, say."""
    names = sorted(checkpoint.index.tensors)
    taken = {each.name for each in mine}
    counts = torch.tensor([name in taken for name in names], dtype=torch.int32, device=device)
    if world.size > 1:
        counts = issue_all_reduce(counts, world).wait()
    left = [name for name, count in zip(names, counts.tolist(), strict=True) if not count]
    if left:
        raise CheckpointError(f"{checkpoint.path}: {left[0]} is in it and not in this run: it is of another model")

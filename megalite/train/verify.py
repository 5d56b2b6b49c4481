"""`megalite verify`: the configured mesh against the mesh of one, in float64, on a shrunk twin of the model.

The twin keeps what makes parallel code go wrong (heads and kv heads, tying, what does not divide, biases, a window,
separate documents, the pipeline's schedule and stages, microbatches, the optimizer) and shrinks the rest, so that every
rank can compute the dense model beside its share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.config import Config, MeshConfig
from megalite.data import Batch
from megalite.parallel.compare import NOISE, Comparison, Row
from megalite.parallel.in_flight import issue_all_reduce
from megalite.parallel.layout import own_positions
from megalite.parallel.mesh import Mesh
from megalite.parallel.parameters import cut
from megalite.parallel.pipeline.generators import GENERATORS
from megalite.parallel.zero import ShardedParameters
from megalite.plan.stages import plan_stages
from megalite.train.gradients import pieces_of
from megalite.train.step import TrainStep

LOSS_BOUND, GRADIENT_BOUND, NORM_BOUND, WEIGHT_BOUND = 1e-10, 1e-9, 1e-10, 1e-9
STEPS = 3


def shrunk(config: Config) -> Config:
    """A config of the same structure as this resolved one that computes in a moment.

    Kept: heads, kv heads, what the vocabulary and the tokens of a sequence on a rank leave over when divided by tp,
    parity, microbatches (what they leave over when divided by pp), stages, and which of them have no layer, one, or
    several. A window becomes shorter than the sequence.
    """
    model, mesh, train = config.model, config.mesh, config.train
    seq_len = _like(train.seq_len, 12 * mesh.sp, 2 * mesh.tp * mesh.sp)
    division = tuple(min(len(stage.layers), 2) for stage in plan_stages(config).stages)
    head_dim = 4 if model.head_dim % 4 == 0 else 2 + model.head_dim % 2
    twin = replace(
        model,
        vocab_size=_like(model.vocab_size, 96, 2 * mesh.tp),
        hidden=model.heads * head_dim,
        head_dim=head_dim,
        ffn=_like(model.ffn, max(2 * model.heads, mesh.tp), 2 * mesh.tp),
        layers=sum(division),
        max_seq_len=max(seq_len, min(model.max_seq_len, 64)),
        window=min(model.window, -(-seq_len // 3)),
        init_std=0.1,  # larger weights, so that no part of the network stays near linear
    )
    own_schedule = mesh.pp > 1 and mesh.schedule not in GENERATORS  # has as many microbatches as it has
    microbatches = mesh.microbatches if own_schedule else _like(mesh.microbatches, 2 * mesh.pp, mesh.pp)
    micro = 1 + train.micro_batch % 2
    return replace(
        config,
        model=twin,
        mesh=replace(
            mesh,
            microbatches=microbatches,
            division=division if mesh.pp > 1 else (),
            bucket_mb=0.01,
            compress="none",  # it is meant to round
        ),
        train=replace(
            train,
            dtype="float64",
            micro_batch=micro,
            global_batch=mesh.dp * micro * microbatches,
            seq_len=seq_len,
        ),
    )


def _like(size: int, about: int, modulus: int) -> int:
    """A size near `about`, never above `size`, that leaves the same remainder when divided by `modulus`."""
    return min(size, about // modulus * modulus + size % modulus or modulus)


@dataclass(frozen=True)
class Outcome:
    """What a run of the twin leaves: all losses, the first gradient and its norm, the weights after one step."""

    losses: list[float]
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def verify(config: Config, device: torch.device) -> list[Row]:
    """Run the (shrunk) config on its mesh and on the mesh of one: rows of relative errors, the same on every rank."""
    torch.set_default_dtype(torch.float64)
    sizes = config.mesh
    mesh = Mesh(sizes.dp, sizes.pp, sizes.sp, sizes.tp, sizes.ulysses, sizes.shard or None)
    batch = _drawn(config)
    plain = replace(config, mesh=MeshConfig(1, microbatches=1), train=replace(config.train, recompute="none"))
    expected, _ = _run(plain, Mesh(), batch, device)
    actual, step = _run(config, mesh, batch, device)

    comparison = Comparison()
    for number, losses in enumerate(zip(actual.losses, expected.losses, strict=True), 1):
        comparison.add(f"loss of step {number}", *losses, LOSS_BOUND)
    comparison.add("gradient norm", actual.norm, expected.norm, NORM_BOUND)
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    for what, mine, whole, bound, least in (
        ("gradient of", actual.gradients, expected.gradients, GRADIENT_BOUND, NOISE * largest),
        ("stepped", actual.weights, expected.weights, WEIGHT_BOUND, config.model.init_std),
    ):
        for name, tensor in whole.items():
            if name in step.table:
                comparison.add(f"{what} {name}", mine[name], cut(tensor, step.table[name], mesh.tp.rank), bound, least)
            else:
                comparison.held_elsewhere(f"{what} {name}", bound)
    return comparison.over_ranks()


def _drawn(config: Config) -> Batch:
    """A global batch: random tokens, some targets masked, and documents of random lengths where they are separate."""
    generator = torch.Generator().manual_seed(config.train.seed)
    rows, length = config.train.global_batch, config.train.seq_len
    ids = torch.randint(config.model.vocab_size, (rows, length + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, : (length + 1) // 3] = -100  # masked tokens make the mean over ranks' means wrong
    ends = torch.randint(max(2, length // 4), (rows, length), generator=generator) == 0  # a few a sequence
    return Batch(ids[:, :-1], targets, ends.cumsum(1) if config.data.separate_documents else None)


def _run(config: Config, mesh: Mesh, batch: Batch, device: torch.device) -> tuple[Outcome, TrainStep]:
    with device:
        step = TrainStep.of(config, mesh)
    share = own_share(batch, mesh, config.mesh.layout).to(device)

    step.backward(share.tokens, share.targets, share.documents)
    norm = step.finish_gradients(clip=0)
    gradients = _gradients(step)
    step.optimizer.zero_grad()
    losses = [step(share.tokens, share.targets, documents=share.documents).loss]
    with step.gathered():
        weights = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    losses += [step(share.tokens, share.targets, documents=share.documents).loss for _ in range(STEPS - 1)]
    return Outcome(losses, norm, gradients, weights), step


def _gradients(step: TrainStep) -> dict[str, Tensor]:
    """Of this rank's parameters, finished; what ZeRO divides is put together again."""
    if not isinstance(step.buckets, ShardedParameters):
        return {name: p.grad.clone() for name, p in step.model.named_parameters() if p.grad is not None}
    whole = {name: torch.zeros_like(parameter) for name, parameter in step.model.named_parameters()}
    for name, start, grad in pieces_of(step.model, step.buckets):
        whole[name].view(-1)[start : start + len(grad)] = grad
    shards = step.buckets.shards
    return whole if shards.size == 1 else {n: issue_all_reduce(x, shards).wait() for n, x in whole.items()}


def own_share(batch: Batch, mesh: Mesh, layout: str) -> Batch:
    """Of a global batch what this rank trains on: rows by dp, positions by sp."""
    length = batch.tokens.shape[1]
    own = torch.from_numpy(own_positions(layout, mesh.ring.size, mesh.ulysses.size, mesh.sp.rank, length))

    def share(x: Tensor) -> Tensor:
        return x.chunk(mesh.dp.size)[mesh.dp.rank][:, own]

    return Batch(share(batch.tokens), share(batch.targets), None if batch.documents is None else share(batch.documents))

"""`megalite verify`: the configured mesh against the mesh of one, in float64, on a shrunk twin of the model.

The twin keeps what makes parallel code go wrong (heads and kv heads, tying, what does not divide, biases, a window,
separate documents, microbatches, the optimizer) and shrinks the rest, so that every rank can compute the dense model
beside its share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.config import Config
from megalite.data import Batch
from megalite.model.gpt import GPT
from megalite.parallel.compare import NOISE, Comparison, Row
from megalite.parallel.layout import own_positions
from megalite.parallel.mesh import Mesh
from megalite.parallel.parameters import cut
from megalite.train.gradients import finish_gradients
from megalite.train.step import TrainStep

LOSS_BOUND, GRADIENT_BOUND, NORM_BOUND, WEIGHT_BOUND = 1e-10, 1e-9, 1e-10, 1e-9
STEPS = 3


def shrunk(config: Config) -> Config:
    """A config of the same structure that computes in a moment.

    Kept: heads, kv heads, what the vocabulary and the tokens of a sequence on a rank leave over when divided by tp,
    parity, microbatches. A window becomes shorter than the sequence.
    """
    model, mesh, train = config.model, config.mesh, config.train
    seq_len = _like(train.seq_len, 12 * mesh.sp, 2 * mesh.tp * mesh.sp)
    head_dim = 4 if model.head_dim % 4 == 0 else 2 + model.head_dim % 2
    twin = replace(
        model,
        vocab_size=_like(model.vocab_size, 96, 2 * mesh.tp),
        hidden=model.heads * head_dim,
        head_dim=head_dim,
        ffn=_like(model.ffn, max(2 * model.heads, mesh.tp), 2 * mesh.tp),
        layers=min(model.layers, 2),
        max_seq_len=max(seq_len, min(model.max_seq_len, 64)),
        window=min(model.window, -(-seq_len // 3)),
        init_std=0.1,  # larger weights, so that no part of the network stays near linear
    )
    share = train.global_batch // mesh.dp
    microbatches = min(2, share // (train.micro_batch or share))
    micro = 1 + (train.micro_batch or share) % 2
    return replace(
        config,
        model=twin,
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
    mesh = Mesh(sizes.dp, sizes.pp, sizes.sp, sizes.tp, sizes.ulysses)
    batch = _drawn(config)
    expected, _ = _run(config, Mesh(), batch, device)
    actual, step = _run(config, mesh, batch, device)

    comparison = Comparison()
    for number, (mine, dense) in enumerate(zip(actual.losses, expected.losses, strict=True), 1):
        comparison.add(f"loss of step {number}", mine, dense, LOSS_BOUND)
    comparison.add("gradient norm", actual.norm, expected.norm, NORM_BOUND)
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    for name, shard in step.table.items():
        gradient = cut(expected.gradients[name], shard, mesh.tp.rank)
        comparison.add(f"gradient of {name}", actual.gradients[name], gradient, GRADIENT_BOUND, NOISE * largest)
    for name, shard in step.table.items():
        weight = cut(expected.weights[name], shard, mesh.tp.rank)
        comparison.add(f"stepped {name}", actual.weights[name], weight, WEIGHT_BOUND, config.model.init_std)
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
    train = config.train
    with device:
        model = GPT.of(config, mesh)
    step = TrainStep(
        model, config.optimizer, micro_batch=train.micro_batch, z_loss=train.z_loss, bucket_mb=0.01
    )  # many buckets, as a real model has
    share = own_share(batch, mesh, config.mesh.layout).to(device)

    step.backward(*share)
    norm = step.finish_gradients(clip=0)
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    step.optimizer.zero_grad()
    losses = [step(share.tokens, share.targets, documents=share.documents).loss]
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses += [step(share.tokens, share.targets, documents=share.documents).loss for _ in range(STEPS - 1)]
    return Outcome(losses, norm, gradients, weights), step


def own_share(batch: Batch, mesh: Mesh, layout: str) -> Batch:
    """Of a global batch what this rank trains on: rows by dp, positions by sp."""
    length = batch.tokens.shape[1]
    own = torch.from_numpy(own_positions(layout, mesh.ring.size, mesh.ulysses.size, mesh.sp.rank, length))

    def share(x: Tensor) -> Tensor:
        return x.chunk(mesh.dp.size)[mesh.dp.rank][:, own]

    return Batch(share(batch.tokens), share(batch.targets), None if batch.documents is None else share(batch.documents))

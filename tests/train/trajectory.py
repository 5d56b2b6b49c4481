"""Ten training steps of a small model on a mesh: what the tests of exactness compare, and how far apart two are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from megalite.config import Config, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig, resolve
from megalite.data import Batch
from megalite.model.gpt import GPT
from megalite.parallel.mesh import Mesh
from megalite.parallel.parameters import Piece, cut
from megalite.parallel.sharding import Shard
from megalite.plan.stages import Stages, plan_stages
from megalite.testing import run_ranks
from megalite.train.gradients import pieces_of
from megalite.train.lr import learning_rate
from megalite.train.pipelined import parts_of
from megalite.train.step import TrainStep
from megalite.train.verify import own_share

STEPS = 10
VOCABULARY = 1001
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup=3, clip=0.5, weight_decay=0.1)  # clips at most steps

LLAMA = ModelConfig(vocab_size=VOCABULARY, layers=2, max_seq_len=48, init_std=0.1)
GPT2 = replace(
    LLAMA, positions="learned", norm="layernorm", activation="gelu_tanh", bias=True, tied=True, kv_heads=0, ffn=0
)
STYLES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "llama tied": replace(LLAMA, tied=True),
    "gpt2 untied": replace(GPT2, tied=False),
}


@dataclass(frozen=True)
class Case:
    """What is trained. kv_heads 0: as many as heads; window 0: none; documents: several in a sequence, apart."""

    style: str = "llama"
    heads: int = 6
    kv_heads: int = 0
    batch: int = 4
    length: int = 11  # odd: no sequence divides over any tp
    z_loss: float = 0.0
    window: int = 0
    documents: bool = False
    layers: int = 2

    @property
    def model(self) -> ModelConfig:
        sizes = {"hidden": 8 * self.heads, "heads": self.heads, "kv_heads": self.kv_heads, "ffn": 5 * self.heads}
        return replace(STYLES[self.style], head_dim=0, window=self.window, layers=self.layers, **sizes)

    def data(self) -> Batch:
        """The global batch; of the first row hardly a target counts, of the last one all do."""
        generator = torch.Generator().manual_seed(11)
        block = torch.randint(VOCABULARY, (self.batch, self.length + 1), generator=generator)
        tokens, targets = block[:, :-1], block[:, 1:].clone()
        for row in range(self.batch):
            targets[row, : (self.length - 1) * (self.batch - 1 - row) // max(1, self.batch - 1)] = -100
        ends = torch.randint(8, tokens.shape, generator=generator) == 0
        return Batch(tokens, targets, ends.cumsum(1) if self.documents else None)


@dataclass(frozen=True)
class Way:
    """Where and how it is trained: what must change no number. micro_batch 0: all of a rank's share at once."""

    dp: int = 1
    sp: int = 1
    tp: int = 1
    sequence_parallel: bool = True
    micro_batch: int = 0
    ulysses: int = 1
    layout: str = "zigzag"
    keep_kv: bool = False
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 0
    division: tuple[int, ...] = ()
    zero: int = 0
    shard: int = 0  # 0: all of dp × sp
    recompute: str = "none"

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.sp * self.tp

    def mesh(self) -> Mesh:
        return Mesh(self.dp, self.pp, self.sp, self.tp, self.ulysses, self.shard or None)

    def stages(self, case: Case) -> Stages:
        """The parts of the model, and the schedule of as many microbatches as `micro_batch` makes."""
        pipeline = {"schedule": self.schedule, "chunks": self.chunks, "division": self.division}
        mesh = MeshConfig(self.dp, self.pp, self.sp, self.tp, self.ulysses, self.layout, **pipeline)
        train = TrainConfig(global_batch=case.batch, micro_batch=self.micro_batch, seq_len=case.length)
        return plan_stages(resolve(Config(case.model, mesh, train=train), self.ranks))

    def gpt(self, case: Case, mesh: Mesh) -> GPT:
        further = {"sequence_parallel": self.sequence_parallel, "layout": self.layout, "keep_kv": self.keep_kv}
        further["recompute"] = self.recompute
        parts = parts_of(self.stages(case), mesh.pp.rank) if self.pp > 1 else ()
        return GPT(case.model, mesh, seed=5, parts=parts, **further)


@dataclass(frozen=True)
class Trajectory:
    """Losses and gradient norms of all steps, what this rank has of the first gradients, and how they are cut."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Piece]
    table: dict[str, Shard]


def train(case: Case, way: Way, mesh: Mesh) -> Trajectory:
    """Ten steps on this rank, in float64. Sets the default dtype for the time being."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        schedule = way.stages(case).schedule if way.pp > 1 else None
        micro_batch = way.micro_batch or (case.batch // way.dp // schedule.microbatches if schedule else 0)
        further = {"schedule": schedule, "micro_batch": micro_batch, "z_loss": case.z_loss, "bucket_mb": 0.02}
        step = TrainStep(way.gpt(case, mesh), OPTIMIZER, zero=way.zero, **further)
        tokens, targets, documents = own_share(case.data(), mesh, way.layout)[:3]

        step.backward(tokens, targets, documents)
        step.finish_gradients(clip=0)
        gradients = {piece.name: clone(piece) for piece in pieces_of(step.model, step.buckets)}
        step.optimizer.zero_grad()
        results = [step(tokens, targets, learning_rate(i, STEPS, OPTIMIZER), documents=documents) for i in range(STEPS)]
        return Trajectory([r.loss for r in results], [r.grad_norm for r in results], gradients, step.table)
    finally:
        torch.set_default_dtype(before)


def clone(piece: Piece) -> Piece:
    """Of its own memory."""
    return piece._replace(grad=piece.grad.clone())


@cache
def dense(case: Case) -> Trajectory:
    """On the mesh of one, the whole batch at once; on a rank, which has one thread and so computes the same twice."""
    return run_ranks(train, 1, case, Way(), Mesh())[0]


@dataclass(frozen=True)
class Distance:
    """The largest relative errors, of a gradient against the largest entry of the whole tensor, and whose it is."""

    loss: float
    norm: float
    gradient: float
    name: str
    names: frozenset[str]  # of the parameters of whose gradient this rank has a part


def distance(case: Case, way: Way, expected: Trajectory) -> Distance:
    """How far this rank is from the mesh of one."""
    mesh = way.mesh()
    actual = train(case, way, mesh)
    assert actual.gradients.keys() <= actual.table.keys() <= expected.gradients.keys()
    assert way.zero or actual.gradients.keys() == actual.table.keys()
    errors = {}
    for name, start, gradient in actual.gradients.values():
        shard = actual.table[name]
        whole = expected.gradients[name].grad.view(shard.shape)
        difference = gradient - cut(whole, shard, mesh.tp.rank).flatten()[start : start + len(gradient)]
        errors[name] = (difference.abs().max() / whole.abs().max()).item()
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    loss, norm = _worst(actual.losses, expected.losses), _worst(actual.norms, expected.norms)
    return Distance(loss, norm, errors[worst], worst, frozenset(errors))


def _worst(actual: list[float], expected: list[float]) -> float:
    return max(abs(a - e) / abs(e) for a, e in zip(actual, expected, strict=True))

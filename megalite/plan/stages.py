"""The stages of a pipeline: the schedule that a config asks for, checked, and which layers each stage has.

    stages = plan_stages(resolve(config))
    stages.of_rank(1)    {1: range(2, 4), 3: range(6, 8)}

Stage 0 has the embedding and the last stage has the head. What cannot be run is a ConfigError of one line, before any
process starts. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from megalite.config import Config, ModelConfig
from megalite.errors import ConfigError
from megalite.parallel.pipeline.check import check
from megalite.parallel.pipeline.files import load
from megalite.parallel.pipeline.generators import one_f_one_b
from megalite.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Stage:
    """A part of the model. layers: their numbers   cost: FLOPs a token, forward and backward"""

    number: int
    rank: int
    layers: range
    cost: int
    has_embedding: bool
    has_head: bool

    def __str__(self) -> str:
        first, last = self.layers.start, self.layers.stop - 1
        layers = f"layer {first}" if first == last else f"layers {first}–{last}"
        parts = [(self.has_embedding, "embedding"), (len(self.layers), layers), (self.has_head, "head")]
        return " + ".join(name for there, name in parts if there)


@dataclass(frozen=True)
class Stages:
    """The parts of a model, the first first, and the schedule in which their ranks compute them."""

    schedule: Schedule
    stages: tuple[Stage, ...]

    @property
    def count(self) -> int:
        """How many stages, on all ranks."""
        return len(self.stages)

    def of_rank(self, rank: int) -> dict[int, range]:
        """The layers of each stage that a rank holds, by the stage's number, the first first."""
        return {stage.number: stage.layers for stage in self.stages if stage.rank == rank}

    @property
    def division(self) -> tuple[int, ...]:
        """How many layers each stage has."""
        return tuple(len(stage.layers) for stage in self.stages)

    @property
    def imbalance(self) -> float:
        """Estimated work of the rank that has most, over the mean of the ranks."""
        work = [0] * len(self.schedule.ranks)
        for stage in self.stages:
            work[stage.rank] += stage.cost
        return max(work) * len(work) / sum(work)

    def __str__(self) -> str:
        """One line for the console, with … where there are many."""
        ranks = []
        for rank in range(len(self.schedule.ranks)):
            held = [str(stage) for stage in self.stages if stage.rank == rank]
            ranks.append(f"rank {rank} {', '.join(_few(held))}")
        return f"stages: {' | '.join(_few(ranks))}; most over mean {self.imbalance:.2f}"


def plan_stages(config: Config) -> Stages:
    """The stages of a resolved config; ConfigError where its schedule or its division cannot be run."""
    schedule = checked_schedule(config)
    layer, head = layer_flops(config.model, config.train.seq_len), head_flops(config.model)
    stages: list[Stage] = []
    first, last = 0, schedule.stages - 1
    for number, count in enumerate(_checked_division(config, schedule)):
        layers, has_head = range(first, first + count), number == last
        cost = count * layer + has_head * head
        stages.append(Stage(number, schedule.rank_of[number], layers, cost, number == 0, has_head))
        first += count
    return Stages(schedule, tuple(stages))


# --- the schedule -------------------------------------------------------------------------------------------------


def checked_schedule(config: Config) -> Schedule:
    """The schedule of a resolved config, free of deadlock and of its size; a ConfigError otherwise."""
    mesh = config.mesh
    if mesh.pp == 1:
        return one_f_one_b(1, mesh.microbatches)
    try:
        schedule = load(mesh.schedule, mesh.pp, mesh.microbatches, mesh.chunks or None)
        given = f"{mesh.schedule!r} given"
        if len(schedule.ranks) != mesh.pp:
            raise ValueError(f"{given}, of {len(schedule.ranks)} ranks; one of mesh.pp={mesh.pp} would do")
        if schedule.microbatches != mesh.microbatches:
            raise ValueError(
                f"{given}, of {schedule.microbatches} microbatches; one of mesh.microbatches={mesh.microbatches} "
                f"would do, or mesh.microbatches={schedule.microbatches}"
            )
        if idle := [rank for rank, actions in enumerate(schedule.ranks) if not actions]:
            raise ValueError(f"{given}, in which rank {idle[0]} computes nothing; a stage on every rank would do")
        check(schedule)
    except ValueError as error:
        raise ConfigError(f"mesh.schedule: {' '.join(str(error).split())}") from None
    return schedule


# --- the division -------------------------------------------------------------------------------------------------


def layer_flops(model: ModelConfig, seq_len: int) -> int:
    """Forward and backward FLOPs of one layer, for a token of a sequence of `seq_len`: PaLM's count (train/metrics)."""
    attention = model.hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    mlp = model.hidden * model.ffn * (3 if model.gated else 2)
    seen = min(seq_len, model.window) if model.window else seq_len
    return 6 * (attention + mlp) + 12 * model.heads * model.head_dim * seen


def head_flops(model: ModelConfig) -> int:
    """Forward and backward FLOPs of the head for a token; the embedding is a lookup and counts nothing."""
    return 6 * model.vocab_size * model.hidden


def divide(layers: int, rank_of: Sequence[int], layer: float, head: float) -> tuple[int, ...]:
    """How many of `layers` each stage gets, by the cost of one and of the head; all but the first and last get one.

    Ranks cost as nearly the same as can be, and in a rank its stages: a step takes as long as its dearest rank, and
    stages that are alike wait least for one another. As all layers cost the same, it is enough to give one at a time to
    the rank that has least. Of equal ranks it is the first, and there the last of equal stages: of all orders this came
    nearest to the shortest steps that the simulator finds.
    """
    last = len(rank_of) - 1
    if layers < last - 1:
        raise ValueError(f"layers: {layers} given; {last - 1} or more would do for {last + 1} stages")
    counts = [int(0 < stage < last) for stage in range(last + 1)]
    held: list[list[tuple[float, int]]] = [[] for _ in range(max(rank_of) + 1)]  # of each rank (cost, −stage)
    for stage, rank in enumerate(rank_of):
        held[rank].append((counts[stage] * layer + head * (stage == last), -stage))
    ranks = [(sum(cost for cost, _ in stages), rank) for rank, stages in enumerate(held)]
    for heap in (ranks, *held):
        heapify(heap)
    for _ in range(layers - sum(counts)):
        total, rank = ranks[0]
        cost, negated = held[rank][0]
        counts[-negated] += 1
        heapreplace(held[rank], (cost + layer, negated))
        heapreplace(ranks, (total + layer, rank))
    return tuple(counts)


def _checked_division(config: Config, schedule: Schedule) -> tuple[int, ...]:
    """The division that is given, or a computed one; a ConfigError where it does not fit the layers and the stages."""
    layers, stages, division = config.model.layers, schedule.stages, config.mesh.division
    if config.mesh.pp == 1:
        return (layers,)
    asked = f"the {stages} stages of {schedule.name} on mesh.pp={config.mesh.pp}"
    if layers < stages - 2:
        raise ConfigError(
            f"model.layers: {layers} given; {stages - 2} or more would do for {asked}, of which all but the first and "
            "the last need one"
        )
    if not division:
        head = head_flops(config.model)
        return divide(layers, schedule.rank_of, layer_flops(config.model, config.train.seq_len), head)
    if len(division) != stages:
        raise ConfigError(f"mesh.division: {len(division)} numbers given; {stages} would do for {asked}")
    for stage, count in enumerate(division):
        least = int(0 < stage < stages - 1)
        if count < least:
            raise ConfigError(f"mesh.division: {count} given for stage {stage}; {least} or more would do")
    if sum(division) != layers:
        raise ConfigError(f"mesh.division: {sum(division)} layers given; as many as model.layers={layers} would do")
    return division


def _few(words: list[str]) -> list[str]:
    return words if len(words) <= 4 else [*words[:2], "…", words[-1]]

"""Bytes that each rank needs in a training step, by kind, before the run. No torch.

parameters   what the Shard arithmetic leaves on the rank: rows of a padded vocabulary, kv heads that neighbours hold
             too, norms whole, a copy of a tied embedding at each end of a pipeline
gradients    the most that lasts from one backward to the next: all, in float32 at least; slices with ZeRO 2, and with
             ZeRO 1 where no microbatches add up
optimizer    two moments of each weight, of what Muon steps one, float32 masters of narrower weights; slices with ZeRO
host         where the optimizer is offloaded: these, masters of all weights and copies of gradients
activations  the most that forwards have left for backwards to come, over the rank's part of the schedule
buffers      about what works beside these at the peak: a block's or the head's backward, buckets that travel
peak         the most at one moment, without host; activations fall while gradients grow, so it can be less than the sum

Bytes per parameter of d shards: formulas in docs/memory.md. What a block keeps: plan/memory.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megalite.config import Config, ModelConfig
from megalite.parallel.pipeline.schedule import Action
from megalite.parallel.sharding import Block, Shard, fused
from megalite.plan.memory import activation_terms
from megalite.plan.stages import Stage, plan_stages

SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element
TRAVELLING = 2  # buckets of ZeRO on their way at a time (parallel/zero.py)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank, by kind as above."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    peak: int
    host: int = 0


def predicted_memory(config: Config) -> list[RankMemory]:
    """Of each pp rank, for a resolved config; other ranks of its stage need as much, to a few bytes of padding.

    ConfigError where its schedule or division cannot be run.
    """
    stages = plan_stages(config)
    of_rank = [[s for s in stages.stages if s.rank == rank] for rank in range(len(stages.schedule.ranks))]
    return [_Rank(config, held).memory(actions) for held, actions in zip(of_rank, stages.schedule.ranks, strict=True)]


# --- parameters ---------------------------------------------------------------------------------------------------


def parameter_shards(model: ModelConfig, tp: int, stages: Sequence[Stage]) -> dict[str, Shard]:
    """The Shard of every parameter that the rank of these stages holds, by the model's names."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    kv_parts, inner = min(model.kv_heads, tp), [model.ffn] * (2 if model.gated else 1)
    words = (Block(model.vocab_size, tp),)
    held: dict[str, Shard] = {}

    def hold(name: str, shape: tuple[int, ...], blocks: tuple[Block, ...] = (), dim: int = 0) -> None:
        held[name] = Shard(shape, "tp", tp, dim, blocks)

    def hold_norm(name: str) -> None:
        hold(f"{name}.weight", (model.hidden,))
        if model.norm == "layernorm" and model.bias:
            hold(f"{name}.bias", (model.hidden,))

    def hold_linear(name: str, sizes: tuple[int, int], blocks: tuple[Block, ...], dim: int) -> None:
        hold(f"{name}.weight", sizes, blocks, dim)
        if model.bias:
            hold(f"{name}.bias", sizes[:1], () if dim else blocks)

    embeds, predicts = any(stage.has_embedding for stage in stages), any(stage.has_head for stage in stages)
    if embeds or (predicts and model.tied):
        hold("embedding.weight", (model.vocab_size, model.hidden), words)
    if embeds and model.positions == "learned":
        hold("positions.weight", (model.max_seq_len, model.hidden))
    for layer in (layer for stage in stages for layer in stage.layers):
        block = f"blocks.{layer}"
        hold_norm(f"{block}.attention_norm")
        qkv = fused([q, kv, kv], [tp, kv_parts, kv_parts])
        hold_linear(f"{block}.attention.qkv", (q + 2 * kv, model.hidden), qkv, 0)
        hold_linear(f"{block}.attention.out", (model.hidden, q), (Block(q, tp),), 1)
        hold_norm(f"{block}.mlp_norm")
        hold_linear(f"{block}.mlp.up", (sum(inner), model.hidden), fused(inner, [tp] * len(inner)), 0)
        hold_linear(f"{block}.mlp.down", (model.hidden, model.ffn), (Block(model.ffn, tp),), 1)
    if predicts:
        hold_norm("norm")
        if not model.tied:
            hold("head.weight", (model.vocab_size, model.hidden), words)
    return held


def held_weights(model: ModelConfig, tp: int, stages: Sequence[Stage]) -> int:
    """How many weights the rank of these stages holds, padding included."""
    return sum(math.prod(shard.local_shape) for shard in parameter_shards(model, tp, stages).values())


# --- one rank -----------------------------------------------------------------------------------------------------


class _Rank:
    """A rank of the pipeline, with its stages."""

    def __init__(self, config: Config, stages: Sequence[Stage]) -> None:
        self.config, self.model, self.mesh, self.stages = config, config.model, config.mesh, stages
        self.size = SIZES[config.train.dtype]
        self.wide = max(4, self.size)
        mesh, self.offload = config.mesh, config.optimizer.offload
        self.flat = mesh.zero > 0 or self.size < self.wide or self.offload  # ShardedParameters, see train/step.py
        self.shards = (mesh.shard or mesh.dp * mesh.sp) if mesh.zero else 1
        self.tokens = config.train.micro_batch * config.train.seq_len // mesh.sp
        split = mesh.tp if mesh.sequence_parallel else 1
        self.residual = -(-self.tokens // split)  # of the residual stream
        self.padded = self.residual * split
        self.words = -(-self.model.vocab_size // mesh.tp)
        self.weights = held_weights(self.model, mesh.tp, stages)

    def memory(self, actions: Sequence[Action]) -> RankMemory:
        """actions: the rank's part of the schedule"""
        takes = self.mesh.microbatches > 1 or any(action.kind == "W" for action in actions)
        kept = {stage.number: self.kept(stage, takes) for stage in self.stages}
        final = {action.stage: action for action in actions}
        gradients = dict.fromkeys(kept, 0)
        held = put_off = most = 0  # of activations, of factors that W takes, of all that comes and goes
        most_held = most_put_off = most_gradients = 0
        for kind, stage, microbatch in actions:
            complete = final[stage] == (kind, stage, microbatch)
            before = held + put_off + sum(gradients.values())
            left, inputs, factors = kept[stage]
            held += {"F": left, "B": inputs - left, "W": -inputs, "BW": -left}[kind]
            put_off += {"F": 0, "B": factors, "W": -factors, "BW": 0}[kind]
            if kind in ("W", "BW"):
                most = max(most, before + self.opening(stage, complete, gradients[stage]))
                closing = self.closing(stage, complete, gradients[stage], takes)
                gradients[stage] = self.gradients(stage, complete)
                most = max(most, held + put_off + sum(gradients.values()) - gradients[stage] + closing)
            most, most_held = max(most, before), max(most_held, held)
            most_put_off, most_gradients = max(most_put_off, put_off), max(most_gradients, sum(gradients.values()))
        stepped = self.wide * self.weights // self.shards
        parameters = self.size * self.weights // (self.shards if self.mesh.zero == 3 else 1)
        gradient = max(most_gradients, stepped)
        optimizer = 0 if self.offload else self.moments + stepped * (self.size < self.wide)
        host = self.moments + 2 * stepped if self.offload else 0
        working = self.working(takes) + self.gathered
        peak = parameters + optimizer + max(most, gradient) + working
        working += most_put_off + self.travelling
        return RankMemory(parameters, gradient, optimizer, most_held, working, peak, host)

    # --- gradients

    def gradients(self, stage: int, complete: bool) -> int:
        """Bytes of a stage's gradients after a backward; complete: after the last of a step."""
        apart = self.apart[stage]
        weights = self.weights_of[stage] - apart
        sharded = self.mesh.zero >= 2 or (self.mesh.zero == 1 and complete)
        return weights * self.wide // (self.shards if sharded else 1) + apart * self.wide

    def opening(self, stage: int, complete: bool, there: int) -> int:
        """Bytes of the buckets that open while all activations are still there; there: of gradients that are."""
        if self.mesh.zero >= 2 and there:
            return self.travelling
        half, moves = self.size < self.wide, self.mesh.dp * self.mesh.sp > 1 or self.offload
        if (half and there) or not (half or (moves and (complete or self.mesh.zero >= 2))):
            return 0
        return min(self.wide * self.weights_of[stage], self.bucket)

    def closing(self, stage: int, complete: bool, there: int, takes: bool) -> int:
        """The most bytes of a stage's gradients when its backward ends: of all kinds, and what travels."""
        narrow = self.size * self.weights_of[stage] if takes and self.size < self.wide else 0
        now = self.gradients(stage, complete)
        if self.mesh.zero == 1:
            return max(there + narrow, now + self.travelling) if complete else now + narrow
        return now + narrow + self.travelling

    @property
    def bucket(self) -> int:
        """Bytes of a full bucket's gradients; ZeRO 3 has a bucket a unit."""
        return self.wide * max(self.units) if self.mesh.zero == 3 else int(self.mesh.bucket_mb * 2**20)

    @property
    def travelling(self) -> int:
        """The most that ZeRO has on its way: a bucket that fills, two that travel, and what comes of them."""
        if not self.mesh.zero:
            return 0
        all_of_it = self.wide * self.weights
        bucket = min(all_of_it, self.bucket)
        on_their_way = min(all_of_it, TRAVELLING * bucket)
        again = self.mesh.zero >= 2 and self.mesh.microbatches > 1
        return on_their_way + (bucket + on_their_way // self.shards if again else 0)

    @cached_property
    def weights_of(self) -> dict[int, int]:
        """Weights of each stage alone; a tied embedding counts where it is the head, if both are here."""
        table = self.words * self.model.hidden * self.model.tied
        return {
            stage.number: held_weights(self.model, self.mesh.tp, [stage]) - table * (stage is self.repeats)
            for stage in self.stages
        }

    @cached_property
    def apart(self) -> dict[int, int]:
        """Those whose gradient stays whole until the step's end: a tied embedding's in a pipeline."""
        shared = self.model.tied and self.mesh.pp > 1 and self.flat
        table = self.words * self.model.hidden if shared else 0
        ends = [stage for stage in self.stages if stage.has_embedding or stage.has_head]
        return {stage.number: table * (stage in ends and stage is not self.repeats) for stage in self.stages}

    @property
    def repeats(self) -> Stage | None:
        """The stage of the embedding, where another one here is that of the head."""
        first, last = self.stages[0], self.stages[-1]
        return first if first is not last and first.has_embedding and last.has_head else None

    @property
    def moments(self) -> int:
        """Bytes of AdamW's two moments of each weight, and of Muon's one of the matrices of blocks."""
        optimizer = self.config.optimizer
        moment, matrices = 2 if optimizer.state_dtype == "bfloat16" else self.wide, 0
        if optimizer.name == "muon":  # and so without ZeRO
            held = parameter_shards(self.model, self.mesh.tp, self.stages)
            shapes = [held[name].local_shape for name in held if name.startswith("blocks.")]
            matrices = sum(math.prod(shape) for shape in shapes if len(shape) > 1)
        return 2 * moment * (self.weights // self.shards - matrices) + self.wide * matrices

    # --- activations

    def kept(self, stage: Stage, takes: bool) -> tuple[int, int, int]:
        """Bytes that a microbatch leaves in a stage; what of them is left between B and W, and what W needs besides."""
        model, train, size, d = self.model, self.config.train, self.size, self.model.hidden
        heads, kv_heads = model.heads // self.mesh.tp, max(1, model.kv_heads // self.mesh.tp)
        ffn, attended = model.ffn // self.mesh.tp, heads * model.head_dim
        left = inputs = factors = 0
        if stage.has_embedding:  # indices, and which are of other ranks
            left += self.padded * (9 * (self.mesh.tp > 1) + 8 * (model.positions == "learned"))
        for number in range(len(stage.layers)):
            again = "none" if number % train.recompute_every else train.recompute
            terms = activation_terms(model, self.mesh, self.tokens, again, size)
            left += sum(terms.values())
            kept = sum(terms.get(name, 0) for name in ("qkv input", "up input", "activation"))
            kept += size * self.padded * attended * (again != "full")
            made = attended + 2 * kv_heads * model.head_dim + ffn * (2 if model.gated else 1) + 2 * d
            inputs += kept
            factors += size * self.padded * (made + 2 * d + attended + ffn) - kept
        if stage.has_head:
            left += size * self.residual * d + self.wide * self.residual * (1 if model.norm == "rmsnorm" else 2)
            if self.narrow_head(takes):
                left += self.padded * (size * d + self.wide * self.words)
                inputs += self.padded * size * d
                factors += self.padded * size * self.words
            else:
                left += size * d * (self.padded + self.words)
        return left, inputs, factors

    def narrow_head(self, takes: bool) -> bool:
        """Whether the head keeps its logits' gradient, and not its weight's (parallel/vocab.py)."""
        return takes and self.padded <= self.model.hidden

    # --- buffers

    def working(self, takes: bool) -> int:
        """About the most that works beside what is kept."""
        model, train = self.model, self.config.train
        layers = any(len(stage.layers) for stage in self.stages)
        wide = self.padded * model.ffn // self.mesh.tp * (5 if model.gated else 2)
        work = self.size * (wide + self.residual * model.hidden) if layers else 0
        if train.recompute == "full" and layers:
            again = activation_terms(model, self.mesh, self.tokens, "none", self.size)
            work += sum(again.values()) - again["x"]
        if any(stage.has_head for stage in self.stages):
            gradient = self.padded * self.words if self.narrow_head(takes) else self.words * model.hidden
            work = max(work, self.wide * (gradient + self.padded * model.hidden))
        return work

    @property
    def gathered(self) -> int:
        """Weights that ZeRO 3 has whole at a time: a unit's and the next one's."""
        if self.mesh.zero < 3 or self.shards == 1:
            return 0
        return self.size * max(map(sum, itertools.pairwise(self.units)), default=sum(self.units))

    @cached_property
    def units(self) -> list[int]:
        """Weights that ZeRO 3 gathers together: of the embedding, of each block, of the head."""
        model, tp, units = self.model, self.mesh.tp, []
        for stage in self.stages:
            nothing = dataclasses.replace(stage, layers=range(0), has_embedding=False, has_head=False)
            units += [dataclasses.replace(nothing, has_embedding=True)] * stage.has_embedding
            units += [dataclasses.replace(nothing, layers=range(layer, layer + 1)) for layer in stage.layers]
            units += [dataclasses.replace(nothing, has_head=True)] * stage.has_head
        return [held_weights(model, tp, [unit]) for unit in units]

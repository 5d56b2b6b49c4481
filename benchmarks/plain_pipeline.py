"""The same Llama under `torch.distributed.pipelining`, as a careful user would run it: the yardstick of pipeline.py.

    python benchmarks/plain_pipeline.py [--only losses,divisions] [--rounds 7]

Each rank makes its own stages by hand, of any number of blocks each. What costs them time or memory and can be done
without is done without: shapes are given, so that no extra forward infers them; the loss is divided by the tokens of
the batch, so that no gradient is scaled; outputs are not collected. Squared norm and loss travel in one all_reduce.

losses      and gradient norms of a few steps by every schedule, against the model whole on one rank
divisions   every sensible division of the blocks over the stages, raced: where DIVISIONS comes from
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

sys.path.insert(0, str(Path(__file__).parent))

from attention import print_ratios, take_turns
from cpu_step import BATCH, MODEL, SEQ_LEN
from plain_llama import PlainLlama

from megalite.config import ModelConfig, OptimizerConfig
from megalite.model.gpt import GPT
from megalite.testing import run_ranks

RANKS, MICROBATCHES = 2, 8
Division = tuple[int, ...]  # blocks of each stage; the first has the embedding too, the last the norm and the head


class Kind(NamedTuple):
    """A class of schedules of `torch.distributed.pipelining`. folded: stages go down the ranks and up again."""

    schedule: type
    chunks: int
    folded: bool = False


KINDS = {
    "gpipe": Kind(pipelining.ScheduleGPipe, 1),
    "1f1b": Kind(pipelining.Schedule1F1B, 1),
    "interleaved": Kind(pipelining.ScheduleInterleaved1F1B, 2),
    "zero-bubble": Kind(pipelining.ScheduleInterleavedZeroBubble, 1),
    "zero-bubble-2": Kind(pipelining.ScheduleInterleavedZeroBubble, 2),
    "zb-v": Kind(pipelining.ScheduleZBVZeroBubble, 2, folded=True),
    "dualpipe-v": Kind(pipelining.ScheduleDualPipeV, 2, folded=True),
}
CANDIDATES: dict[int, list[Division]] = {  # by chunks, over two ranks; the head takes about as long as a block
    1: [(3, 3), (4, 2), (5, 1)],
    2: [(2, 2, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (2, 2, 2, 0), (1, 1, 2, 2), (1, 2, 1, 2), (2, 1, 1, 2)],
}
DIVISIONS: dict[str, Division] = {
    "gpipe": (3, 3),
    "1f1b": (3, 3),
    "interleaved": (1, 2, 2, 1),
    "zero-bubble": (3, 3),
    "zero-bubble-2": (1, 2, 2, 1),
    "zb-v": (2, 2, 1, 1),
    "dualpipe-v": (2, 2, 1, 1),
}


class Part(PlainLlama):
    """Some blocks in a row: tokens `[b, s]`, or x `[b, s, d]` ─▶ x, or logits `[b, s, V]` where the head is held."""

    def __init__(self, c: ModelConfig, seq_len: int, division: Division, stage: int) -> None:
        super().__init__(replace(c, layers=division[stage]), seq_len)
        self.start, self.is_first, self.is_last = sum(division[:stage]), stage == 0, stage == len(division) - 1
        if not self.is_first:
            del self.embedding
        if not self.is_last:
            del self.norm, self.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x)) if self.is_last else x

    def example(self, rows: int) -> tuple[Tensor, Tensor]:
        """What it takes and makes of a microbatch, without storage; PyTorch sends no gradient of what needs none."""
        tokens = torch.empty(rows, len(self.cos), dtype=torch.long, device="meta")
        x, logits = (
            torch.empty(rows, len(self.cos), width, device="meta", requires_grad=True)
            for width in (MODEL.hidden, MODEL.vocab_size)
        )
        return tokens if self.is_first else x, logits if self.is_last else x

    def load_from(self, whole: PlainLlama) -> None:
        """Take this part's weights."""
        for mine, theirs in zip(self.blocks, whole.blocks[self.start :], strict=False):
            mine.load_state_dict(theirs.state_dict())
        for name in ("embedding",) * self.is_first + ("norm", "head") * self.is_last:
            getattr(self, name).load_state_dict(getattr(whole, name).state_dict())


def rank_of(stage: int, ranks: int, folded: bool) -> int:
    """The rank that holds a stage."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if folded and turn % 2 else place


class PlainPipeline:
    """A model over all ranks by KINDS[name] with its optimizer: takes the whole batch on each rank, trains on it.

    whole: whose weights to start from; without, each rank draws its own
    """

    def __init__(self, name: str, division: Division, config: OptimizerConfig, whole: PlainLlama | None = None) -> None:
        kind, ranks, rank = KINDS[name], dist.get_world_size(), dist.get_rank()
        assert len(division) == ranks * kind.chunks
        stages, self.parts = [], nn.ModuleList()
        for stage in range(len(division)):
            if rank_of(stage, ranks, kind.folded) == rank:
                part = Part(MODEL, SEQ_LEN, division, stage)
                if whole is not None:
                    part.load_from(whole)
                shapes = part.example(BATCH // MICROBATCHES)
                stages.append(pipelining.PipelineStage(part, stage, len(division), torch.device("cpu"), *shapes))
                self.parts.append(part)
        self.holds_first, self.holds_last = stages[0].is_first, stages[-1].is_last
        one_stage = issubclass(kind.schedule, pipelining.schedules.PipelineScheduleSingle)
        given: Any = stages[0] if one_stage else stages
        self.schedule = kind.schedule(given, MICROBATCHES, share_of_loss, scale_grads=False)
        self.optimizer, self.clip = optimizer_of(self.parts, config), config.clip

    def __call__(self, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
        """Loss of the whole batch and norm of the gradient, the same on each rank."""
        losses: list[Tensor] = []
        given = {"target": targets, "losses": losses} if self.holds_last else {}
        self.schedule.step(*([tokens] if self.holds_first else []), return_outputs=False, **given)
        norm = nn.utils.get_total_norm([p.grad for p in self.parts.parameters()])
        loss = torch.stack(losses).detach().sum() if losses else torch.zeros(())
        sums = torch.stack([norm.square(), loss])
        dist.all_reduce(sums)
        nn.utils.clip_grads_with_norm_(self.parts.parameters(), self.clip, sums[0].sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sums[1].item(), sums[0].sqrt().item()


def share_of_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """What a microbatch adds to the mean over the tokens of the batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * SEQ_LEN)


def optimizer_of(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW with decay on matrices."""
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, config.lr, (config.beta1, config.beta2), config.eps, fused=True)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets `[BATCH, SEQ_LEN]`, the same on all ranks, without end."""
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(MODEL.vocab_size, (BATCH, SEQ_LEN + 1), generator=generator)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def whole_model() -> PlainLlama:
    """The weights that every contender starts from."""
    return PlainLlama(MODEL, SEQ_LEN).load(GPT(MODEL))


def dense_steps(steps: int) -> list[tuple[float, float]]:
    """Loss and norm of each step of the model whole on one rank."""
    model, config, data = whole_model(), OptimizerConfig(), batches()
    optimizer = optimizer_of(model, config)
    seen = []
    for _ in range(steps):
        tokens, targets = next(data)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.append((loss.item(), norm.item()))
    return seen


def pipeline_steps(name: str, division: Division, steps: int) -> list[tuple[float, float]]:
    """Loss and norm of each step of a pipeline."""
    step, data = PlainPipeline(name, division, OptimizerConfig(), whole_model()), batches()
    return [step(*next(data)) for _ in range(steps)]


def race_divisions(name: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """All candidates of a schedule, turn by turn."""
    whole, data = whole_model(), batches()

    def contender(division: Division) -> Callable[[], object]:
        step = PlainPipeline(name, division, OptimizerConfig(), whole)
        return lambda: step(*next(data))

    return take_turns({str(division): contender(division) for division in CANDIDATES[KINDS[name].chunks]}, rounds)


def report_losses(steps: int = 4) -> None:
    """Print how far losses and gradient norms of each schedule are from those of the model whole."""
    expected = run_ranks(dense_steps, 1, steps, timeout=600)[0]
    print("loss and norm, whole on one rank: " + "  ".join(f"{loss:.6f} {norm:.6f}" for loss, norm in expected))
    for name, division in DIVISIONS.items():
        of_ranks = run_ranks(pipeline_steps, RANKS, name, division, steps, timeout=600)
        assert all(steps == of_ranks[0] for steps in of_ranks)
        off = [
            max(abs(a / b - 1) for a, b in zip(of_steps, of_whole, strict=True))
            for of_steps, of_whole in zip(zip(*of_ranks[0], strict=True), zip(*expected, strict=True), strict=True)
        ]
        print(
            f"  {name:14} {division!s:12} last loss {of_ranks[0][-1][0]:.6f}, largest relative differences: "
            f"loss {off[0]:.1e}, norm {off[1]:.1e}"
        )
        sys.stdout.flush()


def report_divisions(rounds: int, names: list[str]) -> None:
    """Print the speed of every candidate against the one that DIVISIONS has."""
    for name in names:
        print(f"\ndivisions of {MODEL.layers} blocks, {name}")
        print_ratios(run_ranks(race_divisions, RANKS, name, rounds, timeout=3600)[0], str(DIVISIONS[name]))
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="losses,divisions")
    parser.add_argument("--kinds", default=",".join(KINDS), help="whose divisions")
    parser.add_argument("--rounds", type=int, default=7, help="of each division, after two that are not counted")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {RANKS} ranks of one thread, {MICROBATCHES} microbatches, float32")
    for name in options.only.split(","):
        report_losses() if name == "losses" else report_divisions(options.rounds, options.kinds.split(","))


if __name__ == "__main__":
    main()

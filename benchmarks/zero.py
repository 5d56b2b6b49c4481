"""ZeRO on CPU ranks, against PyTorch's DDP and FSDP2: wall, CPU seconds, share of sgemm, peak memory, bytes moved.

    python benchmarks/zero.py [--steps 12] [--only 0,1,2,3] [--rows 8] [--small]

The contenders of a race live in the same processes and take turns, see race.py. Peak memory is taken from processes of
their own, one contender each. Model, batch and the two ranks are those of cpu_step.py, where most of a step is
computing; with fewer `--rows` (sequences a batch) a larger part is sending, and with `--small`, 2 M parameters on four
ranks that have a sequence of 64 tokens each, nearly all.

    zero 0   megalite                   DistributedDataParallel
    zero 1   megalite zero=1       fully_shard of each block and the whole, reshard_after_forward=False; zero 0
    zero 2   megalite zero=2       the same
    zero 3   megalite zero=3       fully_shard as it comes

Theirs are the plain Llama of plain_llama.py with AdamW(fused=True) and clip_grad_norm_.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from cpu_step import BATCH, MODEL, SEQ_LEN, batches
from cpu_step import theirs as plain
from plain_llama import PlainLlama
from race import WARM, Step, Times, Training, medians, take_turns

from megalite.config import ModelConfig, OptimizerConfig
from megalite.model.gpt import GPT
from megalite.parallel.mesh import Mesh
from megalite.testing import run_ranks
from megalite.train.step import TrainStep

RACES = {  # by zero: the others, and how much faster than them is asked for
    0: {"DDP": 1.0},
    1: {"FSDP2 kept": 1.5, "zero 0": 0.9},
    2: {"FSDP2 kept": 1.5, "zero 0": 0.9},
    3: {"FSDP2": 1.0},
}


@dataclass(frozen=True)
class Work:
    """What is trained, and on how many ranks. rows: sequences a batch, over all ranks"""

    model: ModelConfig = MODEL
    rows: int = BATCH
    seq_len: int = SEQ_LEN
    ranks: int = 2

    def batches(self, steps: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's share of each."""
        return batches("dp", steps, self.model.vocab_size, self.rows, self.seq_len)


SMALL = Work(ModelConfig(vocab_size=1024, hidden=192, layers=4, heads=4, ffn=512, max_seq_len=64), 4, 64, 4)


def contender(name: str, work: Work) -> Step:
    """A step by the name of who makes it: takes this rank's share of the batch, returns the global loss."""
    if name.startswith("zero"):
        mesh, zero = Mesh(dp=dist.get_world_size()), int(name.removeprefix("zero"))
        step = TrainStep(GPT(work.model, mesh), OptimizerConfig(), zero=zero)
        return lambda tokens, targets: step(tokens, targets).loss
    return plain("dp", work.model, work.seq_len) if name == "DDP" else fsdp2(work, reshard=name == "FSDP2")


def fsdp2(work: Work, reshard: bool) -> Step:
    """The plain Llama under fully_shard. reshard: weights are let go after forward, and gathered again for backward"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = PlainLlama(work.model, work.seq_len).load(GPT(work.model))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    config = OptimizerConfig()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, config.lr, (config.beta1, config.beta2), config.eps, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> float:
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    return step


def race(names: list[str], steps: int, work: Work) -> tuple[dict[str, Times], dict[str, list[float]], dict[str, int]]:
    """All of them, turn by turn: times, losses, and the bytes of the first one's last step."""
    contenders = {name: Training(contender(name, work), work.batches(steps + WARM)) for name in names}
    seen = take_turns(contenders, steps)
    return seen, {name: one.losses for name, one in contenders.items()}, contenders[names[0]].bytes


def peak_memory(name: str, work: Work, steps: int = 4) -> tuple[float, float]:
    """MiB of one rank before its model exists, and at its peak, in a process that runs one contender only."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    step = contender(name, work)
    for tokens, targets in work.batches(steps):
        step(tokens, targets)
    return before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def expected_bytes(zero: int, work: Work) -> int:
    """Of one step and rank, by the formulas: 2 (n−1)/n·Ψ, and with zero 3 the weights once more for backward.

    Zero 3 sends less: what is read last in forward is not gathered again, nor is what backward does not read.
    """
    passes, weights = 3 if zero == 3 else 2, sum(p.numel() for p in GPT(work.model).parameters())
    return passes * (work.ranks - 1) * 4 * weights // work.ranks


def report(zero: int, work: Work, seen: dict[str, Times], losses: dict[str, list[float]], sent: dict[str, int]) -> None:
    """Print medians of rank 0 and their ratios, and the peak memory of the rank that took most."""
    ours, median = f"zero {zero}", medians(seen)
    print()
    for other, target in RACES[zero].items():
        ratio = {what: median[other][what] / median[ours][what] for what in ("wall", "cpu", "cost")}
        drift = max(abs(a / b - 1) for a, b in zip(losses[ours], losses[other], strict=True))
        print(
            f"{ours}: {ratio['cost']:.3f} × the speed of {other} in sgemms (target {target}), "
            f"wall {ratio['wall']:.3f}, CPU {ratio['cpu']:.3f}; largest difference of losses {drift:.1e}"
        )
    for name, one in median.items():
        command = [sys.executable, __file__, "--memory", name, *work_options(work)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        base, peak = json.loads(done.stdout.splitlines()[-1])
        print(
            f"  {name:10}  wall {one['wall']:.3f} s  CPU {one['cpu']:.3f} s  cost {one['cost']:.1f} × 10 sgemms of "
            f"512³  peak {peak:.0f} MiB, of which {base:.0f} before the model"
        )
    total, expected = sum(sent.values()), expected_bytes(zero, work)
    print(f"  bytes a step and rank: {total:,} counted, {expected:,} by formula ({total / expected - 1:+.2%}); {sent}")
    sys.stdout.flush()


def work_options(work: Work) -> list[str]:
    """How this work is asked for on the command line."""
    return ["--rows", str(work.rows), *(["--small"] if work.ranks == SMALL.ranks else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each contender, after two that are not counted")
    parser.add_argument("--only", default="0,1,2,3")
    parser.add_argument("--rows", type=int, help=f"sequences a batch: {BATCH}, or {SMALL.rows} with --small")
    parser.add_argument("--small", action="store_true", help="2 M parameters, four ranks")
    parser.add_argument("--memory", metavar="CONTENDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = SMALL if options.small else Work()
    work = replace(work, rows=options.rows or work.rows)
    if work.rows % work.ranks:
        parser.error(f"--rows: {work.rows} given; a multiple of the {work.ranks} ranks would do")
    if options.memory:
        results = run_ranks(peak_memory, work.ranks, options.memory, work, timeout=600)
        print(json.dumps(max(results, key=lambda r: r[1])))
        return
    print(f"torch {torch.__version__}, float32, one thread a rank, {asdict(work)}")
    for zero in map(int, options.only.split(",")):
        names = [f"zero {zero}", *RACES[zero]]
        report(zero, work, *run_ranks(race, work.ranks, names, options.steps, work, timeout=3600)[0])


if __name__ == "__main__":
    main()

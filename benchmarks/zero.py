"""ZeRO on two CPU ranks, against PyTorch's DDP and FSDP2: wall, CPU seconds, share of sgemm, peak memory, bytes moved.

    python benchmarks/zero.py [--steps 12] [--only 0,1,2,3]

The contenders of a race live in the same processes and take turns, as in cpu_step.py, whose model, batches and measure
these are: a step's cost is its seconds over the seconds of a short sgemm before it, and a ratio is that of the medians
of these costs. Peak memory is taken from processes of their own, one contender each.

    zero 0   megalite dp=2              DistributedDataParallel
    zero 1   megalite dp=2 zero=1       fully_shard of each block and the whole, reshard_after_forward=False; zero 0
    zero 2   megalite dp=2 zero=2       the same
    zero 3   megalite dp=2 zero=3       fully_shard as it comes

Theirs are the plain Llama of plain_llama.py with AdamW(fused=True) and clip_grad_norm_.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from cpu_step import BATCH, MODEL, SEQ_LEN, Step, batches
from cpu_step import theirs as plain
from plain_llama import PlainLlama

from megalite.config import OptimizerConfig
from megalite.model.gpt import GPT
from megalite.parallel.mesh import Mesh
from megalite.parallel.traffic import traffic
from megalite.testing import run_ranks
from megalite.train.step import TrainStep

RANKS = 2
RACES = {  # by zero: the others, and how much faster than them is asked for
    0: {"DDP": 1.0},
    1: {"FSDP2 kept": 1.5, "zero 0": 0.9},
    2: {"FSDP2 kept": 1.5, "zero 0": 0.9},
    3: {"FSDP2": 1.0},
}


def contender(name: str) -> Step:
    """A step by the name of who makes it: takes this rank's share of the batch, returns the global loss."""
    if name.startswith("zero"):
        step = TrainStep(
            GPT(MODEL, Mesh(dp=dist.get_world_size())), OptimizerConfig(), zero=int(name.removeprefix("zero"))
        )
        return lambda tokens, targets: step(tokens, targets).loss
    return plain("dp") if name == "DDP" else fsdp2(reshard=name == "FSDP2")


def fsdp2(reshard: bool) -> Step:
    """The plain Llama under fully_shard. reshard: weights are let go after forward, and gathered again for backward"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = PlainLlama(MODEL, SEQ_LEN).load(GPT(MODEL))
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


def race(names: list[str], steps: int) -> dict[str, dict]:
    """All of them, turn by turn: seconds, CPU seconds and cost in sgemms of each step, losses, and our last bytes."""
    contenders = {name: contender(name) for name in names}
    a = torch.randn(512, 512)
    seen: dict[str, dict] = {name: {"wall": [], "cpu": [], "cost": [], "loss": []} for name in names}
    for number, (tokens, targets) in enumerate(batches("dp", steps + 2)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(10):
                torch.mm(a, a)
            sgemm = time.perf_counter() - begin
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            traffic.reset()
            loss = contenders[name](tokens, targets)
            wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
            seen[name]["bytes"] = {f"{axis} {operation}": sent for (axis, operation), sent in traffic.bytes.items()}
            seen[name]["loss"].append(loss)
            if number >= 2:  # the first steps allocate
                for what, value in (("wall", wall), ("cpu", cpu), ("cost", wall / sgemm)):
                    seen[name][what].append(value)
    return seen


def peak_memory(name: str, steps: int = 4) -> tuple[float, float]:
    """MiB of one rank before its model exists, and at its peak, in a process that runs one contender only."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    step = contender(name)
    for tokens, targets in batches("dp", steps):
        step(tokens, targets)
    return before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def expected_bytes(zero: int) -> int:
    """Of one step and rank, by the formulas: 2 (n−1)/n·Ψ, and with zero 3 the weights once more for backward.

    Zero 3 sends less: what is read last in forward is not gathered again, nor is what backward does not read.
    """
    passes = 3 if zero == 3 else 2
    return passes * (RANKS - 1) * 4 * sum(p.numel() for p in GPT(MODEL).parameters()) // RANKS


def report(zero: int, seen: dict[str, dict]) -> None:
    """Print medians of rank 0 and their ratios, and the peak memory of the rank that took most."""
    ours = f"zero {zero}"
    median = {
        name: {what: statistics.median(one[what]) for what in ("wall", "cpu", "cost")} for name, one in seen.items()
    }
    print()
    for other, target in RACES[zero].items():
        ratio = {what: median[other][what] / median[ours][what] for what in ("wall", "cpu", "cost")}
        drift = max(abs(a / b - 1) for a, b in zip(seen[ours]["loss"], seen[other]["loss"], strict=True))
        print(
            f"{ours}: {ratio['cost']:.3f} × the speed of {other} in sgemms (target {target}), "
            f"wall {ratio['wall']:.3f}, CPU {ratio['cpu']:.3f}; largest difference of losses {drift:.1e}"
        )
    for name, one in median.items():
        command = [sys.executable, __file__, "--memory", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        base, peak = json.loads(done.stdout.splitlines()[-1])
        print(
            f"  {name:10}  wall {one['wall']:.3f} s  CPU {one['cpu']:.3f} s  cost {one['cost']:.1f} × 10 sgemms of "
            f"512³  peak {peak:.0f} MiB, of which {base:.0f} before the model"
        )
    total, expected = sum(seen[ours]["bytes"].values()), expected_bytes(zero)
    print(
        f"  bytes a step and rank: {total:,} counted, {expected:,} by formula ({total / expected - 1:+.2%}); "
        f"{seen[ours]['bytes']}"
    )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each contender, after two that are not counted")
    parser.add_argument("--only", default="0,1,2,3")
    parser.add_argument("--memory", metavar="CONTENDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        results = run_ranks(peak_memory, RANKS, options.memory, timeout=600)
        print(json.dumps(max(results, key=lambda r: r[1])))
        return
    print(
        f"torch {torch.__version__}, {MODEL}, batch {BATCH}, sequence {SEQ_LEN}, float32, {RANKS} ranks of one thread"
    )
    for zero in map(int, options.only.split(",")):
        names = [f"zero {zero}", *RACES[zero]]
        report(zero, run_ranks(race, RANKS, names, options.steps, timeout=3600)[0])


if __name__ == "__main__":
    main()

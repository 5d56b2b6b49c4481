"""One training step on CPUs, against PyTorch's own: wall, CPU seconds, share of sgemm, peak memory, bytes moved.

    python benchmarks/cpu_step.py [--steps 12] [--only single,dp,tp,tp+sp]

Both contenders of a pair live in the same processes and take turns, see race.py; one thread a rank. Peak memory is
taken from processes of their own, one contender each.

    single   megalite                        plain PyTorch (plain_llama.py), AdamW(fused=True), clip_grad_norm_
    dp       megalite dp=2                   the same under DistributedDataParallel
    tp       megalite tp=2                   the same under parallelize_module, loss_parallel
    tp+sp    megalite tp=2, sequence par.    the same with SequenceParallel norms
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from plain_llama import PlainLlama
from race import WARM, Step, Times, Training, medians, take_turns

from megalite.config import ModelConfig, OptimizerConfig
from megalite.model.gpt import GPT
from megalite.parallel.mesh import Mesh
from megalite.testing import run_ranks
from megalite.train.step import TrainStep

MODEL = ModelConfig(vocab_size=4096, hidden=384, layers=6, heads=6, ffn=1024, max_seq_len=256)
BATCH, SEQ_LEN = 8, 256
TARGETS = {"single": 0.98, "dp": 1.0, "tp": 1.0, "tp+sp": 1.05}


def ours(pair: str) -> Step:
    """A step of megalite: takes this rank's share of the batch, returns the global loss."""
    world = dist.get_world_size()
    mesh = Mesh(dp=world) if pair == "dp" else Mesh(tp=world)
    step = TrainStep(GPT(MODEL, mesh, sequence_parallel=pair == "tp+sp"), OptimizerConfig())
    return lambda tokens, targets: step(tokens, targets).loss


def theirs(pair: str, config: ModelConfig = MODEL, seq_len: int = SEQ_LEN) -> Step:
    """The same step by PyTorch's own means."""
    from torch.distributed.tensor.parallel import loss_parallel

    model = PlainLlama(config, seq_len).load(GPT(config))
    if pair == "dp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif pair.startswith("tp"):
        _parallelize(model, sequence_parallel=pair == "tp+sp")
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    how = OptimizerConfig()
    optimizers = [
        torch.optim.AdamW(group, how.lr, (how.beta1, how.beta2), how.eps, weight_decay, fused=True)
        for group, weight_decay in ((decay, how.weight_decay), (rest, 0.0))
    ]

    def step(tokens: Tensor, targets: Tensor) -> float:
        def loss_of() -> Tensor:
            return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

        if pair.startswith("tp"):
            with loss_parallel():
                loss = loss_of()
                loss.backward()
        else:
            loss = loss_of()
            loss.backward()
        if pair != "tp":  # there plain and distributed tensors mix, which clip_grad_norm_ refuses: theirs goes without
            torch.nn.utils.clip_grad_norm_(model.parameters(), how.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        mean = loss.detach()
        mean = mean.full_tensor() if hasattr(mean, "full_tensor") else mean.clone()
        if pair == "dp":
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return mean.item()

    return step


def _parallelize(model: PlainLlama, sequence_parallel: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    outside = Shard(1) if sequence_parallel else Replicate()
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    three = PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None))
    column, row = ColwiseParallel, lambda: RowwiseParallel(output_layouts=outside)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "head": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(len(model.blocks)):
        plan |= {f"blocks.{i}.attention.{w}": column() for w in ("wq", "wk", "wv")}
        plan |= {f"blocks.{i}.mlp.{w}": column() for w in ("w1", "w3")}
        plan |= {f"blocks.{i}.attention.wo": row(), f"blocks.{i}.mlp.w2": row()}
        if sequence_parallel:
            plan |= {f"blocks.{i}.{n}": SequenceParallel() for n in ("attention_norm", "mlp_norm")}
            plan |= {f"blocks.{i}.attention": three, f"blocks.{i}.mlp": gathered}
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)


SIDES = {"ours": ours, "theirs": theirs}


def batches(
    pair: str, steps: int, words: int = MODEL.vocab_size, rows: int = BATCH, seq_len: int = SEQ_LEN
) -> list[tuple[Tensor, Tensor]]:
    """This rank's share of `steps` batches."""
    ids = torch.randint(words, (steps, rows, seq_len + 1), generator=torch.Generator().manual_seed(0))
    if pair == "dp":
        share = rows // dist.get_world_size()
        ids = ids[:, dist.get_rank() * share :][:, :share]
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in ids]


def race(pair: str, steps: int) -> tuple[dict[str, Times], dict[str, list[float]], dict[str, int]]:
    """Both contenders, turn by turn: times, losses, and the bytes of our last step."""
    contenders = {name: Training(step(pair), batches(pair, steps + WARM)) for name, step in SIDES.items()}
    seen = take_turns(contenders, steps)
    return seen, {name: one.losses for name, one in contenders.items()}, contenders["ours"].bytes


def peak_memory(pair: str, name: str, steps: int = 4) -> tuple[float, float]:
    """MiB of one rank before its model exists, and at its peak, in a process that runs one contender only."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    step = SIDES[name](pair)
    for tokens, targets in batches(pair, steps):
        step(tokens, targets)
    return before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def expected_bytes(pair: str) -> int:
    """Of one step and rank, by the formulas: dp 2(d−1)/d·Ψ; tp (4 a layer + embedding + head) all_reduces of b·s·h."""
    if pair == "dp":
        return 4 * sum(p.numel() for p in GPT(MODEL).parameters())  # 2(d−1)/d = 1 at d = 2
    return 4 * (4 * MODEL.layers + 2) * BATCH * SEQ_LEN * MODEL.hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each contender, after two that are not counted")
    parser.add_argument("--only", default=",".join(TARGETS))
    parser.add_argument("--memory", nargs=2, metavar=("PAIR", "CONTENDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        pair, name = options.memory
        results = run_ranks(peak_memory, 1 if pair == "single" else 2, pair, name, timeout=600)
        print(json.dumps(max(results, key=lambda r: r[1])))
        return
    print(f"torch {torch.__version__}, {MODEL}, batch {BATCH}, sequence {SEQ_LEN}, float32, one thread a rank")
    for pair in options.only.split(","):
        ranks = 1 if pair == "single" else 2
        report(pair, *run_ranks(race, ranks, pair, options.steps, timeout=3600)[0])


def report(pair: str, seen: dict[str, Times], losses: dict[str, list[float]], sent: dict[str, int]) -> None:
    """Print medians of rank 0 and their ratios, and the peak memory of the rank that took most."""
    median = medians(seen)
    ratio = {what: median["theirs"][what] / median["ours"][what] for what in ("wall", "cpu", "cost")}
    drift = max(abs(a / b - 1) for a, b in zip(losses["ours"], losses["theirs"], strict=True))
    print(
        f"\n{pair}: {ratio['cost']:.3f} × their speed in sgemms (target {TARGETS[pair]}), "
        f"wall {ratio['wall']:.3f}, CPU {ratio['cpu']:.3f}"
    )
    memory = {}
    for name in SIDES:
        command = [sys.executable, __file__, "--memory", pair, name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        memory[name] = base, peak = json.loads(done.stdout.splitlines()[-1])
        one = median[name]
        print(
            f"  {name:6}  wall {one['wall']:.3f} s  CPU {one['cpu']:.3f} s  cost {one['cost']:.1f} × 10 sgemms of "
            f"512³  peak {peak:.0f} MiB, of which {base:.0f} before the model"
        )
    (our_base, our_peak), (their_base, their_peak) = memory["ours"], memory["theirs"]
    print(
        f"  peak memory {our_peak / their_peak:.3f} × theirs; without what was there before "
        f"{(our_peak - our_base) / (their_peak - their_base):.3f} ×; largest difference of losses {drift:.1e}"
    )
    if pair != "single":
        total, expected = sum(sent.values()), expected_bytes(pair)
        print(
            f"  bytes a step and rank: {total:,} counted, {expected:,} by formula ({total / expected - 1:+.2%}); {sent}"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()

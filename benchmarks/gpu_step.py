"""Training on one GPU in bfloat16: tokens/s, MFU and peak memory, eager and compiled, against plain PyTorch.

    python benchmarks/gpu_step.py [--preset gpt2-medium,gpt3-1.3b] [--rows 8] [--length 0] [--steps 20]
    python benchmarks/gpu_step.py --device cpu --preset gpt2-tiny --rows 2 --steps 2     # tries the code, measures none

ours     TrainStep: bfloat16 weights, float32 masters; compiled: torch.compile of each block's forward
plain    plain_gpt2.py: float32 weights under autocast, AdamW(fused=True), clip_grad_norm_; compiled: the whole model

Both begin with the same weights and see the same tokens; one is gone before the next begins. Seconds are medians of
steps after three that are not counted. MFU is that of metrics.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from plain_gpt2 import PlainGPT2
from race import Step

from megalite.config import ModelConfig, OptimizerConfig
from megalite.model.gpt import GPT
from megalite.model.presets import PRESETS
from megalite.train.metrics import flops_per_token, peak_flops
from megalite.train.step import TrainStep

WARM = 3
OPTIMIZER = OptimizerConfig()


def ours(config: ModelConfig, device: torch.device, compiled: bool) -> Step:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = GPT(config)
            step = TrainStep(model, OPTIMIZER)
    finally:
        torch.set_default_dtype(torch.float32)
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    return lambda tokens, targets: step(tokens, targets).loss


def plain(config: ModelConfig, device: torch.device, compiled: bool) -> Step:
    model = PlainGPT2(config).load(GPT(config)).to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = OPTIMIZER.beta1, OPTIMIZER.beta2
    optimizer = torch.optim.AdamW(groups, OPTIMIZER.lr, betas, OPTIMIZER.eps, fused=True)
    loss_of = torch.compile(model) if compiled else model

    def step(tokens: Tensor, targets: Tensor) -> float:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


CONTENDERS: dict[str, tuple[Callable[[ModelConfig, torch.device, bool], Step], bool]] = {
    "ours": (ours, False),
    "plain": (plain, False),
    "ours, compiled": (ours, True),
    "plain, compiled": (plain, True),
}


def measure(step: Step, batches: list[tuple[Tensor, Tensor]], device: torch.device) -> tuple[float, float, list[float]]:
    """Median seconds of a step, GiB at the peak (0 on a CPU), losses."""
    seconds, losses = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for tokens, targets in batches:
        begin = time.perf_counter()
        losses.append(step(tokens, targets))  # a loss is a number on the host: the device is done
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return statistics.median(seconds[WARM:]), peak, losses


def report(preset: str, rows: int, length: int, steps: int, names: list[str], device: torch.device) -> None:
    config = ModelConfig(**PRESETS[preset])
    length = length or config.max_seq_len
    ids = torch.randint(
        config.vocab_size, (steps + WARM, rows, length + 1), generator=torch.Generator().manual_seed(0)
    ).to(device)
    batches = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in ids]
    flops, peak_speed = flops_per_token(config, length), peak_flops(device, torch.bfloat16)
    print(f"\n{preset}: {rows} sequences of {length} tokens a step")
    for name in names:
        make, compiled = CONTENDERS[name]
        seconds, peak, losses = measure(make(config, device, compiled), batches, device)
        speed = rows * length / seconds
        print(
            f"  {name:16} {speed:>10,.0f} tokens/s  MFU {speed * flops / peak_speed:6.1%}  peak {peak:6.2f} GiB  "
            f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
        )
        sys.stdout.flush()
        gc.collect()
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2-medium,gpt3-1.3b", help="of the GPT-2 kind, in model/presets.py")
    parser.add_argument("--only", default="; ".join(CONTENDERS), help="contenders, with ; between them")
    parser.add_argument("--rows", type=int, default=8, help="sequences a step")
    parser.add_argument("--length", type=int, default=0, help="tokens a sequence; 0: the longest that the model takes")
    parser.add_argument("--steps", type=int, default=20, help="of each contender, after three that are not counted")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("nothing measured: no CUDA device; --device cpu --preset gpt2-tiny --rows 2 --steps 2 would try the code")
        return
    device = torch.device(options.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    print(f"torch {torch.__version__} on {where}, bfloat16")
    names = [name.strip() for name in options.only.split(";")]
    for preset in options.preset.split(","):
        report(preset, options.rows, options.length, options.steps, names, device)


if __name__ == "__main__":
    main()

"""Recomputation on one core: CPU seconds of forward and backward, and the memory that they take.

    python benchmarks/recompute.py [--rounds 12]

none, selective and full of megalite, and PyTorch's selective checkpointing of the same blocks, whose policy keeps
matrix products and attention. They take turns, round by round; the ratios are those of medians of CPU seconds. Twice:
weight gradients by autograd, and handed over (weight_gradients.py), as with several microbatches. Kept is what is alive
between forward and backward, peak the most at once, of activations and gradients.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).parent))

from attention import LiveBytes
from cpu_step import MODEL, SEQ_LEN

from megalite.model.gpt import GPT
from megalite.model.recompute import Keeping
from megalite.parallel import weight_gradients

BATCH = 4
aten = torch.ops.aten
KEPT = {aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}


def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep matrix products and attention."""
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class ByPolicy(Keeping):
    """PyTorch's selective checkpointing of a block."""

    def around(self, block: nn.Module, forward: Any, x: Tensor, *more: Any) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(forward, x, *more, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def contenders() -> dict[str, GPT]:
    """The same model four times."""
    models = {name: GPT(MODEL, recompute=name) for name in ("none", "selective", "full")}
    models["PyTorch's selective"] = GPT(MODEL)
    for block in models["PyTorch's selective"].blocks:
        block.keeping = block.mlp.keeping = ByPolicy()
    return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="after two that are not counted")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    models, tokens = contenders(), torch.randint(MODEL.vocab_size, (BATCH, SEQ_LEN))
    print(f"torch {torch.__version__}, {MODEL}, batch {BATCH}, sequence {SEQ_LEN}, float32, one thread")
    ways = {"by autograd": nullcontext, "handed over": weight_gradients.taking}
    seconds: dict[tuple[str, str], list[float]] = {(name, way): [] for name in models for way in ways}
    for number in range(rounds + 2):
        for way, context in ways.items():
            for name in sorted(models, reverse=number % 2 == 1):
                begin = time.process_time()
                with context():
                    models[name](tokens, tokens).backward()
                if number >= 2:  # the first ones allocate
                    seconds[name, way].append(time.process_time() - begin)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    for name, model in models.items():
        model.zero_grad()
        with LiveBytes() as live:
            loss = model(tokens, tokens)
            kept = sum(size for storage, size in live.alive.items() if not storage.expired())
            loss.backward()
        times = ", ".join(f"{median[name, way] / median['none', way]:.3f} × {way}" for way in ways)
        print(f"  {name:20}  {times};  kept {kept / 2**20:6.1f} MiB, peak {live.peak / 2**20:6.1f} MiB")


if __name__ == "__main__":
    main()

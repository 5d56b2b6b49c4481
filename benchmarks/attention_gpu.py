"""The ring's local work on one GPU: ranks played in turn, against one flash call over the whole sequence.

    PYTHONPATH=. python benchmarks/attention_gpu.py [--length 32768] [--heads 32] [--kv-heads 8] [--size 128]

Each rank of a ring of 2, 4 and 8 computes its blocks, forward and backward, with the k and v of the others at hand:
what is left of a ring when nothing has to travel. Together the ranks compute what the one call does, so the ratio of
its time to theirs is the share of flash's throughput that blocks keep. On a CPU it runs too (float32, a short length).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.parallel.layout import LAYOUTS, ring_positions
from megalite.parallel.local_attention import Block, Exchange, attend
from megalite.parallel.tiles import Mask, Plan


class Given(Exchange):
    """The blocks of all ranks at hand, as `rank` of a plan would be sent them; gradients go nowhere."""

    def __init__(self, rank: int, plan: Plan, k: Tensor, v: Tensor) -> None:
        self.rank, self.plan = rank, plan
        self.given = [tuple(x[:, torch.from_numpy(own).to(x.device)] for x in (k, v)) for own in plan.positions]

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Block]]:
        """The own block, and the keys that are needed of others."""
        yield from super().blocks(k, v)
        for turn in range(1, self.plan.ranks):
            source = (self.rank - turn) % self.plan.ranks
            keys = self.plan.needs(self.rank, source)
            yield source, Block(*(x[:, keys.start : keys.stop] for x in self.given[source]), keys)


def seconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median of `rounds` runs after two."""
    times = []
    for _ in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def forward_and_backward(attention: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One call over the whole sequence."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768 if cuda else 2048)
    parser.add_argument("--heads", type=int, default=32 if cuda else 4)
    parser.add_argument("--kv-heads", type=int, default=8 if cuda else 2)
    parser.add_argument("--size", type=int, default=128 if cuda else 64)
    parser.add_argument("--rounds", type=int, default=10 if cuda else 3)
    options = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    name = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"torch {torch.__version__} on {name}, {options}, {dtype}, causal, forward and backward")
    counts = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    *qkv, grad = (torch.randn(1, options.length, n, options.size, device=device, dtype=dtype) for n in counts)
    whole = forward_and_backward(flash, qkv, grad)
    alone = seconds(lambda: forward_and_backward(flash, qkv, grad), device, options.rounds)
    flops = 14 * options.heads * options.size * options.length * (options.length + 1) / 2
    print(f"one flash call: {alone * 1e3:.1f} ms, {flops / alone / 1e12:.1f} TFLOP/s (causal FLOPs only)")
    for ring in (2, 4, 8):
        for layout in LAYOUTS:
            plan = Plan(Mask(), [ring_positions(layout, ring, rank, options.length) for rank in range(ring)])
            ranks, errors = [], []
            for rank in range(ring):
                own = torch.from_numpy(plan.positions[rank]).to(device)
                attention = partial(attend, plan=plan, exchange=Given(rank, plan, qkv[1], qkv[2]))
                mine = [x[:, own] for x in (*qkv, grad)]
                run = partial(forward_and_backward, attention, mine[:3], mine[3])
                errors += [(a - b[:, own]).float().abs().max().item() for a, b in zip(run()[:2], whole, strict=False)]
                ranks.append(seconds(run, device, options.rounds))
            print(
                f"ring of {ring} {layout:10}: {sum(ranks) * 1e3:8.1f} ms all ranks, {alone / sum(ranks):.3f} × the one "
                f"call; slowest rank {max(ranks) * 1e3:.1f} ms; out and dq differ by at most {max(errors):.1e}"
            )


if __name__ == "__main__":
    main()

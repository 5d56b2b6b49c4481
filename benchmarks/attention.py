"""Attention over a cut sequence: speed, bytes, balance, error and memory, on CPUs.

    python benchmarks/attention.py [--only speed,step,bytes,balance,error,memory] [--rounds 9]

speed     forward and backward of a ring of 2, one thread a rank, and one thread alone over the whole sequence with
          PyTorch's flash attention; contenders take turns in the same processes, each with a short sgemm before it
step      a training step at sp=2, ring and Ulysses, and PyTorch's context_parallel (plain_context_parallel.py)
bytes     what a rank sends a layer, counted, beside the formula of ring.py and ulysses.py
balance   FLOPs of attention by rank, counted
error     root mean square errors in bfloat16 against float64, over those of one flash call in bfloat16
memory    the most bytes of tensors that live at once in a forward and backward of a GPT, without its parameters
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent))

from attention_gpu import flash, forward_and_backward
from plain_context_parallel import SentBytes, context_parallel_step, squared_errors
from race import Run, Times, print_ratios, take_turns

from megalite.config import ModelConfig, OptimizerConfig
from megalite.model.gpt import GPT
from megalite.parallel.layout import LAYOUTS, own_positions, ring_positions
from megalite.parallel.local_attention import work
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.ring import ring_attention
from megalite.parallel.traffic import traffic
from megalite.parallel.ulysses import ulysses_attention
from megalite.testing import run_ranks
from megalite.train.step import TrainStep

LENGTH, HEADS, SIZE = 4096, 8, 64
MODEL = ModelConfig(vocab_size=4096, hidden=512, layers=4, heads=8, ffn=1408, max_seq_len=LENGTH)


def draw(length: int, *heads: int, size: int = SIZE, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """`[1, length, heads, size]` for each of `heads`, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, length, count, size, generator=generator).to(dtype) for count in heads]


def race_attention(rounds: int, kv_heads: int) -> dict[str, Times]:
    """One rank over the whole sequence against two over its halves."""
    mesh, ulysses = Mesh(sp=2), Mesh(sp=2, ulysses=2).ulysses
    *qkv, grad = draw(LENGTH, HEADS, kv_heads, kv_heads, HEADS)
    *half, half_grad = (x[:, : LENGTH // 2].contiguous() for x in (*qkv, grad))

    def alone() -> None:
        if mesh.rank == 0:
            forward_and_backward(flash, qkv, grad)

    def cut(attend: Callable[..., Tensor], axis: Axis, **how: object) -> Run:
        return lambda: forward_and_backward(partial(attend, axis=axis, **how), half, half_grad)

    contenders: dict[str, Run] = {layout: cut(ring_attention, mesh.sp, layout=layout) for layout in LAYOUTS}
    contenders["zigzag, kept"] = cut(ring_attention, mesh.sp, keep_kv=True)
    return take_turns({"one thread": alone, "ulysses": cut(ulysses_attention, ulysses)} | contenders, rounds)


def race_steps(rounds: int) -> tuple[dict[str, Times], dict[str, dict[str, int]], list[float]]:
    """Ours over a ring and by Ulysses against theirs: times, bytes, and the losses of the last step."""
    ids = torch.randint(MODEL.vocab_size, (1, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    losses: dict[str, float] = {}

    def ours(ulysses: int) -> Run:
        mesh = Mesh(sp=2, ulysses=ulysses)
        step = TrainStep(GPT(MODEL, mesh), OptimizerConfig())
        own = torch.from_numpy(own_positions("zigzag", mesh.ring.size, ulysses, mesh.sp.rank, LENGTH))
        name = "ulysses" if ulysses == 2 else "ring"
        return lambda: losses.update({name: step(tokens[:, own], targets[:, own]).loss})

    plain = context_parallel_step(OptimizerConfig(), MODEL, LENGTH)
    theirs = lambda: losses.update({"context_parallel": plain(tokens, targets)})  # noqa: E731
    contenders: dict[str, Run] = {"ring": ours(1), "ulysses": ours(2), "context_parallel": theirs}
    seen = take_turns(contenders, rounds)
    sent = {}
    for name in ("ring", "ulysses"):
        traffic.reset()
        contenders[name]()
        sent[name] = {f"{axis} {operation}": count for (axis, operation), count in traffic.bytes.items()}
    with SentBytes() as counted:
        theirs()
    return seen, sent | {"context_parallel": dict(counted.bytes)}, list(losses.values())


def bytes_of_a_layer(method: str, kv_heads: int, keep_kv: bool, part: int) -> tuple[int, int]:
    """Sent by this rank, forward and backward."""
    ranks = dist.get_world_size()
    mesh = Mesh(sp=ranks, ulysses=ranks if method == "ulysses" else 1)
    leaves = [x.requires_grad_() for x in draw(part, HEADS, kv_heads, kv_heads)]
    traffic.reset()
    if method == "ulysses":
        out = ulysses_attention(*leaves, mesh.ulysses)
    else:
        out = ring_attention(*leaves, mesh.ring, layout=method, keep_kv=keep_kv)
    forward = sum(traffic.bytes.values())
    out.sum().backward()
    return forward, sum(traffic.bytes.values()) - forward


def flops(layout: str, part: int) -> int:
    """Of this rank, forward and backward."""
    leaves = [x.requires_grad_() for x in draw(part, 2, 2, 2, size=8)]
    work.reset()
    ring_attention(*leaves, Mesh(sp=dist.get_world_size()).sp, layout=layout).sum().backward()
    return work.forward + work.backward


def in_bfloat16(layout: str, kv_heads: int, length: int) -> list[Tensor]:
    """This rank's out, dq, dk, dv."""
    axis = Mesh(sp=dist.get_world_size()).sp
    own = torch.from_numpy(ring_positions(layout, axis.size, axis.rank, length))
    *qkv, grad = (x[:, own] for x in bfloat16_inputs(kv_heads, length))
    return forward_and_backward(lambda *x: ring_attention(*x, axis, layout=layout), qkv, grad)


def bfloat16_inputs(kv_heads: int, length: int) -> list[Tensor]:
    """q, k, v and a gradient."""
    return draw(length, HEADS, kv_heads, kv_heads, HEADS, dtype=torch.bfloat16)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it occupied at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {StorageWeakRef(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (ref := StorageWeakRef(x.untyped_storage())) not in given:
                self.alive[ref] = x.untyped_storage().nbytes()
        self.alive = {ref: size for ref, size in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def peak_bytes(ulysses: int) -> int:
    """Of this rank, of activations and gradients in a step of a small GPT without its optimizer."""
    mesh = Mesh(sp=dist.get_world_size(), ulysses=ulysses)
    model = GPT(replace(MODEL, vocab_size=512, hidden=128, heads=8, head_dim=16, ffn=352), mesh)
    own = torch.from_numpy(own_positions("zigzag", mesh.ring.size, ulysses, mesh.sp.rank, LENGTH))
    ids = torch.randint(512, (1, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    with LiveBytes() as live:
        model(ids[:, :-1][:, own], ids[:, 1:][:, own]).backward()
    return live.peak


def report_speed(rounds: int) -> None:
    for kv_heads in (HEADS, 2):
        print(f"\nspeed: {HEADS}/{kv_heads} heads of {SIZE}, {LENGTH} tokens, float32, causal, forward and backward")
        print_ratios(run_ranks(race_attention, 2, rounds, kv_heads, timeout=3600)[0], "one thread")


def report_step(rounds: int) -> None:
    print(f"\nstep: sp=2, {MODEL}, one sequence of {LENGTH} tokens, float32")
    ranks = run_ranks(race_steps, 2, rounds, timeout=3600)
    seen, _, losses = ranks[0]
    print_ratios(seen, "context_parallel")
    for name in seen:
        of_each = [sent[name] for _, sent, _ in ranks]
        mean = {what: sum(of[what] for of in of_each) // len(ranks) for what in of_each[0]}
        print(f"  {name:20} sends {sum(mean.values()):,} bytes a step and rank (mean of the ranks): {mean}")
    print(f"  largest relative difference of their losses: {max(losses) / min(losses) - 1:.1e}")


def report_bytes(part: int = 128) -> None:
    print(f"\nbytes a layer, mean over the ranks: {part} tokens a rank, {HEADS} heads of {SIZE}, float32")
    for ranks in (2, 4, 8):
        for method in (*LAYOUTS, "ulysses"):
            for kv_heads in (8, 2):
                for keep_kv in (False, True)[: 1 if method == "ulysses" else 2]:
                    sent = run_ranks(bytes_of_a_layer, ranks, method, kv_heads, keep_kv, part)
                    forward, backward = (sum(direction) // ranks for direction in zip(*sent, strict=True))
                    if method == "ulysses":
                        by_formula = ((ranks - 1) * part * SIZE * 4 * 2 * (HEADS + max(kv_heads, ranks)) // ranks,) * 2
                    else:
                        of_all = {"contiguous": 0.5, "zigzag": 0.75, "striped": 1 - 0.5 / part}[method]
                        once = round((ranks - 1) * 2 * part * kv_heads * SIZE * 4 * of_all)
                        by_formula = once, once * (1 if keep_kv else 2)
                    print(
                        f"  {ranks} ranks {method:10} kv heads {kv_heads} {'kept' if keep_kv else '    '}  "
                        f"forward {forward:>9,} (formula {by_formula[0]:>9,})  "
                        f"backward {backward:>9,} (formula {by_formula[1]:>9,})"
                    )


def report_balance(part: int = 512) -> None:
    print(f"\nbalance: FLOPs of attention by rank over their mean, causal, {part} tokens a rank")
    for ranks in (2, 4, 8):
        for layout in LAYOUTS:
            found = run_ranks(flops, ranks, layout, part)
            shares = " ".join(f"{x * ranks / sum(found):.3f}" for x in found)
            print(f"  {ranks} ranks {layout:10} {shares}   most over least {max(found) / min(found):.3f}")


def report_error(length: int = 1024) -> None:
    print(f"\nerror of out, dq, dk, dv in bfloat16 over that of one flash call, {length} tokens, causal")
    for kv_heads in (8, 2):
        *qkv, grad = bfloat16_inputs(kv_heads, length)
        truth = forward_and_backward(flash, [x.double() for x in qkv], grad.double())

        def rms(tensors: list[Tensor], truth: list[Tensor] = truth) -> list[float]:
            return [(a.double() - e).square().mean().sqrt().item() for a, e in zip(tensors, truth, strict=True)]

        single = rms(forward_and_backward(flash, qkv, grad))
        print(f"  kv heads {kv_heads}: one flash call errs by " + " ".join(f"{x:.2e}" for x in single))
        for layout in LAYOUTS:
            for ranks in (1, 2, 4, 8):
                whole = [torch.empty_like(x, dtype=torch.bfloat16) for x in truth]
                for rank, tensors in enumerate(run_ranks(in_bfloat16, ranks, layout, kv_heads, length)):
                    for x, its in zip(whole, tensors, strict=True):
                        x[:, torch.from_numpy(ring_positions(layout, ranks, rank, length))] = its
                ratios = " ".join(f"{a / b:.3f}" for a, b in zip(rms(whole), single, strict=True))
                print(f"    {layout:10} ring of {ranks}: {ratios}")
        for ranks in (2, 4, 8):
            found = run_ranks(squared_errors, ranks, [*qkv, grad], truth)
            errors = [(sum(parts) / e.numel()) ** 0.5 for parts, e in zip(zip(*found, strict=True), truth, strict=True)]
            ratios = " ".join(f"{a / b:.3f}" for a, b in zip(errors, single, strict=True))
            print(f"    PyTorch's context_parallel over {ranks}: {ratios}")


def report_memory() -> None:
    print(f"\nmemory: peak bytes of a rank, {LENGTH} tokens, over those at sp=1")
    whole = max(run_ranks(peak_bytes, 1, 1))
    for ranks, ulysses in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)):
        peak = max(run_ranks(peak_bytes, ranks, ulysses))
        print(
            f"  sp {ranks} = ring {ranks // ulysses} × ulysses {ulysses}: {peak / 2**20:7.1f} MiB, {peak / whole:.3f}"
            f" (1/sp = {1 / ranks:.3f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="speed,step,bytes,balance,error,memory")
    parser.add_argument("--rounds", type=int, default=9, help="of each contender, after two that are not counted")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, one thread a rank")
    timed = {"speed": report_speed, "step": report_step}
    counted = {"bytes": report_bytes, "balance": report_balance, "error": report_error, "memory": report_memory}
    for name in options.only.split(","):
        if name in timed:
            timed[name](options.rounds)
        else:
            counted[name]()
        sys.stdout.flush()


if __name__ == "__main__":
    main()

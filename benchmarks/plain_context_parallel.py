"""PyTorch's own context parallelism (`torch.distributed.tensor.experimental.context_parallel`) on CPUs.

    python benchmarks/plain_context_parallel.py [--steps 8]

It ships with ring attention for the CUDA kernels alone; `register_cpu_ring` hands its ring template the CPU flash
kernel, and all else is PyTorch's: zigzag (head-tail) load balancing, rotation of keys and values, merging of blocks,
DDP for the gradients. The program checks attention and three losses against dense ones, then counts and times a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import _attention as public
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))

from plain_llama import PlainLlama

from megalite.config import ModelConfig, OptimizerConfig
from megalite.model.gpt import GPT
from megalite.testing import run_ranks

SMALL = ModelConfig(vocab_size=512, hidden=128, layers=2, heads=4, kv_heads=4, ffn=256, max_seq_len=512)
LONG = ModelConfig(vocab_size=4096, hidden=512, layers=2, heads=8, max_seq_len=4096)
CASES = {"small": (SMALL, 2, 512), "long": (LONG, 1, 4096)}  # model, batch, sequence
ROTATIONS = ("allgather", "alltoall")  # of keys and values; the first is PyTorch's default
Step = Callable[[Tensor, Tensor], float]


def register_cpu_ring() -> None:
    """Have `context_parallel` take the ring for the CPU flash kernel and its backward; once or often is the same."""
    ring.custom_ops[ring.aten._scaled_dot_product_flash_attention_for_cpu.default] = _ring_handler
    ring.custom_ops[ring.aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = _ring_handler


def _ring_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """What `_sdpa_handler` is for the CUDA kernels, less the sharding rules: everything is cut along the sequence."""
    first: DTensor = args[0]
    given = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    local = {name: value._local_tensor if isinstance(value, DTensor) else value for name, value in given.items()}
    if local.pop("attn_mask") is not None:
        raise NotImplementedError("context parallelism takes no attn_mask")
    group = first.device_mesh.get_group()
    if "grad_out" in local:
        results = ring._templated_ring_attention_backward(group, 2, op, grad_out_name="grad_out", **local)
    else:
        results = ring._templated_ring_attention(group, 2, op, **local)
    return tuple(DTensor.from_local(r, first.device_mesh, first.placements, run_check=False) for r in results)


def context_parallel_step(
    config: OptimizerConfig, model_config: ModelConfig, seq_len: int, rotation: str = ROTATIONS[0]
) -> Step:
    """A step over all ranks: takes the whole batch `[b, s]` on each, returns the mean loss. One rank: a plain step."""
    register_cpu_ring()
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = plain = PlainLlama(model_config, seq_len).load(GPT(model_config))
    if world > 1:  # by default DDP sends rank 0's buffers, the rope tables of its tokens, to the others
        model = torch.nn.parallel.DistributedDataParallel(plain, forward_sync_buffers=False)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, config.lr, (config.beta1, config.beta2), config.eps, fused=True)

    def cut(tokens: Tensor, targets: Tensor) -> AbstractContextManager[None]:
        public.set_rotate_method(rotation)
        buffers, dims = [tokens, targets, plain.cos, plain.sin], [1, 1, 0, 0]
        return context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={tokens, targets})

    def step(tokens: Tensor, targets: Tensor) -> float:
        tokens, targets = tokens.clone(), targets.clone()  # they are cut in place
        with cut(tokens, targets) if world > 1 else nullcontext():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()  # within, since its ring is there too
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach().clone()  # of as many tokens on every rank
        dist.all_reduce(mean)
        return mean.item() / world

    return step


class SentBytes(TorchDispatchMode):
    """Bytes that this rank sends within the block, were each collective bandwidth-optimal over all ranks.

    bytes: by purpose and operation, "attention all_gather". Of S bytes and n ranks, all_reduce sends 2 (n-1)/n · S,
    all_gather (n-1) · S of its own part, all_to_all what is not for the rank itself (its split sizes say).
    Every operation passes through Python meanwhile, so time other steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # first it becomes local operations and collectives, which come here
        library, _, operation = func._schema.name.partition("::")
        others = dist.get_world_size() - 1
        if operation == "all_gather_into_tensor":
            self.bytes["attention all_gather"] += others * args[0].nbytes
        elif operation == "all_to_all_single":
            splits = args[2]
            self.bytes["attention all_to_all"] += (sum(splits) - splits[dist.get_rank()]) * args[0].itemsize
        elif operation == "allreduce_":  # DDP's buckets, and the mean of the loss
            purpose = "loss" if sum(t.numel() for t in args[0]) == 1 else "gradients"
            self.bytes[f"{purpose} all_reduce"] += sum(2 * others * t.nbytes // (others + 1) for t in args[0])
        elif library in ("_c10d_functional", "c10d") and operation not in ("wait_tensor", "_wrap_tensor_autograd"):
            raise NotImplementedError(f"bytes of {func}")
        return func(*args, **(kwargs or {}))


def attention_errors(kv_heads: int, rotation: str) -> dict[str, float]:
    """Largest difference of the ring from dense attention, over the largest entry: output and three gradients."""
    register_cpu_ring()
    public.set_rotate_method(rotation)
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, heads, 256, 32) for heads in (4, kv_heads, kv_heads, 4)]
    *qkv, grad = (torch.randn(shape, generator=generator) for shape in shapes)

    def attend() -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in qkv]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    buffers = [*qkv, grad, *(expected := attend())]
    with context_parallel(init_device_mesh("cpu", (2,)), buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
        pairs = zip(("out", "dq", "dk", "dv"), attend(), expected, strict=True)
        return {name: ((a - b).abs().max() / b.abs().max()).item() for name, a, b in pairs}


def squared_errors(inputs: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Sums over this rank's part of out, dq, dk, dv against `truth`; q, k, v and a gradient are `[1, s, heads, e]`."""
    register_cpu_ring()
    *qkv, grad = (x.transpose(1, 2).contiguous() for x in inputs)
    truth = [x.transpose(1, 2).contiguous() for x in truth]
    buffers = [*qkv, grad, *truth]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
        leaves = [x.detach().clone().requires_grad_() for x in qkv]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        return [(a.double() - e).square().sum().item() for a, e in zip(found, truth, strict=True)]


def measure(case: str, steps: int) -> dict[str, Any]:
    """Steps with each rotation by turns, or of one rank by itself: losses, seconds, bytes sent in the last."""
    model_config, batch, seq_len = CASES[case]
    names = ROTATIONS if dist.get_world_size() > 1 else ("dense",)
    contenders = {name: context_parallel_step(OptimizerConfig(), model_config, seq_len, name) for name in names}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model_config.vocab_size, (steps + 3, batch, seq_len + 1), generator=generator)
    seen: dict[str, Any] = {name: {"wall": [], "loss": []} for name in names}
    for number, tokens in enumerate(ids):
        for name, step in contenders.items():
            dist.barrier()
            begin = time.perf_counter()
            with SentBytes() if number == steps + 2 else nullcontext() as counter:
                loss = step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            seen[name]["wall"].append(time.perf_counter() - begin)
            seen[name]["loss"].append(loss)
            seen[name]["sent"] = dict(counter.bytes) if counter else {}
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="of each rotation, after two that are not counted")
    steps = parser.parse_args().steps
    print(f"torch {torch.__version__}, 2 ranks, one thread each, float32")
    for kv_heads in (4, 2):
        for rotation in ROTATIONS:
            errors = run_ranks(attention_errors, 2, kv_heads, rotation)
            worst = {name: f"{max(e[name] for e in errors):.1e}" for name in errors[0]}
            print(f"attention, 4 heads over {kv_heads} of keys, {rotation}: relative errors {worst}")
            assert all(error < 1e-5 for e in errors for error in e.values()), errors
    for case, (model_config, batch, seq_len) in CASES.items():
        (dense,), (parallel, *_) = (run_ranks(measure, n, case, steps, timeout=3600) for n in (1, 2))
        print(f"\n{case}: {model_config}, batch {batch}, sequence {seq_len}")
        for name, seen in (dense | parallel).items():
            wall = seen["wall"][2:-1]  # the first steps allocate, the last counts bytes
            pairs = list(zip(seen["loss"], dense["dense"]["loss"], strict=True))[:3]
            drift = max(abs(a / b - 1) for a, b in pairs)
            sent = ", ".join(f"{what} {size:,}" for what, size in seen["sent"].items())
            print(f"  {name:9}  {statistics.median(wall):.3f} s a step, best {min(wall):.3f}; losses {drift:.1e} off")
            print(f"             bytes a rank and step: {sent}", flush=True)
            assert drift < 1e-6, pairs  # rope tables of the wrong tokens move the loss by 7e-6 only


if __name__ == "__main__":
    main()

"""Joining and leaving the world: the default process group and the device of one rank.

Whoever starts the ranks (torchrun, the command line, a test) brings the rank and a store through which the ranks
find each other; nothing here reads the environment.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


def join(
    rank: int, size: int, store: dist.Store, device: torch.device = CPU, threads: int = 1, timeout: float = 600.0
) -> None:
    """Enter the world of `size` ranks as `rank`: NCCL where `device` is a GPU, gloo where it is the CPU.

    The store must be fresh: one that an earlier world has used still holds that world's addresses. `threads` is what
    PyTorch computes with on the CPU. A collective that waits longer than `timeout` seconds fails.
    """
    torch.set_num_threads(threads)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=device if gpu else None,
    )


def leave() -> None:
    """Take down every process group of this process, if there is any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def local_device(local_rank: int, local_size: int) -> torch.device:
    """The GPU of one of the `local_size` ranks of this machine where each can have one, else the CPU."""
    alone = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    return torch.device("cuda", local_rank) if alone else CPU


def local_threads(local_size: int) -> int:
    """How many threads each of the `local_size` ranks of this machine may compute with."""
    return max(1, usable_cores() // local_size)


def usable_cores() -> int:
    """The cores that this process may use, which a container or a batch system can hold below those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Checkpoints against torch.distributed.checkpoint: seconds to save and to load, and how long training waits.

    python benchmarks/checkpoint.py [--mb 200] [--rounds 7] [--folder DIR]

Two ranks hold half of every tensor each (weights and AdamW's two moments), ours as a Shard, theirs as DTensors. Both
wait for the disk (fsync) and write no tensor twice; both load what they have saved, from the page cache. Ours writes
and checks a CRC-32 of everything besides. The contenders take turns in the same two processes, and medians are printed.

    save            begin and commit, the files written in between by the rank itself     dcp.save
    load            restored into tensors that are there                                  dcp.load
    blocking        begin, settle after a forward and backward of 0.1 s, and commit once the thread is done: what
                    training waits for, of our save
    one layer       bytes that a rank reads to have one layer of sixteen
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Placement

from megalite.checkpoint import folder
from megalite.checkpoint.held import Held
from megalite.checkpoint.saver import Saver
from megalite.checkpoint.source import Source, load
from megalite.parallel.mesh import Mesh
from megalite.parallel.sharding import Block, Shard
from megalite.testing import run_ranks

LAYERS, COLUMNS, WARM = 16, 1024, 2
STEP = 0.1  # seconds of forward and backward


class Race:
    """The same tensors for both, and what is timed."""

    def __init__(self, mb: int, root: Path) -> None:
        mesh, self.root = Mesh(tp=2), root
        tp, rows = mesh.tp, mb * 2**20 // (4 * COLUMNS * LAYERS * 3) // 2 * 2
        shard = Shard((rows, COLUMNS), "tp", 2, 0, (Block(rows, 2),))
        self.local = {
            f"{kind}/blocks.{layer}.weight": torch.randn(shard.local_shape)
            for layer in range(LAYERS)
            for kind in ("model", "exp_avg", "exp_avg_sq")
        }
        self.held = [Held(name, shard, tp.rank, 0, values.view(-1)) for name, values in self.local.items()]
        device_mesh = mesh.device_mesh["tp"]
        self.theirs = {
            name: DTensor.from_local(x, device_mesh, [Placement(0)], run_check=False) for name, x in self.local.items()
        }
        self.now, self.later = (Saver(root / "ours", mesh.world, asynchronous=kind) for kind in (False, True))
        self.rank, self.number = mesh.rank, 0
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, what: Callable[[], None]) -> None:
        dist.barrier()
        begin = time.perf_counter()
        what()
        dist.barrier()
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)

    def round(self) -> None:
        self.number += 1
        step = self.number
        theirs = self.root / f"theirs-{step}"
        turns = [
            lambda: self.time("save", lambda: self._save(step)),
            lambda: self.time("dcp save", lambda: dcp.save(self.theirs, checkpoint_id=theirs)),
        ]
        for turn in turns[:: -1 if step % 2 else 1]:
            turn()
        before = {name: x.clone() for name, x in self.local.items()}
        turns = [
            lambda: self.time("load", lambda: self._load(step)),
            lambda: self.time("dcp load", lambda: dcp.load(self.theirs, checkpoint_id=theirs)),
        ]
        for turn in turns[:: -1 if step % 2 else 1]:
            for x in self.local.values():
                x.zero_()
            turn()
            assert all(torch.equal(x, before[name]) for name, x in self.local.items())
        self._blocking(step + 10**6)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(theirs)
            shutil.rmtree(self.root / "ours")
        dist.barrier()

    def _save(self, step: int) -> None:
        self.now.begin(step, self.held, {})
        self.now.commit()

    def _load(self, step: int) -> None:
        with Source(folder.read(self.root / "ours" / folder.name_of(step))) as source:
            load(self.held, source)

    def _blocking(self, step: int) -> None:
        """As in training, which computes in between; here the ranks sleep, and the disk has its time."""
        dist.barrier()
        begin = time.perf_counter()
        self.later.begin(step, self.held, {})
        begun = time.perf_counter() - begin
        time.sleep(STEP)
        begin = time.perf_counter()
        self.later.settle()
        settled = time.perf_counter() - begin
        while self.later.writing:
            time.sleep(0.01)
        dist.barrier()
        begin = time.perf_counter()
        self.later.commit()
        committed = time.perf_counter() - begin
        parts = {"begin": begun, "settle": settled, "commit": committed}
        for name, seconds in (*parts.items(), ("blocking", sum(parts.values()))):
            self.seconds.setdefault(name, []).append(seconds)

    def one_layer(self) -> tuple[int, int]:
        """Bytes read, and bytes of what this rank holds of the layer."""
        self._save(1)
        wanted = [each for each in self.held if each.name.split("/")[1] == "blocks.3.weight"]
        with Source(folder.read(self.root / "ours" / folder.name_of(1))) as source:
            load(wanted, source)
            return source.bytes_read, sum(each.values.nbytes for each in wanted)


def measured(mb: int, rounds: int, root: str) -> tuple[dict[str, list[float]], tuple[int, int], int]:
    torch.manual_seed(dist.get_rank())
    race = Race(mb, Path(root))
    for _ in range(rounds + WARM):
        race.round()
    size = 2 * sum(tensor.nbytes for tensor in race.local.values())
    return {name: seconds[WARM:] for name, seconds in race.seconds.items()}, race.one_layer(), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="on the disk to be measured; by default Python's temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as root:
        seconds, (read, held), size = run_ranks(measured, 2, given.mb, given.rounds, root, timeout=1800)[0]
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{size / 2**20:.0f} MiB of state on 2 ranks, medians of {given.rounds} rounds")
    for name, value in median.items():
        print(f"  {name:9} {value:.3f} s   {min(seconds[name]):.3f} to {max(seconds[name]):.3f}")
    for name in ("save", "load"):
        pairs = [theirs / ours for ours, theirs in zip(seconds[name], seconds[f"dcp {name}"], strict=True)]
        print(
            f"  {name}: {median[f'dcp {name}'] / median[name]:.2f} × dcp's speed, paired {statistics.median(pairs):.2f}"
        )
    print(f"  blocking: {median['blocking'] / median['save']:.1%} of a save")
    print(f"  one layer: {read:,} bytes read for {held:,} held, of {size:,}")


if __name__ == "__main__":
    main()

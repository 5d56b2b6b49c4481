"""What a rank's memory holds in one training step, by kind: counted, to stand beside plan/rank_memory.py.

parameters, optimizer   the distinct storages of weights, of masters and of the optimizer's state, after the step
host                    where the optimizer is offloaded: masters, state, copies of gradients; not in `peak`
gradients               likewise, the most after any microbatch's backward of a stage and before the optimizer steps
activations             what forwards made, or were sent, and left: the most at the end of any forward
buffers                 at the moment of the peak, all that is none of these: operators' results that are soon let go
                        of, messages, buckets that travel
peak                    the most at one moment, by the allocator on a GPU; on a CPU, which has none to ask, after any
                        operator: what one takes within itself is not seen

Every operator of that step is looked at (a dispatch mode), which makes it slower, a large model's by some percent; no
other step is touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megalite.config import Config
from megalite.parallel.mesh import coordinates
from megalite.parallel.zero import ShardedParameters
from megalite.plan.rank_memory import RankMemory, predicted_memory
from megalite.train.offload import Offloaded
from megalite.train.step import StepResult, TrainStep

Made = Literal["by forwards", "otherwise"]
LET_GO = 0.002  # seconds in which gloo's threads let go of what has arrived


def measured_memory(step: TrainStep, run: Callable[[], StepResult]) -> tuple[StepResult, RankMemory]:
    """`run()`, which is one call of `step` and not its first, and what this rank's memory held during it."""
    watch, device = _Watch(step), step.pipelined.device
    handles = (
        step.model.register_forward_pre_hook(watch.before_forward, with_kwargs=True),
        step.model.register_forward_hook(watch.after_forward),
        register_optimizer_step_pre_hook(lambda *_: watch.look_at_gradients()),
    )
    step.pipelined.after_backward = watch.look_at_gradients
    held = _bytes([*_weights(step), *(() if isinstance(step.optimizer, Offloaded) else _stepped(step))])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with watch:
            result = run()
    finally:
        step.pipelined.after_backward = None
        for handle in handles:
            handle.remove()
    peak, beside = held + watch.peak, watch.peak - watch.known_at_peak
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        peak, beside = allocated, allocated - held - watch.known_at_peak
    parameters = _bytes(_weights(step))
    optimizer, host = _bytes([*_weights(step), *_stepped(step)]) - parameters, 0
    if isinstance(step.optimizer, Offloaded):
        optimizer, host = 0, optimizer + _bytes(step.optimizer.copies)
    return result, RankMemory(parameters, watch.gradients, optimizer, watch.activations, beside, peak, host)


@dataclass(frozen=True)
class MemoryAccount:
    """The memory of a rank, predicted and measured."""

    rank: int
    predicted: RankMemory
    measured: RankMemory

    @property
    def metrics(self) -> dict[str, dict[str, int]]:
        """For metrics.jsonl."""
        return {"memory": {"rank": self.rank, **asdict(self.measured)}, "memory_predicted": asdict(self.predicted)}

    def __str__(self) -> str:
        unit, size = ("GiB", 2**30) if self.measured.peak >= 10 * 2**30 else ("MiB", 2**20)
        names = [name for name in asdict(self.measured) if name != "host" or self.predicted.host]
        rows = [f"memory of rank {self.rank}, which needs most, in {unit}", " " * 11 + "  ".join(names)]
        for title, row in (("predicted", self.predicted), ("measured", self.measured)):
            numbers = (f"{getattr(row, name) / size:{len(name)}.2f}" for name in names)
            rows.append(f"{title:11}" + "  ".join(numbers))
        return "\n".join(rows)


def account(config: Config, step: TrainStep, run: Callable[[], StepResult]) -> tuple[StepResult, MemoryAccount]:
    """`measured_memory` of the rank with the highest peak, the first of equal ones; every rank calls it."""
    result, memory = measured_memory(step, run)
    mesh, rank = step.mesh, 0
    if mesh.size > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # gloo gathers none of a GPU's
        own = torch.tensor(astuple(memory), device=device)
        rows = [torch.empty_like(own) for _ in range(mesh.size)]
        dist.all_gather(rows, own)
        every = [RankMemory(*row.tolist()) for row in rows]
        rank = max(range(mesh.size), key=lambda rank: every[rank].peak)
        memory = every[rank]
    return result, MemoryAccount(rank, predicted_memory(config)[coordinates(rank, mesh.sizes)["pp"]], memory)


class _Watch(TorchDispatchMode):
    """Of every storage that operators make within, whether a forward made it, how large it is, and when it is gone."""

    def __init__(self, step: TrainStep) -> None:
        super().__init__()
        self.step, self.device = step, step.pipelined.device
        self.gradients = self.activations = self.peak = self.known_at_peak = 0
        self._alive: dict[StorageWeakRef, tuple[int, Made]] = {}
        self._at_peak: dict[StorageWeakRef, int] | None = None  # made by the forward that runs, if the peak is in it
        self._most = 0  # no less than what is alive
        self._making: Made = "otherwise"
        buckets = step.buckets.buckets if isinstance(step.buckets, ShardedParameters) else []
        self._flats = [bucket.flat for bucket in buckets if bucket.flat is not None]
        self._late = self.device.type == "cpu" and step.mesh.size > 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given: set[int] | None = None
        for x in tree_iter(result):
            if not isinstance(x, Tensor) or x.device != self.device:
                continue
            storage = x.untyped_storage()
            if given is None:
                given = {y.untyped_storage()._cdata for y in tree_iter((args, kwargs)) if isinstance(y, Tensor)}
            ref = StorageWeakRef(storage)
            if storage._cdata not in given and ref not in self._alive:
                self._alive[ref] = storage.nbytes(), self._making
                self._most += storage.nbytes()
        if self._most + self._gathered() > self.peak:
            self._look_for_peak()
        return result

    def before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        """What was sent to this stage is an activation."""
        if not torch.is_grad_enabled():
            return
        self._making = "by forwards"
        if (x := kwargs.get("x")) is not None:
            self._count_as(x, "by forwards")

    def after_forward(self, model: Any, args: Any, y: Tensor) -> None:
        """What a stage made is a message, unless it is kept by what comes after."""
        if not torch.is_grad_enabled():
            return
        self._making = "otherwise"
        self._count_as(y, "otherwise")
        if self._late:
            time.sleep(LET_GO)
        self._purge()
        self.activations = max(self.activations, self._left())
        if self._at_peak is not None:
            self.known_at_peak += sum(size for ref, size in self._at_peak.items() if ref in self._alive)
            self._at_peak = None

    def look_at_gradients(self) -> None:
        """At a moment when no backward runs."""
        self.gradients = max(self.gradients, _bytes(_gradients(self.step)))

    def _look_for_peak(self) -> None:
        self._purge()
        if self._most + self._gathered() <= self.peak:
            return
        self.peak, within = self._most + self._gathered(), self._making == "by forwards"
        self._at_peak = {ref: size for ref, (size, made) in self._alive.items() if made == "by forwards"}
        self.known_at_peak = _bytes(_gradients(self.step))
        if not within:
            self.known_at_peak += sum(self._at_peak.values())
            self._at_peak = None

    def _gathered(self) -> int:
        """Weights that are whole for a while, in storages of before."""
        return sum(flat.held for flat in self._flats)

    def _purge(self) -> None:
        self._alive = {ref: made for ref, made in self._alive.items() if not ref.expired()}
        self._most = sum(size for size, _ in self._alive.values())

    def _left(self) -> int:
        return sum(size for size, made in self._alive.values() if made == "by forwards")

    def _count_as(self, x: Tensor, made: Made) -> None:
        ref = StorageWeakRef(x.untyped_storage())
        if ref in self._alive:
            self._alive[ref] = self._alive[ref][0], made


def _weights(step: TrainStep) -> Iterator[Tensor]:
    """Of the model, and slices of those that are whole only while they compute."""
    yield from step.model.parameters()
    if isinstance(step.buckets, ShardedParameters):
        yield from step.buckets.slices


def _stepped(step: TrainStep) -> Iterator[Tensor]:
    """Weights or masters, and the optimizer's state of them."""
    for group in step.optimizer.param_groups:
        yield from group["params"]
    for state in step.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _gradients(step: TrainStep) -> Iterator[Tensor]:
    """Of weights and masters, and buckets that fill."""
    yield from (parameter.grad for parameter in step.model.parameters() if parameter.grad is not None)
    if isinstance(step.buckets, ShardedParameters):
        yield from step.buckets.gradients


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of the distinct storages."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())

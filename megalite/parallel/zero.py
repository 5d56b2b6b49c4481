"""ZeRO 1, 2 and 3, and master weights: what replicas hold alike is divided among them.

    gradients ─ reduce_scatter ─▶ own slice ─ optimizer ─▶ own slice of the weights ─ all_gather ─▶ weights

Parameters lie in flat buffers, each a bucket that travels whole; of every bucket each rank of `shards` owns an equal
slice, with the optimizer's state of it. Weights of half precision have a float32 master of the slice, and their
gradients are summed in float32.

stage   divided                         a bucket's gradients travel
1       optimizer state, masters        in the last backward of a step
2       gradients too                   in every backward; only own slices stay
3       weights too                     likewise; weights are gathered where they are read, see gathered.py

With fewer shards than replicas (HSDP) the slices are summed over `copies` as well, the ranks that own the same ones.

Source: Rajbhandari et al., ZeRO (2020), §5; flat buffers: Megatron-LM's distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megalite.parallel.gathered import Flat, Gathering, Unit, readers_in
from megalite.parallel.in_flight import (
    Pending,
    issue_all_gather_into,
    issue_all_reduce_in_place,
    issue_reduce_scatter,
    own_slice,
)
from megalite.parallel.mesh import Axis
from megalite.parallel.parameters import after_gradient

ALONE = Axis()
IN_FLIGHT = 2  # buckets of gradients on their way before the first of them is waited for


class ShardedParameters:
    """Parameters in flat buckets, of which this rank owns and steps a slice.

    parameters: equal on all replicas, and in the same order; every backward reaches them in the same order too
    shards: over which they are divided   copies: over which slices are summed as well   stage: 1, 2 or 3
    bucket_mb: MiB of gradients that travel together
    shared: those whose gradient comes in several backwards of a microbatch, or that another rank holds too: each has a
        bucket of its own, and travels in `finish`
    units: of stage 3, in the order of a forward, for each part of the model: what a unit reads has buckets of its own.
        Weights are whole until they are given here; those of no unit stay so

        for i, microbatch in enumerate(microbatches):
            with sharded.accumulating(last=i == len(microbatches) - 1):
                loss(microbatch).backward()
        sharded.finish()                            # masters have their gradients
        optimizer.step()                            # made of `masters`
        sharded.publish()                           # weights travel; `wait` before they are read
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        shards: Axis,
        copies: Axis = ALONE,
        *,
        stage: int = 1,
        bucket_mb: float = 25.0,
        shared: Collection[nn.Parameter] = (),
        units: Sequence[Sequence[Unit]] = (),
    ) -> None:
        self.shards, self.copies, self.stage = shards, copies, stage
        apart = {id(parameter) for parameter in shared}
        if stage < 3 or shards.size == 1:
            units = ()
        readers = readers_in(units)
        trained = [p for p in parameters if p.requires_grad]
        self.buckets = _laid_out(trained, int(bucket_mb * 2**20), apart, readers)
        self._bucket_of: dict[Tensor, _Bucket] = {}
        for bucket in self.buckets:
            bucket.own(shards, any(parameter in readers for parameter in bucket.places))
            for parameter in bucket.places:
                bucket.apart = id(parameter) in apart
                self._bucket_of[parameter] = bucket
                after_gradient(parameter, self._arrived)
        self._gathering = Gathering([[(unit, self._flats_of(unit)) for unit in chain] for chain in units])
        self._taking = self._last = False
        self._sent: list[_Bucket] = []

    @property
    def masters(self) -> list[tuple[nn.Parameter, bool]]:
        """What is stepped: a flat slice of each bucket, and whether it is of matrices, which decay."""
        return [(bucket.master, bucket.matrices) for bucket in self.buckets]

    def pieces(self) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """After `finish`, what this rank has of each parameter's gradient: where it starts in the flattened parameter,
        and a view of it."""
        for bucket in self.buckets:
            yield from bucket.pieces(self.shards)

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """After `finish`, this rank's slice of the bucket that has this `shared` parameter alone."""
        (bucket,) = (bucket for bucket in self.buckets if parameter in bucket.places)
        return bucket.gradient

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Around one microbatch's backward; `last`: after it, the gradients that it reaches are complete."""
        self._taking, self._last = True, last
        try:
            yield
        finally:
            self._taking = False

    def complete(self, parameters: Iterable[nn.Parameter], last: bool = True) -> None:
        """A backward in several parts is at its end for these, of the last microbatch or of another."""
        with self.accumulating(last):
            for parameter in parameters:
                if parameter in self._bucket_of:
                    self._arrived(parameter)

    def finish(self) -> None:
        """Wait until the masters' gradients are sums over all replicas; a parameter that got none counts as zero."""
        self.wait()  # for weights that nobody read: they are stepped next
        self._gathering.let_go()
        for bucket in self.buckets:
            for parameter in bucket.places:
                bucket.take(parameter)
            if bucket.arrived or (bucket.master.grad is None and bucket not in self._sent):
                self._send(bucket)
        while self._sent:
            self._sent.pop(0).settle()
        if self.copies.size > 1:
            summing = [issue_all_reduce_in_place(b.gradient, self.copies) for b in self.buckets]
            for pending in summing:
                pending.wait()

    def publish(self) -> None:
        """After the optimizer's step: the weights are made of the masters, and travel to the other shards."""
        self._gathering.let_go()
        for bucket in self.buckets:
            bucket.publish(self.shards)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Around reading weights outside a forward: all of them are here, those of every shard's last step.

        All ranks of the shards enter it together. Forwards within gather nothing, so that some ranks alone may do some.
        """
        self.wait()
        with self._gathering.gathered():
            yield

    def wait(self, parameters: Collection[nn.Parameter] | None = None) -> None:
        """Until these parameters, by default all, are those of every shard's last step."""
        for bucket in self.buckets:
            if bucket.coming is not None and (parameters is None or any(p in bucket.places for p in parameters)):
                bucket.coming.wait()
                bucket.coming = None

    def wait_before(self, module: nn.Module, parameters: Collection[nn.Parameter]) -> None:
        """Let every forward of the module wait for these parameters first, so that others may still travel."""
        module.register_forward_pre_hook(lambda *_: self.wait(parameters))

    def _arrived(self, parameter: Tensor) -> None:
        """Hook of a parameter to whose gradient a backward added."""
        if not self._taking or parameter.grad is None:
            return
        bucket = self._bucket_of[parameter]
        complete = self._last or self.stage >= 2
        if complete or bucket.half:  # else it goes on accumulating where it is
            bucket.take(parameter, complete)
        if len(bucket.arrived) == len(bucket.places) and all(bucket.arrived.values()) and not bucket.apart:
            self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        while len(self._sent) >= IN_FLIGHT or bucket in self._sent:
            self._sent.pop(0).settle()
        bucket.send(self.shards)
        self._sent.append(bucket)

    def _flats_of(self, unit: Unit) -> list[Flat]:
        return [b.flat for b in self.buckets if b.flat is not None and any(p in b.places for p in unit.parameters)]


class _Bucket:
    """Parameters that lie one behind the other in a flat buffer, and padding, so that it divides over the shards."""

    def __init__(self, first: nn.Parameter) -> None:
        self.matrices, self.half = first.ndim >= 2, first.dtype in (torch.float16, torch.bfloat16)
        self.places: dict[nn.Parameter, int] = {}
        self.size = 0
        self.apart = False  # travels in `finish`
        self.arrived: dict[Tensor, bool] = {}  # what is in the buffer, and whether it may be sent
        self.coming: Pending | None = None
        self.flat: Flat | None = None  # where weights are gathered to be read
        self._buffer: Tensor | None = None  # of gradients
        self._pending: Pending | None = None

    def add(self, parameter: nn.Parameter) -> None:
        self.places[parameter] = self.size
        self.size += parameter.numel()

    @torch.no_grad()
    def own(self, shards: Axis, gathered: bool) -> None:
        """Lay the parameters into one buffer, and make the master of this rank's slice.

        gathered: the slice is all that stays
        """
        first = next(iter(self.places))
        self._whole = first.new_zeros(-(-self.size // shards.size) * shards.size)
        for parameter, start in self.places.items():
            place = self._whole[start : start + parameter.numel()].view_as(parameter)
            place.copy_(parameter)
            parameter.data = place
        self._own = own_slice(self._whole, shards, 0)
        if gathered:
            self._own = self._own.clone()
            self.flat = Flat(self._whole, self._own, shards)
        self.start = shards.rank * len(self._own)
        self.master = nn.Parameter(self._own.float() if self.half else self._own)

    @property
    def gradient(self) -> Tensor:
        """Of the master."""
        assert self.master.grad is not None, "before finish"
        return self.master.grad

    def take(self, parameter: Tensor, complete: bool = True) -> None:
        """Move a parameter's gradient, if it has one, into the buffer."""
        if parameter.grad is None:
            return
        assert isinstance(parameter, nn.Parameter)
        place = self._place(parameter)
        place.add_(parameter.grad) if parameter in self.arrived else place.copy_(parameter.grad)
        parameter.grad = None
        self.arrived[parameter] = complete

    def send(self, shards: Axis) -> None:
        """Start summing over the shards."""
        for parameter in self.places.keys() - self.arrived.keys():
            self._place(parameter).zero_()
        assert self._buffer is not None
        self._buffer[self.size :] = 0
        alone = shards.size == 1
        self._pending = Pending(self._buffer) if alone else issue_reduce_scatter(self._buffer, shards, 0)
        self._buffer = None
        self.arrived.clear()

    def settle(self) -> None:
        """Add what was sent to the master's gradient, once it is there."""
        assert self._pending is not None
        total, self._pending = self._pending.wait(), None
        if self.master.grad is None:
            self.master.grad = total
        else:
            self.master.grad += total

    @torch.no_grad()
    def publish(self, shards: Axis) -> None:
        if self.half:
            self._own.copy_(self.master)
        if shards.size > 1 and self.flat is None:
            self.coming = issue_all_gather_into(self._whole, self._own, shards)

    def pieces(self, shards: Axis) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        end = self.start + len(self._own)
        for parameter, place in self.places.items():
            start, stop = max(place, self.start), min(place + parameter.numel(), end)
            if start < stop:
                yield parameter, start - place, self.gradient[start - self.start : stop - self.start]

    def _place(self, parameter: nn.Parameter) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty_like(self._whole, dtype=self.master.dtype)
        start = self.places[parameter]
        return self._buffer[start : start + parameter.numel()].view_as(parameter)


def _laid_out(
    parameters: list[nn.Parameter], limit: int, apart: Collection[int], readers: Mapping[nn.Parameter, list[int]]
) -> list[_Bucket]:
    """Buckets of parameters that are alike, in the order in which backward is done with them."""
    done: list[_Bucket] = []
    filling: dict[tuple, _Bucket] = {}
    for parameter in reversed(parameters):
        units = tuple(readers.get(parameter, ()))
        alone = id(parameter) * (id(parameter) in apart)
        kind = parameter.dtype, parameter.device, parameter.ndim >= 2, alone, units
        bucket = filling.get(kind)
        full = bucket is not None and (bucket.size + parameter.numel()) * parameter.element_size() > limit
        if full and not units:
            done.append(filling.pop(kind))
            bucket = None
        if bucket is None:
            bucket = filling[kind] = _Bucket(parameter)
        bucket.add(parameter)
    return [*done, *filling.values()]

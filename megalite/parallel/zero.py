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

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from megalite.parallel.bucket import Bucket, laid_out
from megalite.parallel.gathered import Flat, Gathering, Unit, readers_in
from megalite.parallel.in_flight import issue_all_reduce_in_place
from megalite.parallel.mesh import Axis
from megalite.parallel.parameters import after_gradient

ALONE = Axis()
IN_FLIGHT = 2  # buckets of gradients on their way before the first of them is waited for


class ShardedParameters:
    """Parameters in flat buckets, of which this rank owns and steps a slice.

    parameters: equal on all replicas, and in the same order; every backward reaches them in the same order too
    shards: over which they are divided   copies: over which slices are summed as well   stage: 1, 2 or 3
    bucket_mb: MiB of gradients that travel together, float32 where weights are narrower
    shared: those whose gradient comes in several backwards of a microbatch, or that another rank holds too: each has a
        bucket of its own, and travels in `finish`
    units: of stage 3, in the order of a forward, for each part of the model: what a unit reads has buckets of its own.
        Weights are whole until they are given here; those of no unit stay so
    offload: masters lie in the host's memory, and the optimizer copies gradients there

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
        offload: bool = False,
    ) -> None:
        self.shards, self.copies, self.stage, self.offload = shards, copies, stage, offload
        apart = {id(parameter) for parameter in shared}
        if stage < 3 or shards.size == 1:
            units = ()
        readers = readers_in(units)
        trained = [p for p in parameters if p.requires_grad]
        self.buckets = laid_out(trained, int(bucket_mb * 2**20), apart, readers)
        self._bucket_of: dict[Tensor, Bucket] = {}
        for bucket in self.buckets:
            gathered = any(parameter in readers for parameter in bucket.places)
            bucket.lay_out(shards, gathered=gathered, offload=offload)
            for parameter in bucket.places:
                bucket.apart = id(parameter) in apart
                self._bucket_of[parameter] = bucket
                after_gradient(parameter, self._arrived)
        self._gathering = Gathering([[(unit, self._flats_of(unit)) for unit in chain] for chain in units])
        self._taking = self._last = False
        self._sent: list[Bucket] = []

    @property
    def masters(self) -> list[tuple[nn.Parameter, bool]]:
        """What is stepped: a flat slice of each bucket, and whether it is of matrices, which decay."""
        return [(bucket.master, bucket.matrices) for bucket in self.buckets]

    @property
    def slices(self) -> list[Tensor]:
        """The weights of this rank's slices."""
        return [bucket.slice for bucket in self.buckets]

    @property
    def gradients(self) -> list[Tensor]:
        """All that there is of gradients now: sums of this rank's slices, and buckets that fill."""
        sums = [bucket.gradient for bucket in self.buckets if bucket.has_gradient]
        return sums + [bucket.buffer for bucket in self.buckets if bucket.buffer is not None]

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
            if bucket.arrived or (not bucket.has_gradient and bucket not in self._sent):
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

    def _send(self, bucket: Bucket) -> None:
        while len(self._sent) >= IN_FLIGHT or bucket in self._sent:
            self._sent.pop(0).settle()
        bucket.send(self.shards)
        self._sent.append(bucket)

    def _flats_of(self, unit: Unit) -> list[Flat]:
        return [b.flat for b in self.buckets if b.flat is not None and any(p in b.places for p in unit.parameters)]

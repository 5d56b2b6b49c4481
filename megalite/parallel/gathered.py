"""ZeRO 3: weights that are whole only while they compute.

    forward     compute 0 ─▶ let go │ compute 1 ─▶ let go │ compute 2 ─▶ ─┐
                gather 1            │ gather 2            │               │ still there
    backward                          compute 1 ◀─────────│ compute 2 ◀── ┘
                                      gather 0              gather 1

A rank keeps its slice of every weight. A unit (a block, say) is gathered before its forward and before its backward,
beside the computing of the unit before it in that direction, and is let go when the next one begins, unless that is the
same one. Whole weights at a time: those of a unit and of the next.

Letting go empties the storage that a parameter, its views and what autograd has kept of them have in common; gathering
fills it again. **To read an empty one ends the process** (PyTorch 2.13): enter `gathered()` before reading weights.

Uses are counted, not assumed to alternate: microbatches of a pipeline go forward and backward in any order.
Source: Rajbhandari et al., ZeRO (2020), §5.3, §7.2.2; Zhao et al., PyTorch FSDP (2023), §3.3, §4.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel.in_flight import Pending, issue_all_gather_into
from megalite.parallel.mesh import Axis


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are read between the call of `first` and the return of `last`, or of one module alone.

    again: whether backward reads them too, which that of an embedding does not
    """

    parameters: Collection[nn.Parameter]
    first: nn.Module
    last: nn.Module
    again: bool = True


def readers_in(units: Sequence[Sequence[Unit]]) -> dict[nn.Parameter, list[int]]:
    """Which units read a parameter, by their numbers."""
    readers: dict[nn.Parameter, list[int]] = {}
    for number, unit in enumerate(unit for chain in units for unit in chain):
        for parameter in unit.parameters:
            readers.setdefault(parameter, []).append(number)
    return readers


class Flat:
    """A flat buffer of weights: this rank's slice `own` stays, `whole` has memory while somebody uses it."""

    def __init__(self, whole: Tensor, own: Tensor, shards: Axis) -> None:
        self.whole, self.own, self.shards = whole, own, shards
        self.users = 0
        self._storage = whole.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._coming: Pending | None = None
        self.let_go()

    @property
    def held(self) -> int:
        """Bytes that `whole` takes now."""
        return self._storage.nbytes()

    def issue(self) -> None:
        """Start gathering it, where it is neither here nor on its way."""
        if not self.held:
            self._storage.resize_(self._bytes)
            self._coming = issue_all_gather_into(self.whole, self.own, self.shards)

    def use(self) -> None:
        """Have it here until as many releases."""
        self.issue()
        self._wait()
        self.users += 1

    def let_go(self) -> None:
        """Give the memory back, unless somebody uses it."""
        if not self.users:
            self._wait()
            self._storage.resize_(0)

    def _wait(self) -> None:
        if self._coming is not None:
            self._coming.wait()
            self._coming = None


class Gathering:
    """Hooks that gather the flat buffers of each unit around its forward and its backward.

    chains: units in the order in which a forward uses them, with their buffers; a chain for each part of the model
    """

    def __init__(self, chains: Sequence[Sequence[tuple[Unit, Collection[Flat]]]]) -> None:
        self._released: list[Flat] = []  # and not let go yet
        self._flats = list({id(flat): flat for chain in chains for _, flats in chain for flat in flats}.values())
        for chain in chains:
            spans = [_Span(self, unit, flats) for unit, flats in chain]
            for i, span in enumerate(spans):
                span.after = spans[i + 1].flats if i + 1 < len(spans) else ()
                span.before = spans[i - 1].flats if i and spans[i - 1].unit.again else ()

    def use(self, flats: Collection[Flat], ahead: Collection[Flat] = ()) -> None:
        """Have these here, and start gathering those that are likely next."""
        for flat in self._released:
            if flat not in flats:
                flat.let_go()
        self._released.clear()
        for flat in flats:
            flat.issue()
        for flat in flats:
            flat.use()
        for flat in ahead:
            flat.issue()

    def release(self, flats: Collection[Flat]) -> None:
        """They are not needed, but for the next that computes."""
        for flat in flats:
            flat.users -= 1
        self._released += flats

    def let_go(self) -> None:
        """Give all memory back that nobody uses."""
        self._released.clear()
        for flat in self._flats:
            flat.let_go()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have all of them here."""
        self.use(self._flats)
        try:
            yield
        finally:
            self.release(self._flats)
            self.let_go()


class _Span:
    """A unit with its buffers and the neighbours'; `entered`: calls of `first` whose `last` has not returned."""

    after: Collection[Flat] = ()
    before: Collection[Flat] = ()

    def __init__(self, gathering: Gathering, unit: Unit, flats: Collection[Flat]) -> None:
        self.gathering, self.unit, self.flats = gathering, unit, flats
        self.entered: list[Tensor | None] = []
        unit.first.register_forward_pre_hook(self._enter, with_kwargs=True)
        unit.last.register_forward_hook(self._leave, always_call=True)  # also where forward raises

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.gathering.use(self.flats, self.after)
        given = (*inputs, *named.values())
        self.entered.append(next((x for x in given if isinstance(x, Tensor) and x.requires_grad), None))

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not self.entered:
            return
        x = self.entered.pop()
        self.gathering.release(self.flats)
        if self.unit.again and isinstance(output, Tensor) and output.grad_fn is not None:
            backward = _Backward(self)
            output.grad_fn.register_prehook(backward.begin)
            if x is not None:
                x.register_hook(backward.end)


@dataclass
class _Backward:
    """From a unit's output having its gradient to its input having one, or to the end where that wants none."""

    span: _Span
    runs: bool = field(default=False, init=False)

    def begin(self, *_: Any) -> None:
        if not self.runs:
            self.runs = True
            self.span.gathering.use(self.span.flats, self.span.before)
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self, *_: Any) -> None:
        if self.runs:
            self.runs = False
            self.span.gathering.release(self.span.flats)

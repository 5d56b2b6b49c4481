"""What a block keeps for its backward, and what it computes again there.

                x ─▶ norm ─▶ qkv, rope ─▶ attention ─▶ out, + ─▶ norm ─▶ up ─▶ activation ─▶ down, +
    none        ●     ●          ●           ●           ●        ●      ●        ●
    selective   ●     ○          ●           ●           ●        ○      ●        ○
    full        ●     ○          ○           ○           ○        ○      ○        ○             ● kept   ○ made again

Selective keeps what matrix products, attention and collectives give, and makes again what a norm or the activation
function gives, from what they keep anyway: little work, and nothing is sent. It needs neither a second forward nor a
list of operators: a linear that is given such a result keeps, in its place, how to make it. Full repeats the forward
within the backward, collectives included (torch.utils.checkpoint).

What is made again is what was made, bit by bit: the same kernels on the same tensors, and a block draws no random
number. The bytes: plan/memory.py.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), §3; Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models (2022), §5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Recompute = Literal["none", "full", "selective"]
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Keeping:
    """What a block keeps.

    recompute: see above   offload: what is kept lies in the host's memory until backward; no effect on a CPU
    """

    recompute: Recompute = "none"
    offload: bool = False

    def around(self, block: nn.Module, forward: Callable[..., Tensor], x: Tensor, *more: Any) -> Tensor:
        """`forward(x, *more)` of a whole block."""
        if not torch.is_grad_enabled():
            return forward(x, *more)
        with _on_host(_link(x.device), block.parameters()) if self.offload and x.is_cuda else nullcontext():
            if self.recompute == "full":
                return checkpoint(forward, x, *more, use_reentrant=False, preserve_rng_state=False)
            return forward(x, *more)

    def through(self, make: Function, x: Tensor, use: Function) -> Tensor:
        """`use(make(x))` within a block; `make` is cheap, and a function of x and parameters alone."""
        if self.recompute == "selective" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _use_and_make_again(make, x, use)
        return use(make(x))  # torch.compile chooses by itself what cheap operations it makes again


def _use_and_make_again(make: Function, x: Tensor, use: Function) -> Tensor:
    """`use(make(x))`, where autograd keeps x wherever it would keep `make(x)`."""
    keep, get = (_host.keep, _host.get) if _host else (_as_it_is, _as_it_is)
    made = make(x)
    key, source = _key(made), keep(x.detach())  # x itself would keep the graph that made it

    def again() -> Tensor:
        with torch.no_grad():
            return make(get(source))

    def pack(kept: Tensor) -> Any:  # `made` lives until `use` returns, so that no other tensor has its address
        return again if _key(kept) == key else keep(kept)

    with saved_tensors_hooks(pack, lambda packed: again() if packed is again else get(packed)):
        return use(made)


def _key(x: Tensor) -> tuple:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _as_it_is(x: Any) -> Any:
    return x


# --- in the host's memory -----------------------------------------------------------------------------------------


class _Link:
    """Between a GPU and its host's memory, on a stream of its own: beside what the GPU computes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def to_host(self, x: Tensor) -> Tensor:
        held = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            held.copy_(x, non_blocking=True)
        x.record_stream(self.stream)
        return held

    def to_device(self, held: Tensor) -> Tensor:
        with torch.cuda.stream(self.stream):
            x = held.to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        x.record_stream(current)
        return x


_link = cache(_Link)


@dataclass(frozen=True)
class _Copy:
    held: Tensor


class _Host:
    """Copies of a block's tensors, one of each. stay: tensors that are on the device in any case"""

    def __init__(self, link: _Link, stay: Iterable[Tensor]) -> None:
        self.link, self.stay = link, {x.untyped_storage().data_ptr() for x in stay}
        self.copies: dict[tuple, tuple[Tensor, _Copy]] = {}  # with what they are of: its address is not given anew

    def keep(self, x: Tensor) -> Tensor | _Copy:
        """A tensor's copy, which is on its way."""
        if x.device != self.link.device or x.untyped_storage().data_ptr() in self.stay:
            return x
        if (key := _key(x)) not in self.copies:
            self.copies[key] = x, _Copy(self.link.to_host(x))
        return self.copies[key][1]

    def get(self, kept: Tensor | _Copy) -> Tensor:
        """What was kept, on the device."""
        return self.link.to_device(kept.held) if isinstance(kept, _Copy) else kept


_host: _Host | None = None  # of the block whose forward runs


@contextmanager
def _on_host(link: _Link, stay: Iterable[Tensor]) -> Iterator[None]:
    """Around a block's forward: what autograd keeps of it goes to the host's memory."""
    global _host
    before, _host = _host, _Host(link, stay)
    try:
        with saved_tensors_hooks(_host.keep, _host.get):
            yield
    finally:
        _host.copies.clear()
        _host = before

"""Where weights come from: load(held, source) fills what a rank holds, and reads no more than it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megalite.checkpoint import index
from megalite.checkpoint.boxes import Box, Place, whole
from megalite.checkpoint.checksum import crc32
from megalite.checkpoint.folder import Checkpoint, opened
from megalite.checkpoint.held import DTYPES, Held
from megalite.checkpoint.index import Slice
from megalite.checkpoint.tensor_file import TensorFile
from megalite.errors import CheckpointError

TORCH = {name: dtype for dtype, name in DTYPES.items()}


class WeightSource(Protocol):
    """Named tensors of which boxes can be read: a checkpoint, or a folder of Hugging Face's.

    Errors of either method are CheckpointErrors that name file and tensor.
    """

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole; CheckpointError where there is no such tensor."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """A box of it, of the box's shape, on the CPU; it may be a view of what was read."""
        ...


class Source:
    """The tensors of a checkpoint. under: what all names given here begin with there, as "model/" for weights alone

    bytes_read: of slices and headers, so far

    A slice is read whole, since its checksum is of the whole, and the last one is remembered. `close` it, or use it in
    a `with`. CheckpointError, naming file and tensor, for whatever is not as it was written.
    """

    def __init__(self, checkpoint: Checkpoint, under: str = "") -> None:
        self.path, self.index, self.under = checkpoint.path, checkpoint.index, under
        self.bytes_read = 0
        self._open = ExitStack()
        self._folder = self._open.enter_context(opened(self.path))
        self._files: dict[str, TensorFile] = {}
        self._last: tuple[Slice, Tensor] | None = None

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of its files."""
        self._open.close()
        self._last = None

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
        return TORCH[self._tensor(name).dtype]

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor; a new tensor, or a view of the slice that has it."""
        pieces = list(self.pieces(name, box))
        if len(pieces) == 1:
            return pieces[0][1]
        values = torch.empty(box.shape, dtype=self.dtype(name), device="cpu")
        for part, read in pieces:
            values[part.within(box).slices] = read
        return values

    def pieces(self, name: str, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """The same, slice by slice, so that no more than one of them is in memory: boxes of the whole, and values."""
        tensor = self._tensor(name)
        if not box.size:
            yield box, torch.empty(box.shape, dtype=TORCH[tensor.dtype], device="cpu")
        for each in tensor.slices:
            if (part := box.intersection(each.box)) is not None:
                yield part, self._slice(name, each)[part.within(each.box).slices]

    def fill(self, name: str, box: Box, place_of: Callable[[Box], Tensor]) -> None:
        """Put a box of a tensor where `place_of` says for a box within; a slice that fits is read right there."""
        for each in self._tensor(name).slices:
            if (part := box.intersection(each.box)) is not None:
                place = place_of(part)
                fits = part == each.box and place.is_contiguous() and place.dtype == self.dtype(name)
                if fits and place.device.type == "cpu":
                    self._read(name, each, place.view(-1).view(torch.uint8))
                else:
                    place.copy_(self._slice(name, each)[part.within(each.box).slices])

    def verify(self) -> None:
        """Read everything."""
        for name, tensor in self.index.tensors.items():
            if name.startswith(self.under):
                for _ in self.pieces(name.removeprefix(self.under), whole(tensor.shape)):
                    pass

    def _tensor(self, name: str) -> index.Tensor:
        if (tensor := self.index.tensors.get(self.under + name)) is None:
            raise CheckpointError(f"{self.path}: {self.under}{name} is not in it: it is of another model or optimizer")
        return tensor

    def _slice(self, name: str, each: Slice) -> Tensor:
        if self._last is None or self._last[0] is not each:
            dtype = self.dtype(name)
            data = torch.empty(each.box.size * dtype.itemsize, dtype=torch.uint8, device="cpu")
            self._read(name, each, data)
            self._last = each, data.view(dtype).view(each.box.shape)
        return self._last[1]

    def _read(self, name: str, each: Slice, data: Tensor) -> None:
        """The bytes of a slice, checked."""
        file, path = self._file(each.file), self.path / each.file
        entry = file.entries.get(each.key)
        if entry is None or entry.shape != each.box.shape or entry.dtype != self._tensor(name).dtype:
            raise CheckpointError(f"{path}: {name}: {each.key} is not there, or of another shape or dtype")
        file.read_into(each.key, content := data.numpy().data)
        self.bytes_read += len(content)
        if crc32(content) != each.crc32:
            raise CheckpointError(f"{path}: {name}: {each.key} is damaged: its CRC-32 is not the one that was written")

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            kept, path = self.index.files[name], Path(self.path / name)
            file = TensorFile(path, folder=self._folder, size=kept.bytes, header_crc32=kept.header_crc32)
            self._files[name] = self._open.enter_context(file)
            self.bytes_read += file.start
        return self._files[name]


@torch.no_grad()
def load(held: Iterable[Held], source: WeightSource) -> None:
    """Fill the values of all that is held, by their names.

    CheckpointError where the source lacks a tensor or has it in another shape, before anything is written; and where
    what is read is damaged, when some may be. Values of another dtype are converted.
    """
    held = list(held)
    for each in held:
        if (shape := source.shape(each.name)) != each.shard.shape:
            raise CheckpointError(
                f"{each.name} has shape {list(shape)} there, and {list(each.shard.shape)} in this run: it is of "
                "another model"
            )
    for each in held:
        for place in each.places:
            if isinstance(source, Source):
                source.fill(each.name, place.box, partial(_within, each, place))
            else:
                each.view(place).copy_(source.read(each.name, place.box))


def _within(each: Held, place: Place, box: Box) -> Tensor:
    return each.view(place.of(box))

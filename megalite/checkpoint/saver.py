"""Saver: a thread copies the state and writes it while training goes on; a later step makes it a checkpoint.

    step 100   begin                 step 101   settle             step 102  …  step 107   commit
    thread      └▶ copy to the host's memory ─▶ │ CRC-32, write, fsync ──────────────────▶ │ index, COMMITTED, rename
    training       forward and backward         optimizer's step: the state changes

The state changes where the optimizer steps, and nowhere else: the copy has a forward and a backward to be made in.

Two phases, so that a checkpoint is whole or is not there: every rank writes its file, and only when all have does rank
0 collect what they wrote and give the folder its name. What fails on one rank is known to all at the same commit.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.checkpoint.boxes import Box
from megalite.checkpoint.folder import INDEX, commit, temporary
from megalite.checkpoint.held import DTYPES, Held, written_by_this_rank
from megalite.checkpoint.index import File, Index, Slice, Tensor, joined
from megalite.checkpoint.tensor_file import Entry, write
from megalite.errors import SaveError
from megalite.parallel.mesh import Axis
from megalite.parallel.words import first_of

Whole = tuple[str, tuple[int, ...], Box]  # of a slice: its tensor's name and shape, and where it lies in it

SLICE = 16 * 2**20  # bytes of a slice, at most: as much as a reader reads at once to check it


class Saver:
    """Writes checkpoints of what all ranks of `world` hold into `root`.

    asynchronous: in a thread, while training goes on

        saver.begin(step, held, state)          # on all ranks
        saver.settle()                          # before what is held changes
        if no rank has saver.writing:           # at the end of a step, agreed on by all ranks
            saver.commit()                      # on all ranks
    """

    def __init__(self, root: Path, world: Axis | None = None, *, asynchronous: bool = True) -> None:
        self.root, self.world, self.asynchronous = root, world or Axis(), asynchronous
        self._buffer = torch.empty(0, dtype=torch.uint8)  # stays from one save to the next
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._step: int | None = None
        self._error = ""
        self._part = Index({}, {})
        self._state = b""

    @property
    def pending(self) -> bool:
        """Whether a save was begun and not committed."""
        return self._step is not None

    @property
    def writing(self) -> bool:
        """Whether this rank's thread still writes."""
        return self._thread is not None and self._thread.is_alive()

    @torch.no_grad()
    def begin(self, step: int, held: Iterable[Held], state: Mapping[str, Any]) -> None:
        """Begin to copy and to write what this rank is to; until `settle`, nothing of `held` may change.

        state: of rank 0, the plain numbers, as JSON takes them; "step" is added. Errors of writing come with `commit`.
        ValueError where a save has been begun and not committed.
        """
        if self.pending:
            raise ValueError(f"the checkpoint of step {self._step} is not committed: commit would do")
        self._step, self._error, self._part = step, "", Index({}, {})
        self._state = json.dumps({"step": step, **state}, indent=1, allow_nan=False).encode() + b"\n"
        path = temporary(self.root, step) / f"rank-{self.world.rank:05d}.safetensors"
        slices = _slices(list(held))
        size = sum(values.nbytes for _, _, values in slices)
        self._copied.set()  # until there is something to copy
        if self._is_full(path, size):
            return
        entries: dict[str, Entry] = {}
        end = 0
        for each, box, values in slices:
            start, end = end, end + values.nbytes
            entries[_key(each.name, box)] = Entry(DTYPES[values.dtype], box.shape, start, end)
        tensors = [values for _, _, values in slices]
        wholes = [(each.name, each.shard.shape, box) for each, box, _ in slices]
        self._copied.clear()
        if not self.asynchronous:
            self._write(path, entries, tensors, wholes)
            return
        stream = torch.cuda.Stream() if any(x.is_cuda for x in tensors) else None
        if stream is not None:  # beside the computing that follows, after what has been asked for
            stream.wait_stream(torch.cuda.current_stream())
        work = path, entries, tensors, wholes, stream
        self._thread = threading.Thread(target=self._write, args=work, name="checkpoint")
        self._thread.start()

    def settle(self) -> None:
        """Before what is held changes: wait until it is copied."""
        if self.pending:
            self._copied.wait()

    @torch.no_grad()
    def _copy(self, entries: Mapping[str, Entry], values: list[torch.Tensor]) -> dict[str, memoryview]:
        """The bytes of each entry in the host's memory; where nothing goes on meanwhile, those of the tensor itself."""
        copied = [self.asynchronous or x.is_cuda or not x.is_contiguous() for x in values]
        size = sum(x.nbytes for x, copy in zip(values, copied, strict=True) if copy)
        pinned = any(x.is_cuda for x in values)
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        data, end = {}, 0
        for key, x, copy in zip(entries, values, copied, strict=True):
            if copy:
                start, end = end, end + x.nbytes
                place = self._buffer[start:end]
                place.view(x.dtype).view(x.shape).copy_(x, non_blocking=pinned)
            else:
                place = x.view(-1).view(torch.uint8)
            data[key] = place.numpy().data
        if pinned:
            torch.cuda.current_stream().synchronize()
        return data

    def commit(self) -> Path:
        """Make the save that was begun a checkpoint, and return its folder. All ranks call it at once.

        Waits for this rank's thread. SaveError, on all ranks, where one of them could not write; older checkpoints are
        as they were, and what was written is removed.
        """
        assert self._step is not None, "nothing was begun"
        step, self._step = self._step, None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        try:
            self._agree()
            parts = self._gather(self._part.to_json())
            if self.world.rank == 0:
                here = temporary(self.root, step) / INDEX
                self._attempt(here, lambda: commit(self.root, step, joined(_parsed(parts, here), here), self._state))
            self._agree()
        except SaveError:
            if self.world.rank == 0:
                shutil.rmtree(temporary(self.root, step), ignore_errors=True)
            raise
        return self.root / temporary(self.root, step).name.removeprefix(".tmp-")

    def _is_full(self, path: Path, size: int) -> bool:
        """Whether the disk has no room, as far as can be known before."""

        def look() -> None:
            self.root.mkdir(parents=True, exist_ok=True)
            free = _free(self.root)
            if free is not None and free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self._attempt(path, look, size)
        return bool(self._error)

    def _write(
        self,
        path: Path,
        entries: dict[str, Entry],
        values: list[torch.Tensor],
        wholes: list[Whole],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """What the thread does."""

        def copy_and_write() -> None:
            with torch.cuda.stream(stream):
                data = self._copy(entries, values)
            self._copied.set()
            self._write_file(path, entries, data, wholes)

        try:
            self._attempt(path, copy_and_write, sum(entry.stop - entry.start for entry in entries.values()))
        finally:
            self._copied.set()

    def _write_file(
        self, path: Path, entries: dict[str, Entry], data: dict[str, memoryview], wholes: list[Whole]
    ) -> None:
        with suppress(FileExistsError):
            path.parent.mkdir()
        if not entries:
            return
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)  # an earlier process was killed here
            about = {"format": "megalite", "rank": str(self.world.rank)}
            written = write(path, folder, entries, data, about)
        finally:
            os.close(folder)
        tensors: dict[str, Tensor] = {}
        for (name, shape, box), (key, entry) in zip(wholes, entries.items(), strict=True):
            part = Slice(path.name, key, box, written.crc32[key])
            before = tensors[name].slices if name in tensors else ()
            tensors[name] = Tensor(entry.dtype, shape, (*before, part))
        self._part = Index(tensors, {path.name: File(written.bytes, written.header_crc32)})

    def _attempt(self, path: Path, what: Callable[[], Any], size: int = 0) -> None:
        """Remember an error instead of raising it: the other ranks do not know of it yet."""
        try:
            what()
        except OSError as error:
            free = _free(self.root)
            self._error = (
                f"{path}: cannot be written on rank {self.world.rank}: {(error.strerror or str(error)).lower()}; "
                f"{size:,} bytes are needed there, {'unknown' if free is None else f'{free:,}'} are free"
            )
        except Exception as error:  # of whatever kind: raised here, the other ranks would wait for ever
            self._error = f"{path}: cannot be written on rank {self.world.rank}: {type(error).__name__}: {error}"

    def _agree(self) -> None:
        """SaveError on all ranks where one of them has an error."""
        if error := first_of(self._error, self.world):
            raise SaveError(error)

    def _gather(self, text: bytes) -> list[bytes]:
        """Every rank's text, on rank 0."""
        if self.world.size == 1:
            return [text]
        device, size, group = "cuda" if self.world.overlaps else "cpu", self.world.size, self.world.group
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
        dist.all_gather(lengths, torch.tensor([len(text)], device=device), group=group)
        longest = max(int(length) for length in lengths)
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        root = self.world.rank == 0
        everyone = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(size)] if root else None
        dist.gather(own.to(device), everyone, group=group, group_dst=0)
        return [t.cpu().numpy().tobytes()[: int(n)] for t, n in zip(everyone or [], lengths, strict=False)]


def _slices(held: list[Held]) -> list[tuple[Held, Box, torch.Tensor]]:
    """What this rank writes, in the order of the file: wide dtypes first, so that each lies where its dtype may."""
    found = []
    for each, place in written_by_this_rank(held):
        for box in place.box.at_most(SLICE // each.values.element_size()):
            found.append((each, box, each.view(place.of(box))))
    return sorted(found, key=lambda item: -item[2].element_size())


def _key(name: str, box: Box) -> str:
    """Of a slice in its file: "norm.weight[0+64]"."""
    return f"{name}[{','.join(f'{start}+{size}' for start, size in zip(box.offset, box.shape, strict=True))}]"


def _parsed(parts: Iterable[bytes], path: Path) -> list[Index]:
    return [Index.from_json(part, path, complete=False) for part in parts]


def _free(path: Path) -> int | None:
    """Bytes that may be written; None where nobody knows."""
    try:
        about = os.statvfs(path)
    except OSError:
        return None
    return about.f_bavail * about.f_frsize

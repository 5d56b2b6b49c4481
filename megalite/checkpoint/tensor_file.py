"""Tensors in a file of the safetensors format: written with a CRC-32 of each, read by name once all is checked.

    8 bytes   n, little-endian          {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}
    n bytes   JSON, padded by spaces    offsets are into what follows, which the tensors fill without a gap
    the tensors

The format has no checksum: whoever wrote a file keeps those that `write` returns. Nothing of what a file claims is
believed, nor memory taken for it, before it is held against the file's size. No torch here.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from megalite.checkpoint import checksum
from megalite.errors import CheckpointError, PathRefused

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
HEADER = 16 * 2**20  # bytes, at most
TENSORS = 100_000  # at most
DIMS = 8  # at most


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its bytes are `start` to `stop` of what follows the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Written:
    """What was written: the file's size, and the CRC-32 of its header and of each tensor."""

    bytes: int
    header_crc32: int
    crc32: dict[str, int]


def write(
    path: Path, folder: int, entries: Mapping[str, Entry], data: Mapping[str, memoryview], about: Mapping[str, str]
) -> Written:
    """Write a new file `path.name` in the open directory `folder`, and wait until it is on the disk.

    entries: one behind the other   data: the bytes of each   about: what the header says besides
    Raises OSError; what was written by then is removed.
    """
    header = header_of(entries, about)
    crc32: dict[str, int] = {}
    sums = threading.Thread(target=lambda: crc32.update((key, checksum.crc32(data[key])) for key in entries))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(path.name, flags, 0o666, dir_fd=folder)  # the umask takes its part
    sums.start()  # checksums while the disk works
    try:
        write_all(file, memoryview(header))
        for key, entry in entries.items():
            write_all(file, data[key])
            if hasattr(os, "posix_fadvise"):  # to Linux this says: begin to write it to the disk, not only at fsync
                os.posix_fadvise(file, len(header) + entry.start, entry.stop - entry.start, os.POSIX_FADV_DONTNEED)
        os.fsync(file)
    except BaseException:
        with suppress(OSError):
            os.unlink(path.name, dir_fd=folder)
        raise
    finally:
        sums.join()
        os.close(file)
    return Written(len(header) + sum(map(len, data.values())), checksum.crc32(header), crc32)


def write_all(file: int, data: memoryview) -> None:
    """os.write may write less than it is given."""
    while data:
        data = data[os.write(file, data) :]


def header_of(entries: Mapping[str, Entry], about: Mapping[str, str]) -> bytes:
    """The first bytes of a file of these tensors, so many that the tensors begin at a multiple of 8."""
    described = {
        key: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.start, entry.stop)}
        for key, entry in entries.items()
    }
    text = json.dumps({"__metadata__": dict(about), **described}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorFile:
    """A file open for reading, whose header is in order: `entries` says what is in it, from byte `start` on.

    folder: an open directory in which it is, and no link; by default that of `path`
    size, header_crc32: what they must be, where somebody kept them
    CheckpointError, naming the file, for one that is missing or that does not hold what it says.
    """

    def __init__(
        self, path: Path, *, folder: int | None = None, size: int | None = None, header_crc32: int | None = None
    ) -> None:
        self.path = path
        self._file = open_file(path, folder)
        try:
            found = os.fstat(self._file).st_size
            if size is not None and found != size:
                raise CheckpointError(f"{path}: {found:,} bytes, {size:,} were written: it is truncated or another")
            self.entries, self.start = self._read_header(found, header_crc32)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def read_into(self, key: str, buffer: memoryview, start: int = 0) -> None:
        """Fill `buffer` with the bytes of a tensor, from its byte `start` on."""
        entry = self.entries[key]
        assert start + len(buffer) <= entry.stop - entry.start
        self._fill(buffer, self.start + entry.start + start, key)

    def _fill(self, buffer: memoryview, position: int, what: str) -> None:
        while buffer:
            try:
                count = os.preadv(self._file, [buffer], position)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {what} cannot be read: {error.strerror}") from None
            if not count:
                raise CheckpointError(f"{self.path}: ends within {what}: it was truncated")
            buffer, position = buffer[count:], position + count

    def _read_header(self, size: int, crc32: int | None) -> tuple[dict[str, Entry], int]:
        """What is in it, and where the tensors begin."""
        if size < 8:
            raise CheckpointError(f"{self.path}: {size} bytes, too few for a safetensors file")
        length = bytearray(8)
        self._fill(memoryview(length), 0, "the header")
        claimed = int.from_bytes(length, "little")
        if claimed > min(HEADER, size - 8):
            raise CheckpointError(
                f"{self.path}: a header of {claimed:,} bytes in a file of {size:,}; at most {HEADER:,} would do"
            )
        text = bytearray(claimed)
        self._fill(memoryview(text), 8, "the header")
        if crc32 is not None and checksum.crc32(text, checksum.crc32(length)) != crc32:
            raise CheckpointError(f"{self.path}: its header is not the one that was written")
        described = parsed(text, self.path)
        described.pop("__metadata__", None)
        if len(described) > TENSORS:
            raise CheckpointError(f"{self.path}: {len(described):,} tensors; at most {TENSORS:,} would do")
        entries = {key: self._entry(key, value) for key, value in described.items()}
        end = 0
        for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start != end:
                raise CheckpointError(f"{self.path}: {shown(key)} begins at byte {entry.start}, not at {end}")
            end = entry.stop
        if end != size - 8 - claimed:
            raise CheckpointError(f"{self.path}: {size:,} bytes, and its header speaks of {8 + claimed + end:,}")
        return entries, 8 + claimed

    def _entry(self, key: str, value: Any) -> Entry:
        try:
            dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
            bytes_ = BYTES[dtype]
            numbers = all(type(number) is int and 0 <= number < 2**63 for number in (*shape, start, stop))
            right = numbers and len(shape) <= DIMS and stop - start == math.prod(shape) * bytes_
        except (KeyError, TypeError, ValueError):
            right = False
        if not right or len(value) != 3:
            raise CheckpointError(f"{self.path}: {shown(key)} is described as {shown(value)}, which is no tensor")
        return Entry(dtype, tuple(shape), start, stop)


def open_file(path: Path, folder: int | None) -> int:
    """Open a plain file for reading, in the open directory where one is given; links are refused there."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if folder is not None else 0)
    try:
        file = os.open(path if folder is None else path.name, flags, dir_fd=folder)
    except OSError as error:
        if folder is not None and os.path.islink(path):
            raise PathRefused(f"{path}: a link; the file itself would do") from None
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path}: no plain file")
    return file


def parsed(text: bytes | bytearray, path: Path) -> dict[str, Any]:
    """The object that JSON text says; CheckpointError for another, or one with a key twice."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=_without_duplicates, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: no JSON: {shown(str(error))}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: no JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{shown(key)} is there twice")
        found[key] = value
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def shown(value: Any) -> str:
    """For a message of one line, whatever it is."""
    try:
        text = ascii(value)
    except RecursionError:
        return "deeply nested"
    return text if len(text) <= 80 else f"{text[:77]}..."

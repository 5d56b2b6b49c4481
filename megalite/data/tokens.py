"""A corpus on disk is one folder: the ids in a flat file, and what they are in a page of JSON.

    DIR/tokens.bin        ids, little-endian uint16 (uint32 when the vocabulary needs it), nothing else
    DIR/index.json        format, version, dtype, count, vocab_size, max_token, end_of_text, documents, source
    DIR/tokenizer.json    how to read them back as text; optional

A reader maps `tokens.bin` into memory, so a corpus of any size costs nothing until it is read. A writer fills a hidden
sibling folder and renames it into place as its last act: a folder that can be opened is a folder that is whole.
"""

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.data.index import INDEX, Index, read_index
from megalite.errors import DataError

SCAN_BYTES = 2**30  # check_ids reads no further: well under a second from a warm page cache
CHUNK = 2**22  # tokens looked at together


class TokenWriter:
    """Streams ids into a new token folder, in constant memory; use as a context manager.

    `folder` must not exist yet, or be empty. When the block raises, or the disk does (DataError), nothing is left
    behind. After a kill a hidden `.NAME.*.partial` remains beside `folder`; nothing reads it and it may be deleted.
    `tokenizer` is the text of a tokenizer.json to keep with the ids, `source` a note on where they came from.
    """

    def __init__(
        self,
        folder: str | Path,
        vocab_size: int,
        end_of_text: int | None = None,
        *,
        tokenizer: str | None = None,
        source: str = "",
    ) -> None:
        self.folder = Path(folder)
        self.index = Index(0, vocab_size, 0, end_of_text, None if end_of_text is None else 0, source)
        self._tokenizer = tokenizer
        self._partial = self.folder.parent / f".{self.folder.name}.{secrets.token_hex(4)}.partial"
        self._file: BinaryIO | None = None

    def __enter__(self) -> "TokenWriter":
        check_free(self.folder)
        try:
            self._partial.mkdir(parents=True)
            self._file = (self._partial / "tokens.bin").open("wb")
        except OSError as error:
            raise self._failed(error) from error
        return self

    def write(self, ids: Sequence[int] | NDArray[np.integer]) -> None:
        """Append `ids`; DataError when one of them is outside [0, vocab_size), or when the disk is full."""
        assert self._file is not None, "TokenWriter is a context manager: with TokenWriter(...) as writer"
        array, index = np.asarray(ids).ravel(), self.index
        if not array.size:
            return
        low, high = array.min(), array.max()
        if array.dtype.kind not in "iu" or low < 0 or high >= index.vocab_size:
            bad = low if low < 0 else high
            raise DataError(f"{self.folder}: token id {bad} given; a whole number below {index.vocab_size} would do")
        try:
            self._file.write(array.astype(index.dtype).data)
        except OSError as error:
            raise self._failed(error) from error
        ended = None if index.documents is None else index.documents + int(np.count_nonzero(array == index.end_of_text))
        self.index = replace(
            index, count=index.count + array.size, max_token=max(index.max_token, int(high)), documents=ended
        )

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        assert self._file is not None
        try:
            if kind is None:
                self._publish(self._file)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                self._file.close()
            shutil.rmtree(self._partial, ignore_errors=True)

    def _publish(self, file: BinaryIO) -> None:
        if not self.index.count:
            raise DataError(f"{self.folder}: no token was written; a token folder needs at least one")
        _sync(file)
        _write_text(self._partial / INDEX, self.index.to_json())
        if self._tokenizer is not None:
            _write_text(self._partial / "tokenizer.json", self._tokenizer)
        _sync_folder(self._partial)
        self._partial.rename(self.folder)
        _sync_folder(self.folder.parent)

    def _failed(self, error: OSError) -> DataError:
        shutil.rmtree(self._partial, ignore_errors=True)
        return DataError(
            f"{self.folder}: writing stopped after {self.index.size} bytes of tokens: {error.strerror or error}; "
            "nothing was left behind, a disk with more space or another folder would do"
        )


class TokenFile:
    """A token folder opened for reading; DataError when it is missing, damaged, truncated or empty.

    `tokens` is the memory-mapped array `[count]`, uint16 or uint32.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "tokens.bin"
        self.index = read_index(self.folder)
        try:
            size = self.path.stat().st_size
            if size != self.index.size:
                raise DataError(
                    f"{self.path}: {size} bytes found, {self.index.size} expected ({self.index.count} tokens of "
                    f"{self.index.dtype.itemsize} bytes); a complete copy would do, or tokenize the corpus again"
                )
            self.tokens: np.memmap = np.memmap(self.path, dtype=self.index.dtype, mode="r")
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}; tokenize the corpus again") from error

    def __len__(self) -> int:
        return self.index.count

    @property
    def vocab_size(self) -> int:
        return self.index.vocab_size

    @property
    def end_of_text(self) -> int | None:
        """The id that ends each document, if one does."""
        return self.index.end_of_text

    @property
    def tokenizer_path(self) -> Path | None:
        """The tokenizer.json kept with the ids, if one is."""
        path = self.folder / "tokenizer.json"
        return path if path.is_file() else None

    def read(self, start: int, stop: int, vocab_size: int) -> NDArray[np.unsignedinteger]:
        """Tokens `[stop - start]`; DataError naming the byte offset and the id when one is >= `vocab_size`."""
        ids = np.asarray(self.tokens[start:stop])
        if ids.max(initial=0) >= vocab_size:
            at = int(np.argmax(ids >= vocab_size))
            raise DataError(
                f"{self.path}: token id {ids[at]} at byte {(start + at) * ids.itemsize} is beyond the vocabulary of "
                f"{vocab_size}; a vocabulary of {int(ids.max()) + 1} would do, or the model's own tokenizer"
            )
        return ids

    def check_ids(self, vocab_size: int) -> None:
        """DataError when an id is >= `vocab_size`; looks at the first 2**30 bytes, and every batch at its own."""
        limit = min(len(self), SCAN_BYTES // self.tokens.itemsize)
        for start in range(0, limit, CHUNK):
            self.read(start, min(start + CHUNK, limit), vocab_size)

    def histogram(self, start: int, stop: int) -> NDArray[np.int64]:
        """How often each id occurs among tokens [start, stop): int64 `[vocab_size]`."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for first in range(start, stop, CHUNK):
            ids = self.read(first, min(first + CHUNK, stop), self.vocab_size)
            counts += np.bincount(ids, minlength=self.vocab_size)
        return counts


def check_free(folder: Path) -> None:
    """DataError when a token folder cannot be made at `folder` because something is there already."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise DataError(f"{folder}: exists and is not empty; another folder would do, or delete it first")


def _write_text(path: Path, text: str) -> None:
    with path.open("wb") as file:
        file.write(text.encode())
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """A rename survives a power cut only when the folder that holds the name has reached the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

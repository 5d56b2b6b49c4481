"""The page of JSON that says what the bytes of a token file are.

A file of bare integers has no mark of its own: read with the wrong width or the wrong vocabulary it trains, silently,
on noise. So every field is checked when a folder is opened, and the file's size is checked against them.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalite.errors import DataError

INDEX = "index.json"
HEAD = {"format": "megalite-tokens", "version": 1}
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Index:
    """`count` ids below `vocab_size`, none above `max_token`; `documents` is how many of them are `end_of_text`."""

    count: int
    vocab_size: int
    max_token: int
    end_of_text: int | None = None
    documents: int | None = None
    source: str = ""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Two bytes an id where they suffice, else four."""
        return DTYPES[dtype_name(self.vocab_size)]

    @property
    def size(self) -> int:
        """Bytes of the token file."""
        return self.count * self.dtype.itemsize

    def to_json(self) -> str:
        return json.dumps(HEAD | {"dtype": dtype_name(self.vocab_size)} | asdict(self), indent=2) + "\n"


def dtype_name(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 2**16 else "uint32"


def read_index(folder: Path) -> Index:
    """The index of a token folder; DataError when it is missing, not ours, or contradicts itself."""
    path = folder / INDEX
    if not folder.is_dir():
        raise DataError(f"{folder}: no such token folder; `megalite data TEXT... -o {folder}` makes one")
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; a token folder holds {INDEX} and tokens.bin") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON; tokenize the corpus again") from error
    if not isinstance(found, dict) or any(found.get(key) != value for key, value in HEAD.items()):
        raise DataError(f"{path}: not the index of a token folder; one that starts with {json.dumps(HEAD)} would do")

    def whole(key: str, low: int, high: int, optional: bool = False) -> Any:
        value = found.get(key)
        if (optional and value is None) or (type(value) is int and low <= value <= high):
            return value
        raise DataError(f"{path}: {key} is {value!r:.40}; a whole number from {low} to {high} would do")

    vocab_size = whole("vocab_size", 1, 2**32)
    if found.get("dtype") != dtype_name(vocab_size):
        raise DataError(
            f"{path}: dtype is {found.get('dtype')!r:.40} with a vocabulary of {vocab_size}; "
            f"{dtype_name(vocab_size)!r} would do"
        )
    return Index(
        count=whole("count", 1, 2**63),
        vocab_size=vocab_size,
        max_token=whole("max_token", 0, vocab_size - 1),
        end_of_text=whole("end_of_text", 0, vocab_size - 1, optional=True),
        documents=whole("documents", 0, 2**63, optional=True),
        source=str(found.get("source", "")),
    )

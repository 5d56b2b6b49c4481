"""index.json: which slices of which tensor lie in which file, with a checksum of each.

    {"format": 1,
     "tensors": {"model/norm.weight": {"dtype": "F32", "shape": [64], "slices": [
         {"file": "rank-00000.safetensors", "key": "model/norm.weight[0+64]",
          "offset": [0], "shape": [64], "crc32": 1}]}},
     "files": {"rank-00000.safetensors": {"bytes": 384, "header_crc32": 2}}}

A slice is a box of the whole tensor. That the slices of each tensor make it up, each element once, is checked before
anything else is read. No torch here.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.boxes import Box, whole
from megalite.checkpoint.tensor_file import BYTES, DIMS, parsed, shown
from megalite.errors import CheckpointError, PathRefused

FORMAT = 1
FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")  # a name that leads nowhere else
NAME = re.compile(r"[A-Za-z0-9._/-]+")


@dataclass(frozen=True)
class Slice:
    """A box of a tensor, under `key` in `file`."""

    file: str
    key: str
    box: Box
    crc32: int


@dataclass(frozen=True)
class Tensor:
    """A whole tensor, and the slices that it is kept in. dtype: as safetensors calls it"""

    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class File:
    """What a file must be."""

    bytes: int
    header_crc32: int


@dataclass(frozen=True)
class Index:
    """All tensors of a checkpoint, and all files."""

    tensors: dict[str, Tensor]
    files: dict[str, File]

    def to_json(self) -> bytes:
        """As it is kept."""
        tensors = {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "slices": [
                    {"file": s.file, "key": s.key, "offset": s.box.offset, "shape": s.box.shape, "crc32": s.crc32}
                    for s in tensor.slices
                ],
            }
            for name, tensor in sorted(self.tensors.items())
        }
        files = {name: {"bytes": f.bytes, "header_crc32": f.header_crc32} for name, f in sorted(self.files.items())}
        return json.dumps({"format": FORMAT, "tensors": tensors, "files": files}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes | bytearray, path: Path, complete: bool = True) -> Index:
        """As it was kept in `path`; CheckpointError, naming the tensor, where it cannot be true.

        complete: whether the slices must make up their tensors, as not those of one rank
        """
        content = _fields(parsed(text, path), {"format": int, "tensors": dict, "files": dict}, f"{path}: it")
        if content["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {shown(content['format'])}; this megalite reads {FORMAT}")
        files = {name: _file(name, value, path) for name, value in content["files"].items()}
        tensors = {name: _tensor(name, value, files, path) for name, value in content["tensors"].items()}
        if complete:
            for name, tensor in tensors.items():
                check_coverage(name, tensor, path)
        return cls(tensors, files)


def joined(parts: Iterable[Index], path: Path) -> Index:
    """One index of the slices of all ranks; CheckpointError where they do not make up every tensor once."""
    tensors: dict[str, Tensor] = {}
    slices: dict[str, list[Slice]] = {}
    files: dict[str, File] = {}
    for part in parts:
        files |= part.files
        for name, tensor in part.tensors.items():
            first = tensors.setdefault(name, tensor)
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(f"{path}: {name}: ranks hold it in different shapes or dtypes")
            slices.setdefault(name, []).extend(tensor.slices)
    for name, tensor in tensors.items():
        inorder = tuple(sorted(slices[name], key=lambda s: (s.box.offset, s.box.shape)))
        tensors[name] = Tensor(tensor.dtype, tensor.shape, inorder)
        check_coverage(name, tensors[name], path)
    return Index(tensors, files)


def check_coverage(name: str, tensor: Tensor, path: Path) -> None:
    """CheckpointError where the slices of a tensor leave something out, or have something twice.

    A box is known by its corners, with signs: their sum over all slices is that of the whole, where and only where each
    element is in one slice.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    boxes = [part.box for part in tensor.slices]
    for sign, box in [*((1, box) for box in boxes), (-1, whole(tensor.shape))]:
        if box.size:
            for corner, sense in _corners(box):
                corners[corner] += sign * sense
    if any(corners.values()) or any(not box.size for box in boxes):
        where = min(corner for corner, count in corners.items() if count) if any(corners.values()) else ()
        raise CheckpointError(
            f"{path}: the slices of {name} do not make up its shape {list(tensor.shape)}, each element once: "
            f"something is missing, or there twice, near {list(where)}"
        )


def _corners(box: Box) -> Iterator[tuple[tuple[int, ...], int]]:
    for ends in itertools.product((False, True), repeat=len(box.shape)):
        corner = tuple(o + s if end else o for o, s, end in zip(box.offset, box.shape, ends, strict=True))
        yield corner, -1 if sum(ends) % 2 else 1


def _file(name: str, value: Any, path: Path) -> File:
    _check_file_name(name, path)
    content = _fields(value, {"bytes": int, "header_crc32": int}, f"{path}: {name}")
    return File(content["bytes"], content["header_crc32"])


def _check_file_name(name: str, path: Path) -> None:
    if not FILE.fullmatch(name):
        raise PathRefused(f"{path}: the file {shown(name)} given; one of letters, digits, '.', '_' and '-' would do")


def _tensor(name: str, value: Any, files: Mapping[str, File], path: Path) -> Tensor:
    if not NAME.fullmatch(name):
        raise CheckpointError(f"{path}: a tensor is called {shown(name)}; letters, digits and ._/- would do")
    what = f"{path}: {name}"
    content = _fields(value, {"dtype": str, "shape": list, "slices": list}, what)
    shape = _numbers(content["shape"], None, what)
    if content["dtype"] not in BYTES:
        raise CheckpointError(f"{what}: dtype {shown(content['dtype'])}; one of {', '.join(BYTES)} would do")
    fields = {"file": str, "key": str, "offset": list, "shape": list, "crc32": int}
    slices = []
    for each in content["slices"]:
        part = _fields(each, fields, f"{what}: a slice")
        _check_file_name(part["file"], path)
        if part["file"] not in files:
            raise CheckpointError(f"{what}: a slice is in {part['file']}, which is not one of the files")
        box = Box(_numbers(part["offset"], len(shape), what), _numbers(part["shape"], len(shape), what))
        slices.append(Slice(part["file"], part["key"], box, part["crc32"]))
    return Tensor(content["dtype"], shape, tuple(slices))


def _numbers(value: list[Any], count: int | None, what: str) -> tuple[int, ...]:
    right = len(value) == count if count is not None else len(value) <= DIMS
    if not right or not all(type(number) is int and 0 <= number < 2**63 for number in value):
        raise CheckpointError(f"{what}: {shown(value)} is no shape or offset")
    if math.prod(value) >= 2**63:
        raise CheckpointError(f"{what}: shape {shown(value)} has more elements than there can be")
    return tuple(value)


def _fields(value: Any, fields: Mapping[str, type], what: str) -> dict[str, Any]:
    """A dict of these keys and types, and no others."""
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise CheckpointError(f"{what} is {shown(value)}; an object of {', '.join(fields)} would do")
    for key, kind in fields.items():
        if type(value[key]) is not kind or (kind is int and not 0 <= value[key] < 2**63):
            raise CheckpointError(f"{what}: {key} is {shown(value[key])}; {_KINDS[kind]} would do")
    return value


_KINDS = {int: "a whole number", str: "a text", list: "a list", dict: "an object"}

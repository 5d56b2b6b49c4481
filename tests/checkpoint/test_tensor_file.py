"""Files of tensors: the safetensors library reads what we write, and we refuse what is none, at once."""

import json
import os
import random
import time
import tracemalloc
import zlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megalite.checkpoint.folder import opened
from megalite.checkpoint.held import DTYPES
from megalite.checkpoint.tensor_file import Entry, TensorFile, write
from megalite.errors import CheckpointError


def written(path, tensors, about=None):
    """A file of these tensors, as `write` leaves it."""
    entries, data = {}, b""
    for name, tensor in tensors.items():
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        entries[name] = Entry(DTYPES[tensor.dtype], tuple(tensor.shape), len(data), len(data) + len(content))
        data += content
    with opened(path.parent) as folder:
        parts = {key: memoryview(data)[entry.start : entry.stop] for key, entry in entries.items()}
        return write(path, folder, entries, parts, about or {})


def some_tensors():
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-100, 100, (3, 5), generator=generator)
    named = {str(dtype): values.to(dtype) for dtype in sorted(DTYPES, key=lambda dtype: -dtype.itemsize)}
    return named | {"scalar": torch.tensor([7], dtype=torch.uint8).view(()), "none": torch.zeros(0, 4)}


def test_the_library_reads_what_we_write(tmp_path):
    result = written(path := tmp_path / "file.safetensors", some_tensors(), {"step": "3"})
    found = load_file(path)
    assert found.keys() == some_tensors().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in some_tensors().items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"step": "3"}
    content = path.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    assert length % 8 == 0 and result.bytes == len(content) and result.header_crc32 == zlib.crc32(content[:length])


def test_we_read_what_the_library_writes(tmp_path):
    save_file(some_tensors(), path := tmp_path / "file.safetensors")
    with TensorFile(path) as file:
        for name, tensor in some_tensors().items():
            entry = file.entries[name]
            file.read_into(name, memoryview(content := bytearray(entry.stop - entry.start)))
            assert entry.shape == tuple(tensor.shape)
            assert bytes(content) == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def file_of(path, header, data=b""):
    """Any header; as text, or as an object."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensor(start, stop, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


HEADERS = {
    "a gap": ({"a": tensor(0, 2), "b": tensor(3, 4)}, "'b' begins at byte 3, not at 2"),
    "an overlap": ({"a": tensor(0, 3), "b": tensor(2, 4)}, "'b' begins at byte 2, not at 3"),
    "the same bytes twice": ({"a": tensor(0, 4), "b": tensor(0, 4)}, "'b' begins at byte 0, not at 4"),
    "less than the file": ({"a": tensor(0, 3)}, "speaks of"),
    "more than the file": ({"a": tensor(0, 2**60)}, "speaks of"),
    "a shape that is too large": ({"a": tensor(0, 4, [2**31, 2**31, 4])}, "no tensor"),
    "a shape that overflows": ({"a": tensor(0, 4, [2**62, 2**62, 2**62])}, "no tensor"),
    "a negative shape": ({"a": tensor(0, 4, [-2, -2])}, "no tensor"),
    "a shape of truths": ({"a": tensor(0, 1, [True])}, "no tensor"),
    "a broken shape": ({"a": tensor(0, 4, [4.0])}, "no tensor"),
    "many dims": ({"a": tensor(0, 4, [1] * 100 + [4])}, "no tensor"),
    "another dtype": ({"a": tensor(0, 4, dtype="F4")}, "no tensor"),
    "a dtype that is none": ({"a": tensor(0, 4, dtype=["F32"])}, "no tensor"),
    "offsets turned round": ({"a": {"dtype": "U8", "shape": [0], "data_offsets": [4, 0]}}, "no tensor"),
    "one offset": ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4]}}, "no tensor"),
    "a further field": ({"a": {**tensor(0, 4), "more": 1}}, "no tensor"),
    "a field missing": ({"a": {"dtype": "U8", "shape": [4]}}, "no tensor"),
    "no object": ({"a": 4}, "no tensor"),
    "a list": (["a"], "no JSON object"),
    "no JSON": (b"{", "no JSON"),
    "no UTF-8": (b'{"\xff": 1}', "no JSON"),
    "a key twice": (b'{"a": 1, "b": 2, "a": 3}', "'a' is there twice"),
    "not a number": (b'{"a": NaN}', "NaN is no number"),
    "deep nesting": (b"[" * 1_000_000, "no JSON"),
    "a number of a million digits": (b'{"a": ' + b"9" * 1_000_000 + b"}", "no JSON"),
    "a name of many lines": ({"a\n" * 1000: tensor(1, 4)}, r"'a\\na"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_is_none_is_refused(what, tmp_path):
    header, message = HEADERS[what]
    file_of(path := tmp_path / "file.safetensors", header, b"1234")
    with pytest.raises(CheckpointError, match=rf"{path}: .*{message}") as error:
        TensorFile(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("length", [17 * 2**20, 2**60, 2**63, 2**64 - 1])
def test_a_header_that_claims_too_much_is_refused_at_once(length, tmp_path):
    path = tmp_path / "file.safetensors"
    with open(path, "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(20 * 2**20)
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"a header of [\d,]+ bytes in a file of 20,971,520"):
        TensorFile(path)
    assert time.perf_counter() - started < 1
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_too_many_tensors_are_refused(tmp_path):
    file_of(path := tmp_path / "file.safetensors", {str(i): tensor(0, 0) for i in range(100_001)})
    with pytest.raises(CheckpointError, match=r"100,001 tensors; at most 100,000 would do"):
        TensorFile(path)


@pytest.mark.parametrize("size", [0, 4, 8, 50])
def test_truncated_files_are_refused(size, tmp_path):
    written(path := tmp_path / "file.safetensors", some_tensors())
    os.truncate(path, size)
    with pytest.raises(CheckpointError, match=str(path)):
        TensorFile(path)


def test_a_file_truncated_while_it_is_read_is_refused(tmp_path):
    """Where a memory-mapped one would end the process."""
    written(path := tmp_path / "file.safetensors", {"a": torch.zeros(1000)})
    with TensorFile(path) as file:
        os.truncate(path, 2000)
        with pytest.raises(CheckpointError, match="ends within a: it was truncated"):
            file.read_into("a", memoryview(bytearray(4000)))


def check_fuzz(path, count, seed):
    """Mutated headers: a CheckpointError, or a file whose every tensor can be read."""
    written(path, some_tensors())
    content = path.read_bytes()
    draw = random.Random(seed)
    for _ in range(count):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 1, 3])):
            at = draw.randrange(int.from_bytes(content[:8], "little") + 8)
            kind = draw.randrange(4)
            if kind == 0:
                damaged[at] = draw.randrange(256)
            elif kind == 1:
                del damaged[at : at + draw.randrange(9)]
            elif kind == 2:
                damaged[at:at] = draw.choice([b"0", b"9999", b"-", b"[", b'"', b"{}", b"null", b"1e9"])
            else:
                damaged[at:at] = damaged[at : at + draw.randrange(40)]
        path.write_bytes(damaged)
        try:
            file = TensorFile(path)
        except CheckpointError:
            continue
        with file:
            for name, entry in file.entries.items():
                file.read_into(name, memoryview(bytearray(entry.stop - entry.start)))


def test_mutated_headers_raise_nothing_else(tmp_path):
    check_fuzz(tmp_path / "file.safetensors", 500, 1)


@pytest.mark.full
def test_ten_thousand_mutated_headers_raise_nothing_else(tmp_path):
    check_fuzz(tmp_path / "file.safetensors", 10_000, 2)

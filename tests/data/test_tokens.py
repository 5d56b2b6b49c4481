"""Token folders: what is written is read back, and a folder that is not whole is never taken for one."""

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data import TokenFile, TokenWriter
from megalite.data import tokens as tokens_module
from megalite.errors import DataError


def write(folder: Path, ids: object, vocab_size: int = 100, **options: object) -> TokenFile:
    with TokenWriter(folder, vocab_size, **options) as writer:  # type: ignore[arg-type]
        writer.write(ids)  # type: ignore[arg-type]
    return TokenFile(folder)


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(256, 2), (65536, 2), (65537, 4), (200_000, 4)])
def test_what_is_written_is_read_back_in_the_narrowest_type(tmp_path, vocab_size, itemsize):
    ids = [0, 1, vocab_size - 1, 0, 7]
    with TokenWriter(tmp_path / "t", vocab_size, end_of_text=0, tokenizer="{}", source="by hand") as writer:
        writer.write(ids)
        writer.write([])
        writer.write(np.array([5, 0], dtype=np.int32))
    file = TokenFile(tmp_path / "t")
    assert file.tokens.tolist() == [*ids, 5, 0]
    assert (len(file), file.vocab_size, file.end_of_text, file.index.max_token) == (7, vocab_size, 0, vocab_size - 1)
    assert (file.index.documents, file.index.source) == (3, "by hand")
    assert file.path.stat().st_size == 7 * itemsize
    assert file.tokenizer_path == tmp_path / "t" / "tokenizer.json"
    assert file.tokens.dtype.newbyteorder("<") == np.dtype(f"<u{itemsize}")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_without_an_end_of_text_or_a_tokenizer_there_is_none(tmp_path):
    file = write(tmp_path / "t", [1, 2])
    assert (file.end_of_text, file.index.documents, file.tokenizer_path) == (None, None, None)


def test_a_writer_takes_an_empty_folder_and_makes_parents(tmp_path):
    (tmp_path / "empty").mkdir()
    assert len(write(tmp_path / "empty", [1])) == 1
    assert len(write(tmp_path / "a" / "b", [1])) == 1


def test_a_writer_refuses_a_folder_that_holds_something(tmp_path):
    write(tmp_path / "t", [1, 2, 3])
    with pytest.raises(DataError, match=r"t: exists and is not empty; another folder would do"):
        write(tmp_path / "t", [4])
    assert TokenFile(tmp_path / "t").tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("ids", [[1, 100], [-1], [0.5], np.array([2**40])])
def test_a_writer_refuses_ids_outside_the_vocabulary_and_leaves_nothing(tmp_path, ids):
    with pytest.raises(DataError, match=r"token id .* given; a whole number below 100 would do"):
        write(tmp_path / "t", ids)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(DataError, match="no token was written"):
        write(tmp_path / "t", [])
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_the_block_leaves_nothing(tmp_path):
    def interrupted():
        with TokenWriter(tmp_path / "t", 10) as writer:
            writer.write([1, 2, 3])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("stage", ["mkdir", "fsync", "rename"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, stage):
    monkeypatch.setattr(*{"fsync": (os, "fsync")}.get(stage, (Path, stage)), full_disk)
    with pytest.raises(DataError, match=r"t: writing stopped after \d+ bytes of tokens: No space left") as caught:
        write(tmp_path / "t", [1, 2, 3])
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_tokens_stream(tmp_path, monkeypatch):
    class Disk:
        closed = 0

        def write(self, data):
            if len(data) >= 1000:
                full_disk()

        def close(self):
            self.closed += 1
            full_disk()

    disk = Disk()
    monkeypatch.setattr(Path, "open", lambda path, mode: disk)
    writer = TokenWriter(tmp_path / "t", 10)
    writer.__enter__()
    writer.write([1, 2])
    with pytest.raises(DataError, match="after 4 bytes of tokens: No space left") as caught:
        writer.write([3] * 1000)
    writer.__exit__(DataError, caught.value, None)
    assert disk.closed == 1
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_writing_leaves_no_folder_that_opens(tmp_path):
    script = (
        "import os, signal, sys; from megalite.data import TokenWriter\n"
        "with TokenWriter(sys.argv[1], 100) as writer:\n"
        "    writer.write(list(range(100))); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "t")], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (orphan,) = tmp_path.iterdir()
    assert orphan.name.startswith(".t.") and orphan.name.endswith(".partial")
    for folder in (tmp_path / "t", orphan):
        with pytest.raises(DataError):
            TokenFile(folder)
    assert len(write(tmp_path / "t", [1])) == 1  # and it is not in the way


def test_a_missing_folder_and_a_missing_file_say_what_would_do(tmp_path):
    with pytest.raises(
        DataError, match=r"nothing: no such token folder; `megalite data TEXT... -o .*nothing` makes one"
    ):
        TokenFile(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"index.json: No such file"):
        TokenFile(tmp_path)
    write(tmp_path / "t", [1]).path.unlink()
    with pytest.raises(DataError, match=r"tokens.bin: No such file"):
        TokenFile(tmp_path / "t")


@pytest.mark.parametrize("size", [0, 1, 199, 201, 400])
def test_a_file_of_the_wrong_size_is_refused_with_both_sizes(tmp_path, size):
    os.truncate(write(tmp_path / "t", range(100)).path, size)
    with pytest.raises(DataError, match=rf"tokens.bin: {size} bytes found, 200 expected \(100 tokens of 2 bytes\)"):
        TokenFile(tmp_path / "t")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "other"),
        ("version", 2),
        ("dtype", "uint32"),
        ("dtype", ["uint16"]),
        ("count", 0),
        ("count", "3"),
        ("count", True),
        ("vocab_size", 0),
        ("vocab_size", None),
        ("max_token", 100),
        ("end_of_text", 100),
        ("documents", -1),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(tmp_path, field, value):
    write(tmp_path / "t", [1, 2, 3])
    path = tmp_path / "t" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(DataError, match=r"index.json: .* would do"):
        TokenFile(tmp_path / "t")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_index_is_an_error_of_ours_or_none(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz") / "t"
    write(folder, [1, 2, 3], source="fuzz")
    path = folder / "index.json"
    text = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=4))
    path.write_bytes(text)
    with suppress(DataError):
        assert len(TokenFile(folder)) == 3


def test_ids_beyond_the_vocabulary_are_named_with_their_place(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "CHUNK", 7)
    file = write(tmp_path / "t", range(100))
    file.check_ids(100)
    with pytest.raises(DataError, match=r"tokens.bin: token id 60 at byte 120 is beyond the vocabulary of 60; .* 63 "):
        file.check_ids(60)  # the chunk with 60 ends at 62
    with pytest.raises(DataError, match="token id 90 at byte 180"):
        file.read(85, 95, 90)
    monkeypatch.setattr(tokens_module, "SCAN_BYTES", 100)
    file.check_ids(60)  # the first fifty only, as its docstring says


def test_histogram(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "CHUNK", 3)
    file = write(tmp_path / "t", [0, 1, 1, 2, 2, 2, 2, 9], vocab_size=10)
    assert file.histogram(0, 8).tolist() == [1, 2, 4, 0, 0, 0, 0, 0, 0, 1]
    assert file.histogram(2, 4).tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0, 0]

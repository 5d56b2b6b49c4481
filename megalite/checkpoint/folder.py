"""A folder of checkpoints, and what makes one of them complete.

    step-00000100/
        rank-00003.safetensors   slices of tensors, a file a rank that writes
        index.json               where which slice is: index.py
        state.json               the plain numbers: step, updates, config, ...
        COMMITTED                SHA-256 of the last two, written when all the others are on the disk

A checkpoint is written as `.tmp-step-00000100` and renamed at the very end, so that whatever has the name of a
checkpoint was whole when it got it. There is no file that says which is the newest: the names do. One that is deleted
is renamed first. No torch here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.index import Index
from megalite.checkpoint.tensor_file import TensorFile, open_file, parsed, write_all
from megalite.errors import CheckpointError, PathRefused

INDEX, STATE, COMMITTED = "index.json", "state.json", "COMMITTED"
NAME = re.compile(r"step-(\d{8,16})")
ABANDONED = re.compile(r"\.(tmp|old|del)-(step-\d{8,16})")
LONGEST = {INDEX: 2**30, STATE: 2**24, COMMITTED: 2**10}  # bytes, at most


@dataclass(frozen=True)
class Checkpoint:
    """One that is complete. state: what state.json says, among it "step" """

    path: Path
    index: Index
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """How many steps had been done."""
        step = self.state.get("step")
        if type(step) is not int or step < 0:
            raise CheckpointError(f'{self.path / STATE}: "step" is missing or no number of steps')
        return step


def name_of(step: int) -> str:
    """Of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def temporary(root: Path, step: int) -> Path:
    """Where it is written."""
    return root / f".tmp-{name_of(step)}"


def steps(root: Path) -> list[int]:
    """What `root` has checkpoints of, by their names, the newest first; links and files are passed over."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read: {error.strerror}") from None
    matches = [match for name in names if (match := NAME.fullmatch(name))]
    return sorted((int(match[1]) for match in matches if match[0] == name_of(int(match[1]))), reverse=True)


def newest(root: Path) -> tuple[Checkpoint | None, list[CheckpointError]]:
    """The newest that is complete, every file of the right size and header; and what is wrong with those after it."""
    wrong: list[CheckpointError] = []
    for step in steps(root):
        try:
            return checked(root / name_of(step)), wrong
        except CheckpointError as error:
            wrong.append(error)
    return None, wrong


def checked(path: Path) -> Checkpoint:
    """`read`, and every file is there, with the size and the header that it was written with."""
    checkpoint = read(path)
    with opened(path) as folder:
        for name, file in checkpoint.index.files.items():
            TensorFile(path / name, folder=folder, size=file.bytes, header_crc32=file.header_crc32).close()
    return checkpoint


def read(path: Path) -> Checkpoint:
    """The index and the plain numbers of a checkpoint, as they were written; CheckpointError for what is none."""
    with opened(path) as folder:
        sums = parsed(text := _content(path / COMMITTED, folder), path / COMMITTED)
        contents = {name: _content(path / name, folder) for name in (INDEX, STATE)}
    expected = _sums(contents)
    if text != _committed(expected):
        wrong = [name for name in contents if sums.get(name) != expected[name]]
        raise CheckpointError(
            f"{path / (wrong[0] if len(wrong) == 1 else COMMITTED)}: not what was written: "
            f"the SHA-256 in {COMMITTED} is another"
        )
    return Checkpoint(path, Index.from_json(contents[INDEX], path / INDEX), parsed(contents[STATE], path / STATE))


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A folder open, so that what is in it is found whatever becomes of its name; PathRefused for a link."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise PathRefused(f"{path}: a link; the folder itself would do") from None
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
    try:
        yield folder
    finally:
        os.close(folder)


def _content(path: Path, folder: int) -> bytes:
    file = open_file(path, folder)
    with os.fdopen(file, "rb") as stream:
        try:
            text = stream.read(LONGEST[path.name] + 1)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if len(text) > LONGEST[path.name]:
        raise CheckpointError(f"{path}: more than {LONGEST[path.name]:,} bytes, too many")
    return text


def _sums(contents: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(text).hexdigest() for name, text in contents.items()}


def _committed(sums: Mapping[str, str]) -> bytes:
    return json.dumps(dict(sums), indent=1).encode() + b"\n"


def commit(root: Path, step: int, index: Index, state: bytes) -> Path:
    """All files of `temporary` are written: add the others, and give it its name. Raises OSError.

    A checkpoint of the same step is replaced.
    """
    source, target = temporary(root, step), root / name_of(step)
    contents = {INDEX: index.to_json(), STATE: state}
    contents[COMMITTED] = _committed(_sums(contents))
    folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = set(os.listdir(folder))
        for name in found - index.files.keys():  # what somebody left
            os.unlink(name, dir_fd=folder)
        for name, kept in index.files.items():
            if name not in found or os.stat(name, dir_fd=folder).st_size != kept.bytes:
                raise OSError(errno.ENOENT, f"{name} is not seen by rank 0; a folder that all machines share would do")
        for name, text in contents.items():
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
            try:
                write_all(file, memoryview(text))
                os.fsync(file)
            finally:
                os.close(file)
            if name != INDEX:
                os.fsync(folder)  # COMMITTED must not be there before the others
    finally:
        os.close(folder)
    old = root / f".old-{target.name}"
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    os.rename(source, target)
    _fsync(root)
    if old.exists():
        shutil.rmtree(old)
    return target


def _fsync(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def retain(root: Path, keep: int, every: int = 0) -> list[int]:
    """Delete all but the last `keep` that are complete, and those of a multiple of `every` steps; returns their steps.

    What is damaged counts for nothing and stays. keep: at least 1
    """
    complete = []
    for step in steps(root):
        with suppress(CheckpointError):
            complete.append(checked(root / name_of(step)).path)
    gone = [path for path in complete[max(1, keep) :] if not every or int(path.name[5:]) % every]
    for path in gone:
        aside = root / f".del-{path.name}"
        os.rename(path, aside)
        shutil.rmtree(aside)
    return [int(path.name[5:]) for path in gone]


def clean(root: Path) -> list[str]:
    """Remove what an earlier process was in the midst of writing or deleting; returns the names. No other may be at it.

    One that was being replaced gets its name back where the other did not get it.
    """
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        if match := ABANDONED.fullmatch(name):
            path, target = root / name, root / match[2]
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            elif match[1] == "old" and not target.exists():
                os.rename(path, target)
            else:
                shutil.rmtree(path)
            found.append(name)
    return found

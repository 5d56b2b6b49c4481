"""A folder of Hugging Face's, file by file: config.json, and tensors in model.safetensors or in several such files.

    model.safetensors.index.json    {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors", …}, …}

Nothing is unpickled: of a folder whose weights are .bin files nothing is read. A name in the index is the name of a
regular file in the folder itself, no path and no link, so that a folder from elsewhere leads nowhere else.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megalite.checkpoint.boxes import Box
from megalite.errors import CheckpointError, PathRefused

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".bin.index.json")
MOST_CONFIG, MOST_INDEX = 2**20, 2**26  # bytes of JSON
FLOATS = ("F64", "F32", "F16", "BF16")
FILE_BYTES = 5 * 10**9  # of tensors in a file, as transformers has it


class HuggingFaceFolder:
    """A WeightSource of a folder as transformers' save_pretrained leaves it, by the names in its files.

    config: what config.json holds   names: of all tensors   bytes_read: of tensors, so far
    CheckpointError for what is missing or damaged, PathRefused for a name or a link that may lead out of the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; one with config.json and model.safetensors would do")
        self.config = _json(self.folder / CONFIG, MOST_CONFIG)
        self.bytes_read = 0
        self._open: dict[Path, Any] = {}
        single = self.folder / SINGLE
        if _there(single):
            self._file_of = dict.fromkeys(self._opened(single).keys(), single)
        elif _there(self.folder / INDEX):
            self._file_of = _file_of_each(self.folder)
        else:
            raise self._without_weights()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole; CheckpointError where there is no such tensor, or it is of no floating-point dtype."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, box: Box) -> Tensor:
        """A box of it, in the dtype of the file; no other bytes of it are read."""
        lazily = self._slice(name)
        try:
            read = lazily[box.slices] if box.shape else self._opened(self._file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._file_of[name]}: {name} cannot be read: {error}") from None
        self.bytes_read += read.nbytes
        return read

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder}: no tensor {name}")
        path = self._file_of[name]
        try:
            lazily = self._opened(path).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: no tensor {name}, which {INDEX} has there ({error})") from None
        if (dtype := lazily.get_dtype()) not in FLOATS:
            raise CheckpointError(f"{path}: {name} has dtype {dtype}; one of {', '.join(FLOATS)} would do")
        return lazily

    def _opened(self, path: Path) -> Any:
        if path not in self._open:
            try:  # which checks the header: its length, its JSON, and that tensors make up the file
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a safetensors file that can be read: {error}") from None
        return self._open[path]

    def _without_weights(self) -> CheckpointError:
        pickles = sorted(path.name for path in self.folder.iterdir() if path.name.endswith(PICKLES))
        if pickles:
            return CheckpointError(
                f"{self.folder}: {pickles[0]} is a pickle, which may run any code when it is read; {SINGLE} would do, "
                "as transformers' save_pretrained writes it"
            )
        return CheckpointError(f"{self.folder}: no weights there; {SINGLE}, or {INDEX} and its files, would do")


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], most: int = FILE_BYTES) -> None:
    """Write tensors into model.safetensors, or into several files of at most `most` bytes each and their index.

    They are asked for one by one, and no more than a file's are held at once.
    """
    files: list[dict[str, int]] = []
    waiting: dict[str, Tensor] = {}

    def write() -> None:
        (path := folder / _numbered(len(files))).touch()
        mode = path.stat().st_mode  # by the umask, of which the library takes no notice
        save_file(waiting, path, {"format": "pt"})
        path.chmod(mode)
        files.append({name: tensor.nbytes for name, tensor in waiting.items()})
        waiting.clear()

    for name, tensor in tensors:
        if waiting and tensor.nbytes + sum(held.nbytes for held in waiting.values()) > most:
            write()
        waiting[name] = tensor.contiguous()
    write()
    if len(files) == 1:
        (folder / _numbered(0)).rename(folder / SINGLE)
        return
    named = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for i, name in enumerate(named):
        (folder / _numbered(i)).rename(folder / name)
    weight_map = {tensor: name for name, held in zip(named, files, strict=True) for tensor in held}
    total = sum(sum(held.values()) for held in files)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _numbered(number: int) -> str:
    """A file's name until it is known of how many it is one."""
    return f"model-{number + 1:05d}.safetensors"


def _file_of_each(folder: Path) -> dict[str, Path]:
    """The files that an index names, by their tensors."""
    path = folder / INDEX
    weight_map = _json(path, MOST_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path}: no weight_map of tensors' names to files' names")
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
            raise PathRefused(f"{path}: {name!r} leads out of the folder; the name of a file in it would do")
        if not name.endswith(".safetensors"):
            reason = "is a pickle, which may run any code when it is read" if name.endswith(PICKLES) else "is none"
            raise CheckpointError(f"{path}: {name!r} {reason}; a .safetensors file would do")
        if not _there(folder / name):
            raise CheckpointError(f"{folder / name}: no such file, and {INDEX} names it; a complete copy would do")
    return {tensor: folder / name for tensor, name in weight_map.items()}


def _there(path: Path) -> bool:
    """Whether there is such a file; PathRefused where it is a link, or no regular file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if stat.S_ISLNK(mode):
        raise PathRefused(f"{path}: a link; a copy with the files themselves would do, as by `cp -rL`")
    if not stat.S_ISREG(mode):
        raise PathRefused(f"{path}: not a regular file")
    return True


def _json(path: Path, most: int) -> dict[str, Any]:
    if not _there(path):
        raise CheckpointError(f"{path}: no such file; a folder written by transformers' save_pretrained would do")
    try:
        if (size := path.stat().st_size) > most:
            raise CheckpointError(f"{path}: {size} bytes; at most {most} would do")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON that can be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content

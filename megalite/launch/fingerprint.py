"""What must be alike on all ranks: settings, code, PyTorch, data, threads. Compared through a store, before anything.

Ranks that differ in one of them compute something, and wrong: gloo sums an int with a float without a word.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import time
import zlib
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megalite.config import Config
from megalite.errors import MeshMismatch, RankLost

PLACES = ("data.paths", "run.dir", "model.init", "checkpoint.resume")  # where things lie may differ between machines
LOOKED_AT, PIECE = 16, 2**16  # of a token file: so many pieces, evenly spaced, of so many bytes
MOST = 4  # keys named in a message
POLL = 0.02  # seconds


def fingerprint(config: Config, threads: int, device: str) -> dict[str, str]:
    """Everything by name; a DataError where data cannot be read."""
    import torch

    from megalite.data import TokenFile

    found = {f"{key}": json.dumps(value) for key, value in _settings(dataclasses.asdict(config)).items()}
    found = {key: value for key, value in found.items() if key not in PLACES}
    found |= {"code": _code(), "torch": str(torch.__version__), "python": platform.python_version()}
    found |= {"threads": str(threads), "device": device}
    for number, path in enumerate(config.data.paths):
        file = TokenFile(path)
        index = {key: value for key, value in dataclasses.asdict(file.index).items() if key != "source"}
        found |= {f"data.paths[{number}].{key}": str(value) for key, value in index.items()}
        found[f"data.paths[{number}].content"] = _content(file.path)
    return found


def compare(store: Any, rank: int, size: int, mine: Mapping[str, str], timeout: float) -> None:
    """Return when all ranks have the same; MeshMismatch, on every rank, names keys, values and ranks."""
    text = json.dumps(mine, sort_keys=True)
    store.set(f"fingerprint/{rank}", text)
    store.set(f"digest/{rank}", hashlib.sha256(text.encode()).hexdigest())
    keys = [f"digest/{each}" for each in range(size)]
    deadline = time.monotonic() + timeout
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [each for each, key in enumerate(keys) if not store.check([key])]
            error = RankLost(f"{_named(missing)} of {size} did not say within {timeout:g} s what it runs")
            error.rank = missing[0]
            raise error
        time.sleep(POLL)
    alike: dict[bytes, list[int]] = defaultdict(list)
    for each, digest in enumerate(store.multi_get(keys)):
        alike[digest].append(each)
    if len(alike) > 1:
        _refuse([(ranks, json.loads(store.get(f"fingerprint/{ranks[0]}"))) for ranks in alike.values()])


def _refuse(groups: list[tuple[list[int], dict[str, str]]]) -> None:
    """Say what differs between groups of ranks that are alike."""
    keys = sorted({key for _, said in groups for key in said})
    differences = []
    for key in keys:
        values: dict[str, list[int]] = defaultdict(list)
        for ranks, said in groups:
            values[said.get(key, "not there")] += ranks
        if len(values) > 1:
            differences.append(f"{key} is " + ", ".join(f"{v} on {_named(sorted(r))}" for v, r in values.items()))
    more = f"; and {len(differences) - MOST} more" if len(differences) > MOST else ""
    error = MeshMismatch(f"ranks differ: {'; '.join(differences[:MOST])}{more}; the same on all of them would do")
    error.rank = min(min(groups, key=lambda group: len(group[0]))[0])
    raise error


def _named(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0, 1, 2", "ranks 0, 1, 2 and 61 more"."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _settings(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


@cache
def _code() -> str:
    """A digest of megalite's source."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _content(path: Path) -> str:
    """A checksum over pieces of a file, for any size of it at once."""
    size, checksum = path.stat().st_size, 0
    with path.open("rb") as file:
        for piece in range(LOOKED_AT):
            file.seek(max(0, size - PIECE) * piece // max(1, LOOKED_AT - 1))
            checksum = zlib.crc32(file.read(PIECE), checksum)
    return f"{checksum:08x}"

"""A model that is kept somewhere, whichever way: a run, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint import folder
from megalite.checkpoint.hf_folder import HuggingFaceFolder
from megalite.checkpoint.source import Source, WeightSource
from megalite.config import ModelConfig
from megalite.config_file import from_tables
from megalite.errors import CheckpointError, ConfigError
from megalite.model.hf import FromHuggingFace
from megalite.model.hf_config import model_config

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Stored:
    """config: of the model   weights: by the names of the whole model's parameters   path: where they are

    tokenizer: the tokenizer.json that goes with it, if there is one
    """

    config: ModelConfig
    weights: WeightSource
    path: Path
    tokenizer: Path | None


@contextmanager
def stored(path: Path) -> Iterator[Stored]:
    """Open a run's newest complete checkpoint, a checkpoint, or a Hugging Face folder; CheckpointError for none."""
    if (path / CHECKPOINTS).is_dir():
        newest, wrong = folder.newest(path / CHECKPOINTS)
        if newest is None:
            raise wrong[0] if wrong else CheckpointError(f"{path / CHECKPOINTS}: no checkpoint there")
        found = newest
    elif (path / "config.json").is_file():
        there = HuggingFaceFolder(path)
        config = model_config(there.config)
        yield Stored(config, FromHuggingFace(there, config), path, _file(path / "tokenizer.json"))
        return
    elif (path / folder.COMMITTED).is_file():
        found = folder.checked(path)
    else:
        raise CheckpointError(
            f"{path}: no model there; the folder of a run with checkpoints, one of those, or a Hugging Face folder "
            "would do"
        )
    try:
        run = from_tables(found.state.get("config", {}))
    except ConfigError as error:
        raise CheckpointError(f"{found.path / folder.STATE}: {error}") from None
    with Source(found, "model/") as source:
        paths = run.data.paths
        yield Stored(run.model, source, found.path, _file(Path(paths[0], "tokenizer.json")) if paths else None)


def _file(path: Path) -> Path | None:
    return path if path.is_file() else None

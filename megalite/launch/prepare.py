"""Before any rank computes, on one process a machine: make the corpus where it is missing, and check all data."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.config import Config
from megalite.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def prepare(config: Config) -> None:
    """Make `data.corpus` in `data.paths[0]` unless something is there, look at all data, make `run.dir`.

    Raises ConfigError and DataError, as a rank would later.
    """
    from megalite.data.corpus import standard_library
    from megalite.train.loop import open_data

    data = config.data
    if data.corpus:
        if not data.paths:
            raise ConfigError("data.paths: none given; a folder for data.corpus to be made in would do")
        if not Path(data.paths[0]).exists():
            tokenize_visibly(standard_library(), Path(data.paths[0]), None, config.model.vocab_size)
    for file in open_data(config).files:
        file.check_ids(config.model.vocab_size)
    try:
        Path(config.run.dir).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=config.run.dir).close()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"run.dir: {config.run.dir} given: {reason}; a folder that can be written would do") from None


def tokenize_visibly(paths: Sequence[Path], folder: Path, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """`data.tokenize` with a progress bar, where there is a terminal, and a line in the end."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from megalite.data.corpus import tokenize

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(f"tokens of {folder}", total=None)
        made = tokenize(
            paths, folder, tokenizer, vocab_size, lambda done, total: bar.update(task, completed=done, total=total)
        )
    print(f"{folder}: {len(made):,} tokens of a vocabulary of {made.vocab_size}", flush=True)

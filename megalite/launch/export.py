"""`megalite export RUN -o DIR`: a checkpoint as a folder that transformers' from_pretrained loads.

    DIR/config.json, generation_config.json        DIR/tokenizer.json, tokenizer_config.json
    DIR/model.safetensors, or several and model.safetensors.index.json

All is written under another name, read again and compared by its logits before it has its own: a folder that is there
is whole, and computes what the checkpoint does.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megalite.checkpoint.boxes import Box
from megalite.checkpoint.hf_folder import HuggingFaceFolder, write_tensors
from megalite.checkpoint.source import WeightSource
from megalite.config import ModelConfig
from megalite.data.tokenizer import end_of_text, load_tokenizer
from megalite.errors import SaveError
from megalite.model.gpt import GPT
from megalite.model.hf import FromHuggingFace, initialise, to_hugging_face
from megalite.model.hf_config import config_json, family_of

TOKENS = 64  # of the sequence whose logits are compared
BOUND = 1e3  # rounding errors of their dtype that they may differ by, of the largest logit


def export(
    config: ModelConfig,
    source: WeightSource,
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    tokenizer: Path | None = None,
) -> None:
    """Write the model whose weights, by our names, are in `source` as a new folder for transformers.

    dtype: of the weights there   tokenizer: a tokenizer.json that goes with it, the token that ends a document included

    Raises ConfigError where transformers has no such model; SaveError where it cannot be written, something is there
    already, or what was written does not compute the same. Then there is no folder.
    """
    folder = Path(folder)
    family_of(config)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise SaveError(f"{folder}: is there already; another name would do, or delete it first")
    partial = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.partial"
    try:
        partial.mkdir(parents=True)
        write_tensors(partial, to_hugging_face(config, source, dtype))
        end = _write_tokenizer(partial, tokenizer, config) if tokenizer else None
        _write(partial / "config.json", config_json(config, str(dtype).removeprefix("torch."), end))
        _write(partial / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
        _check(config, source, partial, dtype)
        for path in (*partial.iterdir(), partial):  # a rename survives a power cut, what is in the files must too
            _sync(path)
        partial.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{folder}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tokenizer(folder: Path, path: Path, config: ModelConfig) -> int | None:
    """Writes tokenizer.json and what transformers wants beside it; the id of the token that ends a document."""
    tokenizer = load_tokenizer(path)
    shutil.copyfile(path, folder / "tokenizer.json")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    end = end_of_text(tokenizer)
    if end is not None:
        settings |= dict.fromkeys(("bos_token", "eos_token"), tokenizer.id_to_token(end))
    _write(folder / "tokenizer_config.json", settings)
    return end


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(config: ModelConfig, source: WeightSource, folder: Path, dtype: torch.dtype) -> None:
    """SaveError unless the folder, read again, has the logits of the source."""
    wide = torch.promote_types(dtype, torch.float32)
    expected = _logits(config, _Rounded(source, dtype), wide)
    actual = _logits(config, FromHuggingFace(HuggingFaceFolder(folder), config), wide)
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    if not expected.isfinite().all():
        raise SaveError("nothing is exported: some of the logits are no numbers")
    if not error <= BOUND * torch.finfo(wide).eps:
        raise SaveError(f"nothing is exported: what was written has other logits, by {error:.1e} of the largest")


def _logits(config: ModelConfig, source: WeightSource, dtype: torch.dtype) -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):  # nothing is drawn that is read in the end
            model = GPT(config).to_empty(device="cpu")
    finally:
        torch.set_default_dtype(before)
    initialise(model, source)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, min(TOKENS, config.max_seq_len)), generator=generator)
    with torch.no_grad():
        return model(tokens)


@dataclass(frozen=True)
class _Rounded:
    """What of a source's values a dtype keeps."""

    source: WeightSource
    dtype: torch.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def read(self, name: str, box: Box) -> Tensor:
        return self.source.read(name, box).to(self.dtype)

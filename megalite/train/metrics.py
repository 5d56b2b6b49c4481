"""What a run measures: metrics.jsonl, a line a step, and the share of the machine's peak that it reached.

MFU = tokens/s · FLOPs per token / (ranks · peak of one), with the FLOPs of PaLM's appendix B: 6 N + 12 L·H·Q·T a token,
forward and backward, no causal halving; N counts the weights that are multiplied (the head, tied or not, but no
embedding or position table), T is the sequence, or the window where that is shorter. The peak is the data sheet's for
GPUs, and on CPUs what a matrix product reaches here and now with every rank computing.

Source: Chowdhery et al., PaLM (2022), appendix B. Peaks: NVIDIA data sheets, dense, by dtype.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megalite.config import ModelConfig
from megalite.errors import SaveError

PEAKS = {  # TFLOP/s, dense: name within the device's name -> (bfloat16, float32 by TF32 or plain)
    "B200": (2250, 1100), "H200": (989, 494), "H100 PCIe": (756, 378), "H100": (989, 494), "A100": (312, 156),
    "L40S": (362, 183), "L4": (121, 60), "A10": (125, 62), "V100": (125, 15.7), "T4": (65, 8.1), "4090": (165, 82.6),
}  # fmt: skip


class MetricsFile:
    """Appends a JSON object a line; each line reaches the file whole and at once.

    done: steps after which the run goes on. Lines of later ones, which are taken again, are moved to a file beside it
    """

    def __init__(self, path: Path, done: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]
            if len(kept) < len(lines):
                with path.with_stem(f"{path.stem}-superseded").open("a", encoding="utf-8") as file:
                    file.writelines(line.rstrip("\n") + "\n" for line in lines if line not in kept)
                partial = path.with_suffix(".tmp")
                partial.write_text("".join(kept), encoding="utf-8")
                partial.replace(path)
        self._path, self._file = path, path.open("a", encoding="utf-8", buffering=1)

    def write(self, values: Mapping[str, Any]) -> None:
        """SaveError where the line cannot be written."""
        try:
            self._file.write(json.dumps(dict(values)) + "\n")
        except OSError as error:
            raise SaveError(f"{self._path}: {error.strerror}; a disk with space would do, and starting again") from None

    def close(self) -> None:
        with suppress(OSError):  # a line that could not be written is tried once more
            self._file.close()


def multiplied_weights(config: ModelConfig) -> int:
    """How many weights a token is multiplied with: all matrices, the head included, lookup tables excluded."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = config.hidden * (2 * q + 2 * kv)
    mlp = config.hidden * config.ffn * (3 if config.gated else 2)
    return config.layers * (attention + mlp) + config.vocab_size * config.hidden


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Forward and backward FLOPs of one token of a sequence of `seq_len`, of which it sees at most a window."""
    seen = min(seq_len, config.window) if config.window else seq_len
    return 6 * multiplied_weights(config) + 12 * config.layers * config.heads * config.head_dim * seen


def peak_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """FLOP/s that one rank could reach: the data sheet's for a known GPU, else measured for about `seconds`.

    To be called by all ranks at once: where they share cores, each then reaches its share.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, (half, single) in PEAKS.items():
            if known in name and dtype != torch.float64:
                return 1e12 * (single if dtype == torch.float32 else half)
    size = 4096 if device.type == "cuda" else 512
    a = torch.ones(size, size, dtype=dtype, device=device)
    torch.mm(a, a)
    products, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        products += 1
    return products * 2 * size**3 / (time.perf_counter() - start)

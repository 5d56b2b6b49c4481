"""What benchmarks compare with is the same model; without a GPU they say so."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalite.config import ModelConfig
from megalite.model.gpt import GPT
from megalite.model.presets import PRESETS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_plain_gpt2_is_the_same_model(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from plain_gpt2 import PlainGPT2

    config = ModelConfig(**PRESETS["gpt2-tiny"])
    ids = torch.randint(config.vocab_size, (2, 18), generator=torch.Generator().manual_seed(0))
    dense = GPT(config).double()
    plain = PlainGPT2(config).double().load(dense)
    ours, theirs = (model(ids[:, :-1], ids[:, 1:]) for model in (dense, plain))
    ours.backward()
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    torch.testing.assert_close(dense.positions.weight.grad, plain.positions.weight.grad, rtol=1e-9, atol=1e-14)
    assert sum(p.numel() for p in dense.parameters()) == sum(p.numel() for p in plain.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_line_says_what_would_do():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu_step.py"], cwd=BENCHMARKS.parent, check=True, capture_output=True, text=True
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("nothing measured: no CUDA device; --device cpu ")

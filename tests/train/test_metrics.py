"""What a run measures: FLOPs by the formula, and a file that loses no earlier run."""

import io
import json
from pathlib import Path

import pytest
import torch

from megalite.config import ModelConfig
from megalite.errors import SaveError
from megalite.model.gpt import GPT
from megalite.model.presets import PRESETS
from megalite.train.metrics import MetricsFile, flops_per_token, multiplied_weights, peak_flops


def test_flops_of_gpt2_by_hand():
    config = ModelConfig(**PRESETS["gpt2"])
    blocks = 12 * (768 * 3 * 768 + 768 * 768 + 2 * 768 * 3072)
    assert multiplied_weights(config) == blocks + 50257 * 768 == 123_532_032
    assert flops_per_token(config, 1024) == 6 * 123_532_032 + 12 * 12 * 768 * 1024 == 854_438_400


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "smollm2-135m", "llama-tiny", "gpt2-tiny"])
def test_multiplied_weights_are_the_matrices_of_the_model(name):
    config = ModelConfig(**PRESETS[name])
    with torch.device("meta"):
        model = GPT(config)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "positions" not in name)
    if not config.tied:
        matrices -= model.embedding.weight.numel()  # looked up, not multiplied
    assert multiplied_weights(config) == matrices


def test_attention_grows_with_the_sequence():
    config = ModelConfig(**PRESETS["llama-tiny"])
    assert flops_per_token(config, 101) - flops_per_token(config, 1) == 12 * 2 * 6 * 8 * 100


def test_attention_grows_no_further_than_its_window():
    config = ModelConfig(**PRESETS["llama-tiny"], window=64)
    assert flops_per_token(config, 1000) == flops_per_token(config, 64) > flops_per_token(config, 63)


def test_the_peak_is_a_rate_that_products_reach():
    assert 1e8 < peak_flops(torch.device("cpu"), torch.float32, seconds=0.01) < 1e14


def test_a_line_is_whole_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "new" / "folder" / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write({"step": 1, "loss": 0.1})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1, "loss": 0.1}]
    metrics.write({"step": 2, "loss": 1 / 3})
    assert json.loads(path.read_text().splitlines()[1])["loss"] == 1 / 3  # to the last bit
    metrics.close()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_that_goes_on_keeps_the_lines_of_the_steps_that_are_done(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in range(1, 6):
        first.write({"step": step, "run": 1})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 6, "ru')  # killed while it wrote
    second = MetricsFile(path, done=3)
    second.write({"step": 4, "run": 2})
    second.close()
    assert [(line["step"], line["run"]) for line in lines_of(path)] == [(1, 1), (2, 1), (3, 1), (4, 2)]
    superseded = (tmp_path / "metrics-superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in superseded[:2]] == [4, 5] and superseded[2].startswith('{"step": 6')
    third = MetricsFile(path, done=4)  # nothing is superseded
    third.close()
    assert len(lines_of(path)) == 4 and len((tmp_path / "metrics-superseded.jsonl").read_text().splitlines()) == 3


def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    with Path("/dev/full").open("ab", buffering=0) as full:
        monkeypatch.setattr(metrics, "_file", io.TextIOWrapper(full, write_through=True))
        with pytest.raises(SaveError, match=r"metrics\.jsonl: No space left on device"):
            metrics.write({"step": 1})
        metrics.close()

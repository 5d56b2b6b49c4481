"""The run: the same numbers twice, the same on another mesh, and what it leaves in its folder."""

import json
import math
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megalite.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    check,
    resolve,
)
from megalite.config_file import load
from megalite.data import TokenWriter
from megalite.errors import ConfigError, DataError
from megalite.model.block import Block
from megalite.model.presets import PRESETS
from megalite.parallel.pipeline.clock import Clock
from megalite.parallel.pipeline.saved import load as saved_step
from megalite.plan.measured_division import advice
from megalite.testing import run_ranks
from megalite.train import loop
from megalite.train.loop import open_data, pretrain
from megalite.train.metrics import peak_flops

KEYS = {"step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second", "mfu"}
MEMORY = {"memory", "memory_predicted"}  # of the second step
STEPS = 12


@pytest.fixture
def config(tmp_path):
    """A tiny model on tokens that can be learned: each follows from the one before, but for some noise."""
    generator = np.random.default_rng(0)
    ids = np.empty(4000, dtype=np.int64)
    ids[0] = 1
    for i in range(1, len(ids)):
        ids[i] = (3 * ids[i - 1] + 1) % 97 if generator.random() < 0.9 else generator.integers(97)
    with TokenWriter(tmp_path / "tokens", 97, 4) as writer:  # so 4 ends documents
        writer.write(ids)
    return Config(
        ModelConfig(**{**PRESETS["llama-tiny"], "vocab_size": 97, "tied": True}),
        MeshConfig(),
        DataConfig((str(tmp_path / "tokens"),), validation=0.1),
        TrainConfig(steps=STEPS, global_batch=8, seq_len=33, validate_every=5, validation_batches=2),
        OptimizerConfig(lr=1e-2, warmup=2),
        run=RunConfig(str(tmp_path / "run")),
    )


def sooner(config, device):
    """`pretrain`, which looks for the peak of FLOPS, that no number but `mfu` depends on, no longer than a product."""
    with patch.object(loop, "peak_flops", partial(peak_flops, seconds=1e-3)):
        pretrain(config, device)


def run(config, tmp_path, name, dp=1, *, train=sooner, **mesh):
    folder = tmp_path / name
    config = resolve(check(replace(config, mesh=MeshConfig(dp, **mesh), run=RunConfig(str(folder)))))
    run_ranks(train, config.mesh.size, config, torch.device("cpu"))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(lines, others, **bounds):
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        for key in bounds.keys() & line.keys():
            assert line[key] == pytest.approx(other[key], rel=bounds[key]), f"{key} of step {line['step']}"


def test_a_line_a_step_with_the_keys_of_the_design(config, tmp_path, capsys):
    lines = run(config, tmp_path, "run", dp=2, train=pretrain)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        validated = line["step"] in (5, 10, STEPS)
        measured = {name: line.pop(name) for name in MEMORY & line.keys()}
        assert bool(measured) == (line["step"] == 2)
        assert line.keys() == KEYS | ({"val_loss"} if validated else set())
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in line.values())
        assert line["tokens"] == line["step"] * 8 * 33
        assert line["tokens_per_second"] == pytest.approx(8 * 33 / line["step_seconds"])
        assert 0 < line["mfu"] < 1.5
    assert [line["lr"] for line in lines[:3]] == pytest.approx([0.005, 0.01, 0.01])
    assert abs(lines[0]["loss"] - math.log(97)) < 0.2
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    shown = capsys.readouterr().out
    assert "unigram entropy" in shown and "ln 97 = 4.575" in shown
    assert f"step {STEPS}/{STEPS}" in shown and "rank 1: " not in shown  # rank 0 speaks alone
    asked = replace(config, mesh=MeshConfig(2), run=RunConfig(str(tmp_path / "run")))
    assert load(tmp_path / "run" / "config.toml") == resolve(asked)


@pytest.mark.parametrize(("dp", "sp", "tp"), [(1, 1, 1), (2, 1, 2), (1, 3, 1)])
def test_the_same_numbers_twice(config, tmp_path, dp, sp, tp):
    config = replace(config, train=replace(config.train, steps=6))
    first, second = (run(config, tmp_path, name, dp, sp=sp, tp=tp, layout="striped") for name in ("first", "second"))
    for name in ("loss", "grad_norm", "lr", "tokens", "val_loss"):
        assert [line.get(name) for line in first] == [line.get(name) for line in second]  # to the last bit


def test_the_same_numbers_on_another_mesh(config, tmp_path):
    config = replace(config, train=replace(config.train, steps=6))
    alone = run(config, tmp_path, "alone")
    meshes = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "dp2 tp2": {"dp": 2, "tp": 2, "sequence_parallel": False}}
    for name, mesh in meshes.items():
        same(run(config, tmp_path, name, **mesh), alone, loss=1e-5, val_loss=1e-5, grad_norm=1e-4)


CUTS = {
    "ring": {"sp": 4, "ulysses": 1},
    "ulysses": {"sp": 2, "layout": "contiguous"},
    "both": {"sp": 4, "layout": "striped", "keep_kv": True},
    "all": {"dp": 2, "sp": 2, "tp": 2, "ulysses": 1},
}


@pytest.mark.parametrize(
    ("separate", "meshes"), [(True, CUTS), (False, ["both"]), pytest.param(False, CUTS, marks=pytest.mark.full)]
)
def test_the_same_numbers_with_the_sequence_cut(config, tmp_path, separate, meshes):
    """Of llama-tiny's 6 heads and 2 kv heads: a window and documents, over rings, ulysses and both."""
    data = replace(config.data, separate_documents=separate)
    train = replace(config.train, seq_len=24, dtype="float64", steps=3, validate_every=2)
    config = replace(config, data=data, train=train, model=replace(config.model, window=11 * separate))
    alone = run(config, tmp_path, "alone")
    for name in meshes:
        lines = run(config, tmp_path, name, **CUTS[name])
        same(lines, alone, tokens=0, loss=1e-12, val_loss=1e-12, grad_norm=1e-11)


PIPELINES = {
    "pp2": {"pp": 2},
    "pp3 interleaved": {"pp": 3, "schedule": "interleaved-1f1b", "microbatches": 8},
    "dp2 pp2 zb-v": {"dp": 2, "pp": 2, "schedule": "zb-v"},
    "pp2 sp2 tp2 zb-h1": {"pp": 2, "sp": 2, "tp": 2, "schedule": "zb-h1", "microbatches": 4, "division": (1, 3)},
}


@pytest.mark.parametrize(
    ("tied", "meshes"), [(True, PIPELINES), (False, ["pp2"]), pytest.param(False, PIPELINES, marks=pytest.mark.full)]
)
def test_the_same_numbers_through_a_pipeline(config, tmp_path, tied, meshes):
    """With validation; each of these has another schedule, and all axes are in one."""
    train = replace(config.train, seq_len=24, dtype="float64", steps=3, validate_every=2)
    config = replace(config, train=train, model=replace(config.model, tied=tied, layers=4))
    alone = run(config, tmp_path, "alone")
    for name in meshes:
        lines = run(config, tmp_path, name, **PIPELINES[name])
        for line in lines:
            assert 0 <= line.pop("bubble") < 1 and 0 <= line.pop("bubble_predicted") < 1
        same(lines, alone, tokens=0, loss=1e-12, val_loss=1e-12, grad_norm=1e-11)


def test_what_a_pipeline_leaves_and_says(config, tmp_path, capsys):
    run(replace(config, train=replace(config.train, steps=3)), tmp_path, "run", pp=2, microbatches=4)
    shown = capsys.readouterr().out
    assert "stages: rank 0 embedding + layer" in shown and "head; most over mean 1." in shown
    assert "predicted)" in shown and "parameters on rank 0" in shown
    saved = saved_step(tmp_path / "run" / "timeline.json")
    assert saved.steps == 3 and saved.ranks == 2
    assert [len(spans) for spans in saved.measured.ranks] == [8, 8]
    assert saved.measured.begin < saved.measured.start < saved.measured.end < saved.measured.finish


def test_a_better_division_is_said_at_the_end(config, tmp_path, capsys):
    """By a clock on which forwards of layers take 10 ms and nothing else any; there are enough cores for one rank."""

    def train(config):
        def counted(*given, **more):
            nonlocal now
            now += 0.01
            return forward(*given, **more)

        now, forward = 0.0, Block.forward
        with patch.object(Block, "forward", counted), patch.object(Clock, "mark", lambda clock: now):
            pretrain(config, torch.device("cpu"), local_ranks=1)

    config = replace(config, model=replace(config.model, layers=4), train=replace(config.train, steps=3))
    for division, line in (
        ((1, 3), "by the times measured, mesh.division=[2, 2] would make the pipeline "),
        ((2, 2), ""),
    ):
        mesh, folder = MeshConfig(1, 2, microbatches=4, division=division), tmp_path / str(division)
        run_ranks(train, 2, resolve(check(replace(config, mesh=mesh, run=RunConfig(str(folder))))))
        shown = capsys.readouterr().out
        assert line in shown and ("by the times measured" in shown) == bool(line)
        assert saved_step(folder).layers == division
        assert advice(saved_step(folder)) in shown


def test_memory_measured_beside_what_was_predicted(config, tmp_path, capsys):
    """Of the rank with the highest peak: of two stages the first, which has a microbatch more in flight."""
    config = replace(config, train=replace(config.train, steps=3), model=replace(config.model, tied=False, layers=4))
    line = run(config, tmp_path, "run", dp=2, pp=2, zero=1, microbatches=4, division=(2, 2))[1]
    shown = capsys.readouterr().out
    measured, predicted = line["memory"], line["memory_predicted"]
    names = ["parameters", "gradients", "optimizer", "activations", "buffers", "peak"]
    assert measured.pop("rank") == 0 and list(measured) == list(predicted) == [*names, "host"]
    for name in names[:4]:
        assert measured[name] == pytest.approx(predicted[name], rel=0.002)
    lines = [line.removeprefix("rank 0: ") for line in shown.splitlines()]
    header, *rows = lines[lines.index("memory of rank 0, which needs most, in MiB") + 1 :][:3]
    assert header.split() == names
    for row, title, values in zip(rows, ("predicted", "measured"), (predicted, measured), strict=True):
        assert row.split() == [title, *(f"{values[name] / 2**20:.2f}" for name in names)]
    assert "memory of the rank that needs most: 1 MiB predicted\n" in shown


def test_a_cpu_offloads_nothing_and_says_so(config, tmp_path, capsys):
    config = replace(config, train=replace(config.train, steps=3), optimizer=replace(config.optimizer, offload=True))
    line = run(config, tmp_path, "run")[1]
    assert "optimizer.offload=true has no effect: a CPU's memory is the host's\n" in capsys.readouterr().out
    assert line["memory"]["optimizer"] and not line["memory"]["host"]
    assert load(tmp_path / "run" / "config.toml").optimizer.offload  # as it was asked for


def test_how_sp_is_cut_is_said(config, tmp_path, capsys):
    config = replace(config, train=replace(config.train, seq_len=24, steps=2))
    run(config, tmp_path, "chosen", sp=4)
    assert ": sp 4 = ring 2 × ulysses 2 (by 2 kv heads a rank), zigzag\n" in capsys.readouterr().out
    run(config, tmp_path, "given", sp=2, ulysses=1, layout="striped")
    assert ": sp 2 = ring 2 × ulysses 1, striped\n" in capsys.readouterr().out
    run(config, tmp_path, "whole", sp=2)
    assert ": sp 2 = ring 1 × ulysses 2 (by 2 kv heads a rank)\n" in capsys.readouterr().out
    run(config, tmp_path, "none", dp=2)
    assert "ulysses" not in capsys.readouterr().out


def test_accumulation_changes_no_number_in_float64(config, tmp_path):
    wide = replace(config, train=replace(config.train, dtype="float64", steps=4))
    whole = run(wide, tmp_path, "whole")
    parts = run(replace(wide, train=replace(wide.train, micro_batch=2)), tmp_path, "parts", dp=2)
    same(parts, whole, loss=1e-12, val_loss=1e-12, grad_norm=1e-12)


def test_validation_is_the_mean_loss_of_its_split(config, tmp_path):
    """A learning rate of zero: the model stays, so every validation gives the same, and about ln of the vocabulary."""
    still = replace(config, optimizer=OptimizerConfig(lr=0.0, warmup=0))
    values = [line["val_loss"] for line in run(still, tmp_path, "still") if "val_loss" in line]
    assert len(values) == 3 and len(set(values)) == 1
    assert abs(values[0] - math.log(97)) < 0.2


def test_without_validation_there_is_no_value(config, tmp_path):
    none = replace(config, data=replace(config.data, validation=0.0), train=replace(config.train, steps=2))
    assert [line.keys() for line in run(none, tmp_path, "none")] == [KEYS, KEYS | MEMORY]


def test_a_sample_without_a_tokenizer_says_so(config, tmp_path, capsys):
    run(replace(config, train=replace(config.train, steps=2, sample_tokens=3)), tmp_path, "sample")
    assert "no tokenizer beside the tokens" in capsys.readouterr().out


def test_data_is_checked_when_it_is_opened(config, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.paths: none given; token folders made by `megalite data`"):
        open_data(replace(config, data=DataConfig()))
    with pytest.raises(DataError, match="no such token folder"):
        open_data(replace(config, data=DataConfig((str(tmp_path / "no"),))))
    with pytest.raises(DataError, match="token ids up to 96 are beyond the vocabulary of 50"):
        open_data(replace(config, model=replace(config.model, vocab_size=50)))
    with pytest.raises(DataError, match="4000 tokens are too few for seq_len 5000"):
        open_data(replace(config, train=replace(config.train, seq_len=5000)))
    with TokenWriter(tmp_path / "endless", 97) as writer:
        writer.write(np.arange(4000) % 97)
    with pytest.raises(DataError, match="no end_of_text tells where a document ends"):
        open_data(replace(config, data=DataConfig((str(tmp_path / "endless"),), separate_documents=True)))

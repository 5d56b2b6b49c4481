"""Runs that end early and go on: the same numbers as those of a run that never ended."""

import errno
import hashlib
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megalite.checkpoint import saver
from megalite.config import (
    CheckpointConfig,
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
from megalite.data import TokenWriter
from megalite.data.ledger import audit
from megalite.errors import CheckpointError, ConfigError, DataError, Preempted
from megalite.model.presets import PRESETS
from megalite.testing import RanksFailed, run_ranks
from megalite.train import loop
from megalite.train.control import Heard
from megalite.train.loop import open_data, pretrain
from megalite.train.metrics import peak_flops
from megalite.train.step import TrainStep

STEPS, CPU = 9, torch.device("cpu")


def made(folder):
    """A config of a run in a folder, and its tokens there."""
    with TokenWriter(folder / "tokens", 97, 4) as writer:
        writer.write(np.random.default_rng(0).integers(97, size=2000))
    return Config(
        ModelConfig(**{**PRESETS["llama-tiny"], "vocab_size": 97, "tied": True}),
        MeshConfig(dp=1),
        DataConfig((str(folder / "tokens"),), validation=0.1),
        TrainConfig(steps=STEPS, global_batch=8, seq_len=32, validation_batches=1, dtype="float64"),
        OptimizerConfig(lr=1e-2, warmup=2),
        CheckpointConfig(every=4, asynchronous=False),  # so that it is known when one is complete
        RunConfig(str(folder / "run")),
    )


@pytest.fixture
def config(tmp_path):
    return made(tmp_path)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The config of a run that is done, for tests that leave it as it is."""
    config = on(made(tmp_path_factory.mktemp("done")))
    train(config)
    return config


def on(config, folder=None, checkpoint=None, train=None, **mesh):
    """The config on another mesh, or in another folder, or with other settings of two sections."""
    run = config.run if folder is None else RunConfig(str(folder))
    config = replace(config, mesh=MeshConfig(**{"dp": 1, **mesh}), run=run)
    if checkpoint:
        config = replace(config, checkpoint=replace(config.checkpoint, **checkpoint))
    return resolve(check(replace(config, train=replace(config.train, **(train or {})))))


class Lost(Exception):
    """What ends a rank in the midst of a step."""


def until(config, last=None, terminate=None, save=None, full=None):
    """Train, and be lost in step `last` + 1, or hear signals before the end of a step; full: the rank without disk."""
    heard, call = Heard(), TrainStep.__call__

    def step(self, *args, **kwargs):
        if self.steps == last:
            raise Lost
        heard.terminate |= self.steps + 1 == terminate
        heard.save |= self.steps + 1 == save
        return call(self, *args, **kwargs)

    def no_space(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write, saver.write = (
        saver.write,
        saver.write if (dist.get_rank() if dist.is_initialized() else 0) != full else no_space,
    )
    TrainStep.__call__ = step
    try:
        with patch.object(loop, "peak_flops", partial(peak_flops, seconds=1e-3)):  # that no number here depends on
            pretrain(config, CPU, heard=heard)
    except (Lost, Preempted) as error:
        return type(error).__name__
    finally:
        TrainStep.__call__, saver.write = call, write
    return "done"


def train(config, **how):
    return set(run_ranks(until, config.mesh.size, config, **how))


def losses(config, begin=1):
    lines = [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(begin, begin + len(lines)))
    return [(line["loss"], line["grad_norm"], line["tokens"]) for line in lines]


def kept(config):
    return sorted(path.name for path in (Path(config.run.dir) / "checkpoints").iterdir())


def audited(config):
    return audit(Path(config.run.dir), open_data(config).train, config.train.global_batch)


MESHES = [{"dp": 2}, {"dp": 2, "zero": 3}, {"pp": 2, "microbatches": 4}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_lost_run_goes_on_bitwise(config, tmp_path, mesh):
    whole, lost = on(config, tmp_path / "whole", **mesh), on(config, **mesh)
    assert train(whole) == {"done"}
    assert train(lost, last=6) == {"Lost"} and kept(lost) == ["step-00000004"]
    assert train(lost) == {"done"}
    assert losses(lost) == losses(whole)
    assert kept(lost) == ["step-00000008", "step-00000009"]  # keep=2
    found = audited(lost)
    assert (found.steps, found.attempts, found.repeated, found.problems) == (STEPS, 2, 2, ())


def test_on_another_mesh_it_goes_on_to_rounding(config, tmp_path):
    meshes = [{"dp": 2, "zero": 1}, {"tp": 2, "sp": 2}, {"pp": 2, "microbatches": 4}, {}]
    whole = on(config, tmp_path / "whole")
    train(whole)
    for part, mesh in enumerate(meshes):
        train(on(config, checkpoint={"every": 2}, **mesh), last=2 * part + 3 if mesh else None)
    moved = losses(on(config))
    np.testing.assert_allclose(moved, losses(whole), rtol=1e-10)
    assert audited(on(config)).problems == ()


def test_a_run_that_is_told_to_leave_has_saved(config, tmp_path):
    whole, left = on(config, tmp_path / "whole", dp=2), on(config, dp=2)
    train(whole)
    assert train(left, terminate=3) == {"Preempted"} and kept(left) == ["step-00000003"]
    assert train(left) == {"done"}
    assert losses(left) == losses(whole)


def test_a_run_that_is_told_to_save_goes_on(config):
    config = on(config, dp=2, checkpoint={"every": 0, "keep": 0, "asynchronous": True})
    assert train(config, save=3) == {"done"} and kept(config) == ["step-00000003", "step-00000009"]


def test_what_is_kept(config):
    config = on(config, checkpoint={"every": 1, "keep": 2, "keep_every": 3, "asynchronous": False})
    train(config)
    assert kept(config) == [f"step-{step:08}" for step in (3, 6, 8, 9)]


def test_nothing_is_kept_where_nothing_is_asked_for(config):
    config = on(config, checkpoint={"every": 0, "at_end": False})
    train(config)
    assert not (Path(config.run.dir) / "checkpoints").exists() or kept(config) == []


def test_a_done_run_says_so_and_more_steps_go_on(config, tmp_path, capsys):
    config = on(config)
    train(config)
    before = losses(config)
    train(config)
    assert "is done, at step 9: more train.steps would go on" in capsys.readouterr().out
    assert losses(config) == before
    more = on(config, train={"steps": STEPS + 3})
    train(more)
    assert len(losses(more)) == STEPS + 3 and losses(more)[:STEPS] == before


def test_never_begins_anew_and_puts_aside_what_was_there(config):
    config = on(config)
    train(config)
    first = losses(config)
    anew = on(config, checkpoint={"resume": "never"})
    train(anew)
    assert losses(anew) == first
    aside = Path(config.run.dir) / "earlier-1"
    assert sorted(path.name for path in aside.iterdir()) == ["checkpoints", "metrics.jsonl", "samples"]
    assert audited(anew).attempts == 1


def test_from_a_folder(config, tmp_path):
    first = on(config, checkpoint={"keep": 0})
    train(first)
    root = Path(first.run.dir) / "checkpoints"
    other = on(config, tmp_path / "other", checkpoint={"resume": str(root / "step-00000004")})
    train(other)
    assert losses(other, begin=5) == losses(first)[4:]
    back = on(config, checkpoint={"resume": str(root / "step-00000004"), "keep": 0})  # in the same folder
    train(back)
    assert losses(back) == losses(first)
    assert [path.name for path in (Path(first.run.dir) / "earlier-1" / "checkpoints").iterdir()]


def test_a_damaged_checkpoint_is_passed_over(config, tmp_path, capsys):
    whole, damaged = on(config, tmp_path / "whole", dp=2), on(config, dp=2)
    train(whole)
    train(damaged, last=8)
    path = next((Path(damaged.run.dir) / "checkpoints" / "step-00000008").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    train(damaged)
    said = capsys.readouterr().out
    assert "passed over" in said and "going on after step 4" in said
    assert losses(damaged) == losses(whole)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_usable_checkpoint_is_an_error_on_every_rank(config, ranks):
    config = on(config, dp=ranks)
    train(config)
    for marker in (Path(config.run.dir) / "checkpoints").glob("*/COMMITTED"):
        marker.unlink()
    with pytest.raises(RanksFailed, match=r"CheckpointError: .*no checkpoint that can be used.*COMMITTED"):
        train(config)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: replace(c, train=replace(c.train, seed=5)), ConfigError, "train.seed: 5 given; 0 would do"),
        (lambda c: replace(c, model=replace(c.model, layers=3)), ConfigError, "model.layers: 3 given; 2 would do"),
        (
            lambda c: replace(c, optimizer=replace(c.optimizer, name="muon")),
            ConfigError,
            "optimizer.name: 'muon' given",
        ),
        (lambda c: replace(c, data=replace(c.data, paths=c.data.paths * 2)), DataError, "data.paths: .* given"),
        (lambda c: replace(c, train=replace(c.train, dtype="float32")), CheckpointError, "float64 there, .*float32"),
        (
            lambda c: replace(c, checkpoint=CheckpointConfig(resume="/nowhere")),
            CheckpointError,
            "/nowhere",
        ),
    ],
    ids=["seed", "layers", "optimizer", "data", "dtype", "nowhere"],
)
def test_what_would_be_another_run_is_refused(done, change, error, message):
    before = losses(done)
    with pytest.raises(RanksFailed, match=f"{error.__name__}: .*{message}"):
        train(resolve(check(change(done))))
    assert losses(done) == before


@pytest.mark.parametrize("on_error", ["stop", "warn"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_where_nothing_can_be_written(config, on_error, asynchronous, capsys):
    config = on(config, dp=2, checkpoint={"on_error": on_error, "asynchronous": asynchronous})
    if on_error == "warn":
        train(config, full=1)
        assert "no checkpoint" in capsys.readouterr().out and len(losses(config)) == STEPS
    else:
        with pytest.raises(RanksFailed, match=r"SaveError: .*cannot be written"):
            train(config, full=1)
    assert kept(config) == []


def test_a_state_that_no_run_has_kept_is_told_in_one_line(config):
    config = on(config)
    train(config)
    for path in (Path(config.run.dir) / "checkpoints").iterdir():
        state = json.loads((path / "state.json").read_text())
        del state["config"]["train"]
        (path / "state.json").write_text(json.dumps(state))
        sums = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in ("index.json", "state.json")}
        (path / "COMMITTED").write_text(json.dumps(sums, indent=1) + "\n")
    with pytest.raises(RanksFailed, match=r"CheckpointError: .*state.json: not what a run of megalite keeps: KeyError"):
        train(config)

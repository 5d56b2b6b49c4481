"""`megalite export`, from a checkpoint of any mesh to what transformers loads, and a run that begins with it."""

import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megalite.checkpoint import folder
from megalite.checkpoint.boxes import whole
from megalite.checkpoint.folder import name_of
from megalite.checkpoint.hf_folder import HuggingFaceFolder
from megalite.checkpoint.saver import Saver
from megalite.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    resolve,
)
from megalite.data import TokenWriter
from megalite.data.tokenizer import train_bpe
from megalite.errors import CheckpointError
from megalite.launch.cli import main
from megalite.launch.stored import stored
from megalite.model.gpt import GPT
from megalite.model.presets import PRESETS
from megalite.parallel.mesh import Mesh
from megalite.testing import run_ranks
from megalite.train.loop import open_data, pretrain
from megalite.train.state import held
from megalite.train.step import TrainStep

MODEL = replace(ModelConfig(**PRESETS["gpt2-tiny"]), vocab_size=303, max_seq_len=32)


def save(run, data, seed, step):
    """A checkpoint of a run on two ranks, without training."""
    config = Config(MODEL, MeshConfig(tp=2), DataConfig((str(data),)), TrainConfig(seed=seed, seq_len=32))
    config = resolve(config)
    mesh = Mesh(tp=2)
    saver = Saver(run / "checkpoints", mesh.world, asynchronous=False)
    saver.begin(step, held(TrainStep.of(config, mesh)), {"config": asdict(config)})
    saver.commit()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder of a run whose newest checkpoint is damaged: those of steps 10, 20 and 30 have that as their seed."""
    path = tmp_path_factory.mktemp("run")
    text = "To be, or not to be, that is the question. " * 50
    with TokenWriter(path / "data", 303, 0, tokenizer=train_bpe([text], 280).to_str()) as writer:
        writer.write(torch.randint(280, (1000,)).tolist())
    for step in (10, 20, 30):
        run_ranks(save, 2, path, path / "data", step, step)
    (path / "checkpoints" / name_of(30) / "COMMITTED").write_text("{}")
    return path


def megalite(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


def logits_of(seed, tokens):
    return GPT(MODEL, seed=seed)(tokens)


@pytest.mark.parametrize(("which", "seed"), [(".", 20), ("checkpoints/step-00000010", 10)])
def test_a_checkpoint_becomes_a_folder_that_transformers_loads(which, seed, run, tmp_path, capsys):
    assert megalite("export", run / which, "-o", tmp_path / "out") == 0
    assert f"step-000000{seed} in float32, its logits compared; the tokenizer is {run}" in capsys.readouterr().out
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.randint(303, (2, 20))
    assert torch.allclose(theirs(tokens).logits, logits_of(seed, tokens), atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([0]) == "<|endoftext|>"
    assert theirs.config.eos_token_id == 0


def test_another_dtype_and_no_tokenizer(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    assert megalite("export", tmp_path / "run", "-o", tmp_path / "out", "--dtype", "bfloat16") == 0
    (run / "data").rename(run / "moved")
    try:
        assert megalite("export", tmp_path / "run", "-o", tmp_path / "bare") == 0
    finally:
        (run / "moved").rename(run / "data")
    assert "without a tokenizer: none was found" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert HuggingFaceFolder(tmp_path / "out").config["eos_token_id"] == 0
    assert HuggingFaceFolder(tmp_path / "bare").config["eos_token_id"] is None


def test_a_stored_model_is_opened_whichever_way_it_is_kept(run, tmp_path):
    name = "blocks.1.mlp.up.weight"
    expected = dict(GPT(MODEL, seed=20).named_parameters())[name]
    assert megalite("export", run, "-o", tmp_path / "out") == 0
    for path in (run, run / "checkpoints" / name_of(20), tmp_path / "out"):
        with stored(path) as model:
            assert replace(model.config, init_std=0.02) == MODEL
            assert torch.equal(model.weights.read(name, whole(expected.shape)), expected)
            assert model.tokenizer is not None


def test_what_is_no_model_is_said_in_a_line(run, tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    for path, says in (
        (tmp_path, "no checkpoint there"),
        (tmp_path / "absent", "no model there; the folder of a run"),
        (run / "checkpoints" / name_of(30), "COMMITTED"),
    ):
        assert megalite("export", path, "-o", tmp_path / "out") == 66
        error = capsys.readouterr().err
        assert says in error and error.startswith("megalite: error: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_config_that_is_none_is_a_damaged_checkpoint(run, tmp_path, monkeypatch):
    checkpoint = run / "checkpoints" / name_of(20)
    state = {"step": 20, "config": {"model": {"layers": "many"}}}
    monkeypatch.setattr(folder, "checked", lambda path: folder.Checkpoint(path, folder.read(checkpoint).index, state))
    with pytest.raises(CheckpointError, match=r"state\.json: model\.layers: 'many' given"), stored(checkpoint):
        pass


def test_a_run_begins_with_the_weights_of_a_folder_and_goes_on_without_it(run, tmp_path):
    def losses(config):
        pretrain(config, torch.device("cpu"))
        return [json.loads(line)["loss"] for line in (tmp_path / "further/metrics.jsonl").read_text().splitlines()]

    assert megalite("export", run, "-o", tmp_path / "out") == 0
    config = Config(
        replace(MODEL, init=str(tmp_path / "out")),
        data=DataConfig((str(run / "data"),), validation=0.0),
        train=TrainConfig(steps=1, seq_len=32, seed=3),
        optimizer=OptimizerConfig(warmup=0),
        run=RunConfig(dir=str(tmp_path / "further")),
    )
    config = resolve(config)
    (tmp_path / "further").mkdir()
    (first,) = run_ranks(losses, 1, config)[0]
    batch = open_data(config).train.batch(0, config.train.global_batch)
    expected = GPT(MODEL, seed=20)(batch.tokens, batch.targets).item()  # of the checkpoint, not of train.seed
    assert abs(first - expected) < 1e-5
    assert abs(GPT(MODEL, seed=3)(batch.tokens, batch.targets).item() - expected) > 1e-3
    shutil.rmtree(tmp_path / "out")
    further = run_ranks(losses, 1, replace(config, train=replace(config.train, steps=2)))[0]
    assert further[0] == first and len(further) == 2

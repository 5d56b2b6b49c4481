"""The command line, as a user meets it: one line and an exit code for a mistake, before any rank starts; whole runs."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite.data import TokenFile, TokenWriter
from megalite.launch.cli import main

TINY = """
[model]
preset = "llama-tiny"
vocab_size = 97
[data]
paths = ["tokens"]
validation = 0.1
[train]
steps = 3
global_batch = 4
seq_len = 32
[optimizer]
warmup = 1
[run]
dir = "run"
ranks = 4
[mesh]
tp = 2
"""


def megalite(*arguments, cwd):
    """`python -m megalite ...`, as on a terminal that is none."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    root = Path(__file__).parents[2]
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), clean.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "megalite", *map(str, arguments)],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """`megalite ...` in this process, which has imported what another would first have to: the same result, sooner."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, *capsys.readouterr())

    return call


def refused(result, code, *says):
    """One line on stderr, no stack trace, the exit code, and nothing that a rank would have left."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("megalite: error: "), result.stderr
    for text in says:
        assert text in lines[0]
    return lines[0]


@pytest.fixture
def folder(tmp_path):
    """A config and 2000 tokens of a vocabulary of 97."""
    (tmp_path / "tiny.toml").write_text(TINY)
    ids = np.random.default_rng(0).integers(97, size=2000)
    ids[::2] = 5
    with TokenWriter(tmp_path / "tokens", 97) as writer:
        writer.write(ids)
    return tmp_path


# --- mistakes -------------------------------------------------------------------------------------------------------

SETTINGS = {
    "unknown key": (["model.head=4"], ["model.head: no such setting; did you mean 'heads'?"]),
    "unknown section": (["modle.heads=4"], ["modle: no such setting; did you mean 'model'?"]),
    "wrong type": (["mesh.tp=two"], ["mesh.tp: 'two' given; a whole number would do"]),
    "override without =": (["mesh.tp"], ["override: 'mesh.tp' given", "section.key=value would do"]),
    "heads": (["mesh.tp=4", "run.ranks=4"], ["mesh.tp: 4 given; a divisor of model.heads=6 would do"]),
    "mesh product": (["mesh.tp=3", "run.ranks=4", "model.kv_heads=6"], ["tp 3 cannot be 4 ranks; start 3"]),
    "batch": (["train.global_batch=5"], ["train.global_batch: 5 given; a multiple of mesh.dp=2 would do"]),
    "sequence beyond the model": (["train.seq_len=129"], ["at most model.max_seq_len=128 would do"]),
    "no data": (["data.paths=[]"], ["data.paths: none given", "megalite data"]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_bad_setting_is_78(folder, here, name):
    overrides, says = SETTINGS[name]
    refused(here("train", "tiny.toml", *overrides), 78, *says)
    assert not (folder / "run").exists()  # no rank has begun


@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_missing_config_is_78(tmp_path, command):
    refused(megalite(command, "no.toml", cwd=tmp_path), 78, "no.toml: no such file")


def test_a_broken_config_is_78(folder, here):
    (folder / "tiny.toml").write_text("[model\n")
    refused(here("verify", "tiny.toml"), 78, "tiny.toml: not a TOML file", "line 1")


def without_tokens(folder):
    shutil.rmtree(folder / "tokens")


def empty(folder):
    without_tokens(folder)
    (folder / "tokens").mkdir()


def truncated(folder):
    path = folder / "tokens" / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-3])


DATA = {
    "missing": (without_tokens, [], ["tokens: no such token folder; `megalite data"]),
    "empty": (empty, [], ["index.json: No such file"]),
    "truncated": (truncated, [], ["tokens.bin: 3997 bytes found, 4000 expected"]),
    "ids beyond the vocabulary": (lambda folder: None, ["model.vocab_size=50"], ["beyond the vocabulary of 50"]),
    "sequence longer than the data": (
        lambda folder: None,
        ["model.max_seq_len=4000", "train.seq_len=3000"],
        ["2000 tokens are too few for seq_len 3000", "a seq_len of at most"],
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_bad_data_is_65(folder, here, name):
    spoil, overrides, says = DATA[name]
    spoil(folder)
    refused(here("train", "tiny.toml", *overrides), 65, *says)
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    "arguments", [[], ["trian", "tiny.toml"], ["train"], ["data", "a.txt"], ["train", "tiny.toml", "--fast"]], ids=str
)
def test_a_misused_command_is_64(here, arguments):
    assert "--help" in refused(here(*arguments), 64)


def test_help_is_no_mistake(here):
    for arguments in (["--help"], ["train", "--help"]):
        result = here(*arguments)
        assert result.returncode == 0 and "megalite" in result.stdout and not result.stderr


def test_half_of_torchruns_environment_is_78(folder, here, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    refused(here("train", "tiny.toml"), 78, "WORLD_SIZE is not")


def torchrun(ranks, *arguments, cwd):
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", "megalite", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_mesh_of_another_size_than_torchruns_world_is_one_line_and_no_rank_begins(folder):
    result = torchrun(2, "train", "tiny.toml", "mesh.tp=3", "model.kv_heads=6", cwd=folder)
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if line.startswith("megalite: error: ")]
    assert len(said) == 1
    assert "dp free × pp 1 × sp 1 × tp 3 cannot be 2 ranks; start 3, or change a size" in said[0]
    assert not (folder / "run").exists()
    assert "exitcode  : 78" in result.stderr  # torchrun's own report, which has a code of its own


# --- data -----------------------------------------------------------------------------------------------------------


def test_data_makes_tokens_of_text_and_of_jsonl(tmp_path, here):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    lines = [{"text": f"document number {i}"} for i in range(20)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = megalite("data", "a.txt", "b.jsonl", "-o", "out", "--vocab-size", 300, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    tokens = TokenFile(tmp_path / "out")
    assert tokens.index.documents == 21
    assert 257 <= tokens.vocab_size <= 300
    assert f"out: {len(tokens):,} tokens of a vocabulary of {tokens.vocab_size}" in result.stdout
    again = here("data", "b.jsonl", "-o", "more", "--tokenizer", "out/tokenizer.json")
    assert again.returncode == 0, again.stderr
    more = TokenFile(tmp_path / "more")
    assert more.tokens.tolist() == tokens.tokens[-len(more) :].tolist()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no.txt", "-o", "out"], "no.txt: no such file or folder"),
        (["empty.txt", "-o", "out"], "empty.txt: holds no text"),
        (["bad.jsonl", "-o", "out"], "bad.jsonl: line 2"),
        (["latin.txt", "-o", "out"], "latin.txt: byte 3 is not UTF-8"),
        (["a.txt", "-o", "full"], "full: exists and is not empty"),
        (["a.txt", "-o", "out", "--tokenizer", "no.json"], "no.json"),
        (["a.txt", "-o", "out", "--vocab-size", "5"], "5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_text_is_65_and_leaves_nothing(tmp_path, here, arguments, says):
    (tmp_path / "a.txt").write_text("some text\n" * 9)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    refused(here("data", *arguments), 65, says)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "bad.jsonl", "empty.txt", "full", "latin.txt"]


# --- whole runs -----------------------------------------------------------------------------------------------------


def test_train_from_text_to_metrics(tmp_path, here):
    (tmp_path / "text.txt").write_text("".join(f"line {i % 17} of the text\n" for i in range(600)))
    assert here("data", "text.txt", "-o", "tokens", "--vocab-size", 280).returncode == 0
    (tmp_path / "tiny.toml").write_text(TINY)
    vocabulary = TokenFile(tmp_path / "tokens").vocab_size
    more = [f"model.vocab_size={vocabulary}", "train.steps=12", "train.sample_tokens=8", "optimizer.lr=1e-2"]
    result = megalite("train", "tiny.toml", *more, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    assert "mesh dp 2 × pp 1 × sp 1 × tp 2 on " in result.stdout
    assert "unigram entropy" in result.stdout and "what it writes:" in result.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert abs(lines[0]["loss"] - math.log(vocabulary)) < 0.3
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert "val_loss" in lines[-1]

    again = here("train", "run/config.toml", "run.dir=again")  # a run's config is a config
    assert again.returncode == 0, again.stderr
    repeated = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in repeated] == [line["loss"] for line in lines]


def test_a_loss_that_diverges_is_79_with_step_and_rank(folder):
    result = megalite("train", "tiny.toml", "optimizer.lr=1e30", "optimizer.warmup=0", cwd=folder)
    line = refused(result, 79, " at step 2 on rank ", "the weights are those of step 1")
    assert "the loss is " in line or "the gradient is no number" in line


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="llama"),
        pytest.param(["model.preset=gpt2-tiny", "train.seq_len=31"], id="gpt2", marks=pytest.mark.full),
    ],
)
def test_verify_needs_no_data_and_passes(folder, more):
    without_tokens(folder)
    result = megalite("verify", "tiny.toml", *more, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "dp 2 × pp 1 × sp 1 × tp 2 against the mesh of one, float64" in result.stdout
    assert "gradient norm" in result.stdout and "ok" in result.stdout and "OUT" not in result.stdout
    assert not (folder / "run").exists()

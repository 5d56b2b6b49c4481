"""Settings: a mistake is one line with the setting, what was given and what would do; what is right is kept."""

import dataclasses
import itertools

import pytest
import torch

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
from megalite.config_file import load, to_toml
from megalite.errors import ConfigError
from megalite.model.gpt import GPT
from megalite.model.presets import PRESETS
from megalite.parallel.layout import LAYOUTS, sequence_divisor

HUGE = "9" * 400  # an integer that no float holds

# what is set, on how many ranks (None: as many as it asks for), how the message begins, what else it says
BAD = [
    # unknown names: the nearest known one, or all of them
    (["modle.heads=4"], None, "modle: no such setting", "did you mean 'model'?"),
    (["model.head=4"], None, "model.head: no such setting", "did you mean 'heads'?"),
    (["model.vocabsize=4"], None, "model.vocabsize: no such setting", "did you mean 'vocab_size'?"),
    (["train.global_batchs=4"], None, "train.global_batchs: no such setting", "did you mean 'global_batch'?"),
    (["optimizer.learning_rate=1"], None, "optimizer.learning_rate: no such setting", "weight_decay"),
    (["mesh.zz=1"], None, "mesh.zz: no such setting", "one of bucket_mb, chunks, compress, compress_rank, division, "),
    (["mesh.tp.x=1"], None, "mesh.tp.x: no such setting", ""),
    (["model.preset=lama-tiny"], None, "model.preset: 'lama-tiny' given", "did you mean 'llama-tiny'?"),
    (["model.preset=bert"], None, "model.preset: 'bert' given", "gpt2-tiny"),
    (["model.preset=7"], None, "model.preset: 7 given", "llama-tiny"),
    (["model.preset=[1]"], None, "model.preset: [1] given", "llama-tiny"),
    # overrides that are none
    (["mesh.tp"], None, "override: 'mesh.tp' given", "section.key=value would do"),
    (["tp=2"], None, "override: 'tp=2' given", "section.key=value would do"),
    (["=2"], None, "override: '=2' given", "section.key=value would do"),
    (["mesh.=2"], None, "override: 'mesh.=2' given", "section.key=value would do"),
    ([""], None, "override: '' given", "section.key=value would do"),
    # wrong types
    (["mesh.tp=two"], None, "mesh.tp: 'two' given", "a whole number would do"),
    (["mesh.tp="], None, "mesh.tp: '' given", "a whole number would do"),
    (["mesh.tp=2.0"], None, "mesh.tp: 2.0 given", "a whole number would do"),
    (["mesh.tp=true"], None, "mesh.tp: True given", "a whole number would do"),
    (["mesh.tp=[2]"], None, "mesh.tp: [2] given", "a whole number would do"),
    (["mesh.sequence_parallel=yes"], None, "mesh.sequence_parallel: 'yes' given", "true or false would do"),
    (['mesh.sequence_parallel="true"'], None, "mesh.sequence_parallel: 'true' given", "true or false would do"),
    (["mesh.sequence_parallel=True"], None, "mesh.sequence_parallel: 'True' given", "true or false would do"),
    (["mesh.sequence_parallel=1"], None, "mesh.sequence_parallel: 1 given", "true or false would do"),
    (["optimizer.lr=fast"], None, "optimizer.lr: 'fast' given", "a number would do"),
    (["optimizer.lr=true"], None, "optimizer.lr: True given", "a number would do"),
    (["run.dir=5"], None, "run.dir: 5 given", "a string would do"),
    (["train.seed=1.5"], None, "train.seed: 1.5 given", "a whole number would do"),
    (["train.dtype=float8"], None, "train.dtype: 'float8' given", "'bfloat16' or 'float16' would do"),
    (["train.dtype=32"], None, "train.dtype: 32 given", "'float32' or 'float64' or 'bfloat16' or"),
    (["model.norm=batchnorm"], None, "model.norm: 'batchnorm' given", "'rmsnorm' or 'layernorm' would do"),
    (["model.positions=alibi"], None, "model.positions: 'alibi' given", "'rope' or 'learned' would do"),
    (["model.activation=relu"], None, "model.activation: 'relu' given", "'swiglu' or 'gelu' or 'gelu_tanh' would do"),
    (["optimizer.schedule=linear"], None, "optimizer.schedule: 'linear' given", "'cosine' or 'wsd'"),
    (["mesh.layout=spiral"], None, "mesh.layout: 'spiral' given", "'contiguous' or 'zigzag' or 'striped' would do"),
    (["mesh.keep_kv=1"], None, "mesh.keep_kv: 1 given", "true or false would do"),
    (["data.separate_documents=1"], None, "data.separate_documents: 1 given", "true or false would do"),
    (["data.corpus=web"], None, "data.corpus: 'web' given", "'stdlib' would do"),
    (["data.paths=[1]"], None, "data.paths[0]: 1 given", "a string would do"),
    (["data.paths=true"], None, "data.paths: True given", "a list would do"),
    (["data.weights=[1, 'a']"], None, "data.weights[1]: 'a' given", "a number would do"),
    # not numbers, or too large to be any
    (["optimizer.lr=nan"], None, "optimizer.lr: nan given", "a finite number would do"),
    (["optimizer.lr=inf"], None, "optimizer.lr: inf given", "a finite number would do"),
    (["train.z_loss=-inf"], None, "train.z_loss: -inf given", "a finite number would do"),
    (["data.weights=[nan]"], None, "data.weights[0]: nan given", "a finite number would do"),
    ([f"optimizer.lr={HUGE}"], None, "optimizer.lr: ", "would do"),
    # out of bounds: negative, zero, too large
    (["model.vocab_size=0"], None, "model.vocab_size: 0 given", "1 to 4294967296 would do"),
    (["model.vocab_size=4294967297"], None, "model.vocab_size: 4294967297 given", "1 to 4294967296 would do"),
    (["model.hidden=0"], None, "model.hidden: 0 given", "1 or more would do"),
    (["model.hidden=-8"], None, "model.hidden: -8 given", "1 or more would do"),
    (["model.hidden=2"], None, "model.hidden: 2 given", "a multiple of model.heads=4 would do"),
    (["model.layers=0"], None, "model.layers: 0 given", "1 or more would do"),
    (["model.heads=0"], None, "model.heads: 0 given", "1 or more would do"),
    (["model.heads=-4"], None, "model.heads: -4 given", "1 or more would do"),
    (["model.kv_heads=-1"], None, "model.kv_heads: -1 given", "1 or more would do"),
    (["model.head_dim=-2"], None, "model.head_dim: -2 given", "1 or more would do"),
    (["model.ffn=-1"], None, "model.ffn: -1 given", "1 or more would do"),
    (["model.norm_eps=-1e-5"], None, "model.norm_eps: -1e-05 given", "0 to 1 would do"),
    (["model.window=-1"], None, "model.window: -1 given", "0 or more would do"),
    (["mesh.ulysses=-1"], None, "mesh.ulysses: -1 given", "0 or more would do"),
    (["mesh.dp=-1"], None, "mesh.dp: -1 given", "0 or more would do"),
    (["mesh.tp=0"], None, "mesh.tp: 0 given", "1 or more would do"),
    (["mesh.chunks=-1"], None, "mesh.chunks: -1 given", "0 or more would do"),
    (["mesh.microbatches=-1"], None, "mesh.microbatches: -1 given", "0 or more would do"),
    (["mesh.division=[1.5]"], None, "mesh.division[0]: 1.5 given", "a whole number would do"),
    (["mesh.division=even"], None, "mesh.division[0]: 'even' given", "a whole number would do"),
    (["mesh.zero=-1"], None, "mesh.zero: -1 given", "0 to "),
    (["mesh.zero=4"], None, "mesh.zero: 4 given", "0 to "),
    (["mesh.zero=true"], None, "mesh.zero: True given", "a whole number would do"),
    (["mesh.shard=-1"], None, "mesh.shard: -1 given", "0 or more would do"),
    (["mesh.bucket_mb=0"], None, "mesh.bucket_mb: 0.0 given", "0.001 or more would do"),
    (["data.validation=1"], None, "data.validation: 1.0 given", "0 to 0.9 would do"),
    (["train.steps=0"], None, "train.steps: 0 given", "1 or more would do"),
    (["train.global_batch=0"], None, "train.global_batch: 0 given", "1 or more would do"),
    (["train.micro_batch=-1"], None, "train.micro_batch: -1 given", "0 or more would do"),
    (["train.seq_len=0"], None, "train.seq_len: 0 given", "1 or more would do"),
    (["train.seed=-1"], None, "train.seed: -1 given", "0 to 9223372036854775807 would do"),
    (["optimizer.lr=-1"], None, "optimizer.lr: -1.0 given", "0 or more would do"),
    (["optimizer.beta2=1"], None, "optimizer.beta2: 1.0 given", "0 to 0.9999999 would do"),
    (["optimizer.clip=-1"], None, "optimizer.clip: -1.0 given", "0 or more would do"),
    (["optimizer.min_lr=1.5"], None, "optimizer.min_lr: 1.5 given", "0 to 1 would do"),
    (["run.ranks=0"], None, "run.ranks: 0 given", "1 to 1048576 would do"),
    (["run.timeout=0"], None, "run.timeout: 0.0 given", "1 to 1000000 would do"),
    # settings that do not go together
    (["model.hidden=250"], None, "model.hidden: 250 given", "a multiple of model.heads=4 would do"),
    (["model.kv_heads=3"], None, "model.kv_heads: 3 given", "a divisor of model.heads=4 would do"),
    (["model.kv_heads=8"], None, "model.kv_heads: 8 given", "a divisor of model.heads=4 would do"),
    (["model.head_dim=3"], None, "model.head_dim: 3 given", "an even number would do"),
    (["train.seq_len=4096"], None, "train.seq_len: 4096 given", "at most model.max_seq_len=2048 would do"),
    (
        ["mesh.pp=2", "mesh.chunks=2"],
        None,
        "mesh.chunks: 2 given; 0 would do",
        "mesh.schedule='1f1b', or 'interleaved-",
    ),
    (["mesh.sp=4", "mesh.ulysses=3"], None, "mesh.ulysses: 3 given", "a divisor of mesh.sp=4 would do"),
    (["mesh.sp=2", "mesh.ulysses=4"], None, "mesh.ulysses: 4 given", "a divisor of mesh.sp=2 would do"),
    (["mesh.sp=8", "mesh.ulysses=8"], None, "mesh.ulysses: 8 given; a divisor of 4", "the rest of mesh.sp=8 becomes"),
    (["mesh.sp=8", "mesh.tp=2", "mesh.ulysses=8"], None, "mesh.ulysses: 8 given; a divisor of 2", "has 2 heads"),
    (["mesh.sp=3", "mesh.ulysses=3"], None, "mesh.ulysses: 3 given; 1 would do", "mesh.sp=3 becomes a ring"),
    (
        ["mesh.sp=3", "train.seq_len=255"],
        None,
        "train.seq_len: 255 given; a multiple of 6",
        "a zigzag ring of 3 × ulyss",
    ),
    (["mesh.sp=3", "mesh.layout=striped"], None, "train.seq_len: 256 given; a multiple of 3", "a striped ring of 3 × "),
    (["mesh.sp=4", "train.seq_len=254"], None, "train.seq_len: 254 given; a multiple of 4 would do", "mesh.sp=4"),
    (
        ["mesh.sp=8", "train.seq_len=252"],
        None,
        "train.seq_len: 252 given; a multiple of 8 would do",
        "ring of 2 × ulys",
    ),
    (["mesh.tp=3"], None, "mesh.tp: 3 given", "a divisor of model.heads=4 would do"),
    (["model.heads=6", "model.hidden=48", "model.kv_heads=2", "mesh.tp=3"], None, "mesh.tp: 3 given", "kv_heads=2"),
    (["model.ffn=130", "mesh.tp=4"], None, "mesh.tp: 4 given", "a divisor of model.ffn=130 would do"),
    (["mesh.dp=4", "mesh.shard=3"], None, "mesh.shard: 3 given", "a divisor of dp × sp = 4 would do"),
    (["mesh.dp=2", "mesh.sp=2", "mesh.shard=8"], None, "mesh.shard: 8 given", "a divisor of dp × sp = 4 would do"),
    # what gradients and the optimizer's state cannot be at once
    (["mesh.compress=int8", "mesh.zero=1"], None, "mesh.compress: 'int8' given; 'none' would do with mesh.zero=1", ""),
    (["mesh.compress=int8", "mesh.zero=3"], None, "mesh.compress: 'int8' given; 'none' would do with mesh.zero=3", ""),
    (
        ["mesh.compress=powersgd", "train.dtype=bfloat16"],
        None,
        "mesh.compress: 'powersgd' given; 'none' would do with train.dtype='bfloat16'",
        "since it sums gradients whole",
    ),
    (["mesh.compress=bfloat16", "train.dtype=float16"], None, "mesh.compress: 'bfloat16' given", "dtype='float16'"),
    (["mesh.compress=int8", "optimizer.offload=true"], None, "mesh.compress: 'int8' given", "optimizer.offload=true"),
    *(
        (["optimizer.name=muon", f"mesh.zero={zero}"], None, f"mesh.zero: {zero} given; 0 would do", "whole matrices")
        for zero in (1, 2, 3)
    ),
    (
        ["optimizer.name=muon", "optimizer.offload=true"],
        None,
        "optimizer.offload: true given; false would do with optimizer.name='muon'",
        "whole matrices",
    ),
    (
        ["optimizer.state_dtype=bfloat16", "train.dtype=float64"],
        None,
        "optimizer.state_dtype: 'bfloat16' given; 'float32' would do with train.dtype='float64'",
        "",
    ),
    (["data.weights=[1]"], None, "data.weights: 1 given", "one for each of the 0 data.paths would do"),
    (["data.paths=['a']", "data.weights=[-1]"], None, "data.weights: [-1.0] given", "none negative"),
    (["data.paths=['a']", "data.weights=[0]"], None, "data.weights: [0.0] given", "not all zero would do"),
    (["optimizer.warmup=200"], None, "optimizer.warmup: 200 given", "at most train.steps=100 would do"),
    # the mesh and the ranks
    (["mesh.dp=2", "mesh.tp=2"], 8, "mesh: dp 2 × pp 1 × sp 1 × tp 2 cannot be 8 ranks", "start 4"),
    (["mesh.tp=2"], 3, "mesh: dp free × pp 1 × sp 1 × tp 2 cannot be 3 ranks", "so that the product is 3"),
    (["mesh.tp=4"], 2, "mesh: dp free × pp 1 × sp 1 × tp 4 cannot be 2 ranks", "start 4"),
    (["mesh.tp=2", "run.ranks=3"], None, "mesh: dp free × pp 1 × sp 1 × tp 2 cannot be 3 ranks", "start 2"),
    (["mesh.sp=4"], 6, "mesh: dp free × pp 1 × sp 4 × tp 1 cannot be 6 ranks", "start 4"),
    (["mesh.dp=3"], None, "train.global_batch: 8 given", "a multiple of mesh.dp=3 would do"),
    (["train.micro_batch=3"], None, "train.micro_batch: 3 given", "a divisor of 8, a dp rank's share"),
    (["mesh.dp=2", "train.micro_batch=8"], None, "train.micro_batch: 8 given", "a divisor of 4, a dp rank's share"),
    (["mesh.microbatches=3"], None, "mesh.microbatches: 3 given", "a divisor of 8, a dp rank's share"),
    (["mesh.pp=2", "mesh.microbatches=16"], None, "mesh.microbatches: 16 given", "a divisor of 8, a dp rank's share"),
    (
        ["mesh.microbatches=2", "train.micro_batch=2"],
        None,
        "mesh.microbatches: 2 given; 4 would do with train.micro_batch=2, of 8",
        "or 0 for one of the two",
    ),
]


def error_line(path, overrides=(), ranks=None):
    """The message of the ConfigError, known to be one line."""
    with pytest.raises(ConfigError) as caught:
        resolve(load(path, overrides, PRESETS), ranks)
    assert caught.value.exit_code == 78
    message = str(caught.value)
    assert message and message.splitlines() == [message]
    return message


@pytest.mark.parametrize(("overrides", "ranks", "start", "rest"), BAD, ids=[" ".join(case[0])[:60] for case in BAD])
def test_a_bad_setting_is_one_line_that_says_what_would_do(overrides, ranks, start, rest):
    message = error_line(None, overrides, ranks)
    assert message.startswith(start)
    assert rest in message
    assert "would do" in message or "did you mean" in message or "change a size" in message


BAD_FILES = {
    "not TOML": (b"[model\nheads = 4\n", "not a TOML file"),
    "a key twice": (b"[model]\nheads = 4\nheads = 4\n", "not a TOML file"),
    "no value": (b"[model]\nheads =\n", "not a TOML file"),
    "not text": (b"\xff\xfe\x00", "not a TOML file"),
    "an integer beyond Python's limit": (b"[model]\nheads = " + b"9" * 5000, "not a TOML file"),
    "nested beyond reason": (b"[model]\nheads = " + b"[" * 100_000, "not a TOML file"),
    "a number for a table": (b"model = 3\n", "model: 3 given; a table [model] would do"),
    "a list for a table": (b"[[model]]\nheads = 4\n", "model: [{'heads': 4}] given; a table [model] would do"),
    "a key of no section": (b"heads = 4\n", "heads: no such setting"),
    "an unknown section": (b"[trian]\nsteps = 4\n", "trian: no such setting; did you mean 'train'?"),
    "a key of two lines": (b'[model]\n"he\\nads" = 4\n', "no such setting; did you mean 'heads'?"),
    "a date": (b"[train]\nsteps = 2024-01-01\n", "train.steps: datetime.date(2024, 1, 1) given; a whole number"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_line(tmp_path, name):
    content, expected = BAD_FILES[name]
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    message = error_line(path)
    assert expected in message
    assert str(path) in message or "would do" in message or "did you mean" in message


def test_a_missing_file_and_a_folder_are_one_line(tmp_path):
    missing = tmp_path / "no.toml"
    assert error_line(missing) == f"{missing}: no such file; the path of a TOML file would do"
    assert error_line(tmp_path).startswith(f"{tmp_path}: not a TOML file")


def test_an_override_of_a_table_that_is_none(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("mesh = 3\n")
    assert error_line(path, ["mesh.tp=2"]) == "mesh: 3 given; a table [mesh] would do"


def test_an_override_value_beyond_pythons_integers_is_one_line():
    assert error_line(None, ["train.steps=" + "9" * 5000]).startswith("train.steps: ")


# --- what is right ------------------------------------------------------------------------------------------------


def test_no_file_is_the_defaults():
    assert load(None) == Config()


def test_overrides_win_over_the_file_and_presets_lose_to_both(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[model]\npreset = "llama-tiny"\nlayers = 3\n[mesh]\ntp = 2\n[data]\npaths = ["a", "b"]\n')
    overrides = ["mesh.tp=1", "model.ffn = 120", "run.dir=runs/a b", "optimizer.lr=1", "train.seq_len=64"]
    config = load(path, overrides, PRESETS)
    tiny = PRESETS["llama-tiny"]
    assert config.model == ModelConfig(**{**tiny, "preset": "llama-tiny", "layers": 3, "ffn": 120})
    assert config.mesh.tp == 1
    assert config.data.paths == ("a", "b")
    assert config.run.dir == "runs/a b"
    assert config.optimizer.lr == 1.0 and type(config.optimizer.lr) is float


def test_a_preset_by_override_takes_the_place_of_the_files(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('[model]\npreset = "llama-tiny"\n')
    assert load(path, ["model.preset=gpt2", "train.seq_len=64"], PRESETS).model.vocab_size == 50257


def test_a_single_value_stands_for_a_list_of_one():
    config = load(None, ["data.paths=tokens", "data.weights=2"])
    assert config.data == DataConfig(paths=("tokens",), weights=(2.0,))


def test_derived_sizes():
    assert ModelConfig(hidden=48, heads=6).head_dim == 8
    assert ModelConfig(heads=6).kv_heads == 6
    assert ModelConfig(hidden=48, activation="gelu").ffn == 192
    assert ModelConfig(hidden=48).ffn == 128  # 8/3 · 48, already a multiple of 64
    assert ModelConfig(hidden=49).ffn == 192
    assert ModelConfig(hidden=4096).ffn == 10944


@pytest.mark.parametrize(
    ("mesh", "ranks", "dp"),
    [
        (MeshConfig(), 1, 1),
        (MeshConfig(), 6, 6),
        (MeshConfig(tp=2), 8, 4),
        (MeshConfig(dp=4, tp=2), 8, 4),
        (MeshConfig(dp=2, pp=2, sp=2, tp=2), 16, 2),
    ],
)
def test_dp_is_what_the_ranks_leave_over(mesh, ranks, dp):
    assert mesh.resolved(ranks) == dataclasses.replace(mesh, dp=dp)


def test_without_ranks_the_config_says_how_many():
    assert resolve(load(None, ["mesh.dp=4"])).mesh.dp == 4
    assert resolve(load(None, ["mesh.tp=4"])).mesh.dp == 1
    assert resolve(load(None, ["run.ranks=4", "mesh.tp=2"])).mesh.dp == 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "sp", "ulysses"),
    [
        (8, 8, 1, 1, 1),
        (8, 8, 1, 4, 4),
        (8, 8, 1, 16, 8),
        (8, 4, 1, 8, 4),
        (8, 4, 2, 8, 2),  # 2 kv heads a rank
        (8, 2, 4, 8, 1),  # less than one: all a ring
        (6, 6, 1, 4, 2),
        (6, 6, 1, 3, 3),
        (5, 5, 1, 8, 1),
    ],
)
def test_ulysses_is_chosen_from_the_kv_heads_of_a_rank(heads, kv_heads, tp, sp, ulysses):
    model = ModelConfig(heads=heads, kv_heads=kv_heads, hidden=8 * heads, ffn=64)
    config = Config(model, MeshConfig(tp=tp, sp=sp), train=TrainConfig(seq_len=480))
    mesh = resolve(check(config)).mesh
    assert (mesh.ulysses, mesh.ring, mesh.size) == (ulysses, sp // ulysses, tp * sp)
    assert resolve(dataclasses.replace(config, mesh=mesh)).mesh == mesh


def test_ulysses_that_is_given_is_kept():
    """Also beyond the kv heads: those are then held by several ranks."""
    for ulysses in (1, 2, 4):
        assert resolve(load(None, ["mesh.sp=4", f"mesh.ulysses={ulysses}", "model.kv_heads=1"])).mesh.ulysses == ulysses


@pytest.mark.parametrize(
    ("dp", "pp", "batch", "given", "microbatches"),
    [
        (1, 1, 12, (0, 0), 1),
        (3, 1, 12, (0, 0), 1),
        (2, 1, 12, (2, 0), 3),
        (2, 1, 12, (0, 3), 3),
        (2, 1, 12, (2, 3), 3),
        (1, 2, 12, (0, 0), 6),  # of at most 8
        (1, 2, 16, (0, 0), 8),
        (1, 2, 5, (0, 0), 5),
        (2, 2, 26, (0, 0), 1),  # 13 is prime
        (2, 3, 48, (0, 0), 12),
        (1, 2, 12, (12, 0), 1),
        (1, 2, 12, (1, 0), 12),
        (1, 2, 12, (0, 4), 4),
    ],
)
def test_a_share_of_the_batch_is_microbatches_of_sequences(dp, pp, batch, given, microbatches):
    """given: train.micro_batch and mesh.microbatches"""
    config = Config(
        mesh=MeshConfig(dp, pp, microbatches=given[1]), train=TrainConfig(global_batch=batch, micro_batch=given[0])
    )
    resolved = resolve(check(config))
    assert resolved.mesh.microbatches == microbatches
    assert resolved.train.micro_batch == batch // dp // microbatches
    assert resolve(check(resolved)) == resolved


def test_settings_of_the_pipeline_are_not_looked_at_without_one():
    resolve(load(None, ["mesh.schedule=none", "mesh.chunks=3", "mesh.division=[9]"]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_must_divide_as_the_layout_wants_it(layout):
    for ring, ulysses in itertools.product(range(1, 13), repeat=2):
        mesh = MeshConfig(sp=ring * ulysses, ulysses=ulysses, layout=layout)
        assert mesh.ring == ring
        assert mesh.sequence_divisor == sequence_divisor(layout, ring, ulysses)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", [["state_dtype=bfloat16"], ["offload=true"], ["name=muon"]])
def test_what_is_not_refused_goes_together(optimizer, zero, dtype):
    settings = [f"optimizer.{setting}" for setting in optimizer] + [f"mesh.zero={zero}", f"train.dtype={dtype}"]
    clashes = (dtype == "float64" and "state_dtype=bfloat16" in optimizer) or (zero and "name=muon" in optimizer)
    if clashes:
        assert error_line(None, settings)
    else:
        resolve(load(None, settings))


EVERYTHING = Config(
    ModelConfig(
        vocab_size=1001, hidden=48, heads=6, kv_heads=3, head_dim=10, ffn=96, norm="layernorm", tied=True, window=9
    ),
    MeshConfig(2, 1, 6, 3, 2, "striped", True, False, 0.5, 'a "b".py:c', 3, 5, (2, 0, 1), 2, 3),
    DataConfig(("a/b", 'c "quoted" \\ back', "ümläut"), (0.25, 1e-7, 3.0), 0.125, "stdlib", True),
    TrainConfig(steps=7, global_batch=4, micro_batch=1, seq_len=65, seed=2**63 - 1, dtype="float64", z_loss=1e-4),
    OptimizerConfig(lr=1e-22, schedule="wsd", warmup=0, beta1=0.0, clip=0.0, eps=0.0),
    CheckpointConfig(5, False, 0, 7, "runs/other", False, "warn"),
    RunConfig("runs/x\ty\nz", 6, 12.5),
)


@pytest.mark.parametrize("config", [Config(), EVERYTHING], ids=["defaults", "everything"])
def test_to_toml_is_read_back_as_it_was(tmp_path, config):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load(path) == config


@pytest.mark.parametrize("text", ["😀 def", "\x7f", "\u2028", '"', "\\", "\x00"], ids=ascii)
def test_any_text_is_read_back_as_it_was(tmp_path, text):
    path = tmp_path / "config.toml"
    config = Config(train=TrainConfig(sample_prompt=text))
    path.write_text(to_toml(config), encoding="utf-8")
    assert load(path) == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_written_out_and_needs_no_preset_to_be_read(tmp_path, name):
    path = tmp_path / "config.toml"
    config = load(None, [f"model.preset={name}", "train.seq_len=64"], PRESETS)
    path.write_text(to_toml(config))
    assert load(path).model == dataclasses.replace(config.model, preset="")


# --- presets ------------------------------------------------------------------------------------------------------

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
}
ABOUT = {  # published in rounded form: parameters, and within which share
    "gpt3-1.3b": (1.3e9, 0.02),
    "gpt3-2.7b": (2.7e9, 0.02),
    "gpt3-6.7b": (6.7e9, 0.01),
    "gpt3-13b": (13.0e9, 0.02),
    "gpt3-175b": (175e9, 0.01),
    "llama3-405b": (405.85e9, 0.001),
}


def parameters_of(name):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(ModelConfig(**PRESETS[name])).parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    assert parameters_of(name) == PUBLISHED[name]


@pytest.mark.parametrize("name", ABOUT)
def test_a_preset_has_about_the_published_number_of_parameters(name):
    count, share = ABOUT[name]
    assert parameters_of(name) == pytest.approx(count, rel=share)


def test_every_preset_has_a_count_or_is_tiny():
    assert {name for name in PRESETS if not name.endswith("-tiny")} == PUBLISHED.keys() | ABOUT.keys()

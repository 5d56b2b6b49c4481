"""Models of transformers loaded here, and ours loaded there: the same logits, the same words, on every mesh."""

import dataclasses
import errno
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    modeling_rope_utils,
)
from transformers.models.llama import modeling_llama

from megalite.checkpoint.boxes import Box, whole
from megalite.checkpoint.hf_folder import HuggingFaceFolder
from megalite.config import Config, MeshConfig, ModelConfig, TrainConfig, resolve
from megalite.data.tokenizer import train_bpe
from megalite.errors import CheckpointError, ConfigError, PathRefused, SaveError
from megalite.launch import export as exporting
from megalite.launch.export import export
from megalite.model.generate import generate
from megalite.model.gpt import GPT
from megalite.model.hf import FromHuggingFace, initialise
from megalite.model.hf_config import config_json, model_config
from megalite.model.presets import PRESETS
from megalite.parallel.mesh import Mesh
from megalite.testing import run_ranks
from megalite.train.initial import initialise as initialise_step
from megalite.train.state import held
from megalite.train.step import TrainStep

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 24}
VOCABULARY = 103  # divides over no tp


class _Wide:
    """PyTorch, but what is asked for in float32 is float64: transformers' formulas without their casts."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@pytest.fixture(autouse=True)
def _float64(monkeypatch):
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    monkeypatch.setattr(modeling_llama, "torch", _Wide())
    monkeypatch.setattr(modeling_rope_utils, "torch", _Wide())
    yield
    torch.set_default_dtype(before)
    torch.set_num_threads(threads)


class InMemory:
    """The weights of a model as a WeightSource."""

    def __init__(self, model):
        self.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def shape(self, name):
        return tuple(self.weights[name].shape)

    def read(self, name, box):
        return self.weights[name][box.slices]


@torch.no_grad()
def drawn(model):
    """Weights, biases and norms that are all of a different size."""
    generator = torch.Generator().manual_seed(8)
    for name, parameter in model.named_parameters():
        one = 1.0 if parameter.ndim == 1 and not name.endswith("bias") else 0.0
        parameter.copy_(one + 0.15 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def words(batch=3, length=23):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(6))


def distance(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


# --- theirs into ours ----------------------------------------------------------------------------------------------


def llama(**settings):
    sizes = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **settings, "bos_token_id": None, "eos_token_id": None}))


def gpt2(**settings):
    sizes = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    settings = {**sizes, **settings, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**settings, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def rope(**parameters):
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


THEIRS = {
    "llama, grouped queries": (llama, {}),
    "llama, one kv head, tied": (llama, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, as many kv heads, wider": (llama, {"num_key_value_heads": 4, "head_dim": 16}),
    "llama, biases of attention": (llama, {"attention_bias": True}),
    "llama, biases of the feed-forward": (llama, {"mlp_bias": True}),
    "llama, biases": (llama, {"attention_bias": True, "mlp_bias": True}),
    "llama, other theta": (llama, rope(rope_type="default", rope_theta=500_000.0)),
    "llama, linear scaling": (llama, rope(rope_type="linear", factor=3.0)),
    "llama, llama3 scaling": (llama, rope(**LLAMA3)),
    "gpt2": (gpt2, {}),
    "gpt2, untied": (gpt2, {"tie_word_embeddings": False}),
    "gpt2, gelu, narrow": (gpt2, {"activation_function": "gelu", "n_inner": 40, "layer_norm_epsilon": 1e-3}),
}


@pytest.fixture
def saved(tmp_path):
    """A function: a model of THEIRS, random, and the folder that transformers has saved it in."""

    def save(variant, **options):
        make, settings = THEIRS[variant]
        model = drawn(make(**settings).double())
        model.save_pretrained(tmp_path / "theirs", **options)
        return model, tmp_path / "theirs"

    return save


def loaded(folder, mesh=None):
    """A folder as a GPT, whole or a rank's part."""
    source = HuggingFaceFolder(folder)
    model = GPT(model_config(source.config), mesh)
    initialise(model, FromHuggingFace(source, model.config))
    return model


@pytest.mark.parametrize("variant", THEIRS)
def test_logits_of_a_folder_of_theirs(variant, saved):
    theirs, folder = saved(variant)
    assert distance(loaded(folder)(words()), theirs(words()).logits) < 1e-12


@pytest.mark.parametrize("variant", ["llama, grouped queries", "gpt2"])
def test_several_files_and_their_index(variant, saved):
    theirs, folder = saved(variant, max_shard_size="60KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    assert distance(loaded(folder)(words()), theirs(words()).logits) < 1e-12


@pytest.mark.parametrize("variant", ["llama, grouped queries", "llama, one kv head, tied", "gpt2"])
def test_without_the_prefix_and_with_what_older_files_have_besides(variant, saved):
    theirs, folder = saved(variant)
    prefix = "transformer." if variant == "gpt2" else "model."
    tensors = {name.removeprefix(prefix): value for name, value in load_file(folder / "model.safetensors").items()}
    if variant == "gpt2":
        tensors |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    else:
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    if "tied" in variant:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert distance(loaded(folder)(words()), theirs(words()).logits) < 1e-12


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 3.0}, LLAMA3])
def test_rope_as_transformers_4_wrote_it(scaling):
    new = {"rope_type": "default"} if scaling is None else {**scaling, "rope_type": scaling.get("rope_type", "linear")}
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling}
    assert model_config(old) == model_config({"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, **new}})
    assert model_config(old).rope_theta == 5e5


@pytest.mark.parametrize("beside", [{}, {"original_max_position_embeddings": 40}])
@pytest.mark.parametrize("within", [{}, {"original_max_position_embeddings": 24}])
def test_the_length_before_is_found_where_transformers_finds_it(beside, within):
    scaling = {**LLAMA3, **within} if within else {k: v for k, v in LLAMA3.items() if not k.startswith("original")}
    settings = {"model_type": "llama", "max_position_embeddings": 64, **beside, "rope_parameters": scaling}
    theirs = LlamaConfig(**{**settings, "rope_parameters": {"rope_theta": 1e4, **scaling}})
    theirs.standardize_rope_params()  # as the model does when it works out its angles
    assert model_config(settings).rope_original == theirs.rope_parameters["original_max_position_embeddings"]


def last_logits(folder, mesh, tokens):
    """Of every sequence's last token, on this rank, by the way that training goes."""
    torch.set_default_dtype(torch.float64)
    train = TrainConfig(global_batch=4 * mesh.dp, seq_len=8, dtype="float64")
    config = resolve(Config(model_config(HuggingFaceFolder(folder).config), mesh, train=train))
    step = TrainStep.of(config, Mesh(mesh.dp, mesh.pp, mesh.sp, mesh.tp))
    initialise_step(step, str(folder))
    with torch.no_grad():
        return step.pipelined.logits(tokens)


def check_mesh(saved, variant, dp=1, pp=1, tp=1, zero=0, **options):
    theirs, folder = saved(variant, **options)
    mesh = MeshConfig(dp, pp, tp=tp, zero=zero)
    expected = theirs(words()).logits[:, -1]
    for actual in run_ranks(last_logits, mesh.size, folder, mesh, words()):
        assert distance(actual, expected) < 1e-9


MESHES = [{"tp": 2}, {"tp": 4}, {"pp": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "pp": 2}, {"dp": 2, "pp": 2, "zero": 3}]
MESHES += [
    {"dp": 2, "tp": 2, "zero": 3},
    {"pp": 2, "tp": 2},
    {"pp": 3, "tp": 2},
    {"dp": 2, "pp": 2, "tp": 2, "zero": 3},
]


@pytest.mark.parametrize(
    ("variant", "mesh"),
    [
        ("llama, grouped queries", {"tp": 4}),  # kv heads are replicated
        ("llama, biases of attention", {"tp": 2, "pp": 2}),
        ("llama, one kv head, tied", {"pp": 2, "dp": 2, "zero": 3}),
        ("llama, llama3 scaling", {"dp": 2, "zero": 3}),
        ("gpt2", {"tp": 2}),
        ("gpt2", {"pp": 2}),
    ],
)
def test_logits_on_a_mesh(variant, mesh, saved):
    check_mesh(saved, variant, **mesh, max_shard_size="60KB")


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("variant", THEIRS)
def test_logits_on_every_mesh(variant, mesh, saved):
    check_mesh(saved, variant, **mesh)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_masters_have_every_bit_of_the_file(zero, saved):
    def masters(folder, zero):
        torch.set_default_dtype(torch.bfloat16)
        mesh, train = MeshConfig(2, zero=zero), TrainConfig(global_batch=2, seq_len=8, dtype="bfloat16")
        settings = model_config(HuggingFaceFolder(folder).config)
        step = TrainStep.of(resolve(Config(settings, mesh, train=train)), Mesh(2))
        read = initialise_step(step, str(folder))
        with step.gathered():
            return read, held(step), dict(step.model.named_parameters())["norm.weight"].clone()

    theirs, folder = saved("llama, grouped queries")
    theirs.float().save_pretrained(folder)
    exact, found = theirs.get_parameter("model.norm.weight"), torch.full((48,), torch.nan, dtype=torch.float32)
    for read, mine, rounded in run_ranks(masters, 2, folder, zero):
        assert read == sum(4 * len(each.values) for each in mine)
        for each in mine:
            if each.name == "model/norm.weight":
                found[each.start : each.start + len(each.values)] = each.values
        assert torch.equal(rounded, exact.bfloat16())
    assert found.dtype == torch.float32 and torch.equal(found, exact)


def test_every_rank_hears_of_a_file_that_one_cannot_read(saved):
    def error(folder):
        settings = model_config(HuggingFaceFolder(folder).config)
        step = TrainStep.of(resolve(Config(settings, MeshConfig(2))), Mesh(2))
        with pytest.raises(CheckpointError) as raised:
            initialise_step(step, str(folder if step.mesh.rank else folder / "absent"))
        return str(raised.value)

    _, folder = saved("llama, grouped queries")
    assert len({*run_ranks(error, 2, folder)}) == 1


def test_a_rank_reads_its_part_only(saved):
    def bytes_read(folder):
        source = HuggingFaceFolder(folder)
        settings = model_config(source.config)
        model = GPT(settings, Mesh(tp=4))
        initialise(model, FromHuggingFace(source, settings))
        return source.bytes_read, sum(parameter.numel() for parameter in model.parameters())

    theirs, folder = saved("llama, grouped queries")
    padding = 2 * theirs.config.hidden_size  # one row of a vocabulary of 103 over 4, at most, of embedding and head
    for read, mine in run_ranks(bytes_read, 4, folder):
        assert 8 * (mine - padding) <= read <= 8 * mine


# --- ours into theirs ----------------------------------------------------------------------------------------------

SMALL = {"vocab_size": VOCABULARY, "hidden": 48, "layers": 2, "heads": 4, "ffn": 40, "max_seq_len": 64}
LLAMA = ModelConfig(**SMALL, kv_heads=2, init_std=0.15)
GPT2 = ModelConfig(**{**PRESETS["gpt2-tiny"], **SMALL, "init_std": 0.15})
OURS = {
    "llama": LLAMA,
    "llama, one kv head, tied": dataclasses.replace(LLAMA, kv_heads=1, tied=True),
    "llama, as many kv heads, wider": dataclasses.replace(LLAMA, kv_heads=4, head_dim=16),
    "llama, biases": dataclasses.replace(LLAMA, bias=True),
    "llama, other theta": dataclasses.replace(LLAMA, rope_theta=500_000.0, norm_eps=1e-3),
    "llama, linear scaling": dataclasses.replace(LLAMA, rope_scaling="linear", rope_factor=3.0),
    "llama, llama3 scaling": dataclasses.replace(LLAMA, rope_scaling="llama3", rope_original=24),
    "gpt2": GPT2,
    "gpt2, untied": dataclasses.replace(GPT2, tied=False),
    "gpt2, gelu": dataclasses.replace(GPT2, activation="gelu", norm_eps=1e-3),
}


@pytest.mark.parametrize("variant", OURS)
def test_logits_and_greedy_words_of_what_is_exported(variant, tmp_path):
    config = OURS[variant]
    ours = drawn(GPT(config))
    export(config, InMemory(ours), tmp_path / "out", torch.float64)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert distance(theirs(words()).logits, ours(words())) < 1e-12
    expected, seen = generate(ours, words(4, 5), 30, temperature=0), torch.ones(4, 5, dtype=torch.long)
    actual = theirs.generate(words(4, 5), attention_mask=seen, max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert len(expected[:, 5:].unique()) > 5 and torch.equal(actual, expected)
    back = HuggingFaceFolder(tmp_path / "out")
    assert model_config(back.config) == dataclasses.replace(config, init_std=back.config["initializer_range"])


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_what_they_save_of_what_is_exported_is_the_same_again(variant, tmp_path):
    ours = drawn(GPT(OURS[variant]))
    export(OURS[variant], InMemory(ours), tmp_path / "out", torch.float64)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64).save_pretrained(tmp_path / "again")
    again = dict(loaded(tmp_path / "again").named_parameters())
    assert all(torch.equal(again[name], parameter) for name, parameter in ours.named_parameters())


def test_bfloat16_is_rounded_once(tmp_path):
    ours = drawn(GPT(LLAMA))
    export(LLAMA, InMemory(ours), tmp_path / "out", torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.lm_head.weight, ours.head.weight.bfloat16())


def test_a_large_model_is_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting.write_tensors, "__defaults__", (40_000,))
    ours = drawn(GPT(LLAMA))
    export(LLAMA, InMemory(ours), tmp_path / "out", torch.float64)
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(path.stat().st_mode == (tmp_path / "out/config.json").stat().st_mode for path in files)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert distance(theirs(words()).logits, ours(words())) < 1e-12
    assert torch.equal(loaded(tmp_path / "out")(words()), ours(words()))


def test_the_tokenizer_goes_with_it(tmp_path):
    text = Path(__file__).read_text(encoding="utf-8")
    tokenizer = train_bpe([text], 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = dataclasses.replace(LLAMA, vocab_size=320)  # more rows than words
    export(config, InMemory(GPT(config)), tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.model_max_length) == (0, 0, 64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (0, 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dataclasses.replace(LLAMA, window=8), "model.window: 8 given; 0 would do"),
        (dataclasses.replace(LLAMA, norm="layernorm"), "model.norm: 'layernorm' given; 'rmsnorm' would do"),
        (dataclasses.replace(LLAMA, activation="gelu"), "model.activation: 'gelu' given; 'swiglu' would do"),
        (dataclasses.replace(LLAMA, hidden=50), "model.hidden: 50 given; 48 would do"),
        (dataclasses.replace(GPT2, norm="rmsnorm"), "model.norm: 'rmsnorm' given; 'layernorm' would do"),
        (dataclasses.replace(GPT2, bias=False), "model.bias: False given; True would do"),
        (dataclasses.replace(GPT2, kv_heads=2), "model.kv_heads: 2 given; 4 would do"),
        (dataclasses.replace(GPT2, head_dim=8), "model.head_dim: 8 given; 12 would do"),
        (dataclasses.replace(GPT2, activation="swiglu"), "model.activation: 'swiglu' given; 'gelu_tanh' or 'gelu'"),
    ],
)
def test_a_model_that_transformers_has_not(config, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        export(config, InMemory(GPT(config)), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays(tmp_path):
    (tmp_path / "out").mkdir()
    export(LLAMA, InMemory(GPT(LLAMA)), tmp_path / "out")  # where nothing is in it
    there = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SaveError, match="out: is there already"):
        export(LLAMA, InMemory(GPT(LLAMA, seed=1)), tmp_path / "out")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == there


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(folder, tensors):
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(exporting, "write_tensors", full)
    with pytest.raises(SaveError, match="out: cannot be written: No space left on device"):
        export(LLAMA, InMemory(GPT(LLAMA)), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_weights_that_are_no_numbers_are_not_exported(tmp_path):
    model = GPT(LLAMA)
    model.norm.weight.data[3] = float("nan")
    with pytest.raises(SaveError, match="some of the logits are no numbers"):
        export(LLAMA, InMemory(model), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_weights_that_came_out_wrong_are_not_exported(tmp_path, monkeypatch):
    right = exporting.to_hugging_face

    def wrong(*given):
        for name, values in right(*given):
            yield name, values.flip(0) if name.endswith("k_proj.weight") else values

    monkeypatch.setattr(exporting, "to_hugging_face", wrong)
    with pytest.raises(SaveError, match="nothing is exported: what was written has other logits"):
        export(LLAMA, InMemory(drawn(GPT(LLAMA))), tmp_path / "out")
    assert not list(tmp_path.iterdir())


# --- what is refused -----------------------------------------------------------------------------------------------


def opened(folder, config=None):
    source = HuggingFaceFolder(folder)
    return FromHuggingFace(source, config or model_config(source.config))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "qwen2"}, 'model_type is "qwen2"; "gpt2" or "llama" would do'),
        ({"model_type": None}, 'model_type is null; "gpt2" or "llama" would do'),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; "silu" or "swish" would do'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type is "yarn"; "default" or "linear" or'),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_parameters.factor is null; a number would do"),
        ({"rope_scaling": 3}, "rope_scaling is 3; an object would do"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; 1.0 would do"),
        ({"num_hidden_layers": "3"}, 'num_hidden_layers is "3"; a whole number above 0 would do'),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1000"),
        ({"head_dim": -4}, "head_dim is -4; a whole number above 0 would do"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; a number would do"),
        ({"attention_bias": "yes"}, 'attention_bias is "yes"; true or false would do'),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
        ({"model_type": "gpt2", "activation_function": "relu"}, 'activation_function is "relu"; "gelu_new" or'),
    ],
)
def test_a_config_json_that_ours_cannot_compute(settings, message):
    with pytest.raises(ConfigError, match=message) as raised:
        model_config({"model_type": "llama", **settings})
    assert "\n" not in str(raised.value) and str(raised.value).startswith("config.json: ")


def test_a_model_of_other_settings_is_told_which_would_do(saved):
    _, folder = saved("llama, llama3 scaling")
    config = model_config(HuggingFaceFolder(folder).config)
    opened(folder, dataclasses.replace(config, max_seq_len=128, init_std=0.5, init=str(folder)))
    other = dataclasses.replace(config, layers=5, rope_scaling="none", tied=True, norm_eps=1e-6)
    with pytest.raises(ConfigError) as raised:
        opened(folder, other)
    wanted = "model.layers=3 model.rope_scaling=llama3 model.norm_eps=1e-05 model.tied=false would do"
    assert str(raised.value) == f"model.init: {folder} given, a model of other settings; {wanted}"


def test_settings_of_ours_are_settings_of_theirs():
    for name, preset in PRESETS.items():
        config = ModelConfig(**preset)
        assert dataclasses.replace(model_config(config_json(config, "float32")), preset="") == config, name


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt"])
def test_a_pickle_is_refused(name, saved):
    _, folder = saved("gpt2")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is a pickle, which may run any code"):
        opened(folder)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("../model.safetensors", PathRefused, "leads out of the folder"),
        ("/etc/passwd", PathRefused, "leads out of the folder"),
        ("sub/model.safetensors", PathRefused, "leads out of the folder"),
        ("..", PathRefused, "leads out of the folder"),
        ("", PathRefused, "leads out of the folder"),
        ("link.safetensors", PathRefused, "link.safetensors: a link"),
        ("folder.safetensors", PathRefused, "not a regular file"),
        ("pytorch_model.bin", CheckpointError, "is a pickle"),
        ("absent.safetensors", CheckpointError, "no such file"),
        (3, CheckpointError, "no weight_map"),
    ],
)
def test_an_index_that_names_something_else(name, error, message, saved):
    _, folder = saved("gpt2", max_shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / "folder.safetensors").mkdir()
    (folder / "link.safetensors").symlink_to(folder / next(iter(index["weight_map"].values())))
    index["weight_map"]["transformer.wte.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(error, match=message):
        opened(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_is_refused(name, saved, tmp_path):
    _, folder = saved("gpt2")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PathRefused, match="a link; a copy with the files themselves would do"):
        opened(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0\0",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 300_000) + b"[" * 300_000,
        struct.pack("<Q", 62) + b'{"wte.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        struct.pack("<Q", 70) + b'{"wte.weight":{"dtype":"F32","shape":[4611686018427387904,4611686018]}}',
    ],
)
def test_a_file_that_is_none(content, saved):
    _, folder = saved("gpt2")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file that can be read"):
        opened(folder)


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", " " * (2**20 + 1)])
def test_a_config_json_that_is_none(content, saved):
    _, folder = saved("gpt2")
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        opened(folder)


def change(folder, **changes):
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors[name] = value(tensors.get(name))
        if tensors[name] is None:
            del tensors[name]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": lambda _: None}, "no tensor model.norm.weight"),
        ({"lm_head__weight": lambda _: None}, "no tensor lm_head.weight"),
        ({"model__layers__1__self_attn__q_norm__weight": lambda _: torch.ones(12)}, "q_norm.weight is a tensor for wh"),
        ({"model__layers__1__mlp__up_proj__bias": lambda _: torch.ones(40)}, "up_proj.bias is a tensor for which"),
        ({"model__norm__weight": lambda x: x[:-1]}, r"norm.weight has shape \[47\]; \[48\] would do"),
        ({"model__norm__weight": lambda x: x.long()}, "norm.weight has dtype I64; one of F64, F32, F16, BF16"),
    ],
)
def test_tensors_that_do_not_fit(changes, message, saved):
    _, folder = saved("llama, grouped queries")
    change(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        opened(folder)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        opened(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        opened(tmp_path)


def test_a_box_across_fused_parts_is_read_whole(saved):
    theirs, folder = saved("llama, grouped queries")
    source = opened(folder)
    name = "blocks.1.attention.qkv.weight"
    layer = theirs.model.layers[1].self_attn
    qkv = torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight])
    assert source.shape(name) == tuple(qkv.shape)
    assert torch.equal(source.read(name, whole(qkv.shape)), qkv)
    assert torch.equal(source.read(name, Box((40, 3), (40, 7))), qkv[40:80, 3:10])

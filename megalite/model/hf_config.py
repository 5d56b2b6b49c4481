"""Hugging Face's config.json of a GPT-2 or a Llama as a ModelConfig, and back.

What one side has and the other cannot say is refused with a ConfigError: of ours by `family_of`, of theirs by
`model_config`. Dropout is passed over, since pretraining has none. No torch here.

Source: transformers 5.23, models/gpt2, models/llama and modeling_rope_utils.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from megalite.config import ModelConfig
from megalite.errors import ConfigError
from megalite.model.hf_names import Family

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
CLASS = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
ROPE_KINDS = ["default", "linear", "llama3"]


def family_of(config: ModelConfig) -> Family:
    """Which of the two a model is; ConfigError, naming the setting, where it is neither."""
    if config.positions == "learned":
        needed = {
            "norm": ("layernorm",),
            "activation": ("gelu_tanh", "gelu"),
            "bias": (True,),
            "kv_heads": (config.heads,),
            "head_dim": (config.hidden // config.heads,),
        }
    else:
        needed = {"norm": ("rmsnorm",), "activation": ("swiglu",)}
        if config.hidden % config.heads:
            needed["hidden"] = (config.hidden // config.heads * config.heads,)
    family: Family = "gpt2" if config.positions == "learned" else "llama"
    for name, choices in {**needed, "window": (0,)}.items():
        if (given := getattr(config, name)) not in choices:
            wanted = " or ".join(repr(choice) for choice in choices)
            raise ConfigError(
                f"model.{name}: {given!r} given; {wanted} would do for transformers' {CLASS[family]}, to which "
                f"model.positions={config.positions!r} leads"
            )
    return family


def config_json(config: ModelConfig, dtype: str, end_of_text: int | None = None) -> dict[str, Any]:
    """The config.json of a model; `end_of_text` is the token that begins and ends a document."""
    family = family_of(config)
    both = {
        "architectures": [CLASS[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype,
        "torch_dtype": dtype,  # its name until transformers 4.56
        "use_cache": True,
    }
    if family == "gpt2":
        return {
            **both,
            "n_positions": config.max_seq_len,
            "n_embd": config.hidden,
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_inner": config.ffn,
            "activation_function": "gelu_new" if config.activation == "gelu_tanh" else "gelu",
            "layer_norm_epsilon": config.norm_eps,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    scaling = _rope_scaling(config)
    return {
        **both,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
        "rope_theta": config.rope_theta,  # this and the next until transformers 4
        "rope_scaling": scaling,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": 0.0,
    }


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    if config.rope_scaling == "none":
        return None
    scaling = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "linear":
        return scaling
    return {
        **scaling,
        "low_freq_factor": config.rope_low,
        "high_freq_factor": config.rope_high,
        "original_max_position_embeddings": config.rope_original,
    }


def model_config(settings: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig of a config.json; ConfigError, naming the key, where it has what ours cannot compute.

    A key that is not there is what transformers takes for it. Where only attention or only the feed-forward has
    biases, ours has both, and those that are not there are zeros.
    """
    read = _Reader(settings)
    read.one_of("quantization_config", None, [None])
    if read.one_of("model_type", None, ["gpt2", "llama"]) == "gpt2":
        return _gpt2_config(read)
    return _llama_config(read)


def _gpt2_config(read: _Reader) -> ModelConfig:
    read.one_of("scale_attn_weights", True, [True])
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        read.one_of(name, False, [False])
    return ModelConfig(
        vocab_size=read.whole("vocab_size", 50257),
        hidden=(hidden := read.whole("n_embd", 768)),
        layers=read.whole("n_layer", 12),
        heads=read.whole("n_head", 12),
        ffn=read.whole("n_inner", 4 * hidden),
        max_seq_len=read.whole("n_positions", 1024),
        positions="learned",
        norm="layernorm",
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
        activation=ACTIVATIONS[read.one_of("activation_function", "gelu_new", list(ACTIVATIONS))],  # type: ignore[arg-type]
        bias=True,
        tied=read.one_of("tie_word_embeddings", True, [True, False]),
        init_std=read.number("initializer_range", 0.02),
    )


def _llama_config(read: _Reader) -> ModelConfig:
    read.one_of("hidden_act", "silu", ["silu", "swish"])
    biases = [read.one_of(f"{part}_bias", False, [True, False]) for part in ("attention", "mlp")]
    hidden, heads = read.whole("hidden_size", 4096), read.whole("num_attention_heads", 32)
    return ModelConfig(
        vocab_size=read.whole("vocab_size", 32000),
        hidden=hidden,
        layers=read.whole("num_hidden_layers", 32),
        heads=heads,
        kv_heads=read.whole("num_key_value_heads", heads),
        head_dim=read.whole("head_dim", hidden // heads),
        ffn=read.whole("intermediate_size", 11008),
        max_seq_len=read.whole("max_position_embeddings", 2048),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        bias=any(biases),
        tied=read.one_of("tie_word_embeddings", False, [True, False]),
        init_std=read.number("initializer_range", 0.02),
        **_rope(read),
    )


def _rope(read: _Reader) -> dict[str, Any]:
    """Both ways of writing it: rope_theta and rope_scaling, or all of it in rope_parameters."""
    rope = _Reader(read.table("rope_scaling") or read.table("rope_parameters"), "rope_parameters.")
    theta = rope.number("rope_theta", read.number("rope_theta", 10_000.0))
    for at in (read, rope):
        at.one_of("partial_rotary_factor", 1.0, [1.0])
    kind = rope.one_of("type" if "rope_type" not in rope.settings else "rope_type", "default", ROPE_KINDS)
    found = {"rope_theta": theta, "rope_scaling": "none" if kind == "default" else kind}
    if kind != "default":
        found["rope_factor"] = rope.number("factor")
    if kind == "llama3":
        found["rope_low"] = rope.number("low_freq_factor")
        found["rope_high"] = rope.number("high_freq_factor")
        name = "original_max_position_embeddings"  # beside it rather than in it, if it is there
        found["rope_original"] = read.whole(name, rope.whole(name, read.whole("max_position_embeddings", 2048)))
    return found


class _Reader:
    """Takes settings of a config.json by their types."""

    def __init__(self, settings: Mapping[str, Any], prefix: str = "") -> None:
        self.settings, self.prefix = settings, prefix

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if type(value) is not int or not 0 < value < 2**40:
            raise self._refused(name, value, "a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise self._refused(name, value, "a number")
        return float(value)

    def one_of(self, name: str, default: Any, choices: list[Any]) -> Any:
        value = self._value(name, default)
        if not any(value == choice and type(value) in (type(choice), int) for choice in choices):
            raise self._refused(name, value, " or ".join(json.dumps(choice) for choice in choices))
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self._refused(name, value, "an object")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.settings.get(name)
        return default if value is None else value

    def _refused(self, name: str, value: Any, wanted: str) -> ConfigError:
        shown = json.dumps(value)
        shown = shown if len(shown) < 60 else f"{shown[:60]}…"
        return ConfigError(f"config.json: {self.prefix}{name} is {shown}; {wanted} would do")


def check_settings(config: ModelConfig, theirs: ModelConfig, folder: object) -> None:
    """ConfigError with the settings to change, unless both compute the same from the same weights.

    The longest sequence may differ where positions are not learned: no weight and no angle depends on it.
    """
    passed_over = {"preset", "init", "init_std"}
    if theirs.positions == "learned":
        passed_over |= {field.name for field in dataclasses.fields(ModelConfig) if field.name.startswith("rope_")}
    else:
        passed_over |= {"max_seq_len"}
        passed_over |= {"rope_factor"} if theirs.rope_scaling == "none" else set()
        passed_over |= {"rope_low", "rope_high", "rope_original"} if theirs.rope_scaling != "llama3" else set()
    wanted = [
        f"model.{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in dataclasses.asdict(theirs).items()
        if name not in passed_over and value != getattr(config, name)
    ]
    if wanted:
        raise ConfigError(f"model.init: {folder} given, a model of other settings; {' '.join(wanted)} would do")

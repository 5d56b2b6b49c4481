"""Named sizes, as settings of ModelConfig.

Sources: GPT-2, Radford et al. (2019) and its released configurations; GPT-3, Brown et al. (2020), table 2.1; Llama 3,
Grattafiori et al. (2024), table 3; SmolLM2, Allal et al. (2025) and its released configuration.
"""

from __future__ import annotations

from typing import Any

_GPT = {
    "positions": "learned", "norm": "layernorm", "norm_eps": 1e-5, "activation": "gelu_tanh",
    "bias": True, "tied": True,
}  # fmt: skip
_GPT2 = {**_GPT, "vocab_size": 50257, "max_seq_len": 1024}
_GPT3 = {**_GPT, "vocab_size": 50257, "max_seq_len": 2048}
_LLAMA = {
    "positions": "rope",
    "norm": "rmsnorm",
    "norm_eps": 1e-5,
    "activation": "swiglu",
    "bias": False,
    "tied": False,
}
_LLAMA3 = {**_LLAMA, "vocab_size": 128256, "kv_heads": 8, "rope_theta": 500_000.0, "max_seq_len": 8192}


def _size(base: dict[str, Any], hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {**base, "hidden": hidden, "layers": layers, "heads": heads, **more}


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _size(_GPT2, 768, 12, 12),
    "gpt2-medium": _size(_GPT2, 1024, 24, 16),
    "gpt2-large": _size(_GPT2, 1280, 36, 20),
    "gpt2-xl": _size(_GPT2, 1600, 48, 25),
    "gpt3-1.3b": _size(_GPT3, 2048, 24, 16),  # table 2.1 prints 24 heads of 128, which do not make 2048
    "gpt3-2.7b": _size(_GPT3, 2560, 32, 32),
    "gpt3-6.7b": _size(_GPT3, 4096, 32, 32),
    "gpt3-13b": _size(_GPT3, 5120, 40, 40),  # table 2.1 prints 5140, which 40 heads of 128 do not make
    "gpt3-175b": _size(_GPT3, 12288, 96, 96),
    "llama3-8b": _size(_LLAMA3, 4096, 32, 32, ffn=14336),
    "llama3-70b": _size(_LLAMA3, 8192, 80, 64, ffn=28672),
    "llama3-405b": _size(_LLAMA3, 16384, 126, 128, ffn=53248),
    "smollm2-135m": _size(
        _LLAMA, 576, 30, 9, kv_heads=3, ffn=1536, vocab_size=49152, tied=True, rope_theta=100_000.0, max_seq_len=8192
    ),
    "gpt2-tiny": _size(_GPT2, 48, 2, 6, vocab_size=1001, max_seq_len=128),
    "llama-tiny": _size(_LLAMA, 48, 2, 6, kv_heads=2, ffn=96, vocab_size=1001, max_seq_len=128),
}

"""Bytes of activations that a block keeps for its backward, term by term, on one rank. No torch.

Words, of one microbatch on one rank: n tokens (b · s / sp), d hidden, f ffn, a heads · head_dim and c kv heads ·
head_dim of a tp rank (a / tp each, at least one kv head), r = n / tp tokens of the residual stream where sequence
parallelism splits it, and otherwise n. Elements, times the bytes of the dtype:

    x               r · d        the input, which the first norm keeps; full recomputation keeps it and nothing else
    statistics      1 or 2 · 2 · r   scale of rmsnorm, mean and scale of layernorm, of both norms: float32 or float64
    qkv input       n · d        the first norm's result, gathered under sequence parallelism
    q, k, v         n · (a + 2 c)
    attention       n · a        its result, which is also what the projection is given
    log-sum-exp     n · heads    float32 or float64
    sum             r · d        what the second norm is given
    up input        n · d        the second norm's result, gathered under sequence parallelism
    up              n · f        of a gated activation 2 f, gate and up, since it makes silu again
    activation      n · f        what the down projection is given

Selective recomputation keeps neither activation nor, unless they were gathered, qkv input and up input.

For GELU, as many kv heads as heads and f = 4 d, in 16 bit: 32 · n · d bytes, where Korthikanti et al. count 34, two of
them for dropout masks, and under sequence parallelism (28 / tp + 4) · n · d: what was gathered is kept whole and not
gathered again in backward.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), §4, with flash
attention in place of the scores.
"""

from __future__ import annotations

from megalite.config import MeshConfig, ModelConfig


def activation_bytes(model: ModelConfig, mesh: MeshConfig, tokens: int, recompute: str = "none", size: int = 4) -> int:
    """What a block keeps for its backward, in bytes, on one rank: the sum of `activation_terms`, see there."""
    return sum(activation_terms(model, mesh, tokens, recompute, size).values())


def activation_terms(
    model: ModelConfig, mesh: MeshConfig, tokens: int, recompute: str = "none", size: int = 4
) -> dict[str, int]:
    """Bytes by the names above.

    mesh: resolved   tokens: of a microbatch on one rank, b · s / sp   recompute: "none", "selective" or "full"
    size: bytes of an element: 2, 4 or 8
    """
    split = mesh.tp if mesh.sequence_parallel else 1
    residual = -(-tokens // split)
    if recompute == "full":
        return {"x": size * residual * model.hidden}
    padded = residual * split  # tokens between the linears, whose number divides over tp
    heads, kv_heads = model.heads // mesh.tp, max(1, model.kv_heads // mesh.tp)
    ffn = model.ffn // mesh.tp
    wide = max(4, size)
    ulysses = mesh.ulysses > 1
    # parts of the projection's result, which has padding, unless rope or the exchange makes them anew
    of_qkv = tokens if ulysses or model.positions == "rope" else padded
    terms = {
        "x": size * residual * model.hidden,
        "statistics": wide * residual * 2 * (1 if model.norm == "rmsnorm" else 2),
        "qkv input": size * padded * model.hidden,
        "q, k, v": size * of_qkv * (heads + 2 * _travelling(heads, kv_heads, mesh.ulysses)) * model.head_dim,
        "attention": size * tokens * heads * model.head_dim,
        "log-sum-exp": wide * tokens * heads,
        "sum": size * residual * model.hidden,
        "up input": size * padded * model.hidden,
        "up": size * padded * ffn * (2 if model.gated else 1),
        "activation": size * padded * ffn,
    }
    if ulysses or padded > tokens:  # it is kept before the exchange, or without padding, and after it
        terms["attention"] += size * padded * heads * model.head_dim
    if recompute == "selective":
        del terms["activation"]
        if split == 1:
            del terms["qkv input"], terms["up input"]
    return terms


def _travelling(heads: int, kv_heads: int, ulysses: int) -> int:
    """kv heads of a rank, each as often as it travels: see parallel/ulysses.py."""
    if kv_heads % ulysses == 0:
        return kv_heads
    return ulysses if ulysses % kv_heads == 0 else heads

"""Text from a model: one token at a time, on every rank of its tp and sp axes alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.model.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    logits_of: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`tokens` `[b, s]` followed by `count` more, drawn from the `top_k` likeliest; temperature 0 takes the likeliest.

    All ranks but those of dp draw the same, as logits and seed are. The last max_seq_len tokens are attended to.
    logits_of: tokens ─▶ `[b, V]`, of the word that follows, where a pipeline computes them (PipelinedGPT.logits)
    """
    logits_of = logits_of or (lambda tokens: model(tokens, whole=True)[:, -1])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        logits = logits_of(tokens[:, -model.config.max_seq_len :]).double().cpu()
        if temperature == 0:
            following = logits.argmax(-1, keepdim=True)
        else:
            best, ids = (logits / temperature).topk(min(top_k, logits.shape[-1]))
            following = ids.gather(1, torch.multinomial(best.softmax(-1), 1, generator=generator))
        tokens = torch.cat([tokens, following.to(tokens.device)], 1)
    return tokens

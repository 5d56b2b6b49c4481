"""Text from a model: one token at a time, on every rank of its tp and sp axes alike."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.model.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT, tokens: Tensor, count: int, *, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> Tensor:
    """`tokens` `[b, s]` followed by `count` more, drawn from the `top_k` likeliest; temperature 0 takes the likeliest.

    Every tp and sp rank draws the same, as logits and seed are the same. The last max_seq_len tokens are attended to.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        logits = model(tokens[:, -model.config.max_seq_len :], whole=True)[:, -1].double().cpu()
        if temperature == 0:
            following = logits.argmax(-1, keepdim=True)
        else:
            best, ids = (logits / temperature).topk(min(top_k, logits.shape[-1]))
            following = ids.gather(1, torch.multinomial(best.softmax(-1), 1, generator=generator))
        tokens = torch.cat([tokens, following.to(tokens.device)], 1)
    return tokens

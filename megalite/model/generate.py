"""Text from a model: one token at a time, on every rank of its tp and sp axes alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megalite.model.gpt import GPT, Part
from megalite.model.kv_cache import KVCache

LogitsOf = Callable[[Tensor], Tensor]  # tokens [b, s] ─▶ [b, V], of the word that follows


def generate(model: GPT, tokens: Tensor, count: int, **how: Any) -> Tensor:
    """`tokens` `[b, s]` followed by `count` more, or fewer where all sequences stop before; settings: see `stream`."""
    return torch.cat([tokens, *(drawn.unsqueeze(1) for drawn in stream(model, tokens, count, **how))], 1)


@torch.no_grad()
def stream(
    model: GPT,
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
    logits_of: LogitsOf | None = None,
) -> Iterator[Tensor]:
    """The `count` tokens that follow `tokens` `[b, s]`, each `[b]` as soon as it is drawn; see `draw`.

    All ranks but those of dp draw the same, as logits and seed are. The last max_seq_len tokens are attended to.
    stop: a token after which a sequence has no others but this one; when all have it, no more come
    logits_of: of the last max_seq_len tokens. By default `cached`; `uncached` or, on a pipeline, PipelinedGPT.logits
    """
    most = model.config.max_seq_len
    logits_of = logits_of or cached(model, min(most, tokens.shape[1] + count))
    generator = torch.Generator().manual_seed(seed)
    stopped = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for _ in range(count):
        logits = logits_of(tokens[:, -most:]).double().cpu()
        drawn = draw(logits, temperature, top_k, top_p, generator).to(tokens.device)
        if stop is not None:
            drawn = drawn.masked_fill(stopped, stop)
            stopped |= drawn == stop
        yield drawn
        if stop is not None and stopped.all():
            return
        tokens = torch.cat([tokens, drawn.unsqueeze(1)], 1)


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    """A word for each row of `logits` `[b, V]`: `[b]`. With temperature 0 the likeliest.

    top_k: of so many likeliest ones, 0: all   top_p: and of the fewest of them that have this much of the probability
    """
    if temperature == 0:
        return logits.argmax(-1)
    best, ids = (logits / temperature).topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    likely = best.softmax(-1)
    before = likely.cumsum(-1) - likely  # the probability of those that are likelier
    likely = likely.masked_fill((before >= top_p) & (before > 0), 0)
    return ids.gather(1, torch.multinomial(likely, 1, generator=generator)).squeeze(1)


def uncached(model: GPT) -> LogitsOf:
    """Logits by a forward over all tokens, every time."""
    return lambda tokens: model(tokens, whole=True)[:, -1]


def cached(model: GPT, capacity: int) -> LogitsOf:
    """The same, to rounding, for at most `capacity` tokens that each time are one more: the new ones are computed.

    Where max_seq_len tokens were there already, the first one falls out and every position changes: all are computed.
    """
    cache = KVCache(model.config, capacity, model.dtype, next(model.parameters()).device)
    without_head = Part(range(model.config.layers), embedding=True, head=False)

    def logits(tokens: Tensor) -> Tensor:
        batch, given = tokens.shape
        if given <= cache.length:
            return model(tokens, whole=True)[:, -1]
        if known := given - 1 - cache.length:  # of words that are given, no logits are needed
            model(tokens[:, :-1], whole=True, part=without_head, about=cache.context(batch, known))
        return model(tokens[:, -1:], whole=True, about=cache.context(batch, 1))[:, -1]

    return logits

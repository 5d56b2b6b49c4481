"""Generation: the cache changes no number, draws are from whom they should be, ends are ends."""

import dataclasses

import pytest
import torch

from megalite.config import ModelConfig
from megalite.model.generate import cached, draw, generate, stream, uncached
from megalite.model.gpt import GPT
from megalite.model.kv_cache import KVCache
from megalite.parallel.mesh import Mesh
from megalite.testing import run_ranks

ROPE = ModelConfig(vocab_size=97, hidden=32, layers=2, heads=4, max_seq_len=24, init_std=0.3)
LEARNED = dataclasses.replace(
    ROPE, positions="learned", norm="layernorm", activation="gelu", bias=True, tied=True, window=0
)
CASES = {
    "rope": ROPE,
    "gqa": dataclasses.replace(ROPE, kv_heads=2),
    "one kv head, window": dataclasses.replace(ROPE, kv_heads=1, window=5),
    "scaled": dataclasses.replace(ROPE, rope_scaling="linear", rope_factor=4.0),
    "learned": LEARNED,
    "learned, gqa, window": dataclasses.replace(LEARNED, kv_heads=2, window=7),
    "window of one": dataclasses.replace(ROPE, window=1),
}


@pytest.fixture(autouse=True)
def _float64():
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(dtype)


def prompt(batch, length):
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(2))


def with_logits(model, tokens, count, logits_of, **how):
    """What is generated `[b, s + count]`, and the logits before each token."""
    seen = []

    def noted(tokens):
        seen.append(logits_of(tokens))
        return seen[-1]

    return generate(model, tokens, count, logits_of=noted, **how), torch.stack(seen)


@pytest.mark.parametrize("case", CASES)
def test_with_the_cache_and_without_it_are_the_same(case):
    """From a prompt of 1, of several, of max_seq_len and of more, past max_seq_len."""
    model = GPT(CASES[case], seed=4)
    for param in model.parameters():  # norms and biases that do something
        torch.nn.init.normal_(
            param, 0.5 * (param.ndim == 1), 0.3, generator=torch.Generator().manual_seed(param.numel())
        )
    for length, count, how in ((1, 26, {"temperature": 0}), (7, 4, {"seed": 1}), (24, 2, {"seed": 1}), (27, 2, {})):
        tokens = prompt(2, length)
        slow = with_logits(model, tokens, count, uncached(model), **how)
        fast = with_logits(model, tokens, count, cached(model, 24), **how)
        assert torch.equal(fast[0], slow[0])
        assert (fast[1] - slow[1]).abs().max() < 1e-12 * slow[1].abs().max()
        assert torch.equal(generate(model, tokens, count, **how), slow[0])


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"sp": 2, "ulysses": 1}, {"sp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("case", ["gqa", "learned, gqa, window"])
def test_every_rank_of_a_mesh_has_its_own_cache(case, mesh):
    config = CASES[case]

    def written():
        torch.set_default_dtype(torch.float64)
        model = GPT(config, Mesh(**mesh), seed=4)
        made = [with_logits(model, prompt(3, 5), 22, f, temperature=0) for f in (uncached(model), cached(model, 24))]
        assert torch.equal(made[0][0], made[1][0])
        assert (made[0][1] - made[1][1]).abs().max() < 1e-12 * made[0][1].abs().max()
        return made[1][0]

    alone = generate(GPT(config, seed=4), prompt(3, 5), 22, temperature=0)
    for rank in run_ranks(written, mesh.get("sp", 1) * mesh.get("tp", 1)):
        assert torch.equal(rank, alone)


def test_only_new_tokens_are_computed():
    """A prompt once and without a head, then one token a step; past max_seq_len all of them."""
    model, lengths = GPT(ROPE), []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: lengths.append(len(inputs[0])))
    heads = []
    model.norm.register_forward_pre_hook(lambda _, inputs: heads.append(len(inputs[0])))
    generate(model, prompt(2, 20), 7)
    assert lengths == [2 * 19, 2, 2, 2, 2, 2, 2 * 24, 2 * 24]
    assert heads == [2, 2, 2, 2, 2, 2 * 24, 2 * 24]


def test_a_cache_is_as_large_as_its_text_and_says_when_it_is_full():
    cache = KVCache(dataclasses.replace(ROPE, kv_heads=1), 3, torch.float64, torch.device("cpu"))
    model = GPT(cache.config)
    tokens = prompt(2, 5)
    model(tokens[:, :2], about=cache.context(2, 2))
    assert [tuple(x.shape) for layer in cache.layers for x in layer] == [(2, 3, 1, 8)] * 4
    with pytest.raises(ValueError, match="2 tokens given after 2; one at a time would do"):
        cache.context(2, 2)
    model(tokens[:, 2:3], about=cache.context(2, 1))
    with pytest.raises(ValueError, match="1 tokens given after 3; a capacity of 4 or more would do"):
        cache.context(2, 1)
    with pytest.raises(ValueError, match="capacity: 25 given; 1 to max_seq_len=24 would do"):
        KVCache(ROPE, 25, torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_has_a_cache_of_its_own_dtype(dtype):
    torch.set_default_dtype(dtype)
    model = GPT(dataclasses.replace(CASES["gqa"], init_std=0.1))
    cache = KVCache(model.config, 9, dtype, torch.device("cpu"))
    tokens = prompt(2, 9)
    whole = model(tokens).float()
    model(tokens[:, :6], about=cache.context(2, 6))
    for i in range(6, 9):
        step = model(tokens[:, i : i + 1], about=cache.context(2, 1))[:, 0].float()
        assert (step - whole[:, i]).norm() < 4 * torch.finfo(dtype).eps * whole[:, i].norm()
    assert cache.layers[0][0].dtype == dtype


def drawn(logits, count=400, **how):
    """Which words come, of one row of logits, over many seeds."""
    rows = logits.expand(count, -1)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **how}
    return draw(rows, generator=torch.Generator().manual_seed(0), **settings)


def test_what_is_drawn():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert set(drawn(logits, temperature=0).tolist()) == {1}
    assert set(drawn(logits).tolist()) == {0, 1, 2, 3}
    assert set(drawn(logits, top_k=2).tolist()) == {1, 3}
    assert set(drawn(logits, top_k=9).tolist()) == {0, 1, 2, 3}
    for top_p, words in ((0.0, {1}), (0.39, {1}), (0.41, {1, 3}), (0.71, {1, 2, 3}), (0.95, {0, 1, 2, 3})):
        assert set(drawn(logits, top_p=top_p).tolist()) == words
    assert set(drawn(logits, top_k=2, top_p=0.5).tolist()) == {1}  # 4 of 7 of what top_k leaves
    assert set(drawn(logits, temperature=0.01).tolist()) == {1}
    share = drawn(logits, 20_000).bincount() / 20_000
    torch.testing.assert_close(share, logits.exp(), atol=0.01, rtol=0)
    halved = drawn(logits, 20_000, temperature=0.5).bincount() / 20_000
    torch.testing.assert_close(halved, logits.exp().square() / 0.3, atol=0.01, rtol=0)


def test_a_seed_is_a_text():
    model = GPT(ROPE)
    texts = [generate(model, prompt(1, 4), 12, seed=seed).tolist() for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_ends_each_sequence_and_then_all():
    model = GPT(ROPE, seed=4)
    free = generate(model, prompt(3, 4), 14, seed=3)[:, 4:]
    stop = int(free[1, 5])
    where = [row.index(stop) if stop in row else 14 for row in free.tolist()]
    stopped = generate(model, prompt(3, 4), 14, seed=3, stop=stop)[:, 4:]
    assert stopped.shape[1] == min(14, max(where) + 1)
    for row, before, end in zip(stopped.tolist(), free.tolist(), where, strict=True):
        assert row[: end + 1] == before[: end + 1][: len(row)]
        assert set(row[end:]) <= {stop}
    alone = generate(model, prompt(1, 4), 14, temperature=0)
    last = int(alone[0, 9])
    short = generate(model, prompt(1, 4), 14, temperature=0, stop=last)
    assert short.tolist() == [alone[0, : alone[0, 4:].tolist().index(last) + 5].tolist()]


def test_a_stream_has_no_gradients_and_leaves_the_callers_as_they_are():
    model = GPT(ROPE)
    text = stream(model, prompt(1, 4), 3)
    first = next(text)
    assert first.shape == (1,) and torch.is_grad_enabled()
    assert model(prompt(1, 4)).requires_grad
    assert len(list(text)) == 2
    assert generate(model, prompt(2, 4), 0).tolist() == prompt(2, 4).tolist()

"""Recomputation changes no bit of loss or gradients, sends nothing again unless it is full, and keeps W put off."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megalite.config import Config, MeshConfig, ModelConfig, TrainConfig, check, resolve
from megalite.data import Batch
from megalite.errors import ConfigError
from megalite.model.gpt import GPT
from megalite.model.recompute import Keeping
from megalite.parallel import weight_gradients
from megalite.parallel.mesh import Mesh
from megalite.parallel.traffic import traffic
from megalite.testing import run_ranks
from megalite.train.step import TrainStep
from megalite.train.verify import own_share

LLAMA = ModelConfig(vocab_size=101, hidden=48, layers=4, heads=6, kv_heads=2, ffn=144, max_seq_len=64, init_std=0.1)
GPT2 = replace(LLAMA, positions="learned", norm="layernorm", activation="gelu_tanh", bias=True, tied=True, kv_heads=6)
STYLES = {"llama": LLAMA, "gpt2": GPT2}
WAYS = [("selective", 1), ("full", 1), ("full", 2), ("selective", 3)]
BATCH, LENGTH = 4, 24


def batch(documents=False):
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(101, (BATCH, LENGTH + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, :9] = -100
    ends = torch.randint(8, targets.shape, generator=generator) == 0
    return Batch(ids[:, :-1], targets, ends.cumsum(1) if documents else None)


def outcome(config, documents):
    """On this rank: loss, gradients, calls and bytes by axis and operation, and how many factors each W was left."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.train.dtype))
    add, later = weight_gradients.add, []
    try:
        sizes = config.mesh
        mesh = Mesh(sizes.dp, sizes.pp, sizes.sp, sizes.tp, sizes.ulysses)
        step = TrainStep.of(config, mesh)
        share = own_share(batch(documents), mesh, sizes.layout)
        weight_gradients.add = lambda factors: (later.append(len(factors)), add(factors))
        traffic.reset()
        loss, _ = step.backward(*share[:3])
        counted = dict(traffic.calls), dict(traffic.bytes)
        step.finish_gradients(0)
        gradients = {name: parameter.grad for name, parameter in step.model.named_parameters()}
        return loss, gradients, counted, later
    finally:
        torch.set_default_dtype(before)
        weight_gradients.add = add


def outcomes(mesh, model, ways, *, dtype="float64", micro_batch=0, documents=False):
    """Of every rank, by way: without recomputation first."""
    train = TrainConfig(global_batch=BATCH, seq_len=LENGTH, dtype=dtype, micro_batch=micro_batch)
    config = resolve(Config(model, mesh, train=train), mesh.size)

    def all_ways():
        settings = [replace(train, recompute=mode, recompute_every=every) for mode, every in [("none", 1), *ways]]
        return [outcome(replace(config, train=replace(one, micro_batch=config.train.micro_batch)), documents)
                for one in settings]  # fmt: skip

    return run_ranks(all_ways, mesh.size)


def assert_equal(mesh, model, ways=WAYS, **further):
    """Loss and gradients of every rank are bitwise those without recomputation; so is what selective sends."""
    ranks = outcomes(mesh, model, ways, **further)
    for (loss, gradients, counted, later), *others in ranks:
        for (mode, every), other in zip(ways, others, strict=True):
            assert other[0] == loss
            assert other[1].keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert torch.equal(other[1][name], gradient), (mode, every, name)
            assert other[3] == later, (mode, every)
            if mode == "selective":
                assert other[2] == counted
    return ranks


# --- one rank -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("style", STYLES)
def test_one_rank(style, dtype):
    mesh = MeshConfig(dp=1)
    assert_equal(mesh, STYLES[style], dtype=dtype)
    assert_equal(mesh, STYLES[style], dtype=dtype, micro_batch=1)  # linears hand their factors over
    assert_equal(mesh, replace(STYLES[style], window=7), dtype=dtype, documents=True)


def rebuilt(config, tokens, **further):
    """How often each block's parts are computed: in forward, and within backward."""
    model, ran = GPT(config, **further), []
    parts = [(x.attention_norm, x.attention.qkv, x.mlp_norm, x.mlp.up) for x in model.blocks]
    for module in sum(parts, ()):
        module.register_forward_hook(lambda module, *_: ran.append(module))
    loss = model(tokens, tokens)
    assert [ran.count(module) for module in sum(parts, ())] == [1] * 16
    ran.clear()
    loss.backward()
    return [tuple(map(ran.count, modules)) for modules in parts]


def test_what_is_computed_again():
    tokens = batch().tokens
    nothing, norms, all_of_it = (0, 0, 0, 0), (1, 0, 1, 0), (1, 1, 1, 1)
    assert rebuilt(LLAMA, tokens) == [nothing] * 4
    assert rebuilt(LLAMA, tokens, recompute="selective") == [norms] * 4
    assert rebuilt(LLAMA, tokens, recompute="full") == [all_of_it] * 4
    assert rebuilt(LLAMA, tokens, recompute="full", recompute_every=3) == [all_of_it, nothing, nothing, all_of_it]
    assert rebuilt(LLAMA, tokens, offload=True) == [nothing] * 4


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_without_gradients_and_with_frozen_weights(recompute):
    tokens = batch().tokens
    plain, model = GPT(GPT2), GPT(GPT2, recompute=recompute)
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))
    for each in (plain, model):
        each.embedding.requires_grad_(False)
        each.positions.requires_grad_(False)
        each.blocks[1].requires_grad_(False)
        each(tokens, tokens).backward()
    for name, parameter in plain.named_parameters():
        other = model.get_parameter(name).grad
        assert (other is None and parameter.grad is None) or torch.equal(other, parameter.grad), name


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_graph_may_be_used_twice(recompute):
    tokens = batch().tokens
    model = GPT(LLAMA, recompute=recompute)
    loss = model(tokens, tokens)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_result_is_dropped_where_it_is_kept_and_only_there():
    """Of `use` only what is the made tensor itself is made again, not another one of its shape, or a view of it."""
    weight, calls = torch.randn(5, 5, requires_grad=True), []

    def make(x):
        calls.append(1)
        return x.exp()

    def use(made):
        return (made @ weight) * F.gelu(made @ made) + made[:3].sum() * weight[0]

    x = torch.randn(5, 5, requires_grad=True)
    expected = torch.autograd.grad(use(x.exp()).sum(), (x, weight))
    calls.clear()
    actual = torch.autograd.grad(Keeping("selective").through(make, x, use).sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert len(calls) > 1


# --- on a mesh ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_parallel(sequence_parallel):
    mesh = MeshConfig(dp=1, tp=2, sequence_parallel=sequence_parallel)
    ranks = assert_equal(mesh, GPT2, micro_batch=2)
    for (_, _, (calls, sent), _), _, full, _, _ in ranks:  # two microbatches of four blocks, two pairs of linears each
        forwards = 2 * 4 * 2
        operations = ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",)
        for operation in operations:
            assert full[2][0]["tp", operation] == calls["tp", operation] + forwards
        elements = 2 * LENGTH * GPT2.hidden  # of a collective: 2 (t − 1) / t of them in an all_reduce, half of it else
        again = sum(full[2][1].values()) - sum(sent.values())
        assert again == forwards * elements * 8


@pytest.mark.parametrize("ulysses", [1, 2])
def test_context_parallel(ulysses):
    mesh = MeshConfig(dp=1, sp=2, ulysses=ulysses)
    ranks = assert_equal(mesh, LLAMA, [("selective", 1), ("full", 1)], documents=True)
    for (_, _, (calls, _), _), _, full in ranks:
        assert sum(full[2][0].values()) > sum(calls.values())


SCHEDULES = [("1f1b", 0), ("zb-h1", 0), ("zb-v", 0), ("interleaved-1f1b", 2)]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_pipelines_put_weight_gradients_off(schedule):
    mesh = MeshConfig(dp=1, pp=2, schedule=schedule)
    for ways in assert_equal(mesh, LLAMA, [("selective", 1), ("full", 1)], micro_batch=1):
        assert max(ways[0][3]) >= 4  # all linears of a block at once, by a W


# --- all of it ------------------------------------------------------------------------------------------------------

MESHES = [
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False},
    {"tp": 3},
    {"sp": 2, "ulysses": 1},
    {"sp": 2, "ulysses": 1, "keep_kv": True},
    {"sp": 2, "ulysses": 2, "layout": "contiguous"},
    {"sp": 4, "ulysses": 2},
    {"dp": 2, "tp": 2},
    {"sp": 2, "tp": 2, "ulysses": 1},
    *({"pp": 2, "schedule": schedule, "chunks": chunks} for schedule, chunks in SCHEDULES),
    {"pp": 2, "tp": 2, "schedule": "zb-h1"},
    {"pp": 2, "sp": 2, "ulysses": 1, "schedule": "zb-v"},
    {"dp": 2, "pp": 2, "tp": 2, "schedule": "interleaved-1f1b", "chunks": 2},
]


@pytest.mark.full
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: ", ".join(f"{key} {value}" for key, value in mesh.items()))
def test_every_mesh(mesh, style, dtype, documents):
    model = replace(STYLES[style], window=11 * documents, kv_heads=6 if mesh.get("tp") == 3 else STYLES[style].kv_heads)
    assert_equal(MeshConfig(**{"dp": 1, **mesh}), model, dtype=dtype, micro_batch=1, documents=documents)


# --- settings -------------------------------------------------------------------------------------------------------


def test_settings_reach_the_blocks():
    train = TrainConfig(recompute="selective", recompute_every=2, offload_activations=True)
    model = GPT.of(Config(LLAMA, train=train), Mesh())
    kept, again = Keeping(offload=True), Keeping("selective", offload=True)
    assert [block.keeping for block in model.blocks] == [again, kept, again, kept]
    assert [block.mlp.keeping for block in model.blocks] == [again, kept, again, kept]


def test_every_0th_block_is_an_error():
    with pytest.raises(ConfigError, match=r"train\.recompute_every: 0 given; 1 or more would do"):
        check(Config(train=TrainConfig(recompute_every=0)))

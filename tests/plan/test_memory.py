"""The bytes of activations that a block keeps, predicted and as they lie in memory between forward and backward."""

import dataclasses
import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.config import MeshConfig, ModelConfig
from megalite.model.gpt import GPT
from megalite.model.presets import PRESETS
from megalite.model.recompute import Keeping, _on_host
from megalite.parallel.mesh import Mesh
from megalite.plan.memory import activation_bytes, activation_terms
from megalite.testing import run_ranks

LLAMA = ModelConfig(vocab_size=101, hidden=64, heads=4, max_seq_len=64)
GPT2 = dataclasses.replace(
    LLAMA, positions="learned", norm="layernorm", activation="gelu_tanh", bias=True, tied=True, ffn=256
)
MODELS = {
    "llama": LLAMA,
    "llama, grouped queries": dataclasses.replace(LLAMA, kv_heads=2),
    "llama, one kv head, wide heads": dataclasses.replace(LLAMA, kv_heads=1, head_dim=24),
    "llama, window": dataclasses.replace(LLAMA, window=9),
    "gpt2": GPT2,
}
RECOMPUTE = ("none", "selective", "full")
ONE = MeshConfig(dp=1, ulysses=1)


def storages_of(tree):
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Storages(TorchDispatchMode):
    """Of everything that operators make within: what is still alive, in bytes."""

    def __init__(self):
        super().__init__()
        self.made, self.given = {}, {}  # what was given is held, so that its address is not given anew

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for storage in storages_of((args, kwargs)):
            if storage._cdata not in self.made or self.made[storage._cdata][0].expired():
                self.given[storage._cdata] = storage
        result = function(*args, **(kwargs or {}))
        for storage in storages_of(result):
            if storage._cdata not in self.given:
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self):
        return sum(size for storage, size in self.made.values() if not storage.expired())


def measured(config, mesh, batch, length, dtype, **further):
    """Bytes a block: of a model of three layers what is more than of one of one layer, by two."""
    before, alive = torch.get_default_dtype(), []
    torch.set_default_dtype(dtype)
    try:
        for layers in (1, 3):
            model = GPT(dataclasses.replace(config, layers=layers), mesh, **further)
            tokens = torch.randint(config.vocab_size, (batch, length))
            model(tokens, tokens)  # makes the context that later calls take
            with Storages() as storages:
                loss = model(tokens, tokens)
            # gloo's threads let go of what they sent a little after it has arrived
            alive.append(min(storages.alive() for _ in range(10) if mesh.size == 1 or not time.sleep(0.02)))
            del loss
    finally:
        torch.set_default_dtype(before)
    return (alive[1] - alive[0]) / 2


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=FULL), pytest.param(torch.bfloat16, marks=FULL)], ids=str
)
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("model", MODELS)
def test_a_block_keeps_what_is_predicted(model, recompute, dtype):
    config = MODELS[model]
    kept = measured(config, Mesh(), 2, 31, dtype, recompute=recompute)
    predicted = activation_bytes(config, ONE, 2 * 31, recompute, dtype.itemsize)
    if dtype == torch.bfloat16 and config.norm == "layernorm" and recompute != "full":
        # on CPUs either layernorm keeps its input, weight and bias in float32; selective recomputation the input too
        more = 62 * config.hidden * (4 if recompute == "selective" else 2)
        predicted += 2 * (more + 2 * 4 * config.hidden)
    assert kept == predicted


MESHES = {
    "tp": (MeshConfig(dp=1, tp=2, ulysses=1, sequence_parallel=False), 2, 32),
    "tp, sequence parallel": (MeshConfig(dp=1, tp=2, ulysses=1), 2, 32),
    "tp, sequence parallel, padded": (MeshConfig(dp=1, tp=2, ulysses=1), 1, 31),
    "tp 4, more ranks than kv heads": (MeshConfig(dp=1, tp=4, ulysses=1), 2, 32),
    "ring": (MeshConfig(dp=1, sp=2, ulysses=1), 2, 32),
    "ulysses": (MeshConfig(dp=1, sp=2, ulysses=2), 2, 32),
    "ulysses 4, kv heads repeated": (MeshConfig(dp=1, sp=4, ulysses=4), 2, 32),
    "ring × tp": (MeshConfig(dp=1, sp=2, tp=2, ulysses=1), 2, 32),
}
FEW = ("tp, sequence parallel, padded", "ulysses", "ring × tp")


def measured_on(sizes, config, batch, length, recompute):
    mesh = Mesh(1, 1, sizes.sp, sizes.tp, sizes.ulysses)
    further = {"sequence_parallel": sizes.sequence_parallel, "recompute": recompute}
    return measured(config, mesh, batch, length // sizes.sp, torch.float32, **further)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("mesh", [mesh if mesh in FEW else pytest.param(mesh, marks=FULL) for mesh in MESHES])
@pytest.mark.parametrize("model", ["llama, grouped queries", pytest.param("gpt2", marks=FULL)])
def test_a_block_keeps_what_is_predicted_on_a_mesh(mesh, model, recompute):
    sizes, batch, length = MESHES[mesh]
    kept = run_ranks(measured_on, sizes.size, sizes, MODELS[model], batch, length, recompute)
    assert kept == [activation_bytes(MODELS[model], sizes, batch * length // sizes.sp, recompute, 4)] * sizes.size


def test_every_second_block():
    few = [measured(LLAMA, Mesh(), 2, 32, torch.float32, recompute="full", recompute_every=every) for every in (1, 2)]
    whole, input_alone = (activation_bytes(LLAMA, ONE, 64, recompute, 4) for recompute in ("none", "full"))
    assert few == [input_alone, (whole + input_alone) / 2]  # the second of three keeps all


class Post:
    """In place of the way to a host's memory and back: counts, and what it holds is no tensor."""

    device = torch.device("cpu")

    def __init__(self):
        self.sent, self.fetched = 0, 0

    def to_host(self, x):
        self.sent += x.nbytes
        return x.numpy().copy()

    def to_device(self, held):
        self.fetched += 1
        return torch.from_numpy(held.copy())


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("model", ["llama, grouped queries", "gpt2"])
def test_offloaded_activations_travel_once_leave_nothing_behind_and_weights_stay(monkeypatch, model, recompute):
    config, posts, around = dataclasses.replace(MODELS[model], layers=3), [], Keeping.around

    def by_post(self, block, forward, x, *more):
        posts.append(Post())
        with _on_host(posts[-1], block.parameters()):
            return around(self, block, forward, x, *more)

    tokens = torch.randint(101, (2, 32))
    plain, other = GPT(config), GPT(config, recompute=recompute)
    plain(tokens, tokens)  # makes the context that later calls take
    with Storages() as kept:
        expected = plain(tokens, tokens)
    kept = kept.alive()
    monkeypatch.setattr(Keeping, "around", by_post)
    other(tokens, tokens)
    posts.clear()
    with Storages() as left:
        loss = other(tokens, tokens)
    assert left.alive() == kept - 3 * activation_bytes(config, ONE, 64, "none", 4)

    more = 4 * 64 * config.hidden  # the result of attention is kept in two shapes
    more += 4 * 32 * config.head_dim if config.positions == "rope" else 0  # cos and sin
    sent = activation_bytes(config, ONE, 64, recompute, 4) + (0 if recompute == "full" else more)
    assert [(post.sent, post.fetched) for post in posts] == [(sent, 0)] * 3

    loss.backward()
    expected.backward()
    assert all(post.fetched for post in posts)
    for name, parameter in plain.named_parameters():
        assert torch.equal(other.get_parameter(name).grad, parameter.grad), name


def test_it_is_korthikantis_count_without_dropout_masks():
    """Table 2, 16 bit, 34 s b h less two for masks; what is gathered under sequence parallelism is kept whole."""
    config, tokens = ModelConfig(**PRESETS["gpt3-175b"]), 2048
    unit = tokens * config.hidden

    def times(recompute, tp, sequence_parallel):
        mesh = MeshConfig(dp=1, tp=tp, ulysses=1, sequence_parallel=sequence_parallel)
        terms = activation_terms(config, mesh, tokens, recompute, 2)
        small = terms.pop("statistics", 0) + terms.pop("log-sum-exp", 0)
        assert small < 0.01 * unit * 34
        return sum(terms.values()) / unit

    assert times("none", 1, False) == 32
    assert times("none", 8, False) == 8 + 24 / 8  # 10 + 24/t with two masks
    assert times("none", 8, True) == 4 * (1 - 1 / 8) + 32 / 8  # 34/t, and two results of norms that are kept whole
    assert times("selective", 1, False) == 20
    assert times("selective", 8, False) == 4 + 16 / 8
    assert times("selective", 8, True) == 4 + 20 / 8
    assert times("full", 8, False) == 2
    assert times("full", 8, True) == 2 / 8

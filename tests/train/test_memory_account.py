"""What a step holds in memory, by kind, as predicted and as counted."""

import dataclasses
import itertools
from functools import partial

import pytest
import torch

from megalite.config import Config, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig, resolve
from megalite.parallel.mesh import Mesh
from megalite.plan.rank_memory import predicted_memory
from megalite.testing import run_ranks
from megalite.train.memory import account, measured_memory
from megalite.train.step import TrainStep

LLAMA = ModelConfig(vocab_size=509, hidden=64, layers=4, heads=4, kv_heads=2, max_seq_len=64)
GPT2 = dataclasses.replace(
    LLAMA, positions="learned", norm="layernorm", activation="gelu_tanh", bias=True, tied=True, kv_heads=4, ffn=256
)
FULL = pytest.mark.full


def counted(config):
    """Of this rank, its place in the pipeline, its second step's memory, and whose is the most in the third."""
    sizes = config.mesh
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.train.dtype))
    try:
        mesh = Mesh(sizes.dp, sizes.pp, sizes.sp, sizes.tp, sizes.ulysses, sizes.shard or None)
        step = TrainStep.of(config, mesh)
        shape = config.train.global_batch // sizes.dp, config.train.seq_len // sizes.sp
        tokens = torch.randint(config.model.vocab_size, shape)
        step(tokens, tokens)
        _, memory = measured_memory(step, lambda: step(tokens, tokens))
        _, most = account(config, step, lambda: step(tokens, tokens))
        return mesh.pp.rank, memory, most
    finally:
        torch.set_default_dtype(before)


def both(model, mesh, optimizer="adamw", state_dtype="float32", offload=False, **train):
    """Of each rank what was predicted and what was counted."""
    given = {"global_batch": 4 * mesh.dp, "seq_len": 32} | train
    how = OptimizerConfig(optimizer, state_dtype=state_dtype, offload=offload)
    config = resolve(Config(model, mesh, train=TrainConfig(**given), optimizer=how), mesh.size)
    predicted = predicted_memory(config)
    ranks = run_ranks(counted, mesh.size, config)
    assert len({most for *_, most in ranks}) == 1
    return [(predicted[pp], memory) for pp, memory, _ in ranks]


MESHES = {
    "alone": MeshConfig(1),
    "dp": MeshConfig(2),
    "tp": MeshConfig(1, tp=2),
    "tp, tokens whole": MeshConfig(1, tp=2, sequence_parallel=False),
    "sp": MeshConfig(1, sp=2),
    "ring": MeshConfig(1, sp=2, ulysses=1),
    "pp": MeshConfig(1, pp=2),
    "pp, zb-h1": MeshConfig(1, pp=2, schedule="zb-h1"),
    "pp, zb-v": MeshConfig(1, pp=2, schedule="zb-v"),
    "pp, gpipe, few layers last": MeshConfig(1, pp=2, schedule="gpipe", division=(3, 1)),
    "pp, interleaved": MeshConfig(1, pp=2, schedule="interleaved-1f1b"),
    "dp × tp": MeshConfig(2, tp=2),
    "dp × pp": MeshConfig(2, pp=2),
    "dp × sp, copies": MeshConfig(2, sp=2, shard=2),
}


CASES = {
    "none": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "every second": {"recompute": "full", "recompute_every": 2},
    "microbatches": {"micro_batch": 1},
    "bfloat16": {"dtype": "bfloat16"},
}


def require_as_predicted(pairs, peak=(0.9, 1.25), activations=0.01):
    for predicted, counted in pairs:
        for name in ("parameters", "gradients", "optimizer", "host"):
            assert getattr(counted, name) == pytest.approx(getattr(predicted, name), rel=0.002), name
        assert counted.activations == pytest.approx(predicted.activations, rel=activations)
        assert peak[0] <= predicted.peak / counted.peak <= peak[1]
        assert counted.buffers >= 0


FEW = {
    ("alone", "full"),
    ("tp", "selective"),
    ("dp × pp", "none"),
    ("pp, zb-h1", "none"),
    ("dp × sp, copies", "bfloat16"),
}


@pytest.mark.parametrize(
    ("mesh", "case"),
    [pytest.param(*pair, marks=() if pair in FEW else FULL) for pair in itertools.product(MESHES, CASES)],
)
def test_a_rank_holds_what_is_predicted(mesh, case):
    require_as_predicted(both(LLAMA, MESHES[mesh], **CASES[case]))


@pytest.mark.parametrize("case", ["none", pytest.param("microbatches", marks=FULL)])
@pytest.mark.parametrize("mesh", [mesh if mesh == "pp, zb-v" else pytest.param(mesh, marks=FULL) for mesh in MESHES])
def test_with_learned_positions_biases_and_a_tied_embedding(mesh, case):
    require_as_predicted(both(GPT2, MESHES[mesh], **CASES[case]))


@pytest.mark.parametrize(
    "case", ["none", pytest.param("microbatches", marks=FULL), pytest.param("bfloat16", marks=FULL)]
)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp × pp", pytest.param("dp", marks=FULL), pytest.param("dp × tp", marks=FULL)])
def test_with_zero(mesh, zero, case):
    sizes = dataclasses.replace(MESHES[mesh], zero=zero)
    require_as_predicted(both(LLAMA, sizes, **CASES[case]), peak=(0.85, 1.25))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=FULL), "bfloat16"])
@pytest.mark.parametrize("zero", [pytest.param(1, marks=FULL), 2, pytest.param(3, marks=FULL)])
def test_with_zero_and_an_embedding_at_both_ends(zero, dtype):
    sizes = dataclasses.replace(MESHES["dp × pp"], zero=zero)
    # LayerNorm of bfloat16 keeps its input in float32 on CPUs
    activations = 0.01 if dtype == "float32" else 0.15
    require_as_predicted(both(GPT2, sizes, micro_batch=1, dtype=dtype), peak=(0.85, 1.25), activations=activations)


def test_with_zero_over_sp_in_groups_and_a_tied_embedding():
    sizes = dataclasses.replace(MESHES["dp × sp, copies"], zero=1)
    require_as_predicted(both(GPT2, sizes, micro_batch=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_keeps_one_moment_of_the_matrices_of_blocks(dtype):
    require_as_predicted(both(LLAMA, MESHES["tp"], "muon", dtype=dtype))


@pytest.mark.parametrize(("optimizer", "dtype"), [("adamw", "float32"), ("adamw", "bfloat16"), ("muon", "bfloat16")])
def test_state_in_bfloat16_takes_half_of_the_bytes(optimizer, dtype):
    require_as_predicted(both(LLAMA, MESHES["tp"], optimizer, "bfloat16", dtype=dtype))


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("mesh", "zero"), [("alone", 0), ("dp", 0), ("dp", 1), ("dp × pp", 2), ("dp", 3)])
def test_what_is_offloaded_is_on_the_host(mesh, zero, dtype, state_dtype):
    sizes = dataclasses.replace(MESHES[mesh], zero=zero)
    how = {"offload": True, "state_dtype": state_dtype, "dtype": dtype}
    pairs = both(LLAMA, sizes, micro_batch=2, **how)
    require_as_predicted(pairs, peak=(0.85, 1.25))
    assert all(counted.host and not counted.optimizer for _, counted in pairs)


def stepped(model, counts):
    """The weights after two steps, of which the second may be counted."""
    config = resolve(Config(model, MeshConfig(1), train=TrainConfig(global_batch=4, micro_batch=2, seq_len=32)), 1)
    step = TrainStep.of(config, Mesh())
    tokens = torch.randint(model.vocab_size, (4, 32), generator=torch.Generator().manual_seed(1))
    step(tokens, tokens)
    run = partial(step, tokens, tokens)
    result = measured_memory(step, run)[0] if counts else run()
    third = step(tokens, tokens)
    return [result.loss, third.loss, *step.model.state_dict().values()], step


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_counting_changes_no_bit_and_leaves_nothing_behind(model):
    (counted, step), (plain, other) = stepped(model, True), stepped(model, False)
    assert all(a == b if isinstance(a, float) else torch.equal(a, b) for a, b in zip(counted, plain, strict=True))
    assert step.pipelined.after_backward is None
    assert len(step.model._forward_hooks) == len(other.model._forward_hooks)
    assert len(step.model._forward_pre_hooks) == len(other.model._forward_pre_hooks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_the_allocator_says_the_peak(dtype, recompute):
    model = dataclasses.replace(LLAMA, vocab_size=4096, hidden=512, heads=8, kv_heads=8, ffn=1408, max_seq_len=512)
    train = TrainConfig(global_batch=8, seq_len=512, dtype=dtype, recompute=recompute)
    config = resolve(Config(model, MeshConfig(1), train=train), 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("cuda"):
            step = TrainStep.of(config, Mesh())
            tokens = torch.randint(4096, (8, 512))
        step(tokens, tokens)
        _, counted = measured_memory(step, lambda: step(tokens, tokens))
    finally:
        torch.set_default_dtype(before)
    require_as_predicted([(predicted_memory(config)[0], counted)], peak=(0.85, 1.25), activations=0.05)

"""Half precision: how far from float64 it is, that what adds up does so in float32, and float16's loss scale."""

import contextlib
import itertools
import json
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import rms_norm
from trajectory import GPT2, LLAMA, Case, Way

from megalite.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    check,
    resolve,
)
from megalite.data import TokenWriter
from megalite.errors import NumericError
from megalite.model.gpt import GPT
from megalite.model.norm import LayerNorm, RMSNorm
from megalite.model.rope import rotary, rotated_qkv
from megalite.parallel.lookup import lookup
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.parameters import cut
from megalite.parallel.vocab import vocab_parallel_linear_cross_entropy
from megalite.testing import run_ranks
from megalite.train.gradients import pieces_of
from megalite.train.loop import pretrain
from megalite.train.precision import LossScale
from megalite.train.step import TrainStep
from megalite.train.verify import own_share

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EPS = {"bfloat16": 2**-8, "float16": 2**-11}  # of one rounding, relative
STYLES = {"llama": LLAMA, "gpt2": GPT2}
SIZES = {"hidden": 64, "heads": 4, "layers": 3, "vocab_size": 256, "max_seq_len": 128, "init_std": 0.06}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(*shape, seed=3, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def apart(actual, expected):
    """Relative error in the 2-norm."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def words(rows, length, vocabulary=256):
    """Tokens of which some are frequent, as in text."""
    uniform = torch.rand(rows, length + 1, generator=torch.Generator().manual_seed(7))
    block = (vocabulary ** uniform.double()).long() - 1
    return block[:, :-1], block[:, 1:]


# --- what sums or turns, operation by operation -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
def test_rotary_angles_are_exact_at_long_positions(dtype):
    """In half precision position 100 003 would not even be a number of its own, nor its cosine the right one."""
    config = replace(LLAMA, hidden=32, heads=1, kv_heads=1, head_dim=32)
    positions = torch.tensor([0, 1, 4097, 100_003])
    qkv = draw(1, 4, 3, 32).to(HALF[dtype])
    tables = [rotary(config, positions, kind) for kind in (HALF[dtype], torch.float64)]
    assert {table.dtype for table in tables[0]} == {torch.float32}
    half = rotated_qkv(qkv, 1, 1, *tables[0])
    exact = rotated_qkv(qkv.double(), 1, 1, *tables[1])
    for x, y in zip(half, exact, strict=True):
        assert x.dtype == HALF[dtype]
        assert ((x.double() - y).abs() <= 1.001 * EPS[dtype] * y.abs() + 1e-6).all()  # rounded once


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("make", [RMSNorm, LayerNorm])
def test_norms_sum_in_float32(make, dtype):
    """4096 tokens that all add alike to the weight's gradient: in half precision the sum would stop growing."""
    x, grad = (300 * draw(4096, 64)).to(HALF[dtype]), (1 + 0.1 * draw(4096, 64, seed=4)).to(HALF[dtype])
    found = []
    for kind in (HALF[dtype], torch.float64):
        layer = make(64, 1e-5).to(kind)
        given = x.detach().to(kind).requires_grad_()
        layer(given).backward(grad.to(kind))
        found.append([given.grad, *(parameter.grad for parameter in layer.parameters())])
    for actual, expected in zip(*found, strict=True):
        assert apart(actual, expected) < EPS[dtype]


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_of_a_row_that_is_looked_up_often_sum_in_float32(dtype):
    table, ids = draw(8, 16).to(HALF[dtype]), torch.zeros(4096, dtype=torch.int64)
    grad = (1 + 0.1 * draw(4096, 16)).to(HALF[dtype])
    table.requires_grad_()
    lookup(table, ids).backward(grad)
    assert apart(table.grad[0], grad.double().sum(0)) < EPS[dtype]
    plain = table.detach().clone().requires_grad_()
    F.embedding(ids, plain).backward(grad)
    assert apart(plain.grad[0], grad.double().sum(0)) > 10 * EPS[dtype]  # what PyTorch does on a CPU


@pytest.mark.parametrize("dtype", HALF)
def test_attention_is_rounded_once(dtype):
    from megalite.model.context import core

    q, k, v = (draw(1, 96, 2, 16, seed=i).to(HALF[dtype]) for i in range(3))
    for window in (None, 40):
        attend = core(Mesh(), 96, None, window, "zigzag", False)
        assert apart(attend(q, k, v), attend(q.double(), k.double(), v.double())) < EPS[dtype]


def test_a_sum_over_tokens_may_pass_what_float16_holds():
    """Before it is divided by their number: 4096 tokens add 30 each to the gradient of one row."""
    x, weight = torch.full((4096, 8), 32.0, dtype=torch.float16), torch.zeros(16, 8, dtype=torch.float16)
    targets = torch.zeros(4096, dtype=torch.int64)
    weight.requires_grad_()
    (vocab_parallel_linear_cross_entropy(x, weight, targets, Axis(), reduction="sum") / 4096).backward()
    assert weight.grad.dtype == torch.float16
    torch.testing.assert_close(weight.grad[0], torch.full((8,), -30.0, dtype=torch.float16))


# --- a model ----------------------------------------------------------------------------------------------------------


class PlainNorm(nn.Module):
    """nn.RMSNorm or nn.LayerNorm, as PyTorch computes them."""

    def __init__(self, of):
        super().__init__()
        self.weight, self.bias, self.eps = of.weight, getattr(of, "bias", None), of.eps

    def forward(self, x):
        if self.bias is None:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def plain_loss(model, tokens, targets):
    """The same model of PyTorch's operations alone: separate linears, F.embedding, F.cross_entropy over the logits."""
    c = model.config
    x = F.embedding(tokens, model.embedding.weight)
    if model.positions is not None:
        x = x + model.positions.weight[: tokens.shape[1]]
    cos = sin = None
    if c.positions == "rope":
        cos, sin = (
            torch.cat([table.transpose(0, 1)] * 2, -1) for table in rotary(c, torch.arange(tokens.shape[1]), x.dtype)
        )
    for block in model.blocks:
        a = block.attention
        qkv = F.linear(PlainNorm(block.attention_norm)(x), a.qkv.weight, a.qkv.bias)
        q, k, v = qkv.unflatten(-1, (-1, c.head_dim)).transpose(1, 2).split([c.heads, c.kv_heads, c.kv_heads], 1)
        if cos is not None:
            q, k = (
                y * cos.to(y.dtype) + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sin.to(y.dtype)
                for y in (q, k)
            )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        x = x + F.linear(out, a.out.weight, a.out.bias)
        up = F.linear(PlainNorm(block.mlp_norm)(x), block.mlp.up.weight, block.mlp.up.bias)
        inner = F.silu(up.chunk(2, -1)[0]) * up.chunk(2, -1)[1] if c.gated else F.gelu(up, approximate="tanh")
        x = x + F.linear(inner, block.mlp.down.weight, block.mlp.down.bias)
    head = model.embedding if model.head is None else model.head
    logits = F.linear(PlainNorm(model.norm)(x), head.weight)
    return F.cross_entropy(
        logits.flatten(0, 1).float() if x.dtype != torch.float64 else logits.flatten(0, 1), targets.flatten()
    )


def gradients(config, dtype, loss_of):
    """Loss and gradients in `dtype` of a model whose weights bfloat16 has exactly."""
    model = GPT(config, seed=3).to(torch.bfloat16).to(dtype)
    loss = loss_of(model, *words(8, 128))
    loss.backward()
    return loss.item(), {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def ours(model, tokens, targets):
    return model(tokens, targets)


def distances(actual, expected):
    """Of the loss, of the whole gradient and of the tensor that is worst, relative."""
    whole = [torch.cat([g.flatten() for g in found[1].values()]) for found in (actual, expected)]
    worst = max(apart(actual[1][name], grad) for name, grad in expected[1].items())
    return abs(actual[0] / expected[0] - 1), apart(*whole), worst


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("style", STYLES)
def test_gradients_of_a_model_against_float64_and_against_plain_pytorch(style, dtype):
    """As exact as PyTorch's operations in the same dtype, and nearly as autocast, whose residual stream is float32."""
    config = replace(STYLES[style], kv_heads=0, ffn=0, head_dim=0, **SIZES)
    expected = gradients(config, torch.float64, ours)
    loss, whole, worst = distances(gradients(config, HALF[dtype], ours), expected)
    plain = distances(gradients(config, HALF[dtype], plain_loss), expected)
    with torch.autocast("cpu", HALF[dtype]):
        autocast = distances(gradients(config, torch.float32, plain_loss), expected)
    print(f"precision: {style} {dtype} ours {loss:.1e} {whole:.1e} {worst:.1e} plain {plain} autocast {autocast}")
    assert loss < EPS[dtype] / 8
    assert whole < 4 * EPS[dtype] and worst < 6 * EPS[dtype]
    assert whole < 1.05 * plain[1] and worst < 1.05 * plain[2]
    assert whole < 2.5 * autocast[1]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def gradient_of_a_step(case, way, dtype, zero=0, scale=None):
    """What this rank has of the gradient, by the name and first place of each piece, in float64."""
    with default_dtype(dtype):
        mesh = way.mesh()
        stages = way.stages(case)
        model = way.gpt(case, mesh)
        schedule = stages.schedule if way.pp > 1 else None
        step = TrainStep(model, OptimizerConfig(), schedule=schedule, micro_batch=way.micro_batch, zero=zero)
        step.scale.value = scale or step.scale.value
        step.backward(*own_share(case.data(), mesh, way.layout)[:3])
        step.finish_gradients(clip=0)
        pieces = pieces_of(model, step.buckets)
        assert all(piece.grad.dtype == torch.promote_types(dtype, torch.float32) for piece in pieces)
        return {(piece.name, piece.start): piece.grad.double() for piece in pieces}, step.table, mesh.tp.rank


@cache
def of_whole(case, dtype=torch.float64):
    """Gradients of the mesh of one from weights that `dtype` rounds."""
    with default_dtype(torch.float32):
        model = GPT(case.model, seed=5).to(dtype).double()
    tokens, targets, documents = case.data()[:3]
    model(tokens, targets, documents=documents, reduction="sum").backward()
    count = (targets != -100).sum()
    return {name: parameter.grad / count for name, parameter in model.named_parameters()}


def errors_of_a_mesh(case, way, dtype, expected, *more):
    """Squares of the error and of what is expected, over what this rank holds."""
    found, table, rank = gradient_of_a_step(case, way, dtype, *more)
    error = norm = 0.0
    for (name, start), grad in found.items():
        whole = cut(expected[name], table[name], rank).flatten()[start : start + grad.numel()]
        error, norm = error + (grad.flatten() - whole).square().sum().item(), norm + whole.square().sum().item()
    return error, norm


def error_of(case, way, dtype, *more):
    expected = of_whole(case, dtype)
    found = run_ranks(lambda: errors_of_a_mesh(case, way, dtype, expected, *more), way.ranks)
    return math.sqrt(sum(error for error, _ in found) / sum(norm for _, norm in found))


@pytest.mark.parametrize(
    ("style", "way"),
    [
        ("llama", Way(micro_batch=1)),
        pytest.param("gpt2", Way(micro_batch=1), marks=pytest.mark.full),
        ("gpt2", Way(pp=2, micro_batch=1)),
        pytest.param("llama tied", Way(pp=2, schedule="zb-h1", micro_batch=1), marks=pytest.mark.full),
        ("llama tied", Way(pp=2, schedule="zb-v", micro_batch=1)),
    ],
    ids=str,
)
def test_64_microbatches_are_as_exact_as_one(style, way):
    """Sums over them are float32: in bfloat16 the error would grow with their number."""
    case = Case(style, batch=64, length=12, layers=4)
    many, one = error_of(case, way, torch.bfloat16), error_of(case, Way(), torch.bfloat16)
    print(f"precision: 64 microbatches {many:.2e} one {one:.2e}")
    assert many < 1.25 * one


def error_of_embedding(case, way):
    """In bfloat16, on the ranks that have it."""
    expected = of_whole(case, torch.bfloat16)["embedding.weight"].flatten()
    found = run_ranks(lambda: gradient_of_a_step(case, way, torch.bfloat16)[0], way.ranks)
    return max(apart(grads["embedding.weight", 0], expected) for grads in found if ("embedding.weight", 0) in grads)


def test_64_microbatches_of_an_embedding_that_is_the_head_too():
    """Its gradient comes in two backwards of each microbatch, and travels at the end of the step."""
    case, way = Case("llama tied", batch=64, length=12, layers=4), Way(pp=2, schedule="zb-v", micro_batch=1)
    many, one = error_of_embedding(case, way), error_of_embedding(case, Way())
    print(f"precision: embedding of 64 microbatches {many:.2e} of one {one:.2e}")
    assert many < 1.1 * one  # 1.37 where it is summed in bfloat16


MESHES = [
    (Case(), Way(dp=2, micro_batch=1), 0),
    (Case("gpt2"), Way(dp=2), 1),
    (Case("llama tied", kv_heads=3), Way(dp=2, micro_batch=1), 2),
    (Case("gpt2"), Way(tp=2), 0),
    (Case(kv_heads=1), Way(tp=3, sequence_parallel=False), 0),
    (Case("gpt2", length=12), Way(sp=2), 0),
    (Case(length=12, window=5, documents=True), Way(sp=4, ulysses=2), 2),
    (Case("gpt2", layers=3), Way(pp=2, micro_batch=1), 1),
    (Case("llama tied", layers=4, length=12), Way(dp=2, pp=2, tp=2, schedule="zb-v", micro_batch=1), 1),
]


# each mesh in one of the two dtypes, the last in both; with -m full in the other one
HALF_MESHES = [
    pytest.param(*mesh, dtype, marks=[pytest.mark.full] * (i % 2 != j and i < len(MESHES) - 1))
    for i, mesh in enumerate(MESHES)
    for j, dtype in enumerate(HALF)
]


@pytest.mark.combination
@pytest.mark.parametrize(("case", "way", "zero", "dtype"), HALF_MESHES, ids=str)
def test_every_mesh_is_as_exact_as_one_rank(case, way, zero, dtype):
    here, one = error_of(case, way, HALF[dtype], zero), error_of(case, Way(), HALF[dtype])
    print(f"precision: {dtype} mesh {here:.2e} one {one:.2e}")
    assert one < 8 * EPS[dtype]
    assert here < 1.25 * one


def losses(case, dtype, way, steps, zero=0):
    """Of as many steps on one batch."""
    with default_dtype(dtype):
        mesh = way.mesh()
        step = TrainStep(way.gpt(case, mesh), OptimizerConfig(lr=3e-3), zero=zero)
        tokens, targets, _ = own_share(case.data(), mesh, way.layout)[:3]
        return [step(tokens, targets).loss for _ in range(steps)]


@cache
def fifty_of_float32(case):
    return run_ranks(losses, 1, case, torch.float32, Way(), 50)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("style", "stages"),
    [("llama", (2,)), *(pytest.param(*more, marks=pytest.mark.full) for more in (("llama", (1,)), ("gpt2", (1, 2))))],
    ids=str,
)
def test_50_steps_follow_those_of_float32(style, stages, dtype):
    case = Case(style, length=24)
    exact = fifty_of_float32(case)
    half = run_ranks(losses, 1, case, HALF[dtype], Way(), 50)[0]
    divided = [run_ranks(losses, 2, case, HALF[dtype], Way(dp=2), 50, zero)[0] for zero in stages]
    furthest = max(abs(a / b - 1) for a, b in zip(half, exact, strict=True))
    between = max(abs(a / b - 1) for other in divided for a, b in zip(other, half, strict=True))
    print(f"precision: 50 steps of {style} {dtype}: {furthest:.1e} from float32, ZeRO {between:.1e} from none")
    assert exact[-1] < exact[0] - 2
    assert furthest < 8 * EPS[dtype]
    assert between < 8 * EPS[dtype]


# --- the loss scale ---------------------------------------------------------------------------------------------------


def test_a_scale_halves_at_an_infinity_and_doubles_after_good_steps():
    scale = LossScale(torch.float16, first=8.0, grows_after=3)
    assert [scale.takes(norm) for norm in (1.0, math.inf, 1.0, 1.0)] == [True, False, True, True]
    assert (scale.value, scale.skipped) == (4.0, 1)
    assert scale.takes(1.0)  # the third good one in a row
    assert scale.value == 8.0
    assert [scale.takes(math.nan) for _ in range(7)] == [False] * 7
    assert (scale.value, scale.skipped) == (1 / 16, 8)
    assert scale.takes(math.nan)  # it is not the scale: for the caller to refuse
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        other = LossScale(dtype)
        assert other.takes(math.nan) and other.value == 1.0 and not other.dynamic


def test_small_gradients_are_lost_without_a_scale():
    """A loss by 2¹⁵ is what the mean over 2¹⁵ times as many tokens would be without one."""
    scaled, without = (error_of(Case(), Way(), torch.float16, 0, scale) for scale in (2.0**16, 2.0**-15))
    print(f"precision: float16 scaled {scaled:.1e} without {without:.1e}")
    assert scaled < 8 * EPS["float16"]
    assert without > 4 * scaled


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.ranks(4)
def test_an_infinity_on_one_rank_skips_the_step_on_all(zero):
    with default_dtype(torch.float16):
        way, case = Way(dp=2, tp=2), Case()
        mesh = way.mesh()
        step = TrainStep(way.gpt(case, mesh), OptimizerConfig(), zero=zero)
        tokens, targets, _ = own_share(case.data(), mesh, way.layout)[:3]
        first = step(tokens, targets)
        assert first.taken and first.scale == 2**16
        step.buckets.wait()
        before = [parameter.detach().clone() for parameter in step.model.parameters()]
        times = math.inf if mesh.rank == 3 else 1.0
        hook = step.model.blocks[1].mlp.down.weight.register_hook(lambda grad: grad * times)
        second = step(tokens, targets)
        hook.remove()
        step.buckets.wait()
        assert not second.taken and not math.isfinite(second.grad_norm)
        assert (step.scale.value, step.scale.skipped, step.steps) == (2**15, 1, 2)
        assert all(torch.equal(x, y) for x, y in zip(step.model.parameters(), before, strict=True))
        third = step(tokens, targets)
        assert third.taken and third.scale == 2**15 and math.isfinite(third.grad_norm)
        assert not all(torch.equal(x, y) for x, y in zip(step.model.parameters(), before, strict=True))


@pytest.mark.ranks(1)
def test_gradients_that_no_scale_makes_numbers_end_the_run():
    with default_dtype(torch.float16):
        case = Case()
        step = TrainStep(Way().gpt(case, Mesh()), OptimizerConfig())
        step.model.blocks[0].mlp.down.weight.register_hook(lambda grad: grad * math.nan)
        tokens, targets, _ = case.data()[:3]
        with pytest.raises(NumericError, match="the gradient is no number at step 21 "):
            [step(tokens, targets) for _ in range(30)]
        assert step.scale.skipped == 20


@pytest.mark.ranks(1)
def test_a_scale_too_large_finds_its_way_down():
    """An infinity in backward, not put there."""
    with default_dtype(torch.float16):
        case = Case()
        step = TrainStep(Way().gpt(case, Mesh()), OptimizerConfig())
        step.scale.value = 2.0**40
        tokens, targets, _ = case.data()[:3]
        results = [step(tokens, targets) for _ in range(40)]
        taken = [result.taken for result in results]
        assert not taken[0] and taken[-1] and taken == sorted(taken)
        assert results[-1].loss < results[0].loss - 1


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_in_float16_writes_its_scale_and_what_it_skipped(tmp_path, name):
    with TokenWriter(tmp_path / "tokens", 97, 4) as writer:
        writer.write(torch.arange(4000).numpy() % 97)
    config = Config(
        ModelConfig(vocab_size=97, hidden=32, layers=2, heads=2),
        MeshConfig(2),
        DataConfig((str(tmp_path / "tokens"),), validation=0.1),
        TrainConfig(steps=8, global_batch=8, seq_len=32, validation_batches=1, dtype="float16"),
        OptimizerConfig(lr=1e-2, warmup=2, name=name),
        run=RunConfig(str(tmp_path / "run")),
    )

    def run():
        made = LossScale.__init__.__defaults__
        LossScale.__init__.__defaults__ = (2.0**36, *made[1:])
        try:
            pretrain(resolve(check(config)), torch.device("cpu"))
        finally:
            LossScale.__init__.__defaults__ = made

    run_ranks(run, 2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss_scale"] == 2.0**36 and lines[0]["grad_norm"] is None and lines[0]["skipped"] == 1
    for line, following in itertools.pairwise(lines):
        taken = line["grad_norm"] is not None
        assert following["loss_scale"] == line["loss_scale"] / (1 if taken else 2)
    assert lines[-1]["skipped"] == sum(line["grad_norm"] is None for line in lines)
    assert math.isfinite(lines[-1]["val_loss"])

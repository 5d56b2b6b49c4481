"""The vocabulary over several ranks: embedding and cross entropy are F.embedding and F.cross_entropy of the whole."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megalite.parallel.collectives import copy
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.parameters import cut
from megalite.parallel.sharding import Block, Shard
from megalite.parallel.traffic import traffic
from megalite.parallel.vocab import (
    IGNORE_INDEX,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from megalite.testing import assert_matches_dense

TOKENS, SIZE = 12, 6


def tp():
    torch.set_default_dtype(torch.float64)
    return Mesh(tp=dist.get_world_size()).tp


def draw(*shape, seed=3, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(words, *shape):
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(4))


def table_shard(words, size, axis):
    return Shard((words, size), axis.name, axis.size, 0, (Block(words, axis.size),))


def own_columns(whole, axis):
    """This rank's columns of whole logits, with garbage where it holds padding."""
    words = whole.shape[-1]
    shard = Shard(tuple(whole.shape), axis.name, axis.size, whole.ndim - 1, (Block(words, axis.size),))
    local = cut(whole, shard, axis.rank)
    real = sum(piece.rows for piece in shard.pieces(axis.rank))
    local[..., real:] = 1e3  # padding must not be seen, whatever it holds
    return local, real


def reference(logits, targets, *, z_loss=0.0, reduction="mean", ignore_index=IGNORE_INDEX):
    """Cross entropy by PyTorch, the z-loss added by its definition."""
    flat, counts = logits.flatten(0, -2), targets.flatten() != ignore_index
    losses = F.cross_entropy(flat, targets.flatten(), reduction="none", ignore_index=ignore_index)
    losses = losses + torch.where(counts, z_loss * flat.logsumexp(-1).square(), 0)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


# --- embedding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [1001, 5, 24, 7])
def test_embedding(words):
    """5 words on 4 ranks: one rank holds padding alone."""
    tokens = ids(words, 4, 6)

    def make(axis):
        return VocabParallelEmbedding(words, SIZE, axis)

    assert_matches_dense(
        make, nn.Embedding(words, SIZE), tokens, ranks=(1, 2, 3, 4, 8) if words == 5 else (3, 4), bound=1e-14
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_embedding_with_the_tokens_split(dim):
    def make(axis):
        return VocabParallelEmbedding(101, SIZE, axis, sequence_dim=dim)

    assert_matches_dense(make, nn.Embedding(101, SIZE), ids(101, 12, 24), ranks=(1, 2, 3, 4), bound=1e-13)


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_same_seed_draws_the_weights_of_nn_embedding_and_padding_is_zero():
    axis = tp()
    torch.manual_seed(5)
    dense = nn.Embedding(13, SIZE)
    torch.manual_seed(5)
    parallel = VocabParallelEmbedding(13, SIZE, axis)
    assert torch.equal(parallel.weight, cut(dense.weight.detach(), table_shard(13, SIZE, axis), axis.rank))
    if axis.size == 4 and axis.rank == 3:
        assert (parallel.weight[1:] == 0).all() and (parallel.weight[0] != 0).all()


@pytest.mark.ranks(4)
def test_padding_gets_no_gradient():
    axis = tp()
    embedding = VocabParallelEmbedding(5, SIZE, axis)
    embedding(ids(5, 50)).sin().sum().backward()
    real = {0: 2, 1: 2, 2: 1, 3: 0}[axis.rank]
    assert (embedding.weight.grad[:real] != 0).all()
    assert (embedding.weight.grad[real:] == 0).all()


@pytest.mark.parametrize("bad", [-1, 10, 11])  # 10 and 11 are rows of padding on 4 ranks
@pytest.mark.ranks(1, 4)
def test_ids_out_of_range_are_an_error_on_every_rank(bad):
    axis = tp()
    with pytest.raises(IndexError, match=rf"token ids from .*{bad}.* given; 0 to 9 would do"):
        VocabParallelEmbedding(10, SIZE, axis)(torch.tensor([3, bad, 5]))
    logits, _ = own_columns(draw(3, 10), axis)
    with pytest.raises(IndexError, match=r"targets from .* given; 0 to 9 would do"):
        vocab_parallel_cross_entropy(logits, torch.tensor([3, bad, 5]), axis, vocab_size=10)
    with pytest.raises(IndexError, match="0 to 9 would do"):
        vocab_parallel_linear_cross_entropy(
            draw(3, SIZE), draw(logits.shape[-1], SIZE), torch.tensor([3, bad, 5]), axis, vocab_size=10
        )


@pytest.mark.ranks(2)
def test_no_token_is_no_error():
    axis = tp()
    assert VocabParallelEmbedding(10, SIZE, axis)(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, SIZE)


@pytest.mark.ranks(2)
def test_the_embedding_is_one_all_reduce():
    axis = Mesh(tp=2).tp
    embedding = VocabParallelEmbedding(1001, SIZE, axis)
    traffic.reset()
    embedding(ids(1001, 4, 3)).sum().backward()
    assert dict(traffic.calls) == {("tp", "all_reduce"): 1}
    assert traffic.on("tp") == 4 * 3 * SIZE * 4


# --- cross entropy --------------------------------------------------------------------------------------------------

CASES = {
    "odd vocabulary": (1001, {}),
    "a rank of padding": (5, {}),
    "z-loss": (101, {"z_loss": 1e-2}),
    "z-loss and padding": (5, {"z_loss": 0.5}),
    "sum": (101, {"reduction": "sum", "z_loss": 1e-3}),
    "none": (101, {"reduction": "none", "z_loss": 1e-3}),
    "another ignore_index": (101, {"ignore_index": 7}),
    "one word": (1, {}),
}


def close(actual, expected, case, rtol=1e-13, atol=1e-13):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda message: f"{case}: {message}")


@pytest.mark.ranks(1, 2, 3, 4, 8)
def test_cross_entropy():
    axis = tp()
    for case, (words, more) in CASES.items():
        whole = draw(3, 4, words, scale=3).requires_grad_()
        targets = ids(words, 3, 4)
        targets[0, 1] = targets[2] = more.get("ignore_index", IGNORE_INDEX)
        expected = reference(whole, targets, **more)
        local, real = own_columns(whole.detach(), axis)
        kept = local.clone()
        local.requires_grad_()
        actual = vocab_parallel_cross_entropy(local, targets, axis, vocab_size=words, **more)
        close(actual, expected, case)
        cotangent = draw(*expected.shape, seed=9)
        expected.backward(cotangent)
        actual.backward(cotangent)
        gradient, _ = own_columns(whole.grad, axis)
        close(local.grad[..., :real], gradient[..., :real], case, rtol=1e-12, atol=1e-14)
        assert (local.grad[..., real:] == 0).all(), case
        assert torch.equal(local.detach(), kept), case  # the caller's logits are left alone


@pytest.mark.ranks(1, 2, 3, 4)
def test_without_a_vocabulary_the_cut_is_the_callers():
    """As torch.tensor_split cuts: the first ranks hold one word more, and nobody holds padding."""
    axis = tp()
    for words in (10, 11, 1001):
        cut_as_torch_does(axis, words)


def cut_as_torch_does(axis, words):
    whole, targets = draw(TOKENS, words).requires_grad_(), ids(words, TOKENS)
    local = whole.detach().tensor_split(axis.size, -1)[axis.rank].clone().requires_grad_()
    actual, expected = vocab_parallel_cross_entropy(local, targets, axis), F.cross_entropy(whole, targets)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    actual.backward()
    expected.backward()
    torch.testing.assert_close(local.grad, whole.grad.tensor_split(axis.size, -1)[axis.rank], rtol=1e-12, atol=1e-14)
    with pytest.raises(IndexError, match=f"0 to {words - 1} would do"):
        vocab_parallel_cross_entropy(local, targets + words, axis)


@pytest.mark.parametrize("scale", [1e4, 1e300])
@pytest.mark.ranks(1, 2, 4)
def test_huge_logits_stay_finite_and_right(scale):
    axis = tp()
    whole = draw(TOKENS, 11).clamp(-1, 1).mul(scale).requires_grad_()
    targets = ids(11, TOKENS)
    local, real = own_columns(whole.detach(), axis)
    local.requires_grad_()
    actual, expected = (
        vocab_parallel_cross_entropy(local, targets, axis, vocab_size=11),
        F.cross_entropy(whole, targets),
    )
    assert actual.isfinite()
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)
    actual.backward()
    expected.backward()
    gradient, _ = own_columns(whole.grad, axis)
    torch.testing.assert_close(local.grad[:, :real], gradient[:, :real], rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(1, 2, 3)
def test_all_ignored():
    axis = tp()
    local, _ = own_columns(draw(TOKENS, 11), axis)
    local.requires_grad_()
    targets = torch.full((TOKENS,), IGNORE_INDEX)
    total = vocab_parallel_cross_entropy(local, targets, axis, vocab_size=11, reduction="sum", z_loss=1.0)
    assert total == 0
    total.backward()
    assert (local.grad == 0).all()
    assert vocab_parallel_cross_entropy(local, targets, axis, vocab_size=11).isnan()  # the mean of nothing, as F's


@pytest.mark.ranks(2)
def test_logits_that_are_not_contiguous():
    axis = tp()
    whole, targets = draw(4, 3, 11), ids(11, 3, 4)
    local, _ = own_columns(whole, axis)
    actual = vocab_parallel_cross_entropy(local.transpose(0, 1), targets, axis, vocab_size=11)
    torch.testing.assert_close(actual, reference(whole.transpose(0, 1), targets), rtol=1e-13, atol=1e-13)


@pytest.mark.ranks(1, 2)
def test_bfloat16_logits_are_summed_in_float32():
    axis = tp()
    whole, targets = draw(TOKENS, 301, scale=4).bfloat16(), ids(301, TOKENS)
    local, real = own_columns(whole, axis)
    local.requires_grad_()
    wide = whole.float().requires_grad_()
    actual, expected = (
        vocab_parallel_cross_entropy(local, targets, axis, vocab_size=301),
        F.cross_entropy(wide, targets),
    )
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    actual.backward()
    expected.backward()
    gradient, _ = own_columns(wide.grad, axis)
    assert local.grad.dtype == torch.bfloat16  # rounded once, at the end
    torch.testing.assert_close(local.grad[:, :real].float(), gradient[:, :real], rtol=2**-8, atol=1e-7)


def test_an_unknown_reduction_is_an_error():
    with pytest.raises(ValueError, match="reduction: 'max' given; mean, sum or none would do"):
        vocab_parallel_cross_entropy(draw(3, 5), ids(5, 3), Axis(), reduction="max")


# --- fused with the head --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [1001, 5, 24])
@pytest.mark.ranks(1, 2, 3, 4)
def test_fused_with_the_head(words):
    axis = tp()
    settings = ({}, {"reduction": "sum", "z_loss": 1e-2}, {"ignore_index": 3})
    for chunk, more in itertools.product([None, 1, 5, 12, 100], settings):
        x, weight = draw(3, 4, SIZE).requires_grad_(), draw(words, SIZE, seed=8).requires_grad_()
        targets = ids(words, 3, 4)
        targets[1, 1:3] = more.get("ignore_index", IGNORE_INDEX)
        expected = reference(x @ weight.T, targets, **more)
        expected.backward(torch.tensor(1.7))

        own = cut(weight.detach(), table_shard(words, SIZE, axis), axis.rank).requires_grad_()
        z = x.detach().clone().requires_grad_()
        actual = vocab_parallel_linear_cross_entropy(
            copy(z, axis), own, targets, axis, vocab_size=words, chunk=chunk, **more
        )
        actual.backward(torch.tensor(1.7))
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(z.grad, x.grad, rtol=1e-12, atol=1e-13)
        gradient = cut(weight.grad, table_shard(words, SIZE, axis), axis.rank)  # zero where there is padding
        torch.testing.assert_close(own.grad, gradient, rtol=1e-12, atol=1e-13)
        real = sum(piece.rows for piece in table_shard(words, SIZE, axis).pieces(axis.rank))
        assert (own.grad[real:] == 0).all()


@pytest.mark.ranks(1, 3)
def test_fused_is_unfused():
    axis = tp()
    head = VocabParallelHead(101, SIZE, axis)
    x, targets = draw(TOKENS, SIZE), ids(101, TOKENS)
    fused = vocab_parallel_linear_cross_entropy(x, head.weight, targets, axis, vocab_size=101, z_loss=0.1)
    apart = vocab_parallel_cross_entropy(head(x), targets, axis, vocab_size=101, z_loss=0.1)
    torch.testing.assert_close(fused, apart, rtol=1e-14, atol=1e-14)


@pytest.mark.ranks(1, 2)
def test_fused_without_gradients():
    axis = tp()
    weight, targets = draw(5, SIZE), ids(5 * axis.size, TOKENS)
    x = draw(TOKENS, SIZE).requires_grad_()
    with torch.no_grad():
        loss = vocab_parallel_linear_cross_entropy(x, weight, targets, axis)
    assert not loss.requires_grad
    again = vocab_parallel_linear_cross_entropy(x, weight, targets, axis)
    assert torch.equal(loss, again.detach())


@pytest.mark.ranks(1, 2)
def test_fused_takes_bfloat16():
    axis = tp()
    x, weight = draw(TOKENS, SIZE).bfloat16().requires_grad_(), draw(101, SIZE, seed=8).bfloat16()
    targets = ids(101, TOKENS)
    own = cut(weight, table_shard(101, SIZE, axis), axis.rank).requires_grad_()
    loss = vocab_parallel_linear_cross_entropy(copy(x, axis), own, targets, axis, vocab_size=101)
    loss.backward()
    assert (loss.dtype, x.grad.dtype, own.grad.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    wide, whole = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    expected = F.cross_entropy(wide @ whole.T, targets)
    expected.backward()
    # Logits are rounded to bfloat16 (2⁻⁹ of some 8 at most); gradients of up to 1/12 go through two more roundings.
    assert abs(loss.double() - expected) < 2**-9 * 8
    assert (x.grad.double() - wide.grad).abs().max() < 4 * 2**-8 * wide.grad.abs().max()


@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.ranks(2, 4)
def test_the_loss_moves_numbers_per_token_and_never_logits(chunk):
    """Three numbers a token and rank, maximum, sum and target logit: nothing that grows with the vocabulary."""
    axis = Mesh(tp=dist.get_world_size()).tp
    torch.set_default_dtype(torch.float64)
    words, tokens = 400, 24
    weight = draw(words // axis.size, SIZE).requires_grad_()
    x = draw(tokens, SIZE).requires_grad_()
    recorded = []
    for run in (
        lambda: vocab_parallel_linear_cross_entropy(x, weight, ids(words, tokens), axis, vocab_size=words, chunk=chunk),
        lambda: vocab_parallel_cross_entropy(x @ weight.T, ids(words, tokens), axis, vocab_size=words),
    ):
        traffic.reset()
        traffic.recent.clear()
        run().backward()
        recorded.append(sum(call.bytes for call in traffic.recent))
        for call in traffic.recent:
            assert call.operation == "all_gather"
            assert torch.Size(call.shape).numel() <= 3 * axis.size * tokens
    assert recorded == [(axis.size - 1) * 3 * tokens * 8] * 2


@pytest.mark.ranks(2)
def test_compile_takes_the_loss_whole():
    axis = tp()
    words = 11
    x, targets = draw(TOKENS, SIZE), ids(words, TOKENS)
    own = cut(draw(words, SIZE), table_shard(words, SIZE, axis), axis.rank)

    def loss(x, own):
        return vocab_parallel_linear_cross_entropy(copy(x, axis), own, targets, axis, vocab_size=words, chunk=5)

    outcomes = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [leaf.clone().requires_grad_() for leaf in (x, own)]
        value = function(*leaves)
        value.backward()
        outcomes.append([value.detach(), *(leaf.grad for leaf in leaves)])
    for actual, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-14)

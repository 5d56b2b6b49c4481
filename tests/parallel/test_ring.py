"""Ring attention is dense attention, in every layout and under every mask; its error, work and bytes are as stated."""

import itertools

import pytest
import torch
from dense_attention import cut, dense_attention, draw_documents, draw_qkv, with_gradients, worst
from torch import nn

from megalite.parallel.layout import LAYOUTS, ring_positions, sequence_divisor
from megalite.parallel.local_attention import work
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.ring import ring_attention
from megalite.parallel.traffic import traffic
from megalite.testing import assert_matches_dense, run_ranks

BOUND = 1e-10
MASKS = [(True, None), (True, 1), (True, 7), (False, None)]
HEADS = [(4, 4), (6, 2), (3, 1)]


def distance(axis, layout, heads, kv_heads, causal, window, documents, keep_kv, batch=2):
    """On this rank: the largest error of out, dq, dk, dv against dense attention over the whole sequence."""
    length = 3 * sequence_divisor(layout, axis.size) + 24 * sequence_divisor(layout, axis.size) // axis.size
    length -= length % sequence_divisor(layout, axis.size)
    *qkv, grad = draw_qkv(batch, length, heads, kv_heads)
    numbers = draw_documents(batch, length, documents)
    expected = with_gradients(lambda q, k, v: dense_attention(q, k, v, causal, numbers, window), qkv, grad)
    own = ring_positions(layout, axis.size, axis.rank, length)
    actual = with_gradients(
        lambda q, k, v: ring_attention(
            q, k, v, axis, causal, layout, documents=cut(numbers, own), window=window, keep_kv=keep_kv
        ),
        [cut(x, own) for x in qkv],
        cut(grad, own),
    )
    return worst(actual, [cut(x, own) for x in expected])


def every():
    """All layouts × masks × heads × documents, keeping k, v in every second."""
    combinations = itertools.product(LAYOUTS, HEADS, MASKS, ["none", "packed", "mixed"])
    for number, (layout, (heads, kv_heads), (causal, window), documents) in enumerate(combinations):
        yield layout, heads, kv_heads, causal, window, documents, number % 2 == 1


def errors(cases):
    axis = Mesh(sp=torch.distributed.get_world_size()).sp
    return [distance(axis, *case) for case in cases]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_is_the_dense_attention(ranks):
    """On each number of ranks another fifth of the cases, in which every layout, mask, … occurs."""
    cases = list(every())[ranks::5]
    found = run_ranks(errors, ranks, cases, timeout=300)
    for case, error in zip(cases, map(max, zip(*found, strict=True)), strict=True):
        assert error <= BOUND, case


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_all_of_it(ranks):
    cases = list(every())
    found = run_ranks(errors, ranks, cases, timeout=1200)
    for case, error in zip(cases, map(max, zip(*found, strict=True)), strict=True):
        assert error <= BOUND, case


def test_eight_ranks():
    cases = list(every())[1::13]
    assert max(max(found) for found in run_ranks(errors, 8, cases, timeout=300)) <= BOUND


class Attention(nn.Module):
    """An attention layer of somebody's own, its tokens split over the axis."""

    def __init__(self, axis):
        super().__init__()
        self.axis = axis
        self.qkv = nn.Linear(12, 3 * 12, bias=False)  # a bias of k changes nothing: its gradient is only rounding
        self.out = nn.Linear(12, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (9, 4)).chunk(3, 2)
        return self.out(ring_attention(q, k, v, self.axis, layout="contiguous").flatten(2))


def test_a_layer_of_ones_own_is_found_wrong_where_its_gradients_are_not_summed():
    """Each rank sees its own tokens, so gradients of the weights are summands: said, the layer is the dense one."""
    from megalite.parallel.sequence import applied_to_own_tokens

    def layer(axis):
        return applied_to_own_tokens(Attention(axis), axis)

    x = torch.randn(2, 24, 12, generator=torch.Generator().manual_seed(0))
    assert_matches_dense(layer, Attention(Axis()), x, ranks=(1, 2, 3, 4), input_dims=[1])
    with pytest.raises(AssertionError, match=r"gradient of .*: relative error"):
        assert_matches_dense(Attention, Attention(Axis()), x, ranks=(2,), input_dims=[1])


def test_a_rank_whose_tokens_are_all_masked_gives_zeros_and_no_nan():
    def run():
        axis = Mesh(sp=4).sp
        documents = torch.full((2, 6), -1 if axis.rank == 2 else 0)
        *qkv, grad = draw_qkv(2, 6, 4, 2)
        return with_gradients(
            lambda q, k, v: ring_attention(q, k, v, axis, layout="contiguous", documents=documents), qkv, grad
        )

    found = run_ranks(run, 4)
    assert all((tensor == 0).all() for tensor in found[2])
    assert all(tensor.isfinite().all() and (tensor != 0).any() for rank in (0, 1, 3) for tensor in found[rank])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [pytest.param(8, 8, marks=pytest.mark.full), (8, 2)])
def test_bfloat16_errs_less_than_one_flash_call_and_not_more_with_the_ring(layout, heads, kv_heads):
    """Root mean square errors of out, dq, dk, dv against float64, over those of PyTorch's flash call on one rank."""
    length = 512
    *qkv, grad = (x.bfloat16() for x in draw_qkv(1, length, heads, kv_heads, 64))
    truth = with_gradients(dense_attention, [x.double() for x in qkv], grad.double())

    def on_ranks(size):
        def run():
            axis = Mesh(sp=size).sp
            own = ring_positions(layout, size, axis.rank, length)
            return own, with_gradients(
                lambda *x: ring_attention(*x, axis, layout=layout), [cut(x, own) for x in qkv], cut(grad, own)
            )

        whole = [torch.empty_like(x, dtype=torch.bfloat16) for x in truth]
        for own, tensors in run_ranks(run, size):
            for x, part in zip(whole, tensors, strict=True):
                x[:, torch.from_numpy(own)] = part
        return rms(whole)

    def flash(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def rms(tensors):
        return torch.stack([(a.double() - e).square().mean().sqrt() for a, e in zip(tensors, truth, strict=True)])

    single = rms(with_gradients(flash, qkv, grad))
    series = {size: on_ranks(size) / single for size in (1, 2, 4, 8)}
    for size, ratios in series.items():
        print(f"{layout} {heads}/{kv_heads} heads, ring of {size}: {[round(r.item(), 3) for r in ratios]}")
        assert (ratios <= 1.25).all(), (size, ratios)
        assert (ratios <= 1.02 * series[1]).all(), (size, ratios)


def formula(layout, ranks, causal, keep_kv, block, tokens):
    """Bytes that all ranks send together, from the head of ring.py."""
    part = {"contiguous": 1 / 2, "zigzag": 3 / 4, "striped": 1 - 1 / (2 * tokens)}[layout] if causal else 1
    once = ranks * (ranks - 1) * block * part
    return once, once * (1 if keep_kv else 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_and_work_are_the_formulas(layout, ranks):
    batch, part, heads, size = 2, 128, 4, 8

    cases = list(itertools.product((4, 1), (True, False), (False, True)))

    def every():
        axis = Mesh(sp=ranks).sp
        return [run(axis, *case) for case in cases]

    def run(axis, kv_heads, causal, keep_kv):
        leaves = [x.requires_grad_() for x in draw_qkv(batch, part, heads, kv_heads, size)[:3]]
        traffic.reset(), work.reset()
        out = ring_attention(*leaves, axis, causal, layout, keep_kv=keep_kv)
        forward = traffic.bytes["sp", "shift"]
        out.sum().backward()
        assert traffic.on("sp") == traffic.bytes["sp", "shift"]
        return forward, traffic.on("sp") - forward, work.forward, work.backward

    for (kv_heads, causal, keep_kv), found in zip(cases, zip(*run_ranks(every, ranks), strict=True), strict=True):
        forward, backward, work_forward, work_backward = zip(*found, strict=True)
        block = 2 * batch * part * kv_heads * size * 8
        assert (sum(forward), sum(backward)) == formula(layout, ranks, causal, keep_kv, block, part)
        length = ranks * part
        scores = batch * heads * (length * (length + 1) // 2 if causal else length**2)
        assert (sum(work_forward), sum(work_backward)) == (4 * size * scores, 10 * size * scores)
        if not causal or layout != "contiguous":
            assert max(work_forward) <= 1.02 * min(work_forward)


def test_a_window_and_documents_send_only_what_is_seen():
    def run(**mask):
        axis = Mesh(sp=4).sp
        q, k, v, _ = draw_qkv(1, 32, 2, 2)
        traffic.reset()
        ring_attention(q, k, v, axis, layout="contiguous", **mask)
        return traffic.bytes["sp", "shift"]

    token = 2 * 2 * 8 * 8  # of k and v
    assert run_ranks(run, 4, window=9) == [8 * token] * 3 + [0]
    own_document = [torch.full((1, 32), rank) for rank in range(4)]
    assert run_ranks(lambda: run(documents=own_document[torch.distributed.get_rank()]), 4) == [0] * 4


def test_half_precision_sends_k_and_v_as_they_are_and_gradients_as_the_kernel_has_them():
    def run():
        axis = Mesh(sp=2).sp
        leaves = [x.bfloat16().requires_grad_() for x in draw_qkv(1, 32, 2, 2)[:3]]
        traffic.reset()
        ring_attention(*leaves, axis, causal=False).sum().backward()
        return traffic.on("sp")

    assert run_ranks(run, 2) == [32 * 2 * 2 * 8 * (2 + 2 + 4)] * 2


def test_strides_of_any_kind_and_inputs_left_alone():
    def run():
        axis = Mesh(sp=2).sp
        q, k, v, grad = draw_qkv(2, 8, 4, 4)
        plain = with_gradients(lambda *x: ring_attention(*x, axis), (q, k, v), grad)
        odd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        kept = [x.clone() for x in odd]
        strided = with_gradients(lambda *x: ring_attention(*x, axis), odd, grad.transpose(0, 2).clone().transpose(0, 2))
        assert all(torch.equal(a, b) for a, b in zip(odd, kept, strict=True))
        return worst(strided, plain)

    assert max(run_ranks(run, 2)) == 0


def test_backward_twice():
    def run():
        axis = Mesh(sp=2).sp
        leaves = [x.requires_grad_() for x in draw_qkv(1, 8, 2, 2)[:3]]
        out = ring_attention(*leaves, axis)
        first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        return worst(torch.autograd.grad(out.sum(), leaves), first)

    assert max(run_ranks(run, 2)) == 0


def test_what_cannot_be():
    q = torch.zeros(1, 6, 2, 8)
    with pytest.raises(ValueError, match="one of contiguous, zigzag, striped would do"):
        ring_attention(q, q, q, Axis(), layout="spiral")
    with pytest.raises(ValueError, match="window: 4 given; 1 or more, of a causal mask, would do"):
        ring_attention(q, q, q, Axis(), causal=False, window=4)

    def odd():
        with pytest.raises(ValueError, match=r"a sequence of 10 tokens .* a multiple of 4 would do"):
            ring_attention(q[:, :5], q[:, :5], q[:, :5], Mesh(sp=2).sp)

    run_ranks(odd, 2)

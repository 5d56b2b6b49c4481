"""Ulysses is dense attention, alone and over a ring; it moves what its formula says."""

import itertools
from functools import partial

import pytest
import torch
from dense_attention import cut, dense_attention, draw_documents, draw_qkv, with_gradients, worst

from megalite.parallel.layout import own_positions, sequence_divisor
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.ring import ring_attention
from megalite.parallel.traffic import traffic
from megalite.parallel.ulysses import ulysses_attention
from megalite.testing import run_ranks

BOUND = 1e-10
MASKS = [(True, None), (True, 7), (False, None)]


def distance(mesh, layout, heads, kv_heads, causal, window, documents):
    """On this rank: the largest error of out, dq, dk, dv against dense attention over the whole sequence."""
    ulysses = mesh.ulysses.size
    divisor = sequence_divisor(layout, mesh.ring.size, ulysses)
    length = divisor * max(1, 30 // divisor)
    *qkv, grad = draw_qkv(2, length, heads, kv_heads)
    numbers = draw_documents(2, length, documents)
    expected = with_gradients(lambda q, k, v: dense_attention(q, k, v, causal, numbers, window), qkv, grad)
    own = own_positions(layout, mesh.ring.size, ulysses, mesh.sp.rank, length)
    inner = {} if mesh.ring.size == 1 else {"attend": partial(ring_attention, axis=mesh.ring, layout=layout)}
    actual = with_gradients(
        lambda q, k, v: ulysses_attention(
            q, k, v, mesh.ulysses, causal, documents=cut(numbers, own), window=window, **inner
        ),
        [cut(x, own) for x in qkv],
        cut(grad, own),
    )
    return worst(actual, [cut(x, own) for x in expected])


def every(ulysses):
    """All layouts × masks × documents × kv heads: more than ranks, fewer, one, and not aligned with them."""
    heads = [(2 * ulysses, 2 * ulysses), (4 * ulysses, 2), (2 * ulysses, 1), (3 * ulysses, ulysses)]
    heads += [(2 * ulysses, ulysses // 2)] * (ulysses > 2)
    layouts = ["zigzag", "striped", "contiguous"]
    for (h, kv), (causal, window), documents in itertools.product(heads, MASKS, ["none", "packed"]):
        layouts.append(layouts.pop(0))
        if h % kv == 0:
            yield layouts[0], h, kv, causal, window, documents


def errors(ulysses, cases):
    mesh = Mesh(sp=torch.distributed.get_world_size(), ulysses=ulysses)
    return [distance(mesh, *case) for case in cases]


@pytest.mark.parametrize(("ranks", "ulysses"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (6, 3), (6, 2)])
def test_it_is_the_dense_attention(ranks, ulysses):
    cases = list(every(ulysses))[:: 1 + ranks // 3]
    found = run_ranks(errors, ranks, ulysses, cases, timeout=300)
    for case, error in zip(cases, map(max, zip(*found, strict=True)), strict=True):
        assert error <= BOUND, case


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "ulysses"), [(2, 2), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4), (8, 8), (5, 5)])
def test_all_of_it(ranks, ulysses):
    cases = list(every(ulysses))
    found = run_ranks(errors, ranks, ulysses, cases, timeout=1200)
    for case, error in zip(cases, map(max, zip(*found, strict=True)), strict=True):
        assert error <= BOUND, case


def test_kv_heads_that_do_not_align_with_the_ranks():
    """6 heads in 2 groups of 3 over 6, 3 and 2 ranks: one of these gives a rank heads of two groups."""
    for ranks in (2, 3, 6):
        found = run_ranks(errors, ranks, ranks, [("contiguous", 6, 2, True, None, "packed")])
        assert max(map(max, found)) <= BOUND


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_bytes_are_the_formula(kv_heads):
    def run():
        axis = Mesh(sp=4, ulysses=4).ulysses
        leaves = [x.requires_grad_() for x in draw_qkv(2, 16, 8, kv_heads)[:3]]
        traffic.reset()
        out = ulysses_attention(*leaves, axis)
        forward = traffic.on(axis.name)
        out.sum().backward()
        return forward, traffic.on(axis.name) - forward

    sent = 3 * 2 * 16 * 8 * 8 * (2 * 8 + 2 * max(kv_heads, 4)) // 4
    assert run_ranks(run, 4) == [(sent, sent)] * 4


def test_bfloat16_errs_less_than_one_flash_call():
    """Root mean square errors over those of one rank: kv heads that travel twice round their gradients once more."""
    *qkv, grad = (x.bfloat16() for x in draw_qkv(1, 256, 8, 1, 64))
    truth = with_gradients(dense_attention, [x.double() for x in qkv], grad.double())

    def run(size):
        mesh = Mesh(sp=size, ulysses=size)
        own = own_positions("contiguous", 1, size, mesh.sp.rank, 256)
        return with_gradients(
            lambda *x: ulysses_attention(*x, mesh.ulysses), [cut(x, own) for x in qkv], cut(grad, own)
        )

    def flash(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )

    def rms(tensors):
        return torch.stack([(a.double() - e).square().mean().sqrt() for a, e in zip(tensors, truth, strict=True)])

    single = rms(with_gradients(flash, qkv, grad))
    for size in (1, 2, 4, 8):
        parts = zip(*run_ranks(run, size, size), strict=True)
        ratios = rms([torch.cat(part, 1) for part in parts]) / single
        print(f"ulysses {size}: {[round(r.item(), 3) for r in ratios]}")
        assert (ratios <= 1.25).all(), (size, ratios)


def test_heads_that_do_not_divide_name_the_way_out():
    def run():
        q = torch.zeros(1, 4, 6, 8)
        with pytest.raises(ValueError, match=r"6 heads do not divide over the 4 ranks of axis sp.*ring_attention"):
            ulysses_attention(q, q, q, Mesh(sp=4).sp)

    run_ranks(run, 4)


def test_what_attends_is_told_what_differs():
    """A mask is never lost on the way to what attends: it is handed on, or that refuses."""
    q = torch.zeros(1, 4, 2, 8)
    seen = []

    def attend(q, k, v, **further):
        seen.append(further)
        return q

    documents = torch.zeros(1, 4, dtype=torch.int64)
    ulysses_attention(q, q, q, Axis(), attend=attend)
    ulysses_attention(q, q, q, Axis(), causal=False, attend=attend)
    ulysses_attention(q, q, q, Axis(), attend=attend, documents=documents, window=3, scale=0.5)
    assert seen == [{}, {"causal": False}, {"documents": documents, "window": 3, "scale": 0.5}]
    with pytest.raises(TypeError, match="causal"):
        ulysses_attention(q, q, q, Axis(), causal=False, attend=lambda q, k, v: q)

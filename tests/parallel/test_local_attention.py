"""Tiles of one rank are attention; partial results merge; every kernel's backward takes what is of all keys."""

import pytest
import torch
from dense_attention import dense_attention, draw_documents, draw_qkv, with_gradients, worst

from megalite.parallel.kernels import CpuFlash, CudaEfficient, CudaFlash, Reference, kernel_for
from megalite.parallel.local_attention import local_attention, work

MASKS = [(True, None), (True, 1), (True, 7), (True, 64), (False, None)]


@pytest.mark.parametrize("documents", ["none", "packed", "mixed"])
@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_it_is_the_dense_attention(heads, kv_heads, causal, window, documents):
    *qkv, grad = draw_qkv(3, 37, heads, kv_heads)
    numbers = draw_documents(3, 37, documents)
    actual = with_gradients(
        lambda q, k, v: local_attention(q, k, v, causal, documents=numbers, window=window), qkv, grad
    )
    expected = with_gradients(lambda q, k, v: dense_attention(q, k, v, causal, numbers, window), qkv, grad)
    assert worst(actual, expected) <= 1e-12


def test_what_sees_nothing_is_zero_and_so_are_its_gradients():
    *qkv, grad = draw_qkv(2, 8, 2, 1)
    for tensor in with_gradients(lambda q, k, v: local_attention(q, k, v, documents=torch.full((2, 8), -1)), qkv, grad):
        assert (tensor == 0).all()


def test_a_scale_of_ones_own():
    *qkv, grad = draw_qkv(1, 9, 2, 2)
    expected = with_gradients(lambda q, k, v: dense_attention(3 * q, k, v), qkv, grad)
    assert worst(with_gradients(lambda *x: local_attention(*x, scale=3 / 8**0.5), qkv, grad), expected) <= 1e-12


@pytest.mark.parametrize("kernel", [CpuFlash(), Reference()], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_blocks_of_keys_merge_and_give_exact_gradients(kernel, heads, kv_heads):
    """Forward over halves of the keys, merged by lse; backward of each half by the whole's out and lse."""
    q, k, v, grad = draw_qkv(2, 12, heads, kv_heads)
    out, dq, dk, dv = with_gradients(lambda *x: dense_attention(*x, causal=False), (q, k, v), grad)
    halves = [(k[:, a], v[:, a]) for a in (slice(0, 5), slice(5, 12))]
    parts = [kernel.forward(q, *half, False, 8**-0.5) for half in halves]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(part * (part_lse - lse).exp().unsqueeze(-1) for part, part_lse in parts)
    assert worst([merged], [out]) <= 1e-14
    grads = [kernel.backward(grad, q, *half, merged, lse, False, 8**-0.5) for half in halves]
    both = [grads[0][0] + grads[1][0], *(torch.cat([a, b], 1) for a, b in zip(grads[0][1:], grads[1][1:], strict=True))]
    assert worst(both, [dq, dk, dv]) <= 1e-14


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_is_the_reference(dtype, causal):
    q, k, v, grad = (x.to(dtype) for x in draw_qkv(2, 40, 6, 2))
    kernel, reference = kernel_for(q), Reference()
    out, lse = kernel.forward(q, k, v, causal, 0.3)
    expected, expected_lse = reference.forward(q, k, v, causal, 0.3)
    assert out.dtype == kernel.dtype(dtype) and lse.dtype == torch.promote_types(dtype, torch.float32)
    bound = 1e-13 if dtype == torch.float64 else 1e-5
    assert worst([out, lse], [expected, expected_lse]) <= bound
    arguments = (grad, q, k, v, out.to(dtype), lse, causal, 0.3)
    assert worst(kernel.backward(*arguments), reference.backward(*arguments)) <= 10 * bound


@pytest.mark.parametrize(("kernel", "dtype"), [(CudaFlash(), torch.bfloat16), (CudaEfficient(), torch.float32)])
@pytest.mark.parametrize("size", [64, 20])
@pytest.mark.parametrize(("keys", "causal"), [(40, True), (24, False)])
def test_calls_of_gpu_kernels_fit_their_signatures(kernel, dtype, size, keys, causal):
    """By shapes alone, which need no GPU; what they compute is tests/test_gpu.py's."""
    q = torch.empty(2, 40, 6, size, dtype=dtype, device="meta")
    k = v = torch.empty(2, keys, 2, size, dtype=dtype, device="meta")
    out, lse = kernel.forward(q, k, v, causal, 0.3)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, dtype, (2, 40, 6), torch.float32)
    grads = kernel.backward(out, q, k, v, out, lse, causal, 0.3)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, k, v)]


def test_work_is_counted_by_what_the_mask_shows():
    q, k, v, grad = draw_qkv(2, 10, 4, 2)
    work.reset()
    with_gradients(local_attention, (q, k, v), grad)
    assert (work.forward, work.backward) == (2 * 4 * 55 * 4 * 8, 2 * 4 * 55 * 10 * 8)


@pytest.mark.parametrize(
    ("k", "v"), [((2, 8, 3, 8), (2, 8, 3, 8)), ((2, 8, 2, 8), (2, 8, 4, 8)), ((2, 7, 4, 8), (2, 7, 4, 8))]
)
def test_shapes_that_do_not_fit(k, v):
    with pytest.raises(ValueError, match=r"q \[2, 8, 4, 8\], k .* would do"):
        local_attention(torch.zeros(2, 8, 4, 8), torch.zeros(k), torch.zeros(v))


@pytest.mark.parametrize("shape", [(1, 8), (2, 7), (16,)])
def test_documents_of_another_shape(shape):
    q = torch.zeros(2, 8, 4, 8)
    with pytest.raises(ValueError, match=r"documents of .* tokens given; \[2, 8\], over all ranks, would do"):
        local_attention(q, q, q, documents=torch.zeros(shape, dtype=torch.int64))

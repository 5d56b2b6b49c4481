"""Collectives: pairs are adjoint, inputs are left alone, bytes are counted, torch.compile takes them whole."""

import itertools

import pytest
import torch
import torch.distributed as dist

from megalite.parallel.collectives import (
    all_gather,
    all_to_all,
    copy,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from megalite.parallel.in_flight import issue_all_reduce_in_place
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.traffic import Traffic, traffic

# Of each arrow: the state of what goes in and of what comes out.
STATES = {
    copy: ("replicated", "replicated"),
    reduce: ("partial", "replicated"),
    scatter: ("replicated", "split"),
    gather: ("split", "replicated"),
    all_gather: ("split", "replicated"),
    reduce_scatter: ("partial", "split"),
    all_to_all: ("split", "split"),
}
ALL = pytest.mark.parametrize("arrow", STATES, ids=lambda arrow: arrow.__name__)


def tp():
    torch.set_default_dtype(torch.float64)
    return Mesh(tp=dist.get_world_size()).tp


def total(x, axis):
    """Summed over the ranks by PyTorch alone: what the collectives are held against."""
    x = x.detach().clone().contiguous()
    if axis.size > 1:
        dist.all_reduce(x, group=axis.group)
    return x


def every(x, axis):
    """All ranks' tensors, in rank order, by PyTorch alone."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(parts, x.detach().contiguous())
    return parts


def draw(*shape, own=0, stride="contiguous"):
    """Random numbers, the same on all ranks unless `own` says otherwise, in memory laid out as `stride` says."""
    generator = torch.Generator().manual_seed(7 + own)
    x = torch.randn(*shape, generator=generator)
    if stride == "transposed":
        return x.mT.contiguous().mT
    if stride == "with holes":
        return torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)[..., ::2]
    if stride == "expanded":
        return x[:1].expand(shape)
    return x


def odd_but_for(dim, axis):
    return [3 * axis.size if d == dim % 3 else size for d, size in enumerate((3, 5, 7))]


STRIDES = ["contiguous", "transposed", "with holes", "expanded"]


def dense(arrow, x, axis, dim):
    """What comes out, by PyTorch alone: from all ranks' inputs."""
    n, rank = axis.size, axis.rank
    if arrow is copy:
        return x
    if arrow is reduce:
        return total(x, axis)
    if arrow is scatter:
        return x.chunk(n, dim)[rank]
    if arrow in (gather, all_gather):
        return torch.cat(every(x, axis), dim)
    if arrow is reduce_scatter:
        return total(x, axis).chunk(n, dim)[rank]
    return torch.cat([part.chunk(n, dim)[rank] for part in every(x, axis)], dim)


@ALL
@pytest.mark.ranks(1, 2, 3, 4)
def test_values_are_those_of_the_definition_and_the_input_is_left_alone(arrow):
    axis = tp()
    for dim, stride in itertools.product([0, 1, 2, -1], STRIDES):
        shape = odd_but_for(dim, axis)
        x = draw(*shape, own=axis.rank, stride=stride)
        if STATES[arrow][0] == "replicated":
            x = draw(*shape, stride=stride)
        before = x.clone()
        y = arrow(x, axis, dim)
        torch.testing.assert_close(y, dense(arrow, x, axis, dim), rtol=0, atol=1e-14)
        assert torch.equal(x, before)
        if axis.size > 1 and arrow is not copy:
            y.fill_(0)  # what is given is the caller's own
            assert torch.equal(x, before)


def inner(x, y, axis, state):
    """⟨x, y⟩ of whole vectors: a replicated one is one vector, slices and summands are one on each rank."""
    own = (x * y).sum()
    return own if state == "replicated" else total(own, axis)


# ⟨Ax, y⟩ = ⟨x, A*y⟩ holds on the vectors that all ranks' inputs make up. copy and all_gather give each rank a copy to
# use for a part of the result, so that their gradient is partial and counts on every rank; of reduce and gather, all
# ranks compute alike, so that the gradient is one.
COTANGENT = {copy: "partial", all_gather: "partial"}


@ALL
@pytest.mark.ranks(1, 2, 3, 4)
def test_each_pair_is_adjoint(arrow):
    axis = tp()
    before, after = STATES[arrow]
    after = COTANGENT.get(arrow, after)
    for dim, stride in itertools.product([0, 1, -1], STRIDES):
        shape = odd_but_for(dim, axis)
        x = draw(*shape, own=0 if before == "replicated" else 1 + axis.rank, stride=stride).requires_grad_()
        y = arrow(x, axis, dim)
        cotangent = draw(*y.shape, own=100 if after == "replicated" else 101 + axis.rank, stride=stride)
        kept = cotangent.clone()
        y.backward(cotangent)
        left, right = inner(y.detach(), cotangent, axis, after), inner(x.detach(), x.grad, axis, before)
        size = y.detach().norm() * cotangent.norm()
        assert abs(left - right) <= 1e-13 * size.item() * axis.size
        assert torch.equal(cotangent, kept)
        assert x.grad.shape == x.shape


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_to_all_trades_one_dim_for_another_and_back():
    axis = tp()
    n = axis.size
    whole = draw(2 * n, 5, 3 * n)
    tokens, heads = whole.chunk(n, 0)[axis.rank], whole.chunk(n, 2)[axis.rank]
    x = tokens.clone().requires_grad_()
    y = all_to_all(x, axis, 2, 0)
    assert torch.equal(y, heads)
    y.backward(heads)
    assert torch.equal(x.grad, tokens)
    assert torch.equal(all_to_all(y.detach(), axis, 0, 2), tokens)


@ALL
@pytest.mark.ranks(3)
def test_no_graph_where_no_gradient_is_asked_for(arrow):
    axis = tp()
    assert not arrow(draw(3, 3), axis, 0).requires_grad
    with torch.no_grad():
        assert arrow(draw(3, 3).requires_grad_(), axis, 0).grad_fn is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.ranks(3)
def test_any_dtype_travels(dtype):
    axis = tp()
    x = torch.arange(6).to(dtype) + axis.rank
    assert torch.equal(reduce(x, axis), (3 * torch.arange(6) + 3).to(dtype))
    assert torch.equal(gather(x, axis, 0), torch.cat([torch.arange(6) + rank for rank in range(3)]).to(dtype))
    scattered = reduce_scatter(x, axis, 0)
    assert scattered.dtype == dtype
    assert torch.equal(scattered, (3 * torch.arange(6) + 3).to(dtype)[2 * axis.rank : 2 * axis.rank + 2])


@pytest.mark.ranks(4)
def test_each_axis_of_a_mesh_reaches_its_own_ranks():
    mesh = Mesh(dp=2, tp=2)
    x = torch.tensor([10.0**mesh.rank])
    assert reduce(x, mesh.tp).item() == (11 if mesh.dp.rank == 0 else 1100)
    assert reduce(x, mesh.dp).item() == (101 if mesh.tp.rank == 0 else 1010)
    assert gather(x, mesh.dp, 0).tolist() == [10.0**mesh.tp.rank, 10.0 ** (2 + mesh.tp.rank)]
    assert traffic.calls["tp", "all_reduce"] >= 1 and traffic.on("dp") > 0


@ALL
def test_an_axis_of_one_is_the_identity(arrow):
    x = torch.randn(3, 5)
    traffic.reset()
    assert arrow(x, Axis(), 1) is x
    assert not traffic.calls


@pytest.mark.ranks(2)
def test_in_place_is_in_place():
    axis = tp()
    buffer = torch.full((5,), 1.0 + axis.rank)
    assert issue_all_reduce_in_place(buffer, axis).wait().data_ptr() == buffer.data_ptr()
    assert (buffer == 3).all()


@pytest.mark.parametrize("arrow", [scatter, reduce_scatter, all_to_all], ids=lambda arrow: arrow.__name__)
@pytest.mark.ranks(2, 3)
def test_what_does_not_divide_is_an_error_with_both_numbers(arrow):
    axis = tp()
    with pytest.raises(ValueError, match=rf"dim 1 of a tensor of shape \[3, 7\] .* {axis.size} ranks of axis tp"):
        arrow(torch.zeros(3, 7), axis, -1)


# --- what is counted ----------------------------------------------------------------------------------------------

# (operation, n-th parts of S = the bytes of the full buffer that a rank sends) of forward and of backward
PASSES = {
    copy: ((), ("all_reduce", 2)),
    reduce: (("all_reduce", 2), ()),
    scatter: ((), ("all_gather", 1)),
    gather: (("all_gather", 1), ()),
    all_gather: (("all_gather", 1), ("reduce_scatter", 1)),
    reduce_scatter: (("reduce_scatter", 1), ("all_gather", 1)),
    all_to_all: (("all_to_all", 1), ("all_to_all", 1)),
}


@ALL
@pytest.mark.ranks(2, 3, 4)
def test_bytes_are_those_of_the_formula(arrow):
    axis = tp()
    n = axis.size
    x = draw(4 * n, 3, own=axis.rank).requires_grad_()
    full = 8 * x.numel() * (n if arrow in (gather, all_gather) else 1)
    traffic.reset()
    y = arrow(x, axis, 0)
    forward, backward = PASSES[arrow]
    assert dict(traffic.calls) == ({("tp", forward[0]): 1} if forward else {})
    assert traffic.on("tp") == (forward[1] * (n - 1) * full // n if forward else 0)
    traffic.reset()
    y.backward(torch.ones_like(y))
    assert dict(traffic.calls) == ({("tp", backward[0]): 1} if backward else {})
    assert traffic.on("tp") == (backward[1] * (n - 1) * full // n if backward else 0)
    assert traffic.on("dp") == 0


@pytest.mark.ranks(2)
def test_the_ring_remembers_who_asked_for_what():
    axis = tp()
    before = traffic.recent[-1].sequence if traffic.recent else 0
    reduce(torch.zeros(3, 4), axis)
    gather(torch.zeros(5, dtype=torch.float32), axis, 0)
    first, second = list(traffic.recent)[-2:]
    assert (first.sequence, second.sequence) == (before + 1, before + 2)
    assert (first.axis, first.operation, first.shape, first.dtype) == ("tp", "all_reduce", (3, 4), "torch.float64")
    assert first.bytes == 3 * 4 * 8
    assert (second.operation, second.shape, second.bytes) == ("all_gather", (2, 5), 20)
    assert __name__ in first.caller
    assert str(first).startswith(f"tp#{before + 1} all_reduce torch.float64[3, 4] 96 B ")


def test_the_ring_forgets_the_oldest_and_goes_on_counting():
    calls = Traffic(lines=3)
    for number in range(5):
        calls.record("tp" if number % 2 else "dp", 4, "all_gather", (number,), "torch.float32", 100)
    assert [(call.axis, call.sequence, call.shape) for call in calls.recent] == [
        ("dp", 2, (2,)),
        ("tp", 2, (3,)),
        ("dp", 3, (4,)),
    ]
    assert calls.bytes == {("dp", "all_gather"): 225, ("tp", "all_gather"): 150}
    calls.reset()
    calls.record("dp", 2, "all_reduce", (), "torch.float32", 4)
    assert calls.bytes == {("dp", "all_reduce"): 4}
    assert calls.recent[-1].sequence == 4


# --- torch.compile ------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.ranks(3)
def test_compile_takes_it_whole_and_bytes_still_count(arrow):
    same_compiled(arrow)


@pytest.mark.full
@ALL
@pytest.mark.ranks(2, 4)
def test_compile_takes_it_whole_on_other_ranks(arrow):
    same_compiled(arrow)


def same_compiled(arrow):
    axis = tp()

    def layer(x):
        return arrow((arrow(x, axis, 0) * 2).mT, axis, 1).sin()

    def outcome(function):
        x = draw(2 * axis.size**2, 3, own=axis.rank).requires_grad_()
        traffic.reset()
        y = function(x)
        y.square().sum().backward()
        return y.detach(), x.grad, dict(traffic.bytes), dict(traffic.calls)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = outcome(layer)
    for _ in range(2):  # while it is compiled, and after
        y, grad, sent, calls = outcome(compiled)
        torch.testing.assert_close(y, expected[0], rtol=0, atol=1e-14)
        torch.testing.assert_close(grad, expected[1], rtol=0, atol=1e-13)
        assert (sent, calls) == expected[2:]

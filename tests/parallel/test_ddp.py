"""Gradient buckets against torch's DDP and against the whole batch; what travels, and when."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalite.parallel.ddp import GradientBuckets
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.traffic import traffic

TINY = 1e-5  # MiB: 10 bytes, so that every parameter has a bucket of its own


def dp():
    torch.set_default_dtype(torch.float64)
    return Mesh(dp=dist.get_world_size()).dp


class Net(nn.Module):
    """A chain of layers, one weight used twice, one parameter that is used only if asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(6, 6)
        self.spare = nn.Parameter(torch.randn(5))
        self.chain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.last = nn.Linear(6, 2)

    def forward(self, x, spare=False):
        y = self.last(self.chain(self.first(self.first(x).sin()).sin()).sin())
        return y.square().sum() + (self.spare.square().sum() * len(x) if spare else 0)


def batch(rows=24):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def own(x, axis):
    return x.chunk(axis.size)[axis.rank]


def accumulate(net, buckets, parts, **more):
    for i, part in enumerate(parts):
        with buckets.accumulating(last=i == len(parts) - 1):
            net(part, **more).backward()
    buckets.finish()


def gradients(net):
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-13, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("bucket_mb", [TINY, 5e-4, 25.0])
@pytest.mark.ranks(1, 2, 3, 4)
def test_gradients_are_those_of_the_whole_batch_and_of_torchs_ddp(bucket_mb):
    axis = dp()
    net, whole, theirs = Net(), Net(), Net()
    accumulate(net, GradientBuckets(net.parameters(), axis, bucket_mb), [own(batch(), axis)], spare=True)
    whole(batch(), spare=True).backward()
    close(gradients(net), gradients(whole))
    ddp = nn.parallel.DistributedDataParallel(theirs, bucket_cap_mb=0.001)
    ddp(own(batch(), axis), spare=True).backward()
    close(gradients(net), {name: grad * axis.size for name, grad in gradients(theirs).items()})  # theirs is a mean
    assert net.frozen.grad is None


@pytest.mark.parametrize("bucket_mb", [TINY, 25.0])
@pytest.mark.ranks(2, 3)
def test_several_steps_and_several_microbatches(bucket_mb):
    axis = dp()
    net, whole = Net(), Net()
    buckets = GradientBuckets(net.parameters(), axis, bucket_mb)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.01) for n in (net, whole)]
    for step in range(3):
        x = batch() + step
        accumulate(net, buckets, own(x, axis).split(3), spare=True)
        whole(x, spare=True).backward()
        close(gradients(net), gradients(whole))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)  # either way of clearing them will do
    for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bucket_mb", [TINY, 25.0])
@pytest.mark.ranks(2)
def test_a_parameter_that_was_not_used_counts_as_zero(bucket_mb):
    axis = dp()
    net = Net()
    buckets = GradientBuckets(net.parameters(), axis, bucket_mb)
    accumulate(net, buckets, [own(batch(), axis)])
    assert (net.spare.grad == 0).all()
    net.zero_grad()
    accumulate(net, buckets, [own(batch(), axis)], spare=axis.rank == 1)  # used on one rank only
    torch.testing.assert_close(net.spare.grad, 2 * net.spare.detach() * 12, rtol=1e-14, atol=0)


@pytest.mark.ranks(2)
def test_a_parameter_used_only_in_an_earlier_microbatch_keeps_what_it_got():
    axis = dp()
    net, whole = Net(), Net()
    buckets = GradientBuckets(net.parameters(), axis, TINY)
    first, second = own(batch(), axis).chunk(2)
    with buckets.accumulating(last=False):
        net(first, spare=True).backward()
    with buckets.accumulating(last=True):
        net(second).backward()
    buckets.finish()
    (whole(batch()) + whole.spare.square().sum() * 12).backward()
    close(gradients(net), gradients(whole))


@pytest.mark.ranks(2, 4)
def test_bytes_move_on_the_last_microbatch_only_and_are_those_of_the_formula():
    axis = dp()
    net = Net()
    buckets = GradientBuckets(net.parameters(), axis, 5e-4)
    parts = own(batch(), axis).split(2)
    traffic.reset()
    for part in parts[:-1]:
        with buckets.accumulating(last=False):
            net(part).backward()
        assert not traffic.calls
    with buckets.accumulating(last=True):
        net(parts[-1]).backward()
    buckets.finish()
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert traffic.on("dp") == 2 * (axis.size - 1) * trained * 8 // axis.size
    assert 2 < traffic.calls["dp", "all_reduce"] < 12


@pytest.mark.ranks(2)
def test_the_first_all_reduce_leaves_before_the_last_gradient_is_computed():
    axis = dp()
    net = Net()
    buckets = GradientBuckets(net.parameters(), axis, TINY)
    events = []
    net.first.weight.register_hook(lambda grad: events.append(("computed", traffic.calls["dp", "all_reduce"])))
    traffic.reset()
    with buckets.accumulating(last=True):
        net(own(batch(), axis)).backward()
    (_, sent), *more = events
    assert not more and sent >= 10  # the last layer and the chain's four, a weight and a bias each, have left by then
    assert traffic.calls["dp", "all_reduce"] == 12
    buckets.finish()
    assert traffic.calls["dp", "all_reduce"] == 13  # with spare, which got no gradient


@pytest.mark.ranks(2)
def test_all_ranks_issue_the_same_order_even_where_gradients_arrive_in_another():
    axis = dp()

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))

    net = Two()
    buckets = GradientBuckets(net.parameters(), axis, TINY)
    order = [net.a, net.b] if axis.rank else [net.b, net.a]
    traffic.recent.clear()
    with buckets.accumulating(last=True):
        for parameter in order:
            parameter.sum().backward()
    buckets.finish()
    assert [call.shape for call in traffic.recent] == [(4,), (3,)]
    assert (net.a.grad == 2).all() and (net.b.grad == 2).all()


@pytest.mark.ranks(2)
def test_gradients_are_views_into_buckets_of_one_dtype():
    axis = dp()
    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float64)]
    buckets = GradientBuckets(parameters, axis)
    with buckets.accumulating(last=True):
        sum(parameter.double().sum() for parameter in parameters).backward()
    buckets.finish()
    first, second, third = (parameter.grad for parameter in parameters)
    assert first.dtype == torch.float32 and (first == 2).all() and (second == 2).all()
    assert second.untyped_storage().data_ptr() == third.untyped_storage().data_ptr()
    assert first.untyped_storage().data_ptr() != third.untyped_storage().data_ptr()


@pytest.mark.ranks(2)
def test_a_backward_that_raises_leaves_no_sending_state_behind():
    axis = dp()
    net = Net()
    buckets = GradientBuckets(net.parameters(), axis)
    with pytest.raises(RuntimeError, match="on purpose"), buckets.accumulating(last=True):
        raise RuntimeError("on purpose")
    traffic.reset()
    net(own(batch(), axis)).backward()  # outside of `accumulating`, nothing travels
    assert not traffic.calls


def test_an_axis_of_one_leaves_the_parameters_alone():
    net, plain = Net(), Net()
    x = batch().float()
    accumulate(net, GradientBuckets(net.parameters(), Axis("dp")), [x])
    plain(x).backward()
    for name, grad in gradients(net).items():
        assert torch.equal(grad, gradients(plain)[name])
    assert net.spare.grad is None

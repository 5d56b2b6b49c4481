"""Gradient buckets against torch's DDP and against the whole batch; what travels, and when."""

import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalite.parallel import ddp
from megalite.parallel.ddp import GradientBuckets
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.pipeline import dualpipe_v, interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from megalite.parallel.pipeline import executor as executing
from megalite.parallel.pipeline.executor import Pipeline
from megalite.parallel.tensor import ColumnParallelLinear
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


# --- gradients that come by another way than one backward's hooks -----------------------------------------------------


@contextmanager
def reductions(note):
    """Call `note` with the bytes of every bucket that leaves."""
    issue = ddp.issue_all_reduce_in_place

    def noted(buffer, axis):
        note(buffer.numel() * buffer.element_size())
        return issue(buffer, axis)

    with mock.patch.object(ddp, "issue_all_reduce_in_place", noted):
        yield


@pytest.mark.parametrize("bucket_mb", [TINY, 25.0])
@pytest.mark.ranks(2, 3)
def test_what_is_complete_travels_however_it_came(bucket_mb):
    """Gradients written by hand, which no hook sees; in several calls, and again for what has left."""
    axis = dp()
    net, whole = Net(), Net()
    whole(batch(), spare=True).backward()
    buckets = GradientBuckets(net.parameters(), axis, bucket_mb)
    for _ in range(2):
        parts = own(batch(), axis).split(3)
        twin = Net()
        for part in parts:
            twin(part, spare=True).backward()
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            ours.grad = theirs.grad
        left = []
        with reductions(left.append):
            buckets.complete([*net.last.parameters(), net.frozen])
            assert len(left) == (2 if bucket_mb == TINY else 0)
            buckets.complete(net.chain.parameters())
            buckets.complete(net.parameters())
            buckets.complete(net.chain.parameters())
            assert len(left) == (13 if bucket_mb == TINY else 1)
            buckets.finish()
            assert len(left) == (13 if bucket_mb == TINY else 1)
        close(gradients(net), gradients(whole))
        net.zero_grad()


@pytest.mark.ranks(2)
def test_what_a_last_backward_has_sent_is_not_sent_again_by_complete():
    axis = dp()
    net, whole = Net(), Net()
    whole(batch()).backward()
    buckets = GradientBuckets(net.parameters(), axis, TINY)
    left = []
    with reductions(left.append):
        with buckets.accumulating(last=True):
            net(own(batch(), axis)).backward()
        assert len(left) == 12
        buckets.complete(net.parameters())  # spare has no gradient, and waits
        assert len(left) == 12
        buckets.finish()
    assert len(left) == 13
    whole.spare.grad = torch.zeros(5)
    close(gradients(net), gradients(whole))


@pytest.mark.ranks(2)
def test_shared_parameters_travel_when_all_is_done():
    """Two backwards of a microbatch reach `first`: after the last one of either, its gradient is not the sum yet."""
    axis = dp()
    results = []
    for shared in (True, False):
        net = Net()
        buckets = GradientBuckets(net.parameters(), axis, TINY, shared=list(net.first.parameters()) * shared)
        left = []
        with reductions(left.append):
            for head, last in ((net.chain, False), (net.last, True)):
                with buckets.accumulating(last=last):
                    head(net.first(own(batch(), axis))).square().sum().backward()
            net.first.weight.register_hook(lambda gradient: time.sleep(0.1))  # what has left arrives meanwhile
            with buckets.accumulating(last=True):
                net.chain(net.first(own(batch(), axis))).square().sum().backward()
            buckets.complete(net.parameters())
            before = len(left)
            buckets.finish()
        assert (before, len(left)) == (10 if shared else 12, 13)  # spare got nothing
        results.append(gradients(net))
    whole = Net()
    for head in (whole.chain, whole.last, whole.chain):
        head(whole.first(batch())).square().sum().backward()
    torch.testing.assert_close(results[0]["first.weight"], whole.first.weight.grad, rtol=1e-13, atol=1e-13)
    assert (results[1]["first.weight"] - whole.first.weight.grad).abs().max() > 1e-3  # left before all had come


# --- beside a pipeline ------------------------------------------------------------------------------------------------


class Slow(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Stage(nn.Module):
    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.norm, self.linear = nn.LayerNorm(6), ColumnParallelLinear(6, 6, Axis())

    def forward(self, x):
        return x + self.linear(self.norm(x)).sin()


class Drained:
    """A step on dp × pp: when each action ended and each bucket left, on this rank, and the gradients."""

    def __init__(self, schedule, mesh, slow=0.0, bucket_mb=TINY):
        stages = schedule.stages_of(mesh.pp.rank)
        last = schedule.stages - 1
        self.layers = nn.ModuleList([Stage(number) for number in stages])
        parts = dict(zip(stages, self.layers, strict=True))
        buckets = GradientBuckets(self.layers.parameters(), mesh.dp, bucket_mb)
        self.events = []

        def stage(number):
            def compute(x, microbatch):
                if number == 0:
                    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * microbatch + mesh.dp.rank))
                y = parts[number](x)
                y = Slow.apply(y, slow) if number == 0 and slow else y
                return y.square().sum() if number == last else y

            return compute

        pipeline = Pipeline(
            schedule,
            mesh.pp,
            {number: stage(number) for number in stages},
            torch.device("cpu"),
            accumulating=buckets.accumulating,
            complete=lambda number, last: buckets.complete(parts[number].parameters(), last),
        )
        compute = executing._Run.compute

        def noted(run, action):
            compute(run, action)
            self.events.append((time.perf_counter(), action))

        with (
            mock.patch.object(executing._Run, "compute", noted),
            reductions(lambda size: self.events.append((time.perf_counter(), size))),
        ):
            pipeline.step(lambda number, microbatch: (4, 6), torch.float64)
            self.events.append((time.perf_counter(), "drained"))
            buckets.finish()

    def left(self):
        return [moment for moment, event in self.events if isinstance(event, int)]


@pytest.mark.parametrize("make", [one_f_one_b, zb_h1, zb_v, dualpipe_v, lambda p, m: interleaved_1f1b(p, m, 2)])
@pytest.mark.parametrize("bucket_mb", [TINY, 25.0])
@pytest.mark.ranks(4)
def test_gradients_of_a_pipeline_are_summed_over_dp(make, bucket_mb):
    torch.set_default_dtype(torch.float64)
    for mesh in (Mesh(dp=2, pp=2), Mesh(dp=4)):
        schedule = make(mesh.pp.size, 3)
        found = gradients(Drained(schedule, mesh, bucket_mb=bucket_mb).layers)
        whole = nn.ModuleList([Stage(number) for number in range(schedule.stages)])
        for microbatch in range(3):
            for rank in range(mesh.dp.size):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * microbatch + rank))
                nn.Sequential(*whole)(x).square().sum().backward()
        expected = gradients(nn.ModuleList([whole[number] for number in schedule.stages_of(mesh.pp.rank)]))
        close(found, expected)


@pytest.mark.ranks(4)
def test_a_rank_that_is_through_reduces_while_the_others_still_compute():
    """1F1B: the last stage's rank is through first; the first one's begins when its last action has ended."""
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(dp=2, pp=2)
    drained = Drained(one_f_one_b(2, 3), mesh, slow=0.2)
    names = [event if isinstance(event, str) else type(event).__name__ for _, event in drained.events]
    assert names == ["Action"] * 5 + ["int"] * 4 + ["Action", "drained"]  # a bucket leaves before compute returns
    row = [None] * 4
    dist.all_gather_object(row, (mesh.pp.rank, min(drained.left()), drained.events[-1][0]))
    first_left = max(left for pp, left, _ in row if pp == 1)
    end = min(end for pp, _, end in row if pp == 0)
    assert first_left < end  # by 0.4 s where the cores are free: two backwards of stage 0


@pytest.mark.parametrize("make", [zb_v, dualpipe_v, lambda p, m: interleaved_1f1b(p, m, 2)])
@pytest.mark.ranks(4)
def test_a_stage_that_is_complete_reduces_beside_the_actions_of_the_ranks_other_stage(make):
    """All four of its buckets, on both pp ranks: also on the one that ends last."""
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(dp=2, pp=2)
    drained = Drained(make(2, 4), mesh)
    last_action = [event for _, event in drained.events if isinstance(event, tuple)][-1]
    later = [event for _, event in drained.events[-2:]]
    assert later == [last_action, "drained"]
    order = [event for _, event in drained.events]
    before_last = order[: len(order) - 2]
    other = next(a.stage for a in reversed(before_last) if isinstance(a, tuple) and a.stage != last_action.stage)
    done = max(i for i, event in enumerate(order) if isinstance(event, tuple) and event.stage == other)
    early = [event for event in order[:done] if isinstance(event, int)]
    beside = [event for event in order[done + 1 :] if isinstance(event, tuple)]
    assert len(early) == 4 and len(beside) >= 1

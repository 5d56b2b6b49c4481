"""Slices of weights, gradients and optimizer state, against torch's DDP and FSDP2 and the whole batch on one rank."""

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.traffic import traffic
from megalite.parallel.zero import IN_FLIGHT, ShardedParameters

TINY = 1e-5  # MiB: 10 bytes, so that every parameter has a bucket of its own
SIZES = [TINY, 1e-3, 25.0]


def mesh_of(shard=None):
    torch.set_default_dtype(torch.float64)
    return Mesh(dp=dist.get_world_size(), shard=shard)


class Net(nn.Module):
    """Odd sizes; one weight used twice, one tied to another layer's, one used only if asked for, one frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(7, 7)
        self.spare = nn.Parameter(torch.randn(5))
        self.chain = nn.Sequential(*(nn.Linear(7, 7) for _ in range(4)))
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.chain[1].weight
        self.last = nn.Linear(7, 3)

    def forward(self, x, spare=True):
        y = self.tied(self.norm(self.chain(self.first(self.first(x).sin()).sin()))).sin()
        return self.last(y).square().sum() + (self.spare.square().sum() * len(x) if spare else 0)


PARAMETERS = 15  # that are trained: 7 weights and 6 biases, of which the norm's are one each, and spare


def batch(number=0, rows=24):
    return torch.randn(rows, 7, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def own(x, axis):
    return x.chunk(axis.size)[axis.rank]


def trained(net):
    return [p for p in net.parameters() if p.requires_grad]


def sharded_of(net, mesh, stage=1, bucket_mb=25.0, **further):
    return ShardedParameters(net.parameters(), mesh.shards, mesh.copies, stage=stage, bucket_mb=bucket_mb, **further)


def adamw(stepped):
    """Of parameters and whether they decay."""
    stepped = list(stepped)
    groups = [{"params": [p for p, d in stepped if d == decays], "weight_decay": 0.3 * decays} for decays in (0, 1)]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.02, betas=(0.8, 0.9), eps=1e-6)


def adamw_of(net):
    return adamw((p, p.ndim >= 2) for p in trained(net))


def accumulate(net, sharded, parts, **more):
    for i, part in enumerate(parts):
        with sharded.accumulating(last=i == len(parts) - 1):
            net(part, **more).backward()
    sharded.finish()


def update(sharded, optimizer):
    optimizer.step()
    optimizer.zero_grad()
    sharded.publish()
    sharded.wait()


def close(actual, expected, bound=1e-12):
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=bound, atol=bound)


def assert_gradients(net, sharded, expected):
    """What this rank has are slices of these gradients; what all have is all of them."""
    numbers = {parameter: number for number, parameter in enumerate(trained(net))}
    held = torch.zeros(len(numbers))
    for parameter, start, gradient in sharded.pieces():
        whole = expected[numbers[parameter]].flatten()
        torch.testing.assert_close(gradient, whole[start : start + len(gradient)], rtol=1e-12, atol=1e-12)
        held[numbers[parameter]] += len(gradient)
    if sharded.shards.size > 1:
        dist.all_reduce(held, group=sharded.shards.group)
    assert held.tolist() == [parameter.numel() for parameter in numbers]
    assert all(parameter.grad is None for parameter in net.parameters())


def steps_like_the_whole_batch(mesh, stage, bucket_mb, **further):
    """Three steps of three microbatches; also with what some of them do not use."""
    net, whole = Net(), Net()
    sharded = sharded_of(net, mesh, stage, bucket_mb, **further)
    optimizer, dense = adamw(sharded.masters), adamw_of(whole)
    for number in range(3):
        x, spare = batch(number), number != 1
        accumulate(net, sharded, own(x, mesh.replicas).split(2), spare=spare)
        whole(x, spare=spare).backward()
        expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained(whole)]
        assert_gradients(net, sharded, expected)
        for parameter, gradient in zip(trained(whole), expected, strict=True):
            parameter.grad = gradient  # one that got none counts as zero
        update(sharded, optimizer)
        dense.step()
        dense.zero_grad()
        close(net.parameters(), whole.parameters())


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.ranks(1, 2, 3, 4)
def test_three_steps_are_those_of_the_whole_batch(stage):
    mesh = mesh_of()
    for bucket_mb in SIZES:
        steps_like_the_whole_batch(mesh, stage, bucket_mb)


@pytest.mark.ranks(4, 6)
def test_any_number_of_ranks_divide_and_the_others_do_likewise():
    for shard in sorted({1, 2, dist.get_world_size() // 2}):
        mesh = mesh_of(shard)
        for stage in (1, 2):
            steps_like_the_whole_batch(mesh, stage, 1e-3)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.ranks(2, 3)
def test_what_other_ranks_hold_too_travels_at_the_end_and_is_the_same(stage):
    mesh = mesh_of()
    net = Net()
    weight = net.chain[1].weight
    sharded = sharded_of(net, mesh, stage, shared=[weight])
    alone = [bucket for bucket in sharded.buckets if weight in bucket.places]
    assert [list(bucket.places) == [weight] for bucket in alone] == [True]
    accumulate(net, sharded, own(batch(), mesh.dp).split(4))
    whole = Net()
    whole(batch()).backward()
    gradient = sharded.gradient_of(weight)
    padded = torch.zeros(mesh.dp.size * len(gradient))
    padded[: weight.numel()] = whole.chain[1].weight.grad.flatten()
    close([gradient], [padded.chunk(mesh.dp.size)[mesh.dp.rank]])
    assert_gradients(net, sharded, [p.grad for p in trained(whole)])


@pytest.mark.parametrize("reshard", [None, False, True])
@pytest.mark.ranks(2, 4)
def test_three_steps_are_those_of_torchs_ddp_and_fsdp2(reshard):
    """reshard: reshard_after_forward of fully_shard; None: DDP"""
    mesh = mesh_of()
    theirs = Net()
    if reshard is None:
        theirs = DistributedDataParallel(theirs, find_unused_parameters=True)
    else:
        device_mesh = init_device_mesh("cpu", (mesh.dp.size,))
        for module in (*theirs.chain[2:], theirs.last, theirs):
            fully_shard(module, mesh=device_mesh, reshard_after_forward=reshard)
    others = adamw_of(theirs)
    runs = []
    for stage in (1, 2):
        net = Net()
        sharded = sharded_of(net, mesh, stage, 1e-3)
        runs.append((net, sharded, adamw(sharded.masters)))
    for number in range(3):
        x = own(batch(number), mesh.dp)
        for net, sharded, optimizer in runs:
            accumulate(net, sharded, [x])
            update(sharded, optimizer)
        (theirs(x) * mesh.dp.size).backward()  # theirs is a mean over the ranks
        others.step()
        others.zero_grad()
    for net, _, _ in runs:
        close(net.parameters(), (p if reshard is None else p.full_tensor() for p in theirs.parameters()))


@pytest.mark.ranks(4)
def test_hybrid_steps_are_those_of_fsdp2_on_two_dims():
    mesh = mesh_of(shard=2)
    net, theirs = Net(), Net()
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for module in (*theirs.chain[2:], theirs.last, theirs):
        fully_shard(module, mesh=device_mesh)
    sharded, others = sharded_of(net, mesh, 2, 1e-3), adamw_of(theirs)
    optimizer = adamw(sharded.masters)
    for number in range(3):
        x = own(batch(number), mesh.dp)
        accumulate(net, sharded, [x])
        update(sharded, optimizer)
        (theirs(x) * mesh.dp.size).backward()
        others.step()
        others.zero_grad()
    close(net.parameters(), (p.full_tensor() for p in theirs.parameters()))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.ranks(2)
def test_a_parameter_used_in_some_microbatches_only_keeps_what_it_got(stage):
    mesh = mesh_of()
    for used in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)):
        net, whole = Net(), Net()
        sharded = sharded_of(net, mesh, stage, 1e-3)
        for i, (part, spare) in enumerate(zip(own(batch(), mesh.dp).split(4), used, strict=True)):
            with sharded.accumulating(last=i == 2):
                net(part, spare=spare).backward()
        sharded.finish()
        (whole(batch(), spare=False) + whole.spare.square().sum() * 8 * sum(used)).backward()
        assert_gradients(net, sharded, [p.grad for p in trained(whole)])


def test_alone_the_slice_is_the_whole():
    net, plain = Net().double(), Net().double()
    sharded = ShardedParameters(net.parameters(), Axis())
    optimizer, dense = adamw(sharded.masters), adamw_of(plain)
    for number in range(2):
        accumulate(net, sharded, [batch(number)])
        plain(batch(number)).backward()
        update(sharded, optimizer)
        dense.step()
        dense.zero_grad()
    close(net.parameters(), plain.parameters(), 0)


# --- buckets ----------------------------------------------------------------------------------------------------------


def test_buckets_are_filled_from_the_end_with_what_is_alike():
    shapes = [(3, 4), (4,), (5, 4), (6,), (100, 4), (2, 4), (2, 2)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    parameters.append(nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)))
    parameters.append(nn.Parameter(torch.zeros(9), requires_grad=False))
    sharded = ShardedParameters(parameters, Axis(), bucket_mb=36 * 4 / 2**20, shared=[parameters[5]])
    order = {p: i for i, p in enumerate(parameters)}
    made = sorted([order[p] for p in bucket.places] for bucket in sharded.buckets)
    # of matrices 6 alone, since 4 is too large to join, and 4 to be joined
    assert made == [[2, 0], [3, 1], [4], [5], [6], [7]]
    for bucket in sharded.buckets:
        assert next(iter(bucket.places.values())) == 0
        assert bucket.matrices == all(p.ndim >= 2 for p in bucket.places)
        assert bucket.master.dtype == next(iter(bucket.places)).dtype
        assert bucket.size == sum(p.numel() for p in bucket.places)
    decays = {len(master): matrices for master, matrices in sharded.masters}
    assert decays[4 + 6] is False and decays[12 + 20] is True


@pytest.mark.ranks(1, 2, 3, 4)
def test_parameters_keep_their_values_in_buffers_that_divide():
    mesh = mesh_of()
    net, before = Net(), Net()
    sharded = sharded_of(net, mesh, bucket_mb=1e-3)
    close(net.parameters(), before.parameters(), 0)
    for bucket in sharded.buckets:
        (buffer,) = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in bucket.places}.values()
        assert buffer.nbytes() == 8 * len(bucket.master) * mesh.dp.size
        assert 0 <= buffer.nbytes() - 8 * bucket.size < 8 * mesh.dp.size
        assert bucket.master.untyped_storage().data_ptr() == buffer.data_ptr()  # a view: no second copy
    assert net.tied.weight is net.chain[1].weight
    assert len({p for bucket in sharded.buckets for p in bucket.places}) == PARAMETERS


# --- what is sent, and when -------------------------------------------------------------------------------------------


def padded(sharded):
    return sum(len(bucket.master) for bucket in sharded.buckets) * sharded.shards.size


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.ranks(2, 4)
def test_bytes_are_those_of_the_formulas(stage, microbatches):
    mesh = mesh_of()
    net = Net()
    sharded = sharded_of(net, mesh, stage, 1e-3)
    optimizer = adamw(sharded.masters)
    n = mesh.dp.size
    for number in range(2):
        traffic.reset()
        accumulate(net, sharded, own(batch(number), mesh.dp).split(24 // n // microbatches))
        once = (n - 1) * padded(sharded) * 8 // n
        sent = microbatches if stage == 2 else 1
        assert dict(traffic.bytes) == {("shards", "reduce_scatter"): sent * once}
        assert traffic.calls["shards", "reduce_scatter"] == sent * len(sharded.buckets)
        traffic.reset()
        update(sharded, optimizer)
        assert dict(traffic.bytes) == {("shards", "all_gather"): once}
        assert traffic.calls["shards", "all_gather"] == len(sharded.buckets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.ranks(4)
def test_between_groups_only_slices_are_summed(dtype):
    mesh = mesh_of(shard=2)
    net = Net().to(dtype)
    sharded = sharded_of(net, mesh, 2)
    slices = padded(sharded) // 2
    traffic.reset()
    accumulate(net, sharded, own(batch().to(dtype), mesh.dp).split(3))
    sharded.publish()
    sharded.wait()
    assert dict(traffic.bytes) == {
        ("shards", "reduce_scatter"): 2 * slices * 4,  # two microbatches, in float32
        ("copies", "all_reduce"): slices * 4,
        ("shards", "all_gather"): slices * dtype.itemsize,
    }


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.ranks(2)
def test_half_precision_sends_as_often_as_full(stage):
    mesh = mesh_of()
    for bucket_mb in SIZES:
        net = Net().bfloat16()
        sharded = sharded_of(net, mesh, stage, bucket_mb)
        traffic.reset()
        accumulate(net, sharded, own(batch().bfloat16(), mesh.dp).split(4))
        assert traffic.calls["shards", "reduce_scatter"] == (1 if stage == 1 else 3) * len(sharded.buckets)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.ranks(2)
def test_the_first_gradients_leave_before_the_last_are_computed(stage):
    mesh = mesh_of()
    net = Net()
    sharded = sharded_of(net, mesh, stage, TINY)
    sent = []
    net.first.weight.register_hook(lambda gradient: sent.append(traffic.calls["shards", "reduce_scatter"]))
    for last in (False, True):
        traffic.reset()
        with sharded.accumulating(last):
            net(own(batch(), mesh.dp)).backward()
        every = PARAMETERS if last or stage == 2 else 0
        assert traffic.calls["shards", "reduce_scatter"] == every
    assert [count > 8 for count in sent] == [stage == 2, True]
    sharded.finish()
    assert traffic.calls["shards", "reduce_scatter"] == PARAMETERS


def live_bytes(known=()):
    """Bytes of all tensors that Python can reach, gradients included, but for storages of `known` addresses."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):  # no fake ones, which compiled code of other tests leaves
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.device.type == "cpu":
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return {address: size for address, size in storages.items() if address not in known}


class Wide(nn.Module):
    """Twelve matrices of 32 KB: a bucket each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(12)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.ranks(2, 4)
def test_whole_gradients_are_there_of_a_few_buckets_at_a_time(stage, microbatches):
    mesh = mesh_of()
    net, n = Wide(), mesh.dp.size
    sharded = sharded_of(net, mesh, stage, bucket_mb=64 * 64 * 8 / 2**20)
    assert len(sharded.buckets) == 12
    whole, x = 64 * 64 * 8, torch.randn(2, 64)
    known, peaks = live_bytes(), []
    for layer in net.layers:  # hooks before those of the buckets would see less
        layer.weight.register_post_accumulate_grad_hook(lambda _: peaks.append(sum(live_bytes(known).values())))
    for i in range(microbatches):
        with sharded.accumulating(last=i == microbatches - 1):
            net(x).backward()
    del x
    few = (2 * (IN_FLIGHT + 1) + 1) * whole  # of each what is sent and what arrives, and the gradient itself
    everything = 12 * whole if stage == 1 and microbatches > 1 else 12 * whole // n
    assert everything / 2 <= max(peaks) <= everything + few
    sharded.finish()
    looks = []
    for _ in range(4):
        time.sleep(0.02)  # gloo's threads let go of what has arrived
        looks.append(sum(live_bytes(known).values()))
    assert min(looks) == 12 * whole // n
    assert sum(gradient.numel() for _, _, gradient in sharded.pieces()) == 12 * 64 * 64 // n


@pytest.mark.ranks(2, 3)
def test_a_rank_has_the_optimizer_state_of_its_slices_only():
    mesh = mesh_of()
    for bucket_mb in SIZES:
        net = Net()
        sharded = sharded_of(net, mesh, bucket_mb=bucket_mb)
        optimizer = adamw(sharded.masters)
        accumulate(net, sharded, [own(batch(), mesh.dp)])
        update(sharded, optimizer)
        state = sum(x.numel() for state in optimizer.state.values() for x in state.values() if x.ndim)
        assert state == 2 * padded(sharded) // mesh.dp.size
        n = mesh.dp.size
        assert padded(sharded) - sum(p.numel() for p in trained(net)) <= (n - 1) * len(sharded.buckets)


@pytest.mark.ranks(2)
def test_weights_are_waited_for_where_they_are_read():
    mesh = mesh_of()
    net, whole = Net(), Net()
    sharded = sharded_of(net, mesh, bucket_mb=TINY)
    for module in (net.first, *net.chain, net.norm, net.tied, net.last):
        sharded.wait_before(module, list(module.parameters()))
    optimizer, dense = adamw(sharded.masters), adamw_of(whole)
    accumulate(net, sharded, [own(batch(), mesh.dp)])
    optimizer.step()
    sharded.publish()
    assert all(bucket.coming is not None for bucket in sharded.buckets)
    coming = []
    net.chain[0].register_forward_pre_hook(
        lambda *_: coming.append({p for bucket in sharded.buckets if bucket.coming is not None for p in bucket.places})
    )
    loss = net(batch(1), spare=False)
    first = {net.first.weight, net.first.bias, net.chain[0].weight, net.chain[0].bias}
    assert coming == [set(trained(net)) - first]  # the others still travel
    whole(batch()).backward()
    dense.step()
    close([loss], [whole(batch(1), spare=False)])
    assert [list(b.places) for b in sharded.buckets if b.coming is not None] == [[net.spare]]  # which nobody read
    sharded.wait()
    close(net.parameters(), whole.parameters())


@pytest.mark.ranks(2)
def test_weights_that_nobody_reads_are_there_before_they_are_stepped_again():
    """Else the optimizer would write into what is being sent."""
    mesh = mesh_of()
    net = Net()
    sharded = sharded_of(net, mesh, bucket_mb=TINY)
    sharded.publish()
    accumulate(net, sharded, [own(batch(), mesh.dp)])
    assert all(bucket.coming is None for bucket in sharded.buckets)


# --- gradients that come by another way than one backward's hooks -----------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.ranks(2, 3)
def test_what_is_complete_travels_however_it_came(stage):
    """Gradients written by hand, as a pipeline's W does, which no hook sees; in parts, and again for what has left."""
    mesh = mesh_of()
    for bucket_mb in SIZES:
        completed_by_hand(mesh, stage, bucket_mb)


def completed_by_hand(mesh, stage, bucket_mb):
    net, whole = Net(), Net()
    whole(batch()).backward()
    shared = [net.norm.weight]
    sharded = sharded_of(net, mesh, stage, bucket_mb, shared=shared)
    optimizer = torch.optim.SGD([master for master, _ in sharded.masters], lr=0.0)
    for _ in range(2):
        twin = Net()
        traffic.reset()
        parts = own(batch(), mesh.dp).split(4)
        for i, part in enumerate(parts):
            twin.zero_grad()
            twin(part).backward()
            for ours, theirs in zip(trained(net), trained(twin), strict=True):
                ours.grad = theirs.grad if ours.grad is None else ours.grad + theirs.grad
            last = i == len(parts) - 1
            sharded.complete([*net.last.parameters(), net.frozen], last)
            sharded.complete(net.chain.parameters(), last)
            sharded.complete(net.parameters(), last)
            sharded.complete(net.chain.parameters(), last)
            sent = i + 1 if stage == 2 else int(last)
            assert traffic.calls["shards", "reduce_scatter"] == sent * (len(sharded.buckets) - len(shared))
        sharded.finish()
        assert traffic.calls["shards", "reduce_scatter"] == sent * (len(sharded.buckets) - 1) + 1
        assert_gradients(net, sharded, [p.grad for p in trained(whole)])
        update(sharded, optimizer)


@pytest.mark.ranks(2)
def test_outside_of_accumulating_nothing_travels_and_a_backward_that_raises_leaves_nothing_behind():
    mesh = mesh_of()
    net = Net()
    sharded = sharded_of(net, mesh, 2)
    with pytest.raises(RuntimeError, match="on purpose"), sharded.accumulating(last=True):
        raise RuntimeError("on purpose")
    traffic.reset()
    net(own(batch(), mesh.dp)).backward()
    assert not traffic.calls
    assert all(p.grad is not None for p in trained(net))


@pytest.mark.ranks(2)
def test_parameters_do_not_keep_what_divides_them_alive():
    mesh = mesh_of()
    net = Net()
    sharded = weakref.ref(sharded_of(net, mesh))
    gc.collect()
    assert sharded() is None
    net(batch()).backward()  # its hooks are still there, and do nothing
    assert all(p.grad is not None for p in trained(net))


# --- half precision ---------------------------------------------------------------------------------------------------


def rounded(net):
    """A float32 twin with a half net's weights."""
    twin = Net().float()
    with torch.no_grad():
        for ours, theirs in zip(twin.parameters(), net.parameters(), strict=True):
            ours.copy_(theirs)
    return twin


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.ranks(1, 2, 3)
def test_half_weights_are_rounded_masters_and_gradients_are_summed_in_float32(stage):
    """Against masters stepped by hand with the float32 sum of what backward of every microbatch and rank gives."""
    torch.set_default_dtype(torch.float32)
    mesh = Mesh(dp=dist.get_world_size())
    net = Net().bfloat16()
    twin, masters = Net().bfloat16(), rounded(net)
    sharded = sharded_of(net, mesh, stage, 1e-3)
    optimizer, dense = adamw(sharded.masters), adamw_of(masters)
    assert all(master.dtype == torch.float32 for master, _ in sharded.masters)
    for number in range(3):
        x = batch(number).bfloat16()
        accumulate(net, sharded, own(x, mesh.dp).split(4))
        sums = [torch.zeros_like(p) for p in trained(masters)]
        for rank in range(mesh.dp.size):
            for part in x.chunk(mesh.dp.size)[rank].split(4):
                twin.zero_grad()
                twin(part).backward()
                for total, parameter in zip(sums, trained(twin), strict=True):
                    total += parameter.grad
        numbers = {parameter: i for i, parameter in enumerate(trained(net))}
        for parameter, start, gradient in sharded.pieces():
            assert gradient.dtype == torch.float32
            expected = sums[numbers[parameter]].flatten()[start : start + len(gradient)]
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-4)
        for parameter, total in zip(trained(masters), sums, strict=True):
            parameter.grad = total
        update(sharded, optimizer)
        dense.step()
        with torch.no_grad():
            for ours, master, theirs in zip(net.parameters(), masters.parameters(), twin.parameters(), strict=True):
                assert ours.dtype == torch.bfloat16
                torch.testing.assert_close(ours.float(), master, rtol=2**-8, atol=1e-4)
                theirs.copy_(ours)


def test_masters_keep_what_half_weights_cannot():
    """A hundred updates each below half a unit in the last place: the weights follow nevertheless."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    sharded = ShardedParameters([weight], Axis())
    (master, _), *_ = sharded.masters
    optimizer = torch.optim.SGD([master], lr=1e-3)
    for _ in range(100):
        with sharded.accumulating(last=True):
            weight.sum().backward()
        sharded.finish()
        update(sharded, optimizer)
    assert master.detach().allclose(torch.tensor(0.9))
    assert weight.tolist() == [torch.tensor(0.9, dtype=torch.bfloat16).item()] * 4

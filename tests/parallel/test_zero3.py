"""Weights that are whole only while they compute: against FSDP2, and what is held, sent and read, and when."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from megalite.config import Config, MeshConfig, ModelConfig, TrainConfig, resolve
from megalite.model.presets import PRESETS
from megalite.parallel import gathered
from megalite.parallel.gathered import Flat, Unit
from megalite.parallel.mesh import Mesh
from megalite.parallel.traffic import traffic
from megalite.parallel.zero import ShardedParameters
from megalite.testing import run_ranks
from megalite.train.step import TrainStep, _units
from megalite.train.verify import _drawn as drawn
from megalite.train.verify import own_share, shrunk, verify

BLOCKS, WORDS, SIZE = 4, 11, 7  # sizes that hardly divide


class Block(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.norm, self.linear, self.again = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), again

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False) if self.again else self.compute(x)

    def compute(self, x):
        return x + self.linear(self.norm(x)).tanh()


class Net(nn.Module):
    """Embedding, blocks, norm and head, as a GPT has them. tied: to the embedding; again: blocks are recomputed"""

    def __init__(self, tied=False, again=False):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(WORDS, SIZE)
        self.blocks = nn.ModuleList(Block(again) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(SIZE)
        self.head = self.embedding if tied else nn.Linear(SIZE, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.head.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")

    def units(self):
        first = Unit(list(self.embedding.parameters()), self.embedding, self.embedding, again=False)
        blocks = [Unit(list(block.parameters()), block, block) for block in self.blocks]
        return [first, *blocks, Unit([*self.norm.parameters(), self.head.weight], self.norm, self)]


def mesh_of(shard=None):
    torch.set_default_dtype(torch.float64)
    return Mesh(dp=dist.get_world_size(), shard=shard)


def sharded_of(net, mesh, **further):
    return ShardedParameters(net.parameters(), mesh.shards, mesh.copies, stage=3, units=[net.units()], **further)


def batch(number=0, rows=24):
    return torch.randint(WORDS, (rows, 4), generator=torch.Generator().manual_seed(number))


def own(x, axis):
    return x.chunk(axis.size)[axis.rank]


def adamw(stepped):
    return torch.optim.AdamW(stepped, lr=0.02, betas=(0.8, 0.9), eps=1e-6)


def optimizer_of(sharded):
    return adamw([master for master, _ in sharded.masters])


def accumulate(net, sharded, parts):
    for i, part in enumerate(parts):
        with sharded.accumulating(last=i == len(parts) - 1):
            net(part).backward()
    sharded.finish()


def update(sharded, optimizer):
    optimizer.step()
    optimizer.zero_grad()
    sharded.publish()


def whole_bytes(flats):
    return sum(8 * len(flat.whole) for flat in flats)


def flats_of(sharded):
    return [bucket.flat for bucket in sharded.buckets if bucket.flat is not None]


def bytes_of(sharded, unit):
    return whole_bytes(sharded._flats_of(unit))


def held(sharded):
    """Bytes of weights that are whole now."""
    return sum(flat.held for flat in flats_of(sharded))


class Peak:
    """The most bytes of whole weights at once, within a `with`."""

    def __init__(self, sharded):
        self.sharded, self.bytes, self._issue = sharded, 0, Flat.issue

    def __enter__(self):
        def issue(flat):
            self._issue(flat)
            self.bytes = max(self.bytes, held(self.sharded))

        self._patch = mock.patch.object(Flat, "issue", issue)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.ranks(2, 3, 4)
def test_three_steps_are_those_of_fsdp2_and_of_the_whole_batch(tied):
    """Of two of ours, one of which recomputes its blocks."""
    mesh = mesh_of()
    theirs, dense = Net(tied), Net(tied)
    device_mesh = init_device_mesh("cpu", (mesh.dp.size,))
    for module in (*theirs.blocks, theirs):
        fully_shard(module, mesh=device_mesh)
    runs = []
    for again in (False, True):
        net = Net(tied, again)
        sharded = sharded_of(net, mesh)
        runs.append((net, sharded, optimizer_of(sharded)))
    optimizers = adamw(theirs.parameters()), adamw(dense.parameters())
    for number in range(3):
        x = batch(number)
        (theirs(own(x, mesh.dp)) * mesh.dp.size).backward()  # theirs is a mean over the ranks
        dense(x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        fsdp = [p.full_tensor() for p in theirs.parameters()]
        for net, sharded, optimizer in runs:
            accumulate(net, sharded, own(x, mesh.dp).split(2))
            update(sharded, optimizer)
            with sharded.gathered():
                ours = [p.detach().clone() for p in net.parameters()]
            for mine, other, whole in zip(ours, fsdp, dense.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(mine, whole.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shard", [1, 2])
@pytest.mark.ranks(4)
def test_hybrid_shards_step_like_the_whole_batch(shard):
    mesh = mesh_of(shard)
    net, dense = Net(), Net()
    sharded = sharded_of(net, mesh)
    optimizers = optimizer_of(sharded), adamw(dense.parameters())
    for number in range(3):
        accumulate(net, sharded, own(batch(number), mesh.dp).split(3))
        update(sharded, optimizers[0])
        dense(batch(number)).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    sharded.wait()
    with sharded.gathered():
        for mine, whole in zip(net.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), whole.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(3)
def test_half_precision_is_bitwise_that_of_stage_two():
    """Weights travel in bfloat16, gradients in float32; the masters are float32."""
    mesh = mesh_of()
    nets = [Net().bfloat16(), Net().bfloat16()]
    two = ShardedParameters(nets[0].parameters(), mesh.shards, stage=2)
    pairs = (nets[0], two), (nets[1], sharded_of(nets[1], mesh))
    runs = [(net, sharded, optimizer_of(sharded)) for net, sharded in pairs]
    for number in range(3):
        for net, sharded, optimizer in runs:
            sharded.wait()
            accumulate(net, sharded, own(batch(number), mesh.dp).split(2))
            update(sharded, optimizer)
    traffic.reset()
    with runs[0][1].gathered(), runs[1][1].gathered():
        assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    assert traffic.bytes["shards", "all_gather"] == 2 * 2 * sum(len(f.whole) for f in flats_of(runs[1][1])) // 3


def twin(preset, mesh, recompute="none", **train):
    train = TrainConfig(**{"global_batch": 8, "seq_len": 24, "micro_batch": 1, "recompute": recompute, **train})
    return shrunk(resolve(Config(ModelConfig(**PRESETS[preset]), mesh, train=train), mesh.size))


def four_steps(config, mesh):
    """Loss and gradient norm of each."""
    torch.set_default_dtype(torch.float64)
    step = TrainStep.of(config, mesh)
    share = own_share(drawn(config), mesh, config.mesh.layout)
    results = [step(share.tokens, share.targets, 1e-2) for _ in range(4)]
    return [number for result in results for number in (result.loss, result.grad_norm)]


@pytest.mark.parametrize(
    "config",
    [
        twin("gpt2-tiny", MeshConfig(2, zero=3)),
        twin("llama-tiny", MeshConfig(3, zero=3), "selective", global_batch=6),
        pytest.param(twin("smollm2-135m", MeshConfig(4, zero=3, shard=2), "full"), marks=pytest.mark.full),
        pytest.param(twin("gpt2-tiny", MeshConfig(2, tp=2, zero=3), "full"), marks=pytest.mark.full),
        twin("smollm2-135m", MeshConfig(2, sp=2, zero=3, shard=2), "selective"),
        pytest.param(twin("gpt2-tiny", MeshConfig(2, pp=2, zero=3), "full"), marks=pytest.mark.full),
        pytest.param(
            twin("llama-tiny", MeshConfig(2, pp=2, schedule="zb-h1", zero=3), "selective"), marks=pytest.mark.full
        ),
        pytest.param(
            twin("smollm2-135m", MeshConfig(2, pp=2, schedule="zb-v", zero=3), "full"), marks=pytest.mark.full
        ),
        twin("gpt2-tiny", MeshConfig(2, pp=2, schedule="interleaved-1f1b", zero=3)),
    ],
    ids=lambda c: f"{c.mesh.dp}x{c.mesh.pp}x{c.mesh.sp}x{c.mesh.tp} {c.mesh.schedule} {c.train.recompute}",
)
def test_a_gpt_on_every_kind_of_mesh_is_that_of_the_mesh_of_one(config):
    """First loss, norm, gradients and stepped weights; and losses and norms of four steps."""

    def run():
        sizes = config.mesh
        rows = verify(config, torch.device("cpu"))
        mesh = Mesh(sizes.dp, sizes.pp, sizes.sp, sizes.tp, sizes.ulysses, sizes.shard or None)
        return rows, four_steps(config, mesh)

    def alone():
        return four_steps(replace(config, mesh=MeshConfig(1, microbatches=1)), Mesh())

    (expected,) = run_ranks(alone, 1)
    for rows, actual in run_ranks(run, config.mesh.size):
        assert [row.name for row in rows if not row.passed] == []
        assert max(row.error for row in rows) < 1e-11
        assert actual == pytest.approx(expected, rel=1e-10)


# --- what is held -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.ranks(2, 3)
def test_a_rank_keeps_its_slice_and_while_computing_two_units_more(tied):
    mesh = mesh_of()
    net = Net(tied)
    sharded = sharded_of(net, mesh)
    optimizer = optimizer_of(sharded)
    units = [bytes_of(sharded, unit) for unit in net.units()]
    two = max(a + b for a, b in itertools.pairwise(units))
    for number in range(2):
        with Peak(sharded) as peak:
            accumulate(net, sharded, own(batch(number), mesh.dp).split(2))
        assert 0 < peak.bytes <= two
        assert held(sharded) == 0
        update(sharded, optimizer)
        storages = {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in net.parameters())}
        storages |= {s.data_ptr(): s.nbytes() for s in (m.untyped_storage() for m, _ in sharded.masters)}
        least = sum(8 * p.numel() for p in net.parameters()) / mesh.dp.size
        assert least <= sum(storages.values()) < least + 8 * len(sharded.buckets)  # padding


@pytest.mark.parametrize(
    "schedule", [pytest.param("1f1b", marks=pytest.mark.full), "zb-h1", "zb-v", "interleaved-1f1b"]
)
@pytest.mark.ranks(4)
def test_on_a_pipeline_too(schedule):
    torch.set_default_dtype(torch.float64)
    config = twin("llama-tiny", MeshConfig(2, pp=2, schedule=schedule, zero=3))
    step = TrainStep.of(config, Mesh(2, 2))
    sharded = step.buckets
    share = own_share(drawn(config), step.mesh, "zigzag")
    largest = sorted(bytes_of(sharded, u) for part in step.model.parts for u in _units(step.model, part))[-2:]
    for _ in range(2):
        with Peak(sharded) as peak:
            step(share.tokens, share.targets)
        assert 0 < peak.bytes <= sum(largest)
        assert held(sharded) == 0
        assert all(flat.users == 0 for flat in flats_of(sharded))


@pytest.mark.ranks(2)
def test_weights_that_no_unit_reads_stay_whole():
    mesh = mesh_of()
    net = Net()
    net.apart = nn.Parameter(torch.randn(5))
    sharded = sharded_of(net, mesh)
    (bucket,) = (bucket for bucket in sharded.buckets if bucket.flat is None)
    assert list(bucket.places) == [net.apart]
    (net(own(batch(), mesh.dp)) + net.apart.square().sum()).backward()
    with sharded.accumulating(last=True):
        pass
    sharded.finish()
    update(sharded, optimizer_of(sharded))
    sharded.wait()
    assert net.apart.isfinite().all() and held(sharded) == 0


# --- what is sent, and when -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.ranks(2, 4)
def test_bytes_are_those_of_the_formulas(tied, microbatches):
    """3 (n−1)/n of the weights a microbatch, less what is read once or needed at once again."""
    mesh = mesh_of()
    net, n = Net(tied), dist.get_world_size()
    sharded = sharded_of(net, mesh)
    optimizer = optimizer_of(sharded)
    embedding, *blocks, head = (bytes_of(sharded, unit) for unit in net.units())
    for number in range(2):
        traffic.reset()
        accumulate(net, sharded, own(batch(number), mesh.dp).split(24 // n // microbatches))
        update(sharded, optimizer)
        assert dict(traffic.bytes) == {
            ("shards", "all_gather"): microbatches * (n - 1) * (embedding + 2 * sum(blocks) + head) // n,
            ("shards", "reduce_scatter"): microbatches * (n - 1) * whole_bytes(flats_of(sharded)) // n,
        }


@pytest.mark.ranks(2)
def test_each_unit_is_on_its_way_before_the_one_before_it_computes():
    mesh = mesh_of()
    net = Net()
    sharded = sharded_of(net, mesh)
    names = ["embedding", *(f"block {i}" for i in range(BLOCKS)), "head"]
    of = {id(f.whole): name for name, unit in zip(names, net.units(), strict=True) for f in sharded._flats_of(unit)}
    events = []

    def issue(whole, own, axis):
        events.append(f"gather {of[id(whole)]}")
        return real(whole, own, axis)

    def computes(name):
        def hook(module, inputs, output):
            events.append(f"forward {name}")
            if inputs[0].requires_grad:
                inputs[0].register_hook(lambda gradient: events.append(f"backward {name}"))

        return hook

    for name, unit in zip(names, net.units(), strict=True):
        unit.first.register_forward_hook(computes(name))
    real = gathered.issue_all_gather_into
    with mock.patch.object(gathered, "issue_all_gather_into", issue):
        accumulate(net, sharded, [own(batch(), mesh.dp)])
    assert [event for event, _ in itertools.groupby(events)] == [
        "gather embedding",
        "gather block 0",
        "forward embedding",
        *(e for i in range(BLOCKS - 1) for e in (f"gather block {i + 1}", f"forward block {i}")),
        "gather head",
        f"forward block {BLOCKS - 1}",
        "forward head",  # it stays for its backward
        f"gather block {BLOCKS - 1}",
        "backward head",
        *(e for i in range(BLOCKS - 1, 0, -1) for e in (f"gather block {i - 1}", f"backward block {i}")),
        "backward block 0",
    ]


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_gathered_weights_are_read_and_computed_with_and_nothing_is_sent():
    mesh = mesh_of()
    net, dense = Net(), Net()
    sharded = sharded_of(net, mesh)
    with sharded.gathered():
        sent = traffic.calls["shards", "all_gather"]
        for mine, whole in zip(net.parameters(), dense.parameters(), strict=True):
            assert torch.equal(mine, whole)
        if mesh.rank == 0:
            with torch.no_grad():
                assert torch.equal(net(batch()), dense(batch()))
        assert traffic.calls["shards", "all_gather"] == sent
    assert held(sharded) == 0
    with torch.no_grad():
        assert torch.equal(net(batch()), dense(batch()))
    sharded._gathering.let_go()
    assert held(sharded) == 0


@pytest.mark.ranks(2)
def test_after_a_forward_that_raises_the_next_step_is_as_ever():
    mesh = mesh_of()
    net, dense = Net(), Net()
    sharded = sharded_of(net, mesh)
    planted = mock.patch.object(net.blocks[1], "compute", side_effect=RuntimeError("planted"))
    with planted, pytest.raises(RuntimeError, match="planted"):
        net(own(batch(), mesh.dp))
    accumulate(net, sharded, [own(batch(), mesh.dp)])
    assert held(sharded) == 0 and all(flat.users == 0 for flat in flats_of(sharded))
    dense(batch()).backward()
    whole = dict(zip(net.parameters(), dense.parameters(), strict=True))
    for parameter, start, gradient in sharded.pieces():
        expected = whole[parameter].grad.flatten()[start : start + len(gradient)]
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_a_unit_whose_input_needs_no_gradient_is_let_go_when_backward_ends():
    mesh = mesh_of()
    net = Net()
    net.embedding.requires_grad_(False)
    sharded = sharded_of(net, mesh)
    loss = net(own(batch(), mesh.dp))
    with sharded.accumulating(last=True):
        loss.backward()
    assert all(flat.users == 0 for flat in flats_of(sharded))
    sharded.finish()
    assert held(sharded) == 0

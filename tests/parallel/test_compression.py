"""Compressed sums: how far from the sum, the same on every rank, nothing lost over steps, fewer bytes."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalite.parallel.compression import compressor
from megalite.parallel.ddp import GradientBuckets
from megalite.parallel.mesh import Mesh
from megalite.parallel.traffic import traffic

SHAPES = [torch.Size(shape) for shape in ((40, 30), (7,), (16, 64), (5, 3), ())]
SIZE = sum(math.prod(shape) for shape in SHAPES)
# the largest error of a sum over the largest entry of a summand: half a step each way
STEP = {"bfloat16": 2**-8, "int8": 1 / 127}


def gradient(rank, step=0):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64)


def summed(kind, axis, steps, rank=4, of=gradient):
    """What a compressor makes of each step's gradients, and their exact sums."""
    how = compressor(kind, rank, SHAPES)
    for step in range(steps):
        buffer = of(axis.rank, step)
        how.issue(buffer, axis).wait()
        yield buffer, sum(of(r, step) for r in range(axis.size))


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.ranks(2, 3, 4)
def test_a_sum_is_off_by_no_more_than_its_roundings(kind):
    axis = Mesh(dp=dist.get_world_size()).dp
    ((found, exact),) = summed(kind, axis, 1)
    most = max(gradient(r).abs().max().item() for r in range(axis.size))
    error = (found - exact).abs().max().item()
    assert 0 < error <= STEP[kind] * (axis.size * most / 2 + exact.abs().max().item() / 2)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "powersgd"])
@pytest.mark.ranks(2, 3)
def test_every_rank_has_the_same_bits(kind):
    axis = Mesh(dp=dist.get_world_size()).dp
    for found, _ in summed(kind, axis, 3):
        every = [torch.empty_like(found) for _ in range(axis.size)]
        dist.all_gather(every, found)
        assert all(torch.equal(one, found) for one in every)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "powersgd"])
@pytest.mark.ranks(2, 3)
def test_what_is_left_out_comes_later(kind):
    """The error of the sum over steps does not grow with them, and that of one step stays bounded."""
    axis = Mesh(dp=dist.get_world_size()).dp
    constant = lambda rank, step: gradient(rank)  # noqa: E731
    pairs = list(summed(kind, axis, 80, of=constant))
    errors = [sum((found - exact) for found, exact in pairs[:n]).norm() / pairs[0][1].norm() for n in (20, 80)]
    bound = {"bfloat16": 0.01, "int8": 0.03, "powersgd": 12.0}[kind]
    assert errors[1] < bound
    assert errors[1] < 2 * errors[0] + 1e-3


@pytest.mark.ranks(2, 3)
def test_matrices_of_a_low_rank_are_exact_and_what_is_no_matrix_always():
    axis = Mesh(dp=dist.get_world_size()).dp

    def thin(rank, step):
        """Every rank's matrices have their columns in the same two dims."""
        whole = gradient(rank, step)
        for shape, x in zip(SHAPES, whole.split([math.prod(s) for s in SHAPES]), strict=True):
            if len(shape) == 2:
                common = torch.randn(shape[0], 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
                x.copy_((common @ x.view(shape)[:2]).flatten())
        return whole

    for found, exact in summed("powersgd", axis, 3, rank=3, of=thin):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    ((found, exact),) = summed("powersgd", axis, 1)
    places = dict(
        zip(SHAPES, zip(*(x.split([math.prod(s) for s in SHAPES]) for x in (found, exact)), strict=True), strict=True)
    )
    for shape in (SHAPES[1], SHAPES[3], SHAPES[4]):  # vectors, and matrices that two factors would not make smaller
        torch.testing.assert_close(*places[shape], rtol=1e-15, atol=1e-15)
    assert (places[SHAPES[0]][0] - places[SHAPES[0]][1]).abs().max() > 0.1


@pytest.mark.ranks(2, 4)
def test_bytes_that_travel():
    axis = Mesh(dp=dist.get_world_size()).dp
    n, size = axis.size, 2**16
    sent = {}
    for kind in ("bfloat16", "int8", "powersgd"):
        how = compressor(kind, 2, [torch.Size((256, 256))])
        traffic.reset()
        how.issue(torch.randn(size), axis).wait()
        sent[kind] = traffic.on("dp")
    exact = 2 * (n - 1) * 4 * size // n
    assert sent["bfloat16"] == exact // 2
    assert sent["int8"] == exact // 4 + exact // 256
    assert sent["powersgd"] == 2 * (n - 1) * 4 * 2 * 512 // n


@pytest.mark.ranks(2)
def test_buckets_that_are_compressed_train_to_the_same_loss():
    """Two layers on a function: with feedback the loss ends where it ends without compression."""

    axis = Mesh(dp=2).dp

    def train(compress):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 8))
        buckets = GradientBuckets(net.parameters(), axis, 0.002, compress=compress)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(150):
            x = torch.randn(64, 24, generator=torch.Generator().manual_seed(2 * step + axis.rank))
            loss = (net(x) - x[:, :8].sin()).square().mean()
            with buckets.accumulating(last=True):
                loss.backward()
            buckets.finish()
            optimizer.step()
            optimizer.zero_grad()
        x = torch.randn(512, 24, generator=torch.Generator().manual_seed(7))
        return (net(x) - x[:, :8].sin()).square().mean().item(), net[0].weight.detach().clone()

    exact, _ = train(None)
    for kind, bound in (("bfloat16", 1e-3), ("int8", 1e-2), ("powersgd", 5e-2)):
        found, weight = train(lambda shapes, kind=kind: compressor(kind, 4, shapes))
        other = weight.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, weight), kind
        assert found == pytest.approx(exact, rel=bound), kind

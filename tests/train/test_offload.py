"""The optimizer in the host's memory: the same numbers, and nothing of it beside the weights."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from trajectory import OPTIMIZER, Case, Way

from megalite.parallel.bucket import on_host
from megalite.parallel.traffic import traffic
from megalite.testing import run_ranks
from megalite.train.offload import Offloaded
from megalite.train.step import TrainStep
from megalite.train.verify import own_share

FREE = replace(OPTIMIZER, clip=0.0)


def trained(case, way, config, dtype, shift=0.0):
    """Losses and norms of six steps, the weights after them, and the bytes sent in the last one.

    shift: added to the masters after three steps, which must be seen in the weights
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        mesh = way.mesh()
        schedule = way.stages(case).schedule if way.pp > 1 else None
        how = {"schedule": schedule, "micro_batch": way.micro_batch, "zero": way.zero, "bucket_mb": 0.02}
        step = TrainStep(way.gpt(case, mesh), config, **how)
        batch = own_share(case.data(), mesh, way.layout)
        numbers = []
        for i in range(6):
            if i == 3 and shift:
                with torch.no_grad():
                    for master, _ in step.buckets.masters:
                        master.add_(shift)
            traffic.reset()
            result = step(batch.tokens, batch.targets, 1e-2, documents=batch.documents)
            numbers += [result.loss, result.grad_norm, result.scale, result.taken]
        with step.gathered():
            weights = [parameter.detach().clone() for parameter in step.model.parameters()]
        return numbers, weights, dict(traffic.bytes), isinstance(step.optimizer, Offloaded)
    finally:
        torch.set_default_dtype(before)


WAYS = [
    Way(),
    Way(dp=2, micro_batch=1),
    Way(dp=2, zero=1),
    Way(dp=2, zero=2, micro_batch=1, recompute="full"),
    Way(dp=2, zero=3, micro_batch=1),
    Way(dp=4, tp=2, zero=2, shard=2),
    Way(dp=2, pp=2, schedule="zb-v", zero=3, micro_batch=1),
    Way(pp=2, schedule="zb-h1", micro_batch=1),
]


DTYPES = [
    (torch.float32, "float32"),
    (torch.float16, "bfloat16"),
    (torch.bfloat16, "float32"),
    (torch.float64, "float32"),
]
# by default each way with one of the first two dtypes
CASES = [
    pytest.param(way, *dtypes, marks=[pytest.mark.full] * (i % 2 != j))
    for i, way in enumerate(WAYS)
    for j, dtypes in enumerate(DTYPES)
]


@pytest.mark.combination(optimizer="adamw offloaded")
@pytest.mark.parametrize(("way", "dtype", "state_dtype"), CASES, ids=str)
def test_the_numbers_are_bitwise_those_beside_the_weights(way, dtype, state_dtype):
    """Flat float32 slices are normed in another order than whole parameters: those are compared without clipping."""
    case = Case("llama tied", heads=4, layers=4, batch=4)
    config = replace(OPTIMIZER if way.zero else FREE, state_dtype=state_dtype)
    here = run_ranks(trained, way.ranks, case, way, config, dtype)
    there = run_ranks(trained, way.ranks, case, way, replace(config, offload=True), dtype)
    for (numbers, weights, sent, _), (others, moved, sent_too, offloaded) in zip(here, there, strict=True):
        assert offloaded
        if way.zero or dtype in (torch.float16, torch.bfloat16):
            assert numbers == others
            assert sent == sent_too
        else:
            assert numbers == pytest.approx(others, rel=1e-6 if dtype == torch.float32 else 1e-14)
            assert numbers[::4] == others[::4]  # losses
        assert all(torch.equal(a, b) for a, b in zip(weights, moved, strict=True))


def test_what_is_stepped_is_what_is_published():
    """Else that both agree would say nothing of where the optimizer looks."""
    case, way = Case(), Way(dp=2, zero=1)
    config = replace(OPTIMIZER, offload=True)
    plain, *_ = run_ranks(trained, 2, case, way, config, torch.float32)[0]
    shifted, *_ = run_ranks(trained, 2, case, way, config, torch.float32, 1e-2)[0]
    assert plain[:16] == shifted[:16] and plain[16] != shifted[16]


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.ranks(2)
def test_gradients_are_copied_and_let_go(zero):
    """Masters share no memory with weights; after a step nothing of the gradients is left beside the weights."""
    case, way = Case(), Way(dp=dist.get_world_size(), zero=zero)
    step = TrainStep(way.gpt(case, way.mesh()), replace(OPTIMIZER, offload=True), zero=zero)
    batch = own_share(case.data(), way.mesh(), way.layout)
    copies = []
    for _ in range(2):
        step(batch.tokens, batch.targets)
        assert not step.buckets.gradients
        copies.append([copy.data_ptr() for copy in step.optimizer.copies])
    assert copies[0] == copies[1]  # of one memory
    weights = {x.untyped_storage().data_ptr() for x in (*step.model.parameters(), *step.buckets.slices)}
    assert not weights & {master.untyped_storage().data_ptr() for master, _ in step.buckets.masters}


def test_a_copy_on_the_host_is_of_its_own():
    x = torch.arange(3.0)
    copy = on_host(x, torch.float64)
    assert copy.dtype == torch.float64 and copy.tolist() == [0, 1, 2]
    assert on_host(x, torch.float32).data_ptr() != x.data_ptr()

"""A run's state, saved on one mesh and restored on another: the run goes on as if nothing had happened."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trajectory import LLAMA, OPTIMIZER, Case, Way

from megalite.checkpoint import folder
from megalite.checkpoint.boxes import whole
from megalite.checkpoint.saver import Saver
from megalite.checkpoint.source import Source
from megalite.errors import CheckpointError
from megalite.model.gpt import GPT
from megalite.parallel.mesh import Mesh
from megalite.testing import run_ranks
from megalite.train.state import held, numbers, restore
from megalite.train.step import TrainStep
from megalite.train.verify import own_share

BEFORE, AFTER = 3, 5  # steps
MUON = replace(OPTIMIZER, name="muon")
TIED = Case("gpt2", heads=4, kv_heads=2, batch=8, length=12, layers=6)  # biases, learned positions, an odd vocabulary
GROUPED = Case("llama", heads=4, kv_heads=1, batch=8, length=12, layers=6)

ONE = Way()
MIXED = Way(dp=2, pp=2, tp=2, zero=1)
TALL = Way(pp=2, tp=4)
WIDE = Way(dp=4, sp=2, zero=3)
CHUNKS = Way(pp=4, tp=2, schedule="interleaved-1f1b", chunks=2, division=(0, 1, 1, 1, 1, 1, 1, 0))
SHARED = Way(dp=2, pp=2, sp=2, zero=2)
COPIES = Way(dp=4, zero=3, shard=2)
WAYS = [ONE, MIXED, TALL, WIDE, CHUNKS, SHARED, COPIES]


@pytest.fixture(autouse=True)
def _same_dtype():
    """`made` and `plain` set the default dtype, and some tests call them in this process."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


def made(case, way, optimizer, dtype=torch.float64, **more):
    """A step on this rank, and its share of the batch."""
    torch.set_default_dtype(dtype)
    mesh = way.mesh()
    schedule = way.stages(case).schedule if way.pp > 1 else None
    micro_batch = case.batch // way.dp // schedule.microbatches if schedule else 0
    more |= {"schedule": schedule, "micro_batch": micro_batch, "bucket_mb": 0.02, "zero": way.zero}
    step = TrainStep(way.gpt(case, mesh), optimizer, **more)
    return step, own_share(case.data(), mesh, way.layout)[:2]


def trained(step, batch, steps=AFTER):
    return [step(*batch, lr=0.01 / (1 + step.steps)).loss for _ in range(steps)]


def saved(case, way, optimizer, root, dtype=torch.float64, **more):
    """Some steps, a save beside some more, and the losses of these."""
    step, batch = made(case, way, optimizer, dtype, **more)
    trained(step, batch, BEFORE)
    saver = Saver(root, step.mesh.world)
    saver.begin(step.steps, held(step), numbers(step))
    step.optimizer.register_step_pre_hook(lambda *_: saver.settle())
    losses = trained(step, batch)
    saver.commit()
    return losses


def restored(case, way, optimizer, roots, again=None, dtype=torch.float64, **more):
    """From each folder, the losses of the steps that follow. again: where to save what was restored, before them"""
    found = []
    for i, root in enumerate(roots):
        if not i:
            step, batch = made(case, way, optimizer, dtype, **more)
        restore(step, folder.checked(root / folder.name_of(BEFORE)))
        if again is not None:
            saver = Saver(again / str(i), step.mesh.world, asynchronous=False)
            saver.begin(step.steps, held(step), numbers(step))
            saver.commit()
        found.append(trained(step, batch))
    return found


def tensors(root):
    """All of a checkpoint."""
    checkpoint = folder.checked(root / folder.name_of(BEFORE))
    with Source(checkpoint) as source:
        return {name: source.read(name, whole(source.shape(name))).clone() for name in checkpoint.index.tensors}


def check(case, optimizer, writers, readers, tmp_path):
    """Saved by each writer, the run goes on on each reader: on the same mesh bitwise."""
    expected = {}
    for i, way in enumerate(writers):
        expected[way] = run_ranks(saved, way.ranks, case, way, optimizer, tmp_path / str(i), timeout=900)[0]
    roots = [tmp_path / str(i) for i in range(len(writers))]
    states = [tensors(root) for root in roots]
    for reader in readers:
        again = tmp_path / "again" / str(readers.index(reader))
        everyone = run_ranks(restored, reader.ranks, case, reader, optimizer, roots, again, timeout=900)
        for rank, found in enumerate(everyone):
            for writer, losses in zip(writers, found, strict=True):
                assert losses == pytest.approx(expected[writer], rel=1e-10), (writer, reader, rank)
                if writer == reader:
                    assert losses == expected[writer]
        for i, state in enumerate(states):
            passed_on = tensors(again / str(i))
            assert passed_on.keys() == state.keys()
            assert all(torch.equal(passed_on[name], state[name]) for name in state), (writers[i], reader)


def test_a_run_goes_on_on_another_mesh(tmp_path):
    case, way = replace(TIED, layers=2, batch=4), Way(dp=2, tp=2, zero=1)
    check(case, OPTIMIZER, [way, ONE], [way, Way(dp=2, sp=2, zero=3, shard=2)], tmp_path)


def test_a_run_goes_on_on_another_pipeline(tmp_path):
    pipeline = Way(pp=2, tp=2, schedule="interleaved-1f1b", chunks=2)
    check(replace(TIED, batch=2, layers=3), OPTIMIZER, [pipeline], [pipeline, ONE], tmp_path)


def test_muon_goes_on_on_another_mesh(tmp_path):
    case, way = replace(GROUPED, layers=2, batch=4), Way(tp=2, dp=2)
    check(case, MUON, [way], [way, Way(pp=2)], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", [TIED, GROUPED], ids=["gpt2 tied", "llama"])
def test_every_mesh_reads_what_every_other_wrote(case, tmp_path):
    check(case, OPTIMIZER, WAYS, WAYS, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", [TIED, GROUPED], ids=["gpt2 tied", "llama"])
def test_every_mesh_reads_what_every_other_wrote_with_muon(case, tmp_path):
    ways = [way for way in WAYS if not way.zero] + [Way(dp=2, tp=2), Way(dp=2, pp=2, sp=2)]
    check(case, MUON, ways, ways, tmp_path)


HALF = {
    "bfloat16": (torch.bfloat16, OPTIMIZER),
    "bfloat16 muon": (torch.bfloat16, MUON),
    "bfloat16 small state": (torch.bfloat16, replace(OPTIMIZER, state_dtype="bfloat16")),
    "float32 small state": (torch.float32, replace(OPTIMIZER, state_dtype="bfloat16")),
    "float16": (torch.float16, OPTIMIZER),
    "offloaded": (torch.bfloat16, replace(OPTIMIZER, offload=True)),
}


@pytest.mark.parametrize("kind", HALF)
def test_masters_and_their_state_are_kept(kind, tmp_path):
    """Bitwise on the same mesh; on another, state that is saved again is the same."""
    dtype, optimizer = HALF[kind]
    case = Case("llama tied", heads=4, kv_heads=2, batch=4, length=8)
    writer, reader = Way(dp=2), Way(dp=2, tp=2, zero=0 if optimizer.name == "muon" else 1)
    expected = run_ranks(saved, 2, case, writer, optimizer, tmp_path / "a", dtype)
    assert run_ranks(restored, 2, case, writer, optimizer, [tmp_path / "a"], None, dtype) == [[e] for e in expected]
    run_ranks(restored, 4, case, reader, optimizer, [tmp_path / "a"], tmp_path / "b", dtype)
    first, second = tensors(tmp_path / "a"), tensors(tmp_path / "b" / "0")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    weights = {tensor.dtype for name, tensor in first.items() if name.startswith("model/")}
    states = {tensor.dtype for name, tensor in first.items() if not name.startswith("model/")}
    assert weights == {torch.float32}
    assert states == {torch.bfloat16 if optimizer.state_dtype == "bfloat16" else torch.float32}


def test_the_loss_scale_is_kept(tmp_path):
    step, _ = made(GROUPED, ONE, OPTIMIZER, torch.float16)
    step.steps, step.scale.value, step.scale.good, step.scale.skipped = BEFORE, 2.0**9, 2, 1
    saver = Saver(tmp_path)
    saver.begin(BEFORE, held(step), numbers(step))
    saver.commit()
    other, _ = made(GROUPED, ONE, OPTIMIZER, torch.float16)
    restore(other, folder.checked(tmp_path / folder.name_of(BEFORE)))
    scale = other.scale
    assert (other.steps, scale.value, scale.good, scale.skipped) == (BEFORE, 2.0**9, 2, 1)
    assert {float(state["step"]) for state in other.optimizer.state.values()} == {BEFORE - 1}


def save(step, root):
    saver = Saver(root, asynchronous=False)
    saver.begin(BEFORE, held(step), numbers(step))
    return saver.commit()


def plain(optimizer=OPTIMIZER, **sizes):
    """A step on the mesh of one, in float32."""
    torch.set_default_dtype(torch.float32)
    sizes = {"vocab_size": 11, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 8} | sizes
    model = replace(LLAMA, **sizes)
    step = TrainStep(GPT(model, Mesh()), optimizer)
    step.steps = BEFORE
    return step


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: plain(hidden=16), r"model/embedding.weight has shape \[11, 8\] there, and \[11, 16\] in this run"),
        (lambda: plain(layers=3), r"model/blocks.2.attention_norm.weight is not in it"),
        (lambda: plain(layers=1), r"/blocks.1.attention.out.weight is in it and not in this run"),
        (lambda: plain(bias=True), r"bias is not in it: it is of another model or optimizer"),
        (lambda: plain(optimizer=MUON), r"momentum_buffer/blocks.0.attention.qkv.weight is not in it"),
        (
            lambda: plain(optimizer=replace(OPTIMIZER, state_dtype="bfloat16")),
            r"exp_avg/embedding.weight is torch.float32 there, and torch.bfloat16 in this run",
        ),
    ],
)
def test_what_is_of_another_run_is_refused(other, message, tmp_path):
    path = save(plain(), tmp_path)
    with pytest.raises(CheckpointError, match=message) as error:
        restore(other(), folder.checked(path))
    assert "\n" not in str(error.value)


def test_what_one_rank_cannot_read_stops_all_ranks(tmp_path):
    """Else the others would wait for it."""
    way = Way(tp=2)

    def attempt():
        saved(GROUPED, way, OPTIMIZER, tmp_path)
        step, _ = made(GROUPED, way, OPTIMIZER)
        path = tmp_path / folder.name_of(BEFORE)
        checkpoint = folder.checked(path)
        torch.distributed.barrier()
        if step.mesh.rank == 1:
            file = path / "rank-00001.safetensors"
            content = bytearray(file.read_bytes())
            content[-9] ^= 1  # near the end of what tp rank 1 alone holds
            file.write_bytes(content)
        torch.distributed.barrier()
        with pytest.raises(CheckpointError, match=r"rank-00001.safetensors: .* is damaged"):
            restore(step, checkpoint)

    run_ranks(attempt, 2)


def test_a_rank_reads_no_more_than_it_needs(tmp_path):
    """Of weights cut over four ranks, a fourth, and what is replicated."""
    case = replace(GROUPED, kv_heads=4)

    def count(way):
        step, _ = made(case, way, OPTIMIZER)
        return restore(step, folder.checked(tmp_path / folder.name_of(BEFORE)))

    run_ranks(saved, 4, case, Way(tp=4), OPTIMIZER, tmp_path)
    everything = run_ranks(count, 1, ONE)[0]
    files = list(Path(tmp_path / folder.name_of(BEFORE)).glob("*.safetensors"))
    assert everything == sum(file.stat().st_size for file in files)
    assert max(run_ranks(count, 4, Way(tp=4))) < 0.4 * everything

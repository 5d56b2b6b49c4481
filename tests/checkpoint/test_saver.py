"""Saver: all ranks write, all learn of an error at the same commit, and training waits for no more than a copy."""

import json
import os
import resource
import shutil
import threading
import time

import pytest
import torch
import torch.distributed as dist
from kept import content, held, same, save, tensors
from safetensors.torch import load_file

from megalite.checkpoint import folder, saver
from megalite.checkpoint.boxes import whole
from megalite.checkpoint.held import Held
from megalite.checkpoint.saver import Saver
from megalite.checkpoint.source import Source, load
from megalite.errors import SaveError
from megalite.parallel.mesh import Mesh
from megalite.parallel.sharding import Shard
from megalite.testing import run_ranks


def test_ranks_of_tp_write_one_checkpoint_and_any_number_reads_it(tmp_path):
    def write():
        world = Mesh(tp=4).world
        one = Saver(tmp_path, world)
        one.begin(1, held(tensors(), world.rank, 4), {"tokens": 5})
        return str(one.commit())

    paths = run_ranks(write, 4)
    assert paths == [str(tmp_path / "step-00000001")] * 4
    path = tmp_path / "step-00000001"
    assert same(content(path), tensors())
    for ranks in (1, 2, 3, 5, 40):
        for rank in range(ranks):
            expected = held(tensors(), rank, ranks)
            found = [Held(h.name, h.shard, h.rank, 0, torch.zeros_like(h.values)) for h in expected]
            with Source(folder.checked(path)) as source:
                load(found, source)
            assert all(torch.equal(a.values, b.values) for a, b in zip(found, expected, strict=True))


def test_the_safetensors_library_reads_every_file(tmp_path):
    def write():
        world = Mesh(tp=3).world
        one = Saver(tmp_path, world)
        one.begin(1, held(tensors(), world.rank, 3), {})
        one.commit()

    run_ranks(write, 3)
    path = tmp_path / "step-00000001"
    index = folder.read(path).index
    files = {name: load_file(path / name) for name in index.files}
    assert len(files) == 3
    for name, tensor in index.tensors.items():
        values = torch.zeros(tensor.shape, dtype=tensors()[name].dtype)
        for part in tensor.slices:
            values[part.box.slices] = files[part.file].pop(part.key)
        assert torch.equal(values, tensors()[name])
    assert not any(files.values())  # nothing is there twice, and nothing else


def test_what_is_changed_once_it_has_settled_is_not_saved(tmp_path, monkeypatch):
    copy = Saver._copy
    monkeypatch.setattr(Saver, "_copy", lambda *given: (time.sleep(0.05), copy(*given))[1])
    values = tensors()
    one = Saver(tmp_path)
    one.settle()  # of nothing
    one.begin(1, held(values), {})
    one.settle()
    for tensor in values.values():
        tensor.zero_()
    assert same(content(one.commit()), tensors())


def test_the_buffer_serves_saves_of_other_sizes(tmp_path):
    one, two = Saver(tmp_path), tensors(2)
    for step, given in enumerate((tensors(1), {**two, "more": torch.ones(999)}, {"scalar": two["scalar"]}), 1):
        one.begin(step, held(given), {})
        assert same(content(one.commit()), given)


def test_training_goes_on_while_it_is_written(tmp_path, monkeypatch):
    go_on = threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (go_on.wait(), fsync(file)))
    one = Saver(tmp_path)
    one.begin(1, held(tensors()), {})
    assert one.writing and one.pending and folder.steps(tmp_path) == []
    with pytest.raises(ValueError, match="the checkpoint of step 1 is not committed"):
        one.begin(2, held(tensors()), {})
    go_on.set()
    one.commit()
    assert not one.writing and not one.pending and folder.steps(tmp_path) == [1]


def test_a_rank_that_holds_nothing_writes_no_file(tmp_path):
    one = Saver(tmp_path)
    one.begin(3, [], {})
    assert sorted(file.name for file in one.commit().iterdir()) == ["COMMITTED", "index.json", "state.json"]


def test_slices_are_no_larger_than_16_mib(tmp_path):
    values = torch.arange(5 * 2**20, dtype=torch.float32)
    one = Saver(tmp_path)
    shards = {"long": Shard((5 * 2**20,), "tp", 1), "wide": Shard((1, 5 * 2**20), "tp", 1)}
    one.begin(1, [Held(name, shard, 0, 0, values) for name, shard in shards.items()], {})
    checkpoint = folder.checked(one.commit())
    for name, shard in shards.items():
        assert max(part.box.size for part in checkpoint.index.tensors[name].slices) == 2**22
        with Source(checkpoint) as source:
            assert torch.equal(source.read(name, whole(shard.shape)).view(-1), values)


def test_a_rank_reads_the_slices_that_it_needs_and_each_once(tmp_path):
    values = torch.arange(8 * 2**20, dtype=torch.float32)  # two slices
    one = Saver(tmp_path)
    one.begin(1, [Held("w", Shard((2**20, 8), "tp", 1), 0, 0, values)], {})
    checkpoint = folder.checked(one.commit())
    found = torch.zeros(1000)
    for start, slices in ((0, 1), (2**22 - 500, 2), (2**22 + 3, 1)):
        with Source(checkpoint) as source:
            load([Held("w", Shard((2**20, 8), "tp", 1), 0, start, found)], source)
            assert torch.equal(found, values[start : start + 1000])
            assert 0 <= source.bytes_read - slices * 16 * 2**20 < 1000


def test_state_is_json_and_numbers_that_are_none_are_refused(tmp_path):
    path = save(tmp_path, 5, config={"lr": 1e-3, "name": "é"})
    assert json.loads((path / "state.json").read_text()) == {"step": 5, "config": {"lr": 1e-3, "name": "é"}}
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(tmp_path, 6, loss=float("nan"))
    assert folder.steps(tmp_path) == [5]


# --- what cannot be written ------------------------------------------------------------------------------------------


def test_a_disk_without_room_is_known_before(tmp_path, monkeypatch):
    save(tmp_path, 1)
    about = os.statvfs(tmp_path)
    full = os.statvfs_result([*about[:3], 0, 0, *about[5:10]])
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    message = (
        rf"{tmp_path}/.tmp-step-00000002/rank-00000.safetensors: cannot be written on rank 0: "
        r"no space left on device; 1,130 bytes are needed there, 0 are free"
    )
    with pytest.raises(SaveError, match=message):
        save(tmp_path, 2)
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert SaveError.exit_code == 73


def limited(world, root, rank):
    """Saves while one rank's files may not grow, and again without; what each rank was told."""
    big = {"w": torch.ones(1000, 1000)}
    one = Saver(root, world)
    told = []
    for step, limits in ((1, False), (2, True), (3, False)):
        if limits and world.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        try:
            one.begin(step, held(big, world.rank, world.size), {})
            one.commit()
            told.append("")
        except SaveError as error:
            told.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return told


@pytest.mark.parametrize("rank", [0, 2])
def test_what_one_rank_cannot_write_all_know_at_the_same_commit(rank, tmp_path):
    """A file that may not grow is as a full disk, on one rank alone."""
    told = run_ranks(lambda: limited(Mesh(tp=3).world, tmp_path, rank), 3)
    assert told[0] == told[1] == told[2]
    first, second, third = told[0]
    assert first == third == ""
    assert f"rank-0000{rank}.safetensors: cannot be written on rank {rank}: file too large" in second
    assert "bytes are needed there, " in second and second.endswith(" are free")
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_folder_that_vanished_stops_no_rank(when, tmp_path):
    """It is a file, or it is gone when the name is to be given."""

    def attempt():
        world = Mesh(tp=2).world
        root = tmp_path / "root"
        if when == "before" and world.rank == 0:
            root.write_text("no folder")
        dist.barrier()
        one = Saver(root, world)
        one.begin(1, held(tensors(), world.rank, 2), {})
        if when == "between":
            while one.writing:
                pass
            dist.barrier()
            if world.rank == 0:
                shutil.rmtree(root)
            dist.barrier()
        with pytest.raises(SaveError) as error:
            one.commit()
        return str(error.value)

    first, second = run_ranks(attempt, 2)
    assert first == second
    assert str(tmp_path / "root" / ".tmp-step-00000001") in first
    assert ("file exists" if when == "before" else "no such file") in first


def test_an_error_of_any_kind_is_told(tmp_path, monkeypatch):
    """Else the others would wait for this rank."""

    def broken(*args):
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr(saver, "write", broken)
    with pytest.raises(SaveError, match="on rank 0: RuntimeError: what nobody thought of"):
        save(tmp_path)
    assert os.listdir(tmp_path) == []

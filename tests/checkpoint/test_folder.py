"""A folder of checkpoints: whatever happens to the writer, what has the name of a checkpoint is whole."""

import errno
import os
import random
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from kept import content, same, save, tensors

from megalite.checkpoint import folder
from megalite.checkpoint.source import Source
from megalite.errors import CheckpointError, PathRefused, SaveError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Hundreds of saves need not reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def test_what_is_saved_is_read(tmp_path):
    path = save(tmp_path, 7, tokens=99)
    assert path == tmp_path / "step-00000007"
    assert sorted(os.listdir(path)) == ["COMMITTED", "index.json", "rank-00000.safetensors", "state.json"]
    assert os.listdir(tmp_path) == [path.name]
    checkpoint = folder.checked(path)
    assert (checkpoint.step, checkpoint.state) == (7, {"step": 7, "tokens": 99})
    assert same(content(path), tensors())


def test_the_newest_complete_one_is_found_and_the_others_are_told_of(tmp_path):
    for step in (3, 20, 100, 1000):
        save(tmp_path, step)
    (tmp_path / "step-00001000" / "COMMITTED").unlink()
    os.truncate(tmp_path / "step-00000100" / "rank-00000.safetensors", 100)
    (tmp_path / "step-00009999").symlink_to(tmp_path / "step-00000003")
    (tmp_path / "step-00008888").touch()
    (tmp_path / "step-7777").mkdir()
    (tmp_path / "latest").write_text("step-00000100")
    found, wrong = folder.newest(tmp_path)
    assert found is not None and found.step == 20
    assert [str(error).split(": ")[0].removeprefix(f"{tmp_path}/") for error in wrong] == [
        "step-00001000/COMMITTED",
        "step-00000100/rank-00000.safetensors",
    ]
    assert "100 bytes, " in str(wrong[1])


def test_where_there_is_none(tmp_path):
    assert folder.newest(tmp_path / "nothing") == (None, [])
    assert folder.steps(tmp_path) == [] and folder.clean(tmp_path / "nothing") == []


def test_the_last_ones_that_are_complete_are_kept(tmp_path):
    for step in range(10, 100, 10):
        save(tmp_path, step)
    (tmp_path / "step-00000090" / "rank-00000.safetensors").unlink()
    assert folder.retain(tmp_path, keep=2, every=30) == [50, 40, 20, 10]
    assert folder.steps(tmp_path) == [90, 80, 70, 60, 30]  # the damaged one is not ours to delete
    assert folder.retain(tmp_path, keep=0) == [70, 60, 30]  # never the newest
    assert folder.steps(tmp_path) == [90, 80]


def test_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, seed=1)
    assert same(content(save(tmp_path, 5, seed=2)), tensors(2))
    assert os.listdir(tmp_path) == ["step-00000005"]


def test_what_an_earlier_process_left_is_cleaned(tmp_path):
    save(tmp_path, 5)
    shutil.copytree(tmp_path / "step-00000005", tmp_path / ".tmp-step-00000006")
    os.rename(tmp_path / "step-00000005", tmp_path / ".old-step-00000005")  # killed while it was being replaced
    (tmp_path / ".del-step-00000004").mkdir()
    (tmp_path / ".tmp-of-somebody").mkdir()
    assert folder.clean(tmp_path) == [".del-step-00000004", ".old-step-00000005", ".tmp-step-00000006"]
    assert sorted(os.listdir(tmp_path)) == [".tmp-of-somebody", "step-00000005"]
    assert same(content(tmp_path / "step-00000005"), tensors())


def test_files_have_the_mode_that_the_umask_leaves(tmp_path):
    for mask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(mask)
        try:
            path = save(tmp_path, mask)
        finally:
            os.umask(before)
        assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {mode}


def test_what_is_named_is_on_the_disk(tmp_path, monkeypatch):
    """Every file and the folder before the rename, COMMITTED after all others, the name itself at last."""
    happened = []
    rename = os.rename
    monkeypatch.setattr(os, "fsync", lambda file: happened.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    monkeypatch.setattr(os, "rename", lambda *names: happened.append("rename") or rename(*names))
    save(tmp_path, 1)
    *files, committed, last, renamed, root = happened
    assert {"rank-00000.safetensors", "index.json", "state.json", ".tmp-step-00000001"} == set(files)
    assert files[-1] == ".tmp-step-00000001"
    assert [committed, last, renamed, root] == ["COMMITTED", ".tmp-step-00000001", "rename", tmp_path.name]


# --- killed, or refused by the disk, at every call -------------------------------------------------------------------

CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "close")


class Killed(BaseException):
    """What nothing catches."""


def at_call(monkeypatch, number, action):
    """Let call `number` of the file system raise, and tell how many there were."""
    count = [0]

    def patched(name, true):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == number:
                action(name)
            return true(*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, patched(name, getattr(os, name)))
    return count


def killed(name):
    raise Killed


def test_killed_at_any_call_the_newest_is_whole(tmp_path, monkeypatch):
    """Saving step 2 where there is one of it already, and one of step 1; then as the next process finds it."""
    number, reached = 0, set()
    while True:
        number += 1
        root = tmp_path / str(number)
        save(root, 1, seed=1)
        save(root, 2, seed=2)
        with monkeypatch.context() as patch:
            count = at_call(patch, number, killed)
            with suppress(Killed):
                save(root, 2, seed=3)
        folder.clean(root)
        found, wrong = folder.newest(root)
        assert found is not None and found.step == 2 and not wrong, number
        seed = next(seed for seed in (2, 3) if same(content(found.path), tensors(seed)))
        reached.add(seed)
        assert sorted(os.listdir(root)) == ["step-00000001", "step-00000002"]
        assert same(content(save(root, 2, seed=4)), tensors(4))
        if count[0] < number:
            break
        shutil.rmtree(root)
    assert number > 20 and reached == {2, 3}


@pytest.mark.parametrize(
    "code",
    [errno.ENOSPC, *(pytest.param(code, marks=pytest.mark.full) for code in (errno.EIO, errno.EROFS))],
    ids=["full", "broken", "read-only"],
)
def test_refused_at_any_call_it_says_so_and_the_older_one_is_as_it_was(code, tmp_path, monkeypatch):
    def refused(name):
        if name != "close":
            raise OSError(code, os.strerror(code))

    number = 0
    while True:
        number += 1
        root = tmp_path / str(number)
        save(root, 1, seed=1)
        message = ""
        with monkeypatch.context() as patch:
            count = at_call(patch, number, refused)
            try:
                save(root, 2, seed=2)
            except SaveError as error:
                message = str(error)
        found, wrong = folder.newest(root)
        assert found is not None and not wrong
        assert same(content(found.path), tensors(found.step))
        assert found.step == 2 or (os.strerror(code).lower() in message and str(root) in message and "free" in message)
        assert same(content(root / "step-00000001"), tensors(1))
        assert same(content(save(root, 3, seed=3)), tensors(3))
        if count[0] < number:
            break
    assert number > 15


# --- damaged on the disk ---------------------------------------------------------------------------------------------


def damages(path, count, seed):
    """Single bits flipped and files truncated, drawn over all files of a checkpoint, each file as often."""
    draw = random.Random(seed)
    files = sorted(path.iterdir())
    for i in range(count):
        file = files[i % len(files)]
        content_ = file.read_bytes()
        if i // len(files) % 2:
            yield file, content_[: draw.randrange(len(content_))]
        else:
            damaged = bytearray(content_)
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
            yield file, bytes(damaged)


def check_damages(tmp_path, count):
    """No damage is harmless: of every byte of every file there is a checksum, or it is a checksum itself."""
    path = save(tmp_path, 12345, tokens=1000, config={"train": {"seed": 7}})
    for file, damaged in damages(path, count, 5):
        whole_file = file.read_bytes()
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError) as error:
            content(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        file.write_bytes(whole_file)
    assert same(content(path), tensors())


def test_flipped_bits_and_truncations_are_found(tmp_path):
    check_damages(tmp_path, 200)


@pytest.mark.full
def test_two_thousand_flipped_bits_and_truncations_are_found(tmp_path):
    check_damages(tmp_path, 2000)


def test_every_bit_of_committed_counts(tmp_path):
    path = save(tmp_path) / "COMMITTED"
    text = path.read_bytes()
    for bit in range(0, 8 * len(text), 5):
        damaged = bytearray(text)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            folder.read(path.parent)


@pytest.mark.parametrize("name", ["COMMITTED", "index.json", "state.json", "rank-00000.safetensors"])
def test_a_missing_file_is_named(name, tmp_path):
    path = save(tmp_path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{path / name}: cannot be opened: No such file or directory"):
        content(path)


def test_a_file_of_another_step_is_refused(tmp_path):
    one, two = save(tmp_path, 1, seed=1), save(tmp_path, 2, seed=2)
    shutil.copy(one / "rank-00000.safetensors", two / "rank-00000.safetensors")
    assert folder.checked(two).step == 2  # size and header are the same
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: exp_avg/w: .* is damaged"):
        content(two)


# --- hostile ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["COMMITTED", "index.json", "state.json", "rank-00000.safetensors"])
def test_links_are_refused(name, tmp_path):
    path = save(tmp_path)
    os.rename(path / name, tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PathRefused, match=rf"{path / name}: a link"):
        content(path)
    assert PathRefused.exit_code == 77


def test_a_linked_checkpoint_is_refused(tmp_path):
    path = save(tmp_path / "there")
    (tmp_path / "here").symlink_to(path)
    with pytest.raises(PathRefused, match="here: a link; the folder itself would do"):
        folder.read(tmp_path / "here")


def test_a_pipe_does_not_block(tmp_path):
    path = save(tmp_path)
    (path / "state.json").unlink()
    os.mkfifo(path / "state.json")
    with pytest.raises(CheckpointError, match="no plain file"):
        folder.read(path)


def test_what_is_written_does_not_follow_links(tmp_path):
    """A link where the folder is to be written: what it leads to is as it was."""
    (victim := tmp_path / "victim").mkdir()
    (victim / "kept").write_text("kept")
    (root := tmp_path / "root").mkdir()
    (root / ".tmp-step-00000001").symlink_to(victim)
    with pytest.raises(SaveError):
        save(root, 1)
    folder.clean(root)
    assert os.listdir(victim) == ["kept"]
    assert same(content(save(root, 1)), tensors())


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    """Files of pickles beside ours are not opened, and no source file of the package knows how to."""
    path = save(tmp_path)
    for name in (".metadata", "model.pt", "optimizer.bin", "state.pkl"):
        (path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    opened = []
    true = os.open
    monkeypatch.setattr(
        os, "open", lambda name, *args, **kwargs: opened.append(str(name)) or true(name, *args, **kwargs)
    )
    content(path)
    assert {Path(name).name for name in opened} == {
        path.name,
        "COMMITTED",
        "index.json",
        "state.json",
        "rank-00000.safetensors",
    }
    package = Path(folder.__file__).parents[1]
    sources = [file for part in ("checkpoint", "train", "model", "data") for file in (package / part).rglob("*.py")]
    assert [p for p in sources if re.search(r"torch\.load|pickle\.load|Unpickler", p.read_text(encoding="utf-8"))] == []


def test_a_source_lets_go_of_its_files(tmp_path):
    path = save(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Source(folder.read(path)) as source:
            source.verify()
    assert len(os.listdir("/proc/self/fd")) == before

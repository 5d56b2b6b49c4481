"""index.json: names that lead nowhere else, and slices that make up every tensor, each element once."""

import itertools
import json
import random
from pathlib import Path

import pytest
from kept import save

from megalite.checkpoint import folder
from megalite.checkpoint.boxes import Box, whole
from megalite.checkpoint.index import File, Index, Slice, Tensor, check_coverage, joined
from megalite.errors import CheckpointError, PathRefused

PATH = Path("index.json")


def tensor(shape, boxes):
    return Tensor("F32", shape, tuple(Slice("a", str(i), box, 0) for i, box in enumerate(boxes)))


def split(box, draw):
    """Cut in two, anywhere."""
    dim = draw.choice([i for i, size in enumerate(box.shape) if size > 1])
    at = draw.randrange(1, box.shape[dim])
    second = list(box.offset)
    second[dim] += at
    shapes = [[*box.shape], [*box.shape]]
    shapes[0][dim], shapes[1][dim] = at, box.shape[dim] - at
    return Box(box.offset, tuple(shapes[0])), Box(tuple(second), tuple(shapes[1]))


@pytest.mark.parametrize("seed", range(50))
def test_slices_make_up_a_tensor_where_and_only_where_each_element_is_in_one(seed):
    draw = random.Random(seed)
    shape = tuple(draw.randrange(1, 5) for _ in range(draw.randrange(1, 4)))
    boxes = [whole(shape)]
    for _ in range(draw.randrange(6)):
        box = draw.choice(boxes)
        if box.size > 1:
            boxes.remove(box)
            boxes += split(box, draw)
    check_coverage("w", tensor(shape, boxes), PATH)
    for _ in range(20):
        wrong = [*boxes]
        i = draw.randrange(len(wrong))
        if draw.random() < 0.3:
            wrong.pop(i)
        elif draw.random() < 0.3:
            wrong.append(wrong[i])
        else:
            offset, size = list(wrong[i].offset), list(wrong[i].shape)
            changed = draw.choice([offset, size])
            dim = draw.randrange(len(shape))
            changed[dim] = draw.randrange(5)
            wrong[i] = Box(tuple(offset), tuple(size))
        elements = sorted(e for b in wrong for e in itertools.product(*(range(s.start, s.stop) for s in b.slices)))
        right = elements == list(itertools.product(*map(range, shape))) and all(box.size for box in wrong)
        if right:
            check_coverage("w", tensor(shape, wrong), PATH)
        else:
            with pytest.raises(CheckpointError, match="the slices of w do not make up its shape"):
                check_coverage("w", tensor(shape, wrong), PATH)


def test_a_scalar_has_one_slice():
    check_coverage("w", tensor((), [Box((), ())]), PATH)
    for boxes in ([], [Box((), ())] * 2):
        with pytest.raises(CheckpointError):
            check_coverage("w", tensor((), boxes), PATH)


def test_many_slices_are_checked_quickly():
    check_coverage("w", tensor((1, 40_000), [Box((0, i), (1, 1)) for i in range(40_000)]), PATH)


def test_indices_of_ranks_make_one():
    part = [
        Index({"w": Tensor("F32", (4,), (Slice(f, "k", Box((i * 2,), (2,)), i),))}, {f: File(9, 9)})
        for i, f in enumerate("ab")
    ]
    one = joined(part, PATH)
    assert [s.file for s in one.tensors["w"].slices] == ["a", "b"] and one.files.keys() == {"a", "b"}
    assert Index.from_json(one.to_json(), PATH) == one
    with pytest.raises(CheckpointError, match="the slices of w"):
        joined(part[:1], PATH)


def changed(index, change):
    content = json.loads(index.to_json())
    change(content)
    return json.dumps(content).encode()


NAMES = ["../x", "/etc/passwd", "a/../../x", "", ".", "..", "a\0b", "a\nb", "x" * 5 + "/", "~", ".hidden", "é"]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_may_lead_elsewhere_are_refused(name, tmp_path):
    index = folder.read(save(tmp_path)).index

    def change(content):
        content["files"][name] = content["files"].pop("rank-00000.safetensors")
        for each in content["tensors"].values():
            for part in each["slices"]:
                part["file"] = name

    with pytest.raises(PathRefused, match="one of letters, digits") as error:
        Index.from_json(changed(index, change), PATH)
    assert "\n" not in str(error.value)


def put(*path, value):
    def change(content):
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


FIRST = "tensors", "model/norm.weight", "slices", 0
CHANGES = {
    "another format": (put("format", value=2), "format 2; this megalite reads 1"),
    "a format that is true": (put("format", value=True), "format is True"),
    "a further key": (put("more", value=1), "an object of format, tensors, files would do"),
    "a file that is not listed": (put(*FIRST, "file", value="other"), "a slice is in other"),
    "a negative offset": (put(*FIRST, "offset", value=[-1]), "no shape or offset"),
    "an offset of too many dims": (put(*FIRST, "offset", value=[0, 0]), "no shape or offset"),
    "a broken shape": (put(*FIRST, "shape", value=[6.0]), "no shape or offset"),
    "a slice that is moved": (put(*FIRST, "offset", value=[1]), "the slices of model/norm.weight do not make up"),
    "a slice that is larger": (put(*FIRST, "shape", value=[7]), "the slices of model/norm.weight do not make up"),
    "no slices": (put(*FIRST[:3], value=[]), "the slices of model/norm.weight do not make up"),
    "a slice that is none": (put(*FIRST, value=3), "a slice is 3"),
    "a checksum of text": (put(*FIRST, "crc32", value="0"), "crc32 is '0'; a whole number would do"),
    "a shape of too many elements": (put(*FIRST[:2], "shape", value=[2**62, 2**62]), "more elements"),
    "a shape of many dims": (put(*FIRST[:2], "shape", value=[1] * 99), "no shape or offset"),
    "another dtype": (put(*FIRST[:2], "dtype", value="F4"), "dtype 'F4'; one of F64"),
    "sizes of text": (put("files", "rank-00000.safetensors", "bytes", value="1"), "bytes is '1'"),
    "a tensor of a strange name": (put("tensors", "a b", value={}), "letters, digits and ._/- would do"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_index_that_cannot_be_true_is_refused(what, tmp_path):
    change, message = CHANGES[what]
    text = changed(folder.read(save(tmp_path)).index, change)
    with pytest.raises(CheckpointError, match=message) as error:
        Index.from_json(text, PATH)
    assert "\n" not in str(error.value)


def mutate(value, draw):
    """Something in a JSON value is another."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        return {**value, key: mutate(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        i = draw.randrange(len(value))
        return [*value[:i], mutate(value[i], draw), *value[i + 1 :]]
    return draw.choice([None, True, -1, 0, 1, 2**63, 1.5, "", "a", "../a", [], [[]], {}, [0], [2**62] * 3])


def check_fuzz(tmp_path, count, seed):
    """Mutated indices: a CheckpointError, or an index that says what its text does."""
    draw = random.Random(seed)
    index = folder.read(save(tmp_path)).index
    content = json.loads(index.to_json())
    for _ in range(count):
        text = json.dumps(mutate(content, draw)).encode()
        if draw.random() < 0.2:
            at = draw.randrange(len(text))
            text = text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :]
        try:
            found = Index.from_json(text, PATH)
        except CheckpointError:
            continue
        assert json.loads(found.to_json()) == json.loads(text)


def test_mutated_indices_raise_nothing_else(tmp_path):
    check_fuzz(tmp_path, 300, 1)


@pytest.mark.full
def test_ten_thousand_mutated_indices_raise_nothing_else(tmp_path):
    check_fuzz(tmp_path, 10_000, 2)

"""A schedule from a file and from a function, and the one line for each way in which it cannot be had."""

import pytest

from megalite.parallel.pipeline import check, interleaved_1f1b, load, one_f_one_b, read, zb_v

FUNCTION = """
from megalite.parallel.pipeline import gpipe

def rows(stages, microbatches):
    return [[f"{s}{kind}{m}" for kind in ("F", "BW") for m in range(microbatches)] for s in range(stages)]

def whole(stages, microbatches):
    return gpipe(stages, microbatches)

def broken(stages, microbatches):
    return 1 / 0

number = 3
"""


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), zb_v(2, 5), interleaved_1f1b(2, 3, 2)], ids=lambda s: s.name)
def test_what_is_written_is_read(tmp_path, schedule):
    path = tmp_path / "mine.csv"
    path.write_text("# a comment\n\n" + str(schedule).replace(" ", ",,") + "  # and another\n")
    there = read(path)
    assert (there.ranks, there.rank_of, there.microbatches) == (schedule.ranks, schedule.rank_of, schedule.microbatches)
    assert there.name == "mine"
    check(there)


def test_names():
    assert load("1f1b", 3, 4) == one_f_one_b(3, 4)
    assert load("interleaved-1f1b", 3, 4) == interleaved_1f1b(3, 4, 2)
    assert load("interleaved-1f1b", 3, 4, 3) == interleaved_1f1b(3, 4, 3)


def test_functions(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTION)
    assert load(f"{path}:rows", 2, 3).ranks == load(f"{path}:whole", 2, 3).ranks == load("gpipe", 2, 3).ranks
    assert load(f"{path}:rows", 2, 3).name == "rows"


@pytest.mark.parametrize(
    ("source", "sizes", "says"),
    [
        ("1f1b", (None, 4), "1f1b: needs the numbers of stages and of microbatches"),
        ("1f1b", (2, 4, 2), "chunks: 2 given; only interleaved-1f1b has them"),
        ("zb-h1", (2, 0), "microbatches: 0 given"),
        ("interleaved-1f1b", (2, 4, -1), "chunks: -1 given; 1 or more would do"),
        ("2f2b", (2, 4), "2f2b: no such schedule and no such file; gpipe, 1f1b, "),
        ("bad.csv", (), "bad.csv: rank 1: '1FO' given; an action like 2F0"),
        ("empty.csv", (), "no action given"),
        (".", (), "Is a directory"),
        ("mine.py:rows", (), "mine.py:rows: needs the numbers"),
        ("mine.py:column", (2, 3), "mine.py: no function column"),
        ("mine.py:number", (2, 3), "mine.py: no function number"),
        ("mine.py:broken", (2, 3), "broken: ZeroDivisionError: division by zero"),
        ("yours.py:rows", (2, 3), "yours.py: no such file"),
        ("syntax.py:rows", (2, 3), "syntax.py: SyntaxError: "),
    ],
)
def test_what_cannot_be_had(tmp_path, monkeypatch, source, sizes, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTION)
    (tmp_path / "syntax.py").write_text("def rows(")
    (tmp_path / "bad.csv").write_text("0F0 0BW0\n1FO 1BW0")
    (tmp_path / "empty.csv").write_text("# nothing\n")
    with pytest.raises(ValueError) as error:  # noqa: PT011  the message is looked at
        load(source, *sizes, *[None] * (3 - len(sizes)))
    assert says in str(error.value)
    assert "\n" not in str(error.value)

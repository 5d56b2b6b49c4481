"""A schedule from a file and from a function, and the one line for each way in which it cannot be had."""

import pytest

from megalite.parallel.pipeline import check, interleaved_1f1b, load, one_f_one_b, read, zb_v

FUNCTION = """
from megalite.parallel.pipeline import Action, Schedule, gpipe

def rows(stages, microbatches):
    return [[f"{s}{kind}{m}" for kind in ("F", "BW") for m in range(microbatches)] for s in range(stages)]

def whole(stages, microbatches):
    return gpipe(stages, microbatches)

def broken(stages, microbatches):
    return 1 / 0

def lines(stages, microbatches):
    raise RuntimeError("two\\nlines")

def late(stages, microbatches):
    return ([f"{1 / 0}F{m}"] for m in range(microbatches))

def inexact(stages, microbatches):
    return Schedule("own", gpipe(2, 3).ranks, (0, 1.0), 3)

def foreign(stages, microbatches):
    return Schedule("own", (("0F0", 3),), (0,), 3)

def unknown(stages, microbatches):
    return [[Action("X", 0, 0)]]

number = 3
"""
RETURNED = {
    "nothing": "None",
    "one": "7",
    "numbers": "[1, 2]",
    "cells": "[[0, 1], [2]]",
    "tuples": '[[("F", 0, 0)]]',
    "words": '"0F0 0BW0"',
    "octets": 'b"0F0"',
    "empty": "[]",
}


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
        ("mine.py:lines", (2, 3), "lines: RuntimeError: two lines"),
        ("mine.py:late", (2, 3), "returned, ZeroDivisionError: division by zero; a Schedule, or a row of actions"),
        ("mine.py:inexact", (2, 3), "TypeError: 'float' object cannot be interpreted as an integer; a Schedule"),
        ("mine.py:foreign", (2, 3), "ValueError: '3' given; an action like 2F0"),
        ("mine.py:unknown", (2, 3), "rank 0: '0X0' given; an action like 2F0"),
        ("returned.py:nothing", (2, 3), "nothing: None returned, TypeError: 'NoneType' object is not iterable; a Sch"),
        ("returned.py:one", (2, 3), "one: 7 returned, TypeError: 'int' object is not iterable; a Schedule, or a row "),
        ("returned.py:numbers", (2, 3), "numbers: [1, 2] returned, TypeError: 'int' object is not iterable; a Sched"),
        ("returned.py:cells", (2, 3), "rank 0: '1' given; an action like 2F0"),
        ("returned.py:tuples", (2, 3), "rank 0: \"('F', 0, 0)\" given; an action like 2F0"),
        ("returned.py:words", (2, 3), "words: '0F0 0BW0' returned, TypeError: one text; a Schedule, or a row of act"),
        ("returned.py:octets", (2, 3), "octets: b'0F0' returned, TypeError: 'int' object is not iterable; a Schedule"),
        ("returned.py:empty", (2, 3), "empty: no action given; a row for each rank would do"),
        ("yours.py:rows", (2, 3), "yours.py: no such file"),
        ("syntax.py:rows", (2, 3), "syntax.py: SyntaxError: "),
    ],
)
def test_what_cannot_be_had(tmp_path, monkeypatch, source, sizes, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTION)
    functions = [f"def {name}(stages, microbatches):\n    return {value}\n" for name, value in RETURNED.items()]
    (tmp_path / "returned.py").write_text("".join(functions))
    (tmp_path / "syntax.py").write_text("def rows(")
    (tmp_path / "bad.csv").write_text("0F0 0BW0\n1FO 1BW0")
    (tmp_path / "empty.csv").write_text("# nothing\n")
    with pytest.raises(ValueError) as error:  # noqa: PT011  the message is looked at
        load(source, *sizes, *[None] * (3 - len(sizes)))
    assert says in str(error.value)
    assert "\n" not in str(error.value)

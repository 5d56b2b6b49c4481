"""Actions print and are read; a schedule is made of rows, and rows that cannot be one are answered in a line."""

import pytest

from megalite.parallel.pipeline import Action, one_f_one_b, schedule_of, zb_v
from megalite.parallel.pipeline.schedule import KINDS, contiguous, vee, without_microbatches


@pytest.mark.parametrize("kind", KINDS)
def test_an_action_prints_and_is_read_again(kind):
    assert str(Action(kind, 12, 34)) == f"12{kind}34"
    assert Action.parse(f"12{kind}34") == Action(kind, 12, 34)


def test_an_action_has_the_name_that_the_papers_give_it():
    assert str(Action("F", 2, 0)) == f"{Action('F', 2, 0)}" == "2F0"


@pytest.mark.parametrize("text", ["F0", "2X0", "2F", "2f0", "2WB0", "-1F0", "2F0 "])
def test_what_is_no_action(text):
    with pytest.raises(ValueError, match="an action like 2F0"):
        Action.parse(text)


def test_rows_of_text_and_of_actions():
    schedule = schedule_of(["0F0, 0F1,,0BW0;0BW1", [Action("F", 1, 0), "1BW0", "1F1", "1BW1"]], "mine")
    assert str(schedule) == "0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1 1BW1"
    assert (schedule.name, schedule.stages, schedule.microbatches, schedule.rank_of) == ("mine", 2, 2, (0, 1))


def test_rows_of_what_was_printed_are_the_same_schedule():
    schedule = zb_v(3, 7)
    assert schedule_of(str(schedule).splitlines(), schedule.name) == schedule


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "no action given"),
        (["", " "], "no action given"),
        (["0F0 0BWO"], "rank 0: '0BWO' given"),
        (["0F0", "0BW0"], "stage 0 is computed on rank 0 and on rank 1"),
        (["0F0 0BW0", "2F0 2BW0"], "stage 1 is computed nowhere, but stage 2 is"),
    ],
)
def test_rows_that_are_no_schedule(rows, says):
    with pytest.raises(ValueError, match=says) as error:
        schedule_of(rows)
    assert "\n" not in str(error.value)


def test_stages_on_ranks():
    assert contiguous(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3) == (0, 1, 2, 2, 1, 0)
    assert [zb_v(3, 5).stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_without_microbatches_keeps_the_order():
    assert str(without_microbatches(one_f_one_b(2, 3), 1)) == "0F0 0BW0\n1F0 1BW0"
    assert without_microbatches(one_f_one_b(2, 3), 3) == one_f_one_b(2, 3)

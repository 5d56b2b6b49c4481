"""Actions print and are read; a schedule is made of rows, and rows that cannot be one are answered in a line."""

import pytest

from megalite.parallel.pipeline import GENERATORS, Action, check, one_f_one_b, schedule_of, zb_v
from megalite.parallel.pipeline.schedule import KINDS, contiguous, forward_only, messages, vee, without_microbatches


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


def routes(schedule):
    """The messages as text: by "sender>receiver" pairs of what is sent and what uses it."""
    return {
        f"{source}>{to}": " ".join(f"{made}:{used}" for made, used in sent)
        for (source, to), sent in messages(schedule).items()
    }


def test_messages_are_those_between_neighbours_in_order_of_making():
    assert routes(one_f_one_b(2, 2)) == {"0>1": "0F0:1F0 0F1:1F1", "1>0": "1B0:0BW0 1B1:0BW1"}
    assert routes(schedule_of(["0F1 0F0 0BW0 0BW1", "1F0 1F1 1B1 1W1 1BW0"])) == {
        "0>1": "0F1:1F1 0F0:1F0",
        "1>0": "1B1:0BW1 1B0:0BW0",  # a BW makes what others call B
    }
    assert routes(one_f_one_b(1, 3)) == {}


def test_a_rank_sends_nothing_to_itself():
    assert routes(zb_v(2, 1)) == {"0>1": "0F0:1F0 3B0:2B0", "1>0": "2F0:3F0 1B0:0B0"}
    assert routes(schedule_of(["0F0 1F0 1BW0 0BW0"])) == {}


@pytest.mark.parametrize("name", GENERATORS)
def test_every_schedule_has_a_message_for_each_microbatch_border_and_direction(name):
    for p, m in ((2, 1), (3, 5), (4, 8)):
        schedule = GENERATORS[name](p, m, *([2] if name == "interleaved-1f1b" else []))
        found = [pair for sent in messages(schedule).values() for pair in sent]
        borders = [s for s in range(schedule.stages - 1) if schedule.rank_of[s] != schedule.rank_of[s + 1]]
        expected = [(Action("F", s, i), Action("F", s + 1, i)) for s in borders for i in range(m)]
        expected += [(Action("B", s + 1, i), Action("B", s, i)) for s in borders for i in range(m)]
        assert sorted((made, used.made) for made, used in found) == sorted(expected)
        for (source, to), sent in messages(schedule).items():
            order = [action.made for action in schedule.ranks[source]]
            assert [made for made, _ in sent] == sorted((made for made, _ in sent), key=order.index)
            assert all(used in schedule.ranks[to] for _, used in sent)


def test_forwards_alone():
    forwards = forward_only(zb_v(2, 2))
    assert str(forwards) == "0F0 0F1 3F0 3F1\n1F0 2F0 1F1 2F1"
    assert (forwards.rank_of, forwards.microbatches, forwards.stages) == (vee(2), 2, 4)
    assert routes(forwards) == {"0>1": "0F0:1F0 0F1:1F1", "1>0": "2F0:3F0 2F1:3F1"}
    with pytest.raises(ValueError, match="missing"):  # it is for validation
        check(forwards)

"""The check finds what is missing, twice there, out of order or a deadlock, and agrees with a graph on any order."""

import dataclasses
import graphlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.parallel.pipeline import (
    GENERATORS,
    Action,
    Schedule,
    check,
    interleaved_1f1b,
    one_f_one_b,
    schedule_of,
    zb_h1,
)


@st.composite
def published(draw):
    """Any schedule of any generator, small."""
    name = draw(st.sampled_from(sorted(GENERATORS)))
    sizes = [draw(st.integers(1, 4)), draw(st.integers(1, 6))]
    return GENERATORS[name](*sizes, *([draw(st.integers(1, 3))] if name == "interleaved-1f1b" else []))


def replaced(schedule, rank, actions):
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(actions)
    return dataclasses.replace(schedule, ranks=tuple(ranks))


def refused(schedule, *says):
    with pytest.raises(ValueError) as error:  # noqa: PT011  the message is looked at
        check(schedule)
    for text in says:
        assert text in str(error.value)
    assert "\n" not in str(error.value)


@settings(deadline=None)
@given(published(), st.data())
def test_a_missing_action_is_found(schedule, data):
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    actions = list(schedule.ranks[rank])
    gone = actions.pop(data.draw(st.integers(0, len(actions) - 1)))
    refused(replaced(schedule, rank, actions), f"rank {rank}: ", str(gone), "missing")


@settings(deadline=None)
@given(published(), st.data())
def test_a_duplicate_is_found(schedule, data):
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    actions = list(schedule.ranks[rank])
    twice = data.draw(st.sampled_from(actions))
    actions.insert(data.draw(st.integers(0, len(actions))), twice)
    refused(replaced(schedule, rank, actions), f"rank {rank}: {twice} stands there twice")


def edges(schedule):
    """What each action needs, and what stands before it on its rank, from the definition."""
    names = {(a.kind.replace("BW", "B"), a.stage, a.microbatch): a for actions in schedule.ranks for a in actions}
    graph = {}
    for actions in schedule.ranks:
        for before, action in zip((None, *actions), actions, strict=False):
            kind, stage, microbatch = action
            needs = {before} - {None}
            if kind == "F" and stage:
                needs.add(names["F", stage - 1, microbatch])
            if kind in ("B", "BW"):
                needs.add(names["F", stage, microbatch])
                if stage < schedule.stages - 1:
                    needs.add(names["B", stage + 1, microbatch])
            if kind == "W":
                needs.add(names["B", stage, microbatch])
            graph[action] = needs
    return graph


@settings(deadline=None, max_examples=300)
@given(published(), st.data())
def test_a_swap_is_refused_exactly_where_its_graph_has_a_cycle(schedule, data):
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
        actions = list(schedule.ranks[rank])
        i, j = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        actions[i], actions[j] = actions[j], actions[i]
        schedule = replaced(schedule, rank, actions)
    try:
        list(graphlib.TopologicalSorter(edges(schedule)).static_order())
    except graphlib.CycleError:
        refused(schedule)
    else:
        check(schedule)


def test_a_deadlock_is_one_line_with_its_cycle():
    refused(
        schedule_of(["0F0 0BW0 0F1 0BW1", "1F0 1F1 1BW0 1BW1"]),
        "deadlock: rank 0 waits at 0BW0 for 1BW0 of rank 1, and rank 1 waits at 1F1 for 0F1 of rank 0",
    )


def test_a_deadlock_names_the_cycle_and_not_who_waits_for_it():
    refused(
        schedule_of(["0F0 0BW0", "1F0 1BW0", "2F0 3F0 2BW0 3BW0"]),
        "deadlock: rank 2 waits at 2BW0 for 3BW0 of rank 2",
    )


def test_order_on_a_rank():
    refused(schedule_of(["0BW0 0F0"]), "rank 0: 0BW0 stands before 0F0, which it needs")
    refused(schedule_of(["0F0 0W0 0B0"]), "rank 0: 0W0 stands before 0B0, which it needs")


def test_a_backward_is_there_once():
    refused(schedule_of(["0F0 0B0"]), "0W0 missing; 0BW0 would be both gradients in one action")
    refused(schedule_of(["0F0"]), "0B0 and 0W0 missing")
    refused(schedule_of(["0F0 0BW0 0W0"]), "0BW0 is both gradients, and 0W0 stands beside it")


def test_a_last_microbatch_that_nobody_computes_is_missed_where_the_number_is_known():
    refused(schedule_of(["0F0 0BW0"], microbatches=2), "0F1 is missing")


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (Action("F", 1, 0), "1F0 is of a stage that rank 1 holds"),
        (Action("F", 2, 0), "2F0 is of stage 2; there are 2"),
        (Action("F", 0, 3), "0F3 is of microbatch 3; there are 3"),
        (Action("I", 0, 0), "0I0 is of kind 'I'; one of F, B, W, BW would do"),  # type: ignore[arg-type]
    ],
)
def test_an_action_where_it_cannot_be(action, says):
    schedule = one_f_one_b(2, 3)
    refused(replaced(schedule, 0, [*schedule.ranks[0], action]), says)


def test_a_stage_on_no_rank():
    refused(Schedule("mine", ((Action("F", 0, 0),),), (1,), 1), "stage 0 is on rank 1; there are 1 ranks")


def test_whole_and_divided_backwards_meet():
    check(schedule_of(["0F0 0B0 0W0", "1F0 1BW0"]))
    check(schedule_of(["0F0 0BW0", "1F0 1B0 1W0"]))


def test_what_is_returned_are_activations_in_flight():
    assert check(zb_h1(4, 8)) == [4, 4, 4, 4]
    assert check(one_f_one_b(4, 8)) == [4, 3, 2, 1]
    assert max(check(interleaved_1f1b(4, 8, 2))) == 5.5

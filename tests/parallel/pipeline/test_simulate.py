"""The simulator against what was published, against the longest path of a graph, and at size."""

import functools
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_check import edges, published

from megalite.parallel.pipeline import Costs, gpipe, interleaved_1f1b, one_f_one_b, schedule_of, simulate, zb_h1, zb_h2

# Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024): measured milliseconds of F, B, W and a send from Table 9, and
# bubble rates of 1F1B, ZB-H1 and ZB-H2 from Table 5. The rate is (S − m(F+B+W)) / S, where S is the longest over the
# ranks of the time from a rank's own first action to its own last.
PUBLISHED = [
    # p, m, F, B, W, send, 1F1B, ZB-H1, ZB-H2
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{'1.5B' if row[2] < 20 else '6.2B'}-{row[1]}")
def test_published_bubble_rates(row):
    p, m, forward, backward, weight, send, *rates = row
    for generator, rate in zip((one_f_one_b, zb_h1, zb_h2), rates, strict=True):
        bubble = simulate(generator(p, m), Costs(forward, backward, weight, send)).bubble()
        print(f"{generator.__name__:12} m {m}: simulated {bubble.over_own:.5f}, published {rate:.4f}")
        assert bubble.over_own == pytest.approx(rate, abs=0.00005 + 1e-9)  # to the last digit of the table


def longest_paths(schedule, costs):
    """When each action ends, from the definition: after all that it needs, each with its send."""
    graph = edges(schedule)
    rank_of = schedule.rank_of

    @functools.cache
    def end(action):
        begin = 0.0
        for need in graph[action]:
            between = costs.send(need.stage) if rank_of[need.stage] != rank_of[action.stage] else 0.0
            begin = max(begin, end(need) + between)
        seconds = {"F": costs.forward, "B": costs.backward_input, "W": costs.backward_weight}
        return begin + sum(seconds[kind](action.stage) for kind in action.kind)

    return [[end(action) for action in actions] for actions in schedule.ranks]


@settings(deadline=None, max_examples=200)
@given(published(), st.lists(st.floats(0, 10), min_size=4, max_size=40))
def test_every_action_ends_where_its_longest_path_does(schedule, times):
    costs = Costs(*(lambda stage, i=i: times[(4 * stage + i) % len(times)] for i in range(4)))
    timeline = simulate(schedule, costs)
    ends = longest_paths(schedule, costs)
    for spans, actions, of_rank in zip(timeline.ranks, schedule.ranks, ends, strict=True):
        assert [span.action for span in spans] == list(actions)
        assert [span.end for span in spans] == pytest.approx(of_rank)
        assert all(before.end <= after.start for before, after in itertools.pairwise(spans))


def test_a_send_takes_no_time_of_its_rank_and_none_on_it():
    timeline = simulate(gpipe(2, 2), Costs(1.0, 1.0, 1.0, 0.5))
    assert [(span.start, span.end) for span in timeline.ranks[1][:2]] == [(1.5, 2.5), (2.5, 3.5)]
    assert timeline.ranks[0][1].start == 1.0
    alone = simulate(interleaved_1f1b(1, 2, 2), Costs(1.0, 1.0, 1.0, 0.5))
    assert alone.bubble().over_total == 0


def test_costs_of_a_stage():
    timeline = simulate(one_f_one_b(2, 1), Costs(lambda stage: 1 + stage, 3, lambda stage: 0.5, lambda stage: stage))
    starts = {str(span.action): (span.start, span.end) for spans in timeline.ranks for span in spans}
    assert starts == {"0F0": (0, 1), "1F0": (1, 3), "1BW0": (3, 6.5), "0BW0": (7.5, 11)}  # 1 sends for 1, 0 for 0


def test_costs_as_a_list_and_both_backwards_at_once():
    timeline = simulate(one_f_one_b(2, 1), Costs([1, 2], 3, 0.5, backward=[2.5, 3]))
    assert [[span.end - span.start for span in spans] for spans in timeline.ranks] == [[1, 2.5], [2, 3]]
    apart = simulate(zb_h1(2, 1), Costs(1, 3, 0.5, backward=100))
    assert sum(apart.bubble().busy) == 9
    with pytest.raises(ValueError, match="forward: 3 given; 2 would do, one for each stage"):
        simulate(one_f_one_b(2, 1), Costs([1, 2, 3], 1, 1))


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(wrong):
    with pytest.raises(ValueError, match=r"backward_weight of stage 1: .* given; a time of 0 or more would do"):
        simulate(one_f_one_b(2, 2), Costs(1, 1, lambda stage: wrong if stage else 1.0))


def test_a_deadlock_is_refused_here_too():
    with pytest.raises(ValueError, match="deadlock: "):
        simulate(schedule_of(["0F0 0BW0 0F1 0BW1", "1F0 1F1 1BW0 1BW1"]), Costs(1, 1, 1))
    with pytest.raises(ValueError, match="rank 0 waits at 0BW0 for 0F0, which is on no list"):
        simulate(schedule_of(["0BW0", "1F0 1BW0"]), Costs(1, 1, 1))


@pytest.mark.parametrize("microbatches", [410, pytest.param(4096, marks=pytest.mark.full)])
def test_half_a_million_actions_take_seconds(microbatches):
    """By default a tenth of them, in a tenth of the time."""
    schedule = one_f_one_b(64, microbatches)
    begin = time.process_time()
    timeline = simulate(schedule, Costs(1.0, 1.0, 1.0, 0.0))
    simulated = time.process_time() - begin
    over_total = timeline.bubble().over_total
    total = time.process_time() - begin
    print(f"1F1B, 64 stages × {microbatches} microbatches: {simulated:.1f} s of CPU, and {total:.1f} in all")
    assert over_total == pytest.approx(63 / (microbatches + 63), abs=1e-12)
    assert simulated < 20 * microbatches / 4096

"""The account of idle time: it adds up on every rank, and what was done on purpose is found under its name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_check import published

from megalite.parallel.pipeline import Costs, Span, Timeline, gpipe, one_f_one_b, simulate, zb_h1, zb_v
from megalite.parallel.pipeline.replay import begin_times
from megalite.parallel.pipeline.saved import timeline as timeline_of
from megalite.parallel.pipeline.schedule import Action, Schedule

EQUAL = Costs(1.0, 1.0, 1.0)


@settings(deadline=None, max_examples=300)
@given(published(), st.lists(st.floats(0.01, 10), min_size=4, max_size=40), st.booleans())
def test_busy_and_idle_add_up_to_the_step_on_every_rank(schedule, times, free):
    send = 0.0 if free else lambda stage: times[-1 - stage % len(times)] / 5
    forward, backward, weight = (lambda stage, i=i: times[(3 * stage + i) % len(times)] for i in range(3))
    costs = Costs(forward, backward, weight, send)
    timeline = simulate(schedule, costs)
    bubble = timeline.bubble()
    for busy, idle in zip(bubble.busy, bubble.idle, strict=True):
        assert min(idle) >= 0
        assert busy + sum(idle) == pytest.approx(bubble.step)
        assert not free or idle.communication == 0
    assert min(idle.imbalance for idle in bubble.idle) == 0
    assert sum(bubble.causes.values()) == pytest.approx(bubble.over_total)
    assert bubble.over_total == pytest.approx(bubble.over_ideal / (1 + bubble.over_ideal))
    assert bubble.step == timeline.end - timeline.start >= max(bubble.own)


def test_equal_stages_and_free_sends_fill_and_drain():
    for idle, rank in zip(simulate(one_f_one_b(4, 8), EQUAL).bubble().idle, range(4), strict=True):
        assert tuple(idle) == (6 - rank, 3 + rank, 0, 0, 0)
    assert simulate(gpipe(4, 8), EQUAL).bubble().causes["drain"] == pytest.approx(3 / 33)  # the backwards' share


def test_sends_are_exposed_communication_by_as_much_as_they_lengthen_the_step():
    free, slow = (simulate(one_f_one_b(4, 8), Costs(1, 1, 1, send)) for send in (0.0, 0.25))
    longer = slow.end - free.end
    assert longer > 0
    for without, idle in zip(free.bubble().idle, slow.bubble().idle, strict=True):
        assert idle.communication == pytest.approx(longer)
        assert tuple(idle)[:4] == pytest.approx(tuple(without)[:4])


def test_a_slow_stage_is_imbalance_on_the_others():
    bubble = simulate(one_f_one_b(4, 8), Costs(lambda stage: 1.5 if stage == 2 else 1.0, 1, 1)).bubble()
    assert [idle.imbalance for idle in bubble.idle] == pytest.approx([4, 4, 0, 4])
    assert [idle.communication for idle in bubble.idle] == [0, 0, 0, 0]


def test_waits_of_the_order_itself():
    """ZB-V of stages whose W is short waits between fill and drain, though stages are equal and sends free."""
    bubble = simulate(zb_v(4, 12), Costs(1.0, 1.5, 0.3)).bubble()
    assert bubble.causes["order"] > 0.003
    assert bubble.causes["imbalance"] == bubble.causes["communication"] == 0


def test_a_measured_timeline_is_accounted_for_like_a_simulated_one():
    """Spans from any clock: begin at 100 s, and 0.1 s of nothing before every action."""
    simulated = simulate(zb_h1(3, 6), EQUAL)
    late = [[Span(a, 100 + 1.1 * start + 0.1, 100 + 1.1 * end) for a, start, end in spans] for spans in simulated.ranks]
    bubble = Timeline(simulated.schedule, late).bubble()
    assert bubble.step == pytest.approx(1.1 * (simulated.end - simulated.start) - 0.1)
    for busy, idle in zip(bubble.busy, bubble.idle, strict=True):
        assert busy + sum(idle) == pytest.approx(bubble.step)
        assert idle.communication > 0


def test_the_conventions():
    bubble = simulate(one_f_one_b(4, 8), EQUAL).bubble()
    assert (bubble.over_total, bubble.over_ideal) == pytest.approx((3 / 11, 3 / 8))
    assert simulate(zb_v(4, 8), EQUAL).bubble().over_own == pytest.approx(0)


def test_a_step_that_takes_no_time_and_a_rank_that_computes_nothing():
    bubble = simulate(one_f_one_b(2, 2), Costs(0, 0, 0)).bubble()
    assert bubble.over_total == bubble.over_ideal == bubble.over_own == sum(bubble.causes.values()) == 0
    alone = Schedule("mine", ((Action("F", 0, 0), Action("BW", 0, 0)), ()), (0,), 1)
    bubble = simulate(alone, EQUAL).bubble()
    assert bubble.over_total == 0.5 and sum(bubble.idle[1]) == 3


@settings(deadline=None, max_examples=300)
@given(published(), st.floats(0, 0.3), st.floats(0, 1e-3), st.floats(0, 0.05), st.randoms(use_true_random=False))
def test_jitter_and_clocks_that_differ_leave_a_sound_account(schedule, jitter, apart, pause, random):
    """Actions of random length, pauses between them, and ranks whose clocks are up to 2 ms apart."""
    names = {"F": 1.0, "B": 1.2, "W": 0.7, "BW": 1.8}
    seconds = [[names[a.kind] * random.uniform(1, 1 + jitter) for a in actions] for actions in schedule.ranks]
    lasting = [[s + random.uniform(0, pause) for s in row] for row in seconds]
    begin, _ = begin_times(schedule.ranks, schedule.rank_of, schedule.microbatches, lasting, [0.0] * schedule.stages)
    ranks = []
    for begins, lengths in zip(begin, seconds, strict=True):
        clock = 1e5 + random.uniform(-apart, apart)
        times = [
            moment + clock for start, length in zip(begins, lengths, strict=True) for moment in (start, start + length)
        ]
        ranks.append(times)
    timeline = timeline_of(schedule, ranks, begin=1e5 - 0.5, finish=1e5 + 1e3)
    bubble = timeline.bubble()
    for busy, idle in zip(bubble.busy, bubble.idle, strict=True):
        assert min(idle) >= 0
        assert busy + sum(idle) == pytest.approx(bubble.step)
    assert min(idle.imbalance for idle in bubble.idle) == 0
    assert 0 <= bubble.over_total < 1 and timeline.over_total == pytest.approx(bubble.over_total)
    assert sum(bubble.causes.values()) == pytest.approx(bubble.over_total, abs=1e-9)
    assert bubble.data + bubble.step + bubble.optimizer == pytest.approx(1e3 + 0.5)


def test_an_action_that_begins_before_what_it_needs_has_ended_has_no_communication():
    simulated = simulate(one_f_one_b(2, 2), EQUAL)
    early = [
        [Span(a, start - 0.01 * rank, end - 0.01 * rank) for a, start, end in spans]
        for rank, spans in enumerate(simulated.ranks)
    ]
    late_end = [
        [span._replace(end=span.end - 0.02) if span.end == simulated.end else span for span in early[0]],
        early[1],
    ]
    bubble = Timeline(simulated.schedule, late_end).bubble()
    assert [idle.communication for idle in bubble.idle] == [0, 0]
    for busy, idle in zip(bubble.busy, bubble.idle, strict=True):
        assert busy + sum(idle) == pytest.approx(bubble.step)


def test_data_and_optimizer_stand_beside_the_pipelines_own_window():
    simulated = simulate(one_f_one_b(4, 8), EQUAL)
    around = Timeline(simulated.schedule, simulated.ranks, begin=-2.0, finish=simulated.end + 3.0)
    bubble, without = around.bubble(), simulated.bubble()
    assert (bubble.data, bubble.optimizer, bubble.whole) == (2, 3, simulated.end + 5)
    assert (without.data, without.optimizer, without.whole) == (0, 0, simulated.end)
    assert (bubble.over_total, bubble.over_ideal, bubble.causes) == (
        without.over_total,
        without.over_ideal,
        without.causes,
    )
    assert around.extent == (-2, simulated.end + 3) and simulated.extent == (0, simulated.end)
    assert Timeline(simulated.schedule, simulated.ranks, begin=1e-6, finish=simulated.end - 1e-6).bubble() == without

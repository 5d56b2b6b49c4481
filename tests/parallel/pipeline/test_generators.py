"""The published schedules: every size passes the check, and bubbles and activations in flight are the published ones.

Formulas over ideal time, with F, B and W per stage: Narayanan et al. 2021 (SC21) §2.2; Korthikanti et al. 2022 §4.2.3;
Qi et al. 2024 (Zero Bubble) Table 2 and §6; the README of deepseek-ai/DualPipe.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.parallel.pipeline import (
    Costs,
    activations,
    check,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_h2,
    zb_v,
)
from megalite.parallel.pipeline.generators import one_after_another

FLAT = [gpipe, one_f_one_b, zb_h1, zb_h2, zb_v, dualpipe_v]
SIZES = [(1, 1), (1, 5), (2, 1), (2, 2), (3, 7), (4, 4), (4, 8), (4, 13), (8, 8), (8, 24), (8, 31)]
EQUAL = Costs(1.0, 1.0, 1.0)
ranks, many = st.integers(1, 8), st.integers(1, 24)


@pytest.mark.parametrize("generator", FLAT)
@settings(deadline=None, max_examples=150)
@given(ranks, many)
def test_every_size_passes_the_check(generator, stages, microbatches):
    schedule = generator(stages, microbatches)
    in_flight = check(schedule)
    assert len(in_flight) == stages and max(in_flight) <= microbatches
    assert schedule.stages == stages * (2 if generator in (zb_v, dualpipe_v) else 1)
    assert schedule.microbatches == microbatches


@settings(deadline=None, max_examples=400)
@given(ranks, many, st.integers(1, 4))
def test_every_size_of_interleaved_passes_the_check(stages, microbatches, chunks):
    schedule = interleaved_1f1b(stages, microbatches, chunks)
    assert max(check(schedule)) <= microbatches
    assert (len(schedule.ranks), schedule.stages, schedule.microbatches) == (stages, stages * chunks, microbatches)


# --- bubbles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_and_1f1b_idle_for_p_minus_1_of_m_plus_p_minus_1(generator, p, m):
    bubble = simulate(generator(p, m), EQUAL).bubble()
    assert bubble.over_total == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert bubble.over_ideal == pytest.approx((p - 1) / m, abs=1e-12)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_interleaved_divides_the_bubble_by_the_chunks_for_every_m_from_p_on(p, m, v):
    bubble = simulate(interleaved_1f1b(p, m, v), EQUAL).bubble()
    assert bubble.over_total == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
    assert bubble.over_ideal == pytest.approx((p - 1) / (v * m), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p])
@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.7)])
def test_zero_bubble_h1_and_h2_idle_as_table_2_says(p, m, f, b, w):
    costs, ideal = Costs(f, b, w), m * (f + b + w)
    own = {generator: max(simulate(generator(p, m), costs).bubble().own) for generator in (zb_h1, zb_h2)}
    assert own[zb_h1] - ideal == pytest.approx((p - 1) * (f + b - w), abs=1e-9)
    assert own[zb_h2] - ideal == pytest.approx((p - 1) * (f + b - 2 * w), abs=1e-9)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
@pytest.mark.parametrize("generator", [zb_h2, zb_v])
def test_h2_and_v_idle_for_their_fill_only(generator, p, m):
    """Rank r begins r late and ends p − 1 − r early: the parallelogram of Zero Bubble's figures, and no gap in it."""
    bubble = simulate(generator(p, m), EQUAL).bubble()
    assert bubble.over_own == pytest.approx(0, abs=1e-12)
    for rank, idle in enumerate(bubble.idle):
        assert tuple(idle) == pytest.approx((rank, p - 1 - rank, 0, 0, 0), abs=1e-9)


def test_dualpipe_v_waits_less_than_1f1b():
    for p, m in ((2, 8), (4, 8), (8, 24)):
        assert simulate(dualpipe_v(p, m), EQUAL).bubble().over_own < (p - 1) / (2 * m)


# --- activations in flight ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_activations_in_flight(p, m):
    assert activations(gpipe(p, m)) == [m] * p
    assert activations(one_f_one_b(p, m)) == [min(p - rank, m) for rank in range(p)]
    assert max(activations(one_f_one_b(p, m))) == min(p, m)
    if m >= 2 * p:
        assert activations(zb_h1(p, m)) == [p] * p
        assert activations(zb_h2(p, m)) == [2 * p - 1] * p
        assert activations(zb_v(p, m)) == [p] * p
        assert activations(dualpipe_v(p, m)) == [(2 * p + 1) / 2] * p  # PP + 1 stages, PP = 2p of them


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_activations_of_interleaved_are_the_published_ones_in_full_groups(p, v):
    most = max(activations(interleaved_1f1b(p, 4 * p, v)))
    assert most == pytest.approx(p * (1 + (p - 1) / (p * v)) if v > 1 else p)


@pytest.mark.parametrize(("p", "m", "largest"), [(4, 9, 5), (4, 11, 6), (8, 15, 15), (3, 7, 4)])
def test_activations_of_interleaved_in_larger_groups(p, m, largest):
    v = 2
    assert max(activations(interleaved_1f1b(p, m, v))) == p + (p - 1) / v + (v - 1) * (largest - p) / v


@pytest.mark.parametrize("kept", [0.0, 0.4, 1.0])
def test_what_w_keeps_is_counted_by_its_share(kept):
    """Zero Bubble §2.3: (p − i + 1) M_B + (i − 1) M_W of H1's i-th rank, (2p − 2i + 1) M_B + (2i − 2) M_W of H2's."""
    p, m = 4, 12
    assert activations(zb_h1(p, m), kept) == pytest.approx([p - r + r * kept for r in range(p)])
    assert activations(zb_h2(p, m), kept) == pytest.approx([2 * (p - r) - 1 + 2 * r * kept for r in range(p)])


@pytest.mark.parametrize("generator", FLAT)
@pytest.mark.parametrize(("stages", "microbatches", "says"), [(0, 4, "stages: 0 given"), (4, -1, "microbatches: -1")])
def test_sizes_below_one_are_refused(generator, stages, microbatches, says):
    with pytest.raises(ValueError, match=says):
        generator(stages, microbatches)


# --- one microbatch after another -------------------------------------------------------------------------------------


def test_one_after_another():
    assert str(one_after_another((0, 1), 2)) == "0F0 0BW0 0F1 0BW1\n1F0 1BW0 1F1 1BW1"
    assert str(one_after_another((0, 1, 1, 0), 1)) == "0F0 3F0 3BW0 0BW0\n1F0 2F0 2BW0 1BW0"
    assert str(one_after_another((0,), 1)) == "0F0 0BW0"


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 5))
def test_one_after_another_runs_with_the_least_memory_wherever_the_stages_are(rank_of, microbatches):
    schedule = one_after_another(rank_of, microbatches)
    assert schedule.rank_of == tuple(rank_of)
    assert check(schedule) == [1.0 if rank in rank_of else 0.0 for rank in range(max(rank_of) + 1)]

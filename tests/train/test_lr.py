"""The learning rate: its values at the corners of each schedule, and its shape between them."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import OptimizerConfig
from megalite.train.lr import learning_rate


def curve(steps, **settings):
    config = OptimizerConfig(lr=2.0, **settings)
    return [learning_rate(step, steps, config) for step in range(steps)]


def test_warm_up_rises_in_equal_steps_to_the_whole():
    for schedule in ("cosine", "wsd", "constant"):
        assert curve(20, warmup=4, schedule=schedule)[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_cosine_ends_at_the_least_and_is_half_way_in_the_middle():
    rates = curve(21, warmup=0, schedule="cosine", min_lr=0.1)
    assert rates[0] == 2.0
    assert rates[10] == pytest.approx((2.0 + 0.2) / 2)
    assert rates[5] == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates[20] == pytest.approx(0.2)


def test_wsd_is_stable_and_then_falls_in_equal_steps():
    rates = curve(20, warmup=2, schedule="wsd", decay=0.25, min_lr=0.1)
    assert rates[2:15] == [2.0] * 13
    assert rates[15:] == pytest.approx([0.2 + 1.8 * left / 5 for left in (4, 3, 2, 1, 0)])


def test_constant_stays():
    assert curve(9, warmup=0, schedule="constant") == [2.0] * 9


def test_wsd_without_decay_is_constant():
    assert curve(9, warmup=0, schedule="wsd", decay=0.0) == [2.0] * 9


@given(
    st.sampled_from(["cosine", "wsd", "constant"]),
    st.integers(1, 60),
    st.integers(0, 60),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_any_schedule_rises_once_and_never_rises_again(schedule, steps, warmup, decay, least):
    warmup = min(warmup, steps)
    rates = curve(steps, warmup=warmup, schedule=schedule, decay=decay, min_lr=least)
    assert all(0 <= rate <= 2.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    after = rates[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
    assert all(rate >= 2.0 * least - 1e-12 for rate in after)

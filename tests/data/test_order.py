"""Order as a formula: bijections, shares, and no memory."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.order import BLEND_SLOTS, Blend, key_of, permute
from megalite.errors import DataError

KEYS = st.integers(0, 2**64 - 1)


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 600), key=KEYS)
def test_permute_is_a_bijection(n, key):
    assert sorted(permute(index, n, key) for index in range(n)) == list(range(n))


@given(n=st.integers(1, 2**62), key=KEYS, data=st.data())
def test_permute_stays_in_range_for_any_size(n, key, data):
    assert 0 <= permute(data.draw(st.integers(0, n - 1)), n, key) < n


def test_permute_is_the_same_for_ever():
    """Golden values: a change of these changes the data order of every run that resumes."""
    key = key_of(1, "train", 0, 0)
    assert key == 4877351762371655305
    assert [permute(index, 1000, key) for index in range(8)] == [178, 547, 5, 16, 282, 139, 63, 59]


def test_permute_mixes():
    """Every position is about equally often in every quarter, over keys: chi-squared on 16 cells, 9 degrees free."""
    n, draws = 40, 400
    table = np.zeros((4, 4))
    for number in range(draws):
        for index in range(n):
            table[index * 4 // n, permute(index, n, key_of(number)) * 4 // n] += 1
    expected = draws * n / 16
    assert ((table - expected) ** 2 / expected).sum() < 28  # the 99.9th percentile of chi-squared with 9 degrees


def test_neighbours_do_not_stay_neighbours():
    key = key_of("neighbours")
    order = np.array([permute(index, 5000, key) for index in range(5000)])
    assert (np.diff(order) == 1).sum() < 10  # about one is expected of a random order
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.05


def test_keys_differ_in_every_part():
    keys = {key_of(*parts) for parts in [(0, "train", 0), (1, "train", 0), (0, "validation", 0), (0, "train", 1)]}
    assert len(keys) == 4
    assert key_of(np.int64(3), "train") == key_of(3, "train")


@settings(max_examples=20, deadline=None)
@given(weights=st.lists(st.floats(0.1, 100), min_size=1, max_size=6))
def test_a_cycle_honours_the_weights_and_counts_without_memory(weights):
    blend = Blend(weights, key_of(7))
    used: Counter[int] = Counter()
    for sample in range(2 * BLEND_SLOTS):
        source, running = blend.at(sample)
        assert running == used[source]  # what an iterator with state would have counted
        used[source] += 1
        if sample in (BLEND_SLOTS - 1, 2 * BLEND_SLOTS - 1):
            cycles = (sample + 1) // BLEND_SLOTS
            for number, weight in enumerate(weights):
                assert abs(used[number] - cycles * BLEND_SLOTS * weight / sum(weights)) <= cycles
    million, running = blend.at(10**6 * BLEND_SLOTS)
    assert (million, running) == (blend.at(0)[0], 10**6 * used[million] // 2)


def test_sources_alternate_rather_than_queue():
    blend = Blend([3, 1], key_of(0))
    first = Counter(blend.at(sample)[0] for sample in range(400))
    assert 60 < first[1] < 140


def test_a_weight_too_small_for_a_slot_is_refused():
    with pytest.raises(DataError, match=r"weights: source 1 has 1e-06 of 1, less than one sample in 10000"):
        Blend([1, 1e-6], 0)

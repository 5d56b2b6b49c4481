"""Tiles cover what the mask shows, each pair once, and nothing else."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.parallel.layout import LAYOUTS, ring_positions, sequence_divisor
from megalite.parallel.tiles import Mask, Plan


def dense(mask, queries, keys, query_documents, key_documents):
    """The mask of one row as booleans, from its definition."""
    see = np.ones((len(queries), len(keys)), bool)
    if mask.causal:
        see &= keys[None] <= queries[:, None]
    if mask.window is not None:
        see &= queries[:, None] - keys[None] < mask.window
    if mask.documents is not None:
        see &= (query_documents[:, None] == key_documents[None]) & (query_documents[:, None] >= 0)
    return see


def painted(tiles, row, shape):
    """How often the tiles compute each pair of a row."""
    times = np.zeros(shape, int)
    for tile in tiles:
        if tile.row not in (None, row):
            continue
        n, m = len(tile.queries), len(tile.keys)
        assert min(n, m) >= 1
        assert tile.shape == "full" or n == m
        part = {"full": np.ones((n, m)), "lower": np.tri(n, m), "upper": np.tri(n, m).T}[tile.shape]
        assert part.sum() == tile.pairs
        times[tile.queries.start : tile.queries.stop, tile.keys.start : tile.keys.stop] += part.astype(int)
    return times


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_tiles_are_the_mask(data):
    layout, ring = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.integers(1, 5))
    length = sequence_divisor(layout, ring) * data.draw(st.integers(1, 12))
    causal = data.draw(st.booleans())
    window = data.draw(st.none() | st.integers(1, length + 3)) if causal else None
    documents = None
    if data.draw(st.booleans()):
        generator = np.random.default_rng(data.draw(st.integers(0, 10**6)))
        documents = generator.integers(-1, 4, (2, length))
        if data.draw(st.booleans()):
            documents.sort(1)  # as packed documents are, in a contiguous layout
    mask = Mask(causal, window, documents)
    positions = [ring_positions(layout, ring, rank, length) for rank in range(ring)]
    plan = Plan(mask, positions)
    part = length // ring
    for query_rank in range(ring):
        pairs = 0
        for key_rank in range(ring):
            tiles = plan.tiles(query_rank, key_rank)
            needs = plan.needs(query_rank, key_rank)
            seen_keys = np.zeros(part, bool)
            for row in range(2):
                own = (
                    [None, None]
                    if documents is None
                    else [documents[row, r * part : (r + 1) * part] for r in (query_rank, key_rank)]
                )
                expected = dense(mask, positions[query_rank], positions[key_rank], *own)
                assert (painted(tiles, row, expected.shape) == expected).all()
                seen_keys |= expected.any(0)
                pairs += expected.sum()
            seen = np.flatnonzero(seen_keys)
            assert needs == (range(seen[0], seen[-1] + 1) if len(seen) else range(0))
        assert plan.pairs(query_rank, batch=2) == pairs


def shapes(layout, ring, query_rank, key_rank, length=48, window=None):
    plan = Plan(Mask(window=window), [ring_positions(layout, ring, rank, length) for rank in range(ring)])
    return Counter(tile.shape for tile in plan.tiles(query_rank, key_rank))


def test_a_ring_without_documents_takes_one_call_a_block():
    for layout in LAYOUTS:
        for query_rank in range(4):
            assert shapes(layout, 4, query_rank, query_rank) == {"lower": 1}
            for key_rank in set(range(4)) - {query_rank}:
                assert sum(shapes(layout, 4, query_rank, key_rank).values()) <= 1


def test_a_window_is_two_triangles_every_so_many_queries():
    assert shapes("contiguous", 1, 0, 0, length=49, window=9) == {"lower": 6, "upper": 5}


@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_zigzag_and_striped_share_causal_work(ring):
    length = 512 * ring

    def pairs(layout):
        plan = Plan(Mask(), [ring_positions(layout, ring, rank, length) for rank in range(ring)])
        return [plan.pairs(rank, 1) for rank in range(ring)]

    for layout in LAYOUTS:
        assert sum(pairs(layout)) == length * (length + 1) // 2
    assert max(pairs("zigzag")) == min(pairs("zigzag"))
    assert max(pairs("striped")) <= 1.02 * min(pairs("striped"))
    assert ring == 1 or max(pairs("contiguous")) > (2 * ring - 1.1) * min(pairs("contiguous"))


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 4)])
def test_a_window_that_makes_no_sense(causal, window):
    with pytest.raises(ValueError, match="1 or more, of a causal mask, would do"):
        Mask(causal, window)

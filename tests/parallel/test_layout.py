"""Every token is held by one rank, in the order that the layout says."""

import numpy as np
import pytest

from megalite.parallel.layout import LAYOUTS, own_positions, ring_positions, sequence_divisor


def test_the_picture_of_the_file():
    def rows(layout):
        return [ring_positions(layout, 3, rank, 24).tolist() for rank in range(3)]

    assert rows("contiguous") == [[*range(8)], [*range(8, 16)], [*range(16, 24)]]
    assert rows("zigzag") == [[0, 1, 2, 3, 20, 21, 22, 23], [4, 5, 6, 7, 16, 17, 18, 19], [*range(8, 16)]]
    assert rows("striped") == [[*range(0, 24, 3)], [*range(1, 24, 3)], [*range(2, 24, 3)]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (1, 4), (2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (4, 2), (8, 1)])
def test_the_ranks_share_out_every_sequence_that_divides(layout, ring, ulysses):
    divisor = sequence_divisor(layout, ring, ulysses)
    assert divisor in (ring * ulysses, 2 * ring * ulysses)
    for length in (divisor, 3 * divisor):
        held = [own_positions(layout, ring, ulysses, rank, length) for rank in range(ring * ulysses)]
        assert {len(positions) for positions in held} == {length // (ring * ulysses)}
        assert sorted(np.concatenate(held).tolist()) == list(range(length))
        for place in range(ring):
            of_ulysses = np.concatenate(held[place * ulysses : (place + 1) * ulysses])
            assert (of_ulysses == ring_positions(layout, ring, place, length)).all()
            assert (np.diff(of_ulysses) > 0).all()


@pytest.mark.parametrize(
    ("layout", "ring", "ulysses", "length", "would_do"),
    [("zigzag", 4, 1, 12, 8), ("contiguous", 4, 1, 13, 4), ("striped", 2, 2, 6, 4), ("zigzag", 3, 2, 9, 6)],
)
def test_a_length_that_does_not_divide(layout, ring, ulysses, length, would_do):
    with pytest.raises(ValueError, match=f"a sequence of {length} tokens .* a multiple of {would_do} would do"):
        own_positions(layout, ring, ulysses, 0, length)


def test_an_unknown_layout():
    with pytest.raises(ValueError, match="'spiral' given; one of contiguous, zigzag, striped would do"):
        ring_positions("spiral", 2, 0, 8)

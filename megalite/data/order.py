"""Order without memory: shuffles and blends whose element number g is computed from g alone.

A shuffled list must be stored, or drawn again from the start, to know its millionth entry. A permutation that is a
formula need not, and neither does the share of each source among the first g samples when sources take turns in a
fixed cycle. Integers in, integers out: the same on every machine, in every process and for every library version.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from megalite.errors import DataError

BLEND_SLOTS = 10_000  # weights are honoured to one part in this many
ROUNDS = 6
WORD = 2**64 - 1


def key_of(*parts: object) -> int:
    """64 bits for one shuffle: the same on every machine and in every process, unlike Python's own hash."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


def permute(index: int, n: int, key: int) -> int:
    """Where `index` goes in the permutation of range(n) that `key` chooses; a bijection for every n and key.

    A Feistel network on two-digit numbers in base `side`: each round adds to one digit a hash of the other, which can
    be undone, whatever the hash. Some of the side**2 numbers lie beyond n; walking on until one does not keeps the
    bijection (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). side**2 hardly exceeds n, so a walk
    is short.
    """
    side = math.isqrt(n - 1) + 1
    while True:
        high, low = divmod(index, side)
        for turn in range(ROUNDS):
            high, low = low, (high + _mix(key + turn + low * ROUNDS)) % side
        index = high * side + low
        if index < n:
            return index


class Blend:
    """Sources that take turns in a fixed cycle of BLEND_SLOTS samples, each with its share of them by weight.

    DataError when a weight is too small for a single slot.
    """

    def __init__(self, weights: Sequence[float], key: int) -> None:
        total = math.fsum(weights)
        exact = np.asarray(weights, dtype=np.float64) / total * BLEND_SLOTS
        counts = np.floor(exact).astype(np.int64)
        largest_remainders = np.argsort(counts - exact, kind="stable")
        counts[largest_remainders[: BLEND_SLOTS - counts.sum()]] += 1
        if not counts.all():
            least = int(np.argmin(counts))
            raise DataError(
                f"weights: source {least} has {weights[least]:g} of {total:g}, less than one sample in {BLEND_SLOTS}; "
                "a larger weight would do, or 0 to leave it out"
            )
        order = [permute(slot, BLEND_SLOTS, key) for slot in range(BLEND_SLOTS)]
        pattern = np.repeat(np.arange(len(weights)), counts)[order]
        earlier = np.empty(BLEND_SLOTS, dtype=np.int64)
        for source, count in enumerate(counts):
            earlier[pattern == source] = np.arange(count)
        self._pattern, self._earlier, self._counts = pattern.tolist(), earlier.tolist(), counts.tolist()

    def at(self, sample: int) -> tuple[int, int]:
        """The source of sample number `sample`, and how many samples before it came from that source."""
        cycle, slot = divmod(sample, BLEND_SLOTS)
        source = self._pattern[slot]
        return source, cycle * self._counts[source] + self._earlier[slot]


def _mix(x: int) -> int:
    """A 64-bit hash of an integer: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x * 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)

"""What of the score matrix is computed: a mask as a list of tiles, each of them dense or a triangle.

    causal, own tokens      window          a later rank of a zigzag ring     two documents
    ◣ · ·                   ◣ · ·           · · · ·                           ◣ · ·
    ■ ◣ ·                   ◥ ◣ ·           · · · ·                           · ◣ ·
    ■ ■ ◣                   · ◥ ◣           ■ ■ ■ ■                           · ■ ◣

Every mask here lets a query see one run of keys, and along a document both ends of the run only grow. Where an end
moves by one key a query there is a triangle; where it stands still, a rectangle. So kernels need no mask, only their
causal flag (an upper triangle is a lower one read backwards), and what is masked costs nothing.

Plain values, no torch: the same plan on every rank says who computes what, who needs which keys, and how many FLOPs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Shape = Literal["full", "lower", "upper"]


@dataclass(frozen=True)
class Tile:
    """Queries × keys of which all pairs are computed, or a square's triangle including its diagonal.

    queries, keys: ranges in the order held   row: of the batch; None: every one
    """

    queries: range
    keys: range
    shape: Shape = "full"
    row: int | None = None

    @property
    def pairs(self) -> int:
        """How many scores, of one head and row."""
        n = len(self.queries)
        return n * len(self.keys) if self.shape == "full" else n * (n + 1) // 2


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees.

    causal: none after it   window: at most this many, itself included (causal only); None: no such bound
    documents: `[b, s]` of one number a token, by rank and in the order held: only equal numbers see each other, a
        negative one sees nothing and is seen by none; None: all of one document
    """

    causal: bool = True
    window: int | None = None
    documents: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(f"window: {self.window} given; 1 or more, of a causal mask, would do")


@dataclass(frozen=True, eq=False)
class Plan:
    """Tiles of every (query rank, key rank) of a ring whose ranks hold the tokens at `positions`.

    positions: a growing array for each rank, all of one length
    """

    mask: Mask
    positions: Sequence[np.ndarray]
    _made: dict[tuple[int, int], list[Tile]] = field(default_factory=dict, repr=False)

    @property
    def ranks(self) -> int:
        """How many ranks."""
        return len(self.positions)

    def tiles(self, query_rank: int, key_rank: int) -> list[Tile]:
        """What `query_rank` computes with the keys of `key_rank`."""
        pair = query_rank, key_rank
        if pair not in self._made:
            self._made[pair] = self._tiles(*pair)
        return self._made[pair]

    def needs(self, query_rank: int, key_rank: int) -> range:
        """The keys of `key_rank` that `query_rank` has to be sent: empty where the mask removes them all."""
        tiles = self.tiles(query_rank, key_rank)
        if not tiles:
            return range(0)
        return range(min(tile.keys.start for tile in tiles), max(tile.keys.stop for tile in tiles))

    def pairs(self, query_rank: int, batch: int) -> int:
        """Scores computed by `query_rank`, of one head; a score costs 4·e FLOPs forward and 10·e backward."""
        tiles = (tile for key_rank in range(self.ranks) for tile in self.tiles(query_rank, key_rank))
        return sum(tile.pairs * (batch if tile.row is None else 1) for tile in tiles)

    def _tiles(self, query_rank: int, key_rank: int) -> list[Tile]:
        first, last = self._visible(query_rank, key_rank)
        if self.mask.documents is None:
            return _tiles_of(0, first, last, None)
        length = len(first)
        tiles = []
        for row, documents in enumerate(self.mask.documents):
            queries, keys = (documents[rank * length : (rank + 1) * length] for rank in (query_rank, key_rank))
            key_runs = _runs(keys)
            for document, start, stop in _runs(queries):
                for _, lowest, end in (run for run in key_runs if run[0] == document):
                    inside = first[start:stop].clip(lowest, end), last[start:stop].clip(lowest, end)
                    tiles += _tiles_of(start, *inside, row)
        return tiles

    def _visible(self, query_rank: int, key_rank: int) -> tuple[np.ndarray, np.ndarray]:
        """For each query the first key it sees and the one after the last, documents aside."""
        queries, keys = self.positions[query_rank], self.positions[key_rank]
        first, last = np.zeros(len(queries), np.int64), np.full(len(queries), len(keys))
        if self.mask.causal:
            last = np.searchsorted(keys, queries, side="right")
        if self.mask.window is not None:
            first = np.searchsorted(keys, queries - self.mask.window, side="right")
        return first, last


def _runs(documents: np.ndarray) -> list[tuple[int, int, int]]:
    """(document, start, stop) of every run of equal numbers, but the negative ones."""
    edges = [0, *(np.flatnonzero(np.diff(documents)) + 1).tolist(), len(documents)]
    return [(int(documents[a]), a, b) for a, b in itertools.pairwise(edges) if b > a and documents[a] >= 0]


def _tiles_of(offset: int, first: np.ndarray, last: np.ndarray, row: int | None) -> list[Tile]:
    """Tiles of the queries offset, offset + 1 …, of which each sees the keys first … last − 1; both never fall."""
    tiles: list[Tile] = []
    sees = first < last
    moves = np.stack([np.diff(first), np.diff(last)])
    # a piece ends where an end of the run jumps, or begins to move or to stand still
    jumps = (moves > 1).any(0) | (sees[1:] != sees[:-1])
    changes = np.zeros(len(jumps), bool)
    changes[1:] = (moves[:, 1:] != moves[:, :-1]).any(0) & ~jumps[:-1]
    start = 0
    for stop in [*(np.flatnonzero(jumps | changes) + 1).tolist(), len(first)]:
        if stop > start and sees[start]:
            low, high = int(first[start]), int(last[start])
            low_step, high_step = int(first[stop - 1] > low), int(last[stop - 1] > high)
            seen = high - low
            # the upper triangle must leave something seen, and not meet the lower one
            most = max(1, seen - high_step) if low_step else stop - start
            for begin in range(start, stop, most):
                queries = range(offset + begin, offset + min(begin + most, stop))
                by = begin - start
                tiles += _piece(queries, low + by * low_step, high + by * high_step, low_step, high_step, row)
        start = stop
    return tiles


def _piece(queries: range, low: int, high: int, low_step: int, high_step: int, row: int | None) -> list[Tile]:
    """Tiles where the first query sees the keys low … high − 1, and either end moves by its step (0, 1) a query."""
    count = len(queries)
    if count == 1:
        return [Tile(queries, range(low, high), "full", row)]
    tiles = []
    begin, end = low + count * low_step, high - high_step
    if low_step:
        tiles.append(Tile(queries, range(low, begin), "upper", row))
    if begin < end:
        tiles.append(Tile(queries, range(begin, end), "full", row))
    if high_step:
        tiles.append(Tile(queries, range(end, end + count), "lower", row))
    return tiles

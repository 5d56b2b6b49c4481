"""Boxes: whatever the shards, the meshes and the ranges, all writers together write every element once."""

import math
import random
from collections import Counter

import pytest
import torch

from megalite.checkpoint import boxes as under_test
from megalite.checkpoint.boxes import Box, boxes_of_range, places_of, share, whole
from megalite.checkpoint.held import Held, written_by_this_rank
from megalite.parallel.parameters import cut
from megalite.parallel.sharding import Block, Shard


def elements(box):
    """Every element of a box."""
    return [tuple(i.tolist()) for i in torch.ones(box.shape).nonzero() + torch.tensor(box.offset)]


def some_shape(draw):
    return tuple(draw.choice([1, 1, 2, 3, 5, 8]) for _ in range(draw.randrange(4)))


def some_shard(draw, ranks):
    """Any number of dims, cut along any of them, fused and padded."""
    shape = some_shape(draw)
    if not shape:
        return Shard(shape, "tp", ranks)
    dim = draw.randrange(len(shape))
    parts = [n for n in range(1, ranks + 1) if ranks % n == 0]
    blocks = [Block(draw.randrange(1, 8), draw.choice(parts)) for _ in range(draw.choice([1, 1, 2, 3]))]
    rows = sum(block.size for block in blocks)
    return Shard((*shape[:dim], rows, *shape[dim + 1 :]), "tp", ranks, dim, tuple(blocks))


@pytest.mark.parametrize("seed", range(30))
def test_a_range_is_boxes_in_its_order(seed):
    draw = random.Random(seed)
    shape = some_shape(draw)
    size = math.prod(shape)
    start, stop = sorted((draw.randrange(size + 1), draw.randrange(size + 1)))
    boxes = boxes_of_range(shape, start, stop)
    assert [e for box in boxes for e in elements(box)] == elements(whole(shape))[start:stop]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("seed", range(30))
def test_a_box_cut_is_small_boxes_that_make_it_up(seed):
    draw = random.Random(seed)
    shape = some_shape(draw)
    box = Box(tuple(draw.randrange(9) for _ in shape), shape)
    limit = draw.randrange(1, 20)
    parts = box.at_most(limit)
    assert all(part.size <= limit for part in parts)
    assert sorted(e for part in parts for e in elements(part)) == elements(box)


@pytest.mark.parametrize("seed", range(20))
def test_intersections_are_of_elements(seed):
    draw = random.Random(seed)
    a, b = (Box((draw.randrange(4), draw.randrange(4)), (draw.randrange(1, 4), draw.randrange(1, 4))) for _ in "ab")
    common = a.intersection(b)
    assert set(elements(common) if common else []) == set(elements(a)) & set(elements(b))


@pytest.mark.parametrize("seed", range(40))
def test_a_place_is_where_the_values_of_its_box_are(seed):
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 3, 4])
    shard = some_shard(draw, ranks)
    everything = torch.arange(1, math.prod(shard.shape) + 1).view(shard.shape)
    for rank in range(ranks):
        local = cut(everything, shard, rank).flatten()
        start, stop = sorted((draw.randrange(len(local) + 1), draw.randrange(len(local) + 1)))
        held = Held("w", shard, rank, start, local[start:stop])
        found = []
        for place in held.places:
            assert torch.equal(held.view(place), everything[place.box.slices])
            found += held.view(place).flatten().tolist()
        assert sorted(found) == sorted(x for x in local[start:stop].tolist() if x)  # all of it, without padding


@pytest.mark.parametrize("seed", range(60))
def test_writers_write_every_element_once_and_about_as_much(seed, monkeypatch):
    """Ranks of tp × shards × copies, several tensors, of which one is held at two ends of a pipeline."""
    draw = random.Random(seed)
    monkeypatch.setattr(under_test, "GRAIN", draw.choice([4, 16, 2**16]))
    tp, shards, copies = draw.choice([(1, 1, 4), (4, 1, 1), (2, 2, 2), (4, 1, 2), (1, 3, 2), (2, 4, 1), (4, 2, 2)])
    table = {f"w{i}": some_shard(draw, tp) for i in range(draw.randrange(1, 6))}
    values = {name: torch.zeros(math.prod(shard.local_shape)) for name, shard in table.items()}
    written = {name: Counter() for name in table}
    by_rank = []
    for rank in range(tp):
        for part in range(shards):
            for copy in range(copies):
                for end in range(2):
                    held = []
                    for name, shard in table.items():
                        if end and name != "w0":
                            continue  # only the tied one is at the other end
                        size = len(values[name])
                        mine = slice(part * size // shards, (part + 1) * size // shards)
                        tied = (copy * 2 + end, copies * 2) if name == "w0" else (copy, copies)
                        held.append(Held(name, shard, rank, mine.start, values[name][mine], *tied))
                    total = 0
                    for each, place in written_by_this_rank(held):
                        written[each.name].update(elements(place.box))
                        total += place.box.size * 4
                    by_rank.append(total)
    for name, shard in table.items():
        assert written[name] == Counter(elements(whole(shard.shape))), name
    assert sum(by_rank) == sum(4 * math.prod(shard.shape) for shard in table.values())


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_what_is_shared_is_shared_evenly(ranks):
    boxes = [(whole((1000, 300)), 4), (whole((5,)), 4), (whole((3, 70_001)), 8), (whole(()), 8)]
    total = sum(box.size * bytes_ for box, bytes_ in boxes)
    parts = [sum(box.size * boxes[i][1] for i, box in share(boxes, rank, ranks)) for rank in range(ranks)]
    assert sum(parts) == total
    assert max(parts) - total / ranks <= under_test.GRAIN


def test_a_part_all_of_padding_has_no_place():
    shard = Shard((3, 2), "tp", 4, 0, (Block(3, 4),))
    assert [len(places_of(shard, rank, 0, 2)) for rank in range(4)] == [1, 1, 1, 0]

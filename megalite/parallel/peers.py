"""Which ranks are together on each axis of a mesh, for every rank: by arithmetic, without a process group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megalite.parallel.mesh import coordinates


def peers(sizes: Mapping[str, int], ulysses: int, shard: int) -> Sequence[Mapping[str, tuple[int, ...]]]:
    """For every rank the ranks of its group, in axis order, by the names of Mesh's axes.

    sizes: of dp, pp, sp, tp, in this order   ulysses: of sp   shard: over how many replicas ZeRO divides
    """
    size = math.prod(sizes.values())
    places = [_places(rank, sizes, ulysses, shard) for rank in range(size)]
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, place in enumerate(places):
        for axis, (group, index) in place.items():
            groups.setdefault((axis, group), []).append((index, rank))
    ranks = {key: tuple(rank for _, rank in sorted(members)) for key, members in groups.items()}
    return [{axis: ranks[axis, group] for axis, (group, _) in place.items()} for place in places]


def _places(rank: int, sizes: Mapping[str, int], ulysses: int, shard: int) -> Mapping[str, tuple[tuple[int, ...], int]]:
    """For each axis, what is alike in this rank's group and in no other, and its place in it."""
    dp, pp, sp, tp = coordinates(rank, sizes).values()
    replica = dp * sizes["sp"] + sp
    return {
        "dp": ((pp, sp, tp), dp),
        "pp": ((dp, sp, tp), pp),
        "sp": ((dp, pp, tp), sp),
        "tp": ((dp, pp, sp), tp),
        "ring": ((dp, pp, tp, sp % ulysses), sp // ulysses),
        "ulysses": ((dp, pp, tp, sp // ulysses), sp % ulysses),
        "dp×sp": ((pp, tp), replica),
        "copies": ((pp, tp, replica % shard), replica // shard),
        "shards": ((pp, tp, replica // shard), replica % shard),
        "world": ((), rank),
    }

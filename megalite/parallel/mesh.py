"""Mesh and Axis: ranks laid out as dp × pp × sp × tp, tp innermost.

    rank = ((dp · |pp| + pp) · |sp| + sp) · |tp| + tp

        Mesh(dp=2, tp=3)            tp ─▶
                              dp   0  1  2
                               ▼   3  4  5

sp is cut once more, into ring × ulysses with ulysses innermost, the two ways of sharing attention over a sequence:

    sp rank = ring · |ulysses| + ulysses

Neighbours along tp are neighbours in rank, so that tensor parallelism, which talks most, stays inside a
machine. Rank ↔ coordinates is arithmetic on integers; process groups come from PyTorch's DeviceMesh, so that
its own tools accept them. An axis of size one has no group and its collectives are the identity: `Mesh()` needs
no process group at all, and *dense* is simply the mesh of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp", "pp", "sp", "tp")


def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Where `rank` stands on each axis; `sizes` maps axis names to sizes, outermost first."""
    if not 0 <= rank < math.prod(sizes.values()):
        raise ValueError(f"rank {rank} is not in a mesh of {_product(sizes)}")
    where = {}
    for name, size in reversed(list(sizes.items())):
        rank, where[name] = divmod(rank, size)
    return {name: where[name] for name in sizes}


def rank_at(where: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """The rank that stands at the coordinates `where`: the inverse of `coordinates`."""
    rank = 0
    for name, size in sizes.items():
        if not 0 <= where[name] < size:
            raise ValueError(f"coordinate {name}={where[name]} is not in a mesh of {_product(sizes)}")
        rank = rank * size + where[name]
    return rank


def axis_ranks(rank: int, name: str, sizes: Mapping[str, int]) -> list[int]:
    """The ranks that share `rank`'s group on the axis `name`, in axis order."""
    where = coordinates(rank, sizes)
    return [rank_at({**where, name: i}, sizes) for i in range(sizes[name])]


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, as this rank sees it.

    name: "tp", "dp", ...   size: how many ranks   rank: which of them this one is
    group: their process group; None where size is one
    """

    name: str = "none"
    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size > 1 and self.group is None:
            raise ValueError(f"axis {self.name} has {self.size} ranks and no process group to reach them by")

    @property
    def overlaps(self) -> bool:
        """Whether a collective can run beside compute without taking its core: true for NCCL, not for gloo."""
        return self.group is not None and dist.get_backend(self.group) == "nccl"


class Mesh:
    """dp × pp × sp × tp over all ranks of the process group, or the mesh of one.

    dp: data parallel   pp: pipeline   sp: sequence inside attention   tp: tensor parallel
    ulysses: how many ranks of sp trade tokens for heads, the rest of sp being a ring; None: one, all of sp is a ring
    shard: over how many replicas ZeRO divides; None: over all

    Its axes are dp, pp, sp and tp, the two that sp is made of, ring and ulysses, and
    replicas: dp × sp, the ranks that hold equal weights, over which gradients and losses are summed; dp outermost
    copies × shards = replicas: ZeRO divides over shards what is alike on replicas; neighbours are of one division
    world: all ranks

    Raises ValueError where the product of the sizes is neither one nor the number of ranks.
    """

    dp: Axis
    pp: Axis
    sp: Axis
    tp: Axis
    ring: Axis
    ulysses: Axis
    replicas: Axis
    copies: Axis
    shards: Axis
    world: Axis

    def __init__(
        self, dp: int = 1, pp: int = 1, sp: int = 1, tp: int = 1, ulysses: int | None = None, shard: int | None = None
    ) -> None:
        self.sizes = {"dp": dp, "pp": pp, "sp": sp, "tp": tp}
        for name, size in self.sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh.{name}: {size!r} given; a whole number of at least 1 would do")
        ulysses = 1 if ulysses is None else ulysses
        if not isinstance(ulysses, int) or ulysses < 1 or sp % ulysses:
            raise ValueError(f"mesh.ulysses: {ulysses!r} given; a divisor of sp={sp} would do")
        shard = dp * sp if shard is None else shard
        if not isinstance(shard, int) or shard < 1 or dp * sp % shard:
            raise ValueError(f"mesh.shard: {shard!r} given; a divisor of dp × sp = {dp * sp} would do")
        self.size = math.prod(self.sizes.values())
        self.device_mesh: DeviceMesh | None = None
        self._replica_mesh: DeviceMesh | None = None  # where it is more than one dim of device_mesh
        self.rank = 0
        if self.size > 1:
            self._join()
        self.world = Axis("world", self.size, self.rank, dist.group.WORLD if self.size > 1 else None)
        where = coordinates(self.rank, self.sizes)
        for name, size in self.sizes.items():
            group = self.device_mesh.get_group(name) if self.device_mesh is not None and size > 1 else None
            setattr(self, name, Axis(name, size, where[name], group))
        self.ring, self.ulysses = self._parts_of_sp(sp // ulysses, ulysses)
        self.replicas = self._replicas()
        self.copies, self.shards = self._parts_of_replicas(shard)

    def _join(self) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != self.size:
            raise ValueError(
                f"mesh {_product(self.sizes)} needs {self.size} ranks, {world} were started; "
                f"start {self.size} or change a mesh size"
            )
        self.rank = dist.get_rank()
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self.device_mesh = init_device_mesh(device, tuple(self.sizes.values()), mesh_dim_names=AXES)

    def _parts_of_sp(self, ring: int, ulysses: int) -> tuple[Axis, Axis]:
        """The axes ring and ulysses; where one of them is all of sp, it is reached by sp's group."""
        ring_rank, ulysses_rank = divmod(self.sp.rank, ulysses)
        ring_group = ulysses_group = self.sp.group
        if ring > 1 and ulysses > 1:
            assert self.device_mesh is not None
            parts = self.device_mesh._unflatten("sp", (ring, ulysses), ("ring", "ulysses"))
            ring_group, ulysses_group = parts.get_group("ring"), parts.get_group("ulysses")
        return (
            Axis("ring", ring, ring_rank, ring_group if ring > 1 else None),
            Axis("ulysses", ulysses, ulysses_rank, ulysses_group if ulysses > 1 else None),
        )

    def _replicas(self) -> Axis:
        """dp × sp; where one of them has one rank, it is the other."""
        if self.sp.size == 1 or self.dp.size == 1:
            return self.dp if self.sp.size == 1 else self.sp
        assert self.device_mesh is not None
        self._replica_mesh = self.device_mesh["dp", "sp"]._flatten("replicas")
        rank = self.dp.rank * self.sp.size + self.sp.rank
        return Axis("dp×sp", self.dp.size * self.sp.size, rank, self._replica_mesh.get_group())

    def _parts_of_replicas(self, shard: int) -> tuple[Axis, Axis]:
        """The axes copies and shards; where one of them is all of replicas, it is reached by their group."""
        replicas, copies = self.replicas, self.replicas.size // shard
        copy_group = shard_group = replicas.group
        if copies > 1 and shard > 1:
            assert self.device_mesh is not None
            of_replicas = self._replica_mesh or self.device_mesh[replicas.name]
            parts = of_replicas._unflatten(0, (copies, shard), ("copies", "shards"))
            copy_group, shard_group = parts.get_group("copies"), parts.get_group("shards")
        return (
            Axis("copies", copies, replicas.rank // shard, copy_group if copies > 1 else None),
            Axis("shards", shard, replicas.rank % shard, shard_group if shard > 1 else None),
        )

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.sizes.items())}, rank={self.rank})"


def _product(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in sizes.items())

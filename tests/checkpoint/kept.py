"""A small checkpoint to test with: a few tensors cut over ranks that are played one after the other."""

import math

import torch

from megalite.checkpoint import folder, saver
from megalite.checkpoint.boxes import whole
from megalite.checkpoint.held import Held
from megalite.checkpoint.saver import Saver
from megalite.checkpoint.source import Source, load
from megalite.parallel.parameters import cut
from megalite.parallel.sharding import Block, Shard

SHAPES = {"model/embedding.weight": (37, 6), "model/norm.weight": (6,), "exp_avg/w": (5, 7, 3), "scalar": ()}
DTYPES = {"exp_avg/w": torch.bfloat16, "scalar": torch.float64}


def tensors(seed=0):
    """The wholes, of several dtypes and numbers of dims."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(DTYPES.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def held(whole_tensors, rank=0, ranks=1):
    """What a rank of tp holds of them: the first is cut and padded, the others are on all."""
    found = []
    for name, tensor in whole_tensors.items():
        shard = Shard(tuple(tensor.shape), "tp", ranks)
        if name == "model/embedding.weight":
            shard = Shard(tuple(tensor.shape), "tp", ranks, 0, (Block(tensor.shape[0], ranks),))
        found.append(Held(name, shard, rank, 0, cut(tensor, shard, rank).view(-1)))
    return found


def save(root, step=1, seed=0, **state):
    """A checkpoint of `tensors(seed)`, written by one rank in slices of 64 bytes; its folder."""
    limit, saver.SLICE = saver.SLICE, 64
    try:
        one = Saver(root, asynchronous=False)
        one.begin(step, held(tensors(seed)), state)
        return one.commit()
    finally:
        saver.SLICE = limit


def content(path):
    """All tensors of a checkpoint, read as a run reads them."""
    checkpoint = folder.read(path)
    found = {}
    with Source(checkpoint) as source:
        for name, tensor in checkpoint.index.tensors.items():
            values = torch.zeros(math.prod(tensor.shape), dtype=source.dtype(name))
            load([Held(name, Shard(tensor.shape, "tp", 1), 0, 0, values)], source)
            assert torch.equal(source.read(name, whole(tensor.shape)).view(-1), values)
            found[name] = values.view(tensor.shape)
    return found


def same(found, expected):
    """Whether two sets of tensors are bitwise equal."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)

"""Text that all ranks of an axis know afterwards."""

import pytest

from megalite.parallel.mesh import Mesh
from megalite.parallel.words import exchanged, said
from megalite.testing import run_ranks

TEXTS = ["", "Straße ∂x", "line\nline", "x" * 3000]


def everyone(ranks):
    mesh = Mesh(dp=ranks)
    rank = mesh.world.rank
    return exchanged(TEXTS[rank], mesh.world), said(f"from {rank}", mesh.world), exchanged("", mesh.world)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_knows_every_text(ranks):
    for texts, first, nothing in run_ranks(everyone, ranks, ranks):
        assert texts == TEXTS[:ranks] and first == "from 0" and nothing == [""] * ranks

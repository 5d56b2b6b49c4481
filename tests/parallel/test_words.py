"""Text that all ranks of an axis know afterwards."""

import pytest

from megalite.parallel.mesh import Mesh
from megalite.parallel.words import exchanged, first_of, said
from megalite.testing import run_ranks

TEXTS = ["", "Straße ∂x", "line\nline", "x" * 3000]


def everyone(ranks):
    mesh = Mesh(dp=ranks)
    rank = mesh.world.rank
    first = first_of(TEXTS[rank], mesh.world), first_of("", mesh.world)
    return exchanged(TEXTS[rank], mesh.world), said(f"from {rank}", mesh.world), exchanged("", mesh.world), first


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_knows_every_text(ranks):
    for texts, of_0, nothing, first in run_ranks(everyone, ranks, ranks):
        assert texts == TEXTS[:ranks] and of_0 == "from 0" and nothing == [""] * ranks
        assert first == ("" if ranks == 1 else TEXTS[1], "")  # rank 0 has none

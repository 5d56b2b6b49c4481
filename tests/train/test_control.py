"""The word at the end of a step: what one rank heard or wrote, all ranks know at the same step."""

import pytest

from megalite.parallel.mesh import Mesh
from megalite.parallel.traffic import traffic
from megalite.testing import run_ranks
from megalite.train.control import Agreement, Control, Heard, Saving


def alone(rank, **heard):
    """The agreement of four ranks of which one has heard something, and the next one."""
    mesh = Mesh(dp=4)
    control = Control(mesh.world, "cpu", Heard(**heard) if mesh.rank == rank else None)
    return [control.agree(step) for step in (7, 8)], traffic.step


@pytest.mark.parametrize("rank", [0, 3])
def test_one_rank_hears_and_all_leave(rank):
    stop = Agreement(stop=True, save=False, saving=Saving.IDLE)
    assert run_ranks(alone, 4, rank, terminate=True) == [([stop, stop], 8)] * 4


def test_a_request_to_save_is_told_once():
    none = Agreement(stop=False, save=False, saving=Saving.IDLE)
    save = Agreement(stop=False, save=True, saving=Saving.IDLE)
    assert run_ranks(alone, 4, 2, save=True) == [([save, none], 8)] * 4


@pytest.mark.parametrize(
    ("states", "written", "failed"),
    [
        ("WRITTEN WRITTEN WRITTEN WRITTEN", True, False),
        ("WRITTEN WRITING WRITTEN WRITTEN", False, False),
        ("WRITTEN WRITING FAILED WRITTEN", False, True),
        ("IDLE IDLE IDLE IDLE", False, False),
    ],
)
def test_a_save_is_written_when_all_have(states, written, failed):
    def agreed():
        mesh = Mesh(dp=4)
        found = Control(mesh.world, "cpu").agree(1, Saving[states.split()[mesh.rank]])
        return found.written, found.failed

    assert run_ranks(agreed, 4) == [(written, failed)] * 4


def test_the_mesh_of_one_needs_no_other():
    control = Control(Mesh().world, "cpu", Heard(terminate=True, save=True))
    assert control.agree(1, Saving.WRITTEN) == Agreement(stop=True, save=True, saving=Saving.WRITTEN)
    assert not control.agree(2).save

"""Messages of a pipeline's ranks: in the order of making, used in any; what was sent is let go once it has been read.

And how a run ends where one of its ranks fails: under `run_local` and under torchrun.
"""

import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megalite.parallel.mesh import Mesh
from megalite.parallel.pipeline import Action, gpipe, one_f_one_b, schedule_of, zb_v
from megalite.parallel.pipeline.wire import AHEAD, Wire
from megalite.parallel.traffic import traffic

CPU = torch.device("cpu")
WHOLE_RUN_ENDS = 10.0  # seconds after one rank failed


def wire_of(schedule):
    return Wire(schedule, Mesh(pp=dist.get_world_size()).pp, CPU)


def value(made, n=3):
    """What an action makes: other numbers for each."""
    return torch.full((n,), 100.0 * made.stage + made.microbatch + 0.5 * (made.kind == "B"))


def begun(wire, shapes=lambda stage, microbatch: (3,), dtype=torch.float32):
    wire.begin(shapes, dtype)
    return wire


@pytest.mark.ranks(2)
def test_messages_are_used_in_any_order():
    """gloo and NCCL match them by their order alone: places are laid out up to the one that is wanted."""
    wire = wire_of(gpipe(2, 6))
    here = dist.get_rank()
    for order in ([0, 1, 2, 3, 4, 5], [5, 0, 3, 1, 2, 4], [4, 5, 3, 2, 1, 0]):
        begun(wire)
        for microbatch in range(6):
            made = Action("FB"[here], here, microbatch)
            wire.send(made, value(made), 1 - here)
        for microbatch in order:
            made = Action("BF"[here], 1 - here, microbatch)
            assert torch.equal(wire.take(made, 1 - here), value(made))
        wire.finish()


@pytest.mark.ranks(2)
def test_two_neighbours_that_both_send_first_do_not_wait_for_each_other():
    """More messages than have a place, 8 MB each, from either side, before anything is taken."""
    wire = begun(wire_of(gpipe(2, 6)), lambda stage, microbatch: (2_000_000,))
    here = dist.get_rank()
    for microbatch in range(6):
        made = Action("FB"[here], here, microbatch)
        wire.send(made, value(made, 2_000_000), 1 - here)
    for microbatch in range(6):
        made = Action("BF"[here], 1 - here, microbatch)
        assert (wire.take(made, 1 - here) == value(made, 1)).all()
    wire.finish()


@pytest.mark.ranks(2)
def test_shapes_and_dtypes_are_those_of_the_step():
    """A gradient has the shape of the output that it is of; each step has its own."""
    here = dist.get_rank()
    wire = wire_of(one_f_one_b(2, 3))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        begun(wire, lambda stage, microbatch: (1 + stage, 2 + microbatch), dtype)
        for microbatch in range(3):
            wire.send(Action("FB"[here], here, microbatch), torch.ones(1, 2 + microbatch, dtype=dtype), 1 - here)
        for microbatch in range(3):
            x = wire.take(Action("BF"[here], 1 - here, microbatch), 1 - here)
            assert x.shape == (1, 2 + microbatch) and x.dtype == dtype and (x == 1).all()
        wire.finish()


@pytest.mark.ranks(2)
def test_a_tensor_that_is_not_contiguous_arrives_whole():
    here = dist.get_rank()
    wire = begun(wire_of(one_f_one_b(2, 1)), lambda stage, microbatch: (2, 3))
    x = torch.arange(6.0).view(3, 2).T
    wire.send(Action("FB"[here], here, 0), x, 1 - here)
    assert torch.equal(wire.take(Action("BF"[here], 1 - here, 0), 1 - here), x)
    wire.finish()


@pytest.mark.ranks(2)
def test_as_many_places_as_ahead_and_no_more():
    here, places = dist.get_rank(), []
    irecv = dist.irecv

    def counting(x, group, group_src):
        places.append(x)
        return irecv(x, group=group, group_src=group_src)

    with mock.patch.object(dist, "irecv", counting):
        wire = begun(wire_of(gpipe(2, 6)))
        assert len(places) == AHEAD == 2
        for microbatch in range(6):
            made = Action("FB"[here], here, microbatch)
            wire.send(made, value(made), 1 - here)
        for i, (microbatch, laid_out) in enumerate([(0, 3), (1, 4), (4, 5), (2, 6), (3, 6), (5, 6)]):
            wire.take(Action("BF"[here], 1 - here, microbatch), 1 - here)
            assert len(places) == laid_out, i
        wire.finish()


@pytest.mark.ranks(2)
def test_what_was_sent_is_let_go_when_something_comes_that_was_made_after_it_was_used():
    """Not before: gloo may still be reading it."""
    schedule = schedule_of(["0F0 0F1 0F2 0BW0 0BW1 0BW2", "1F0 1F1 1BW0 1F2 1BW1 1BW2"])
    here = dist.get_rank()
    wire, live = begun(wire_of(schedule)), {}

    def send(made):
        x = value(made)
        live[str(made)] = StorageWeakRef(x.untyped_storage())
        wire.send(made, x, 1 - here)

    def kept():
        return [name for name, ref in live.items() if not ref.expired()]

    if here == 0:
        for microbatch in range(3):
            send(Action("F", 0, microbatch))
        assert kept() == ["0F0", "0F1", "0F2"]
        for microbatch, left in ((0, ["0F2"]), (1, []), (2, [])):  # 1B0 was made after 1F0 and 1F1, before 1F2
            wire.take(Action("B", 1, microbatch), 1)
            assert kept() == left
    else:
        for microbatch in (0, 1):
            wire.take(Action("F", 0, microbatch), 0)
        send(Action("B", 1, 0))
        wire.take(Action("F", 0, 2), 0)  # made before 0BW0, which uses 1B0
        send(Action("B", 1, 1))
        send(Action("B", 1, 2))
        assert kept() == ["1B0", "1B1", "1B2"]
    wire.finish()
    assert kept() == []


@pytest.mark.ranks(3)
def test_what_stays_on_a_rank_and_what_nobody_uses_is_not_sent():
    """In a V the last rank's two stages hand over in place; the middle one has four kinds of messages."""
    wire = begun(wire_of(zb_v(3, 2)))
    here = dist.get_rank()
    assert {to for _, to in wire._routes} == {0, 1, 2}
    assert all(abs(source - to) == 1 for source, to in wire._routes)
    sent = [str(made) for (source, _), pairs in wire._routes.items() for made, _ in pairs if source == here]
    assert (
        sorted(sent)
        == [
            ["0F0", "0F1", "5B0", "5B1"],
            ["1B0", "1B1", "1F0", "1F1", "4B0", "4B1", "4F0", "4F1"],
            ["2B0", "2B1", "3F0", "3F1"],
        ][here]
    )
    for (source, to), pairs in wire._routes.items():
        for made, _ in pairs:
            if here == source:
                wire.send(made, value(made), to)
    for (source, to), pairs in wire._routes.items():
        for made, _ in pairs:
            if here == to:
                assert torch.equal(wire.take(made, source), value(made))
    wire.finish()


@pytest.mark.ranks(2)
def test_what_is_sent_is_counted_and_noted():
    here = dist.get_rank()
    wire = begun(wire_of(one_f_one_b(2, 1)))
    traffic.reset()
    made = Action("FB"[here], here, 0)
    wire.send(made, value(made), 1 - here)
    wire.take(Action("BF"[here], 1 - here, 0), 1 - here)
    wire.finish()
    assert traffic.bytes == {("pp", "send"): 12}
    assert "pp#" in str(traffic.recent[-1]) and " send torch.float32[3] 12 B " in str(traffic.recent[-1])


# --- a rank that fails ------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time

def steps(world, fault):
    import torch
    from megalite.parallel.mesh import Mesh
    from megalite.parallel.pipeline import one_f_one_b
    from megalite.parallel.pipeline.executor import Pipeline

    pp = Mesh(pp=world.size).pp
    weight = torch.ones(4, requires_grad=True)

    def stage(x, i):
        if world.rank == 1 and i == 2:
            print(f"fault at {time.time()}", flush=True)
            if fault == "raise":
                raise KeyError("no such layer")
            os._exit(3)
        y = weight * (torch.ones(3, 4) if x is None else x)
        return y.sum() if world.rank == world.size - 1 else y

    pipeline = Pipeline(one_f_one_b(world.size, 6), pp, {pp.rank: stage}, torch.device("cpu"))
    while True:
        pipeline.step(lambda stage, i: (3, 4), torch.float32)

if __name__ == "__main__":
    fault = sys.argv[1]
    if "RANK" in os.environ:
        from megalite.launch.torchrun import join_torchrun
        steps(join_torchrun(timeout=60), fault)
    else:
        from megalite.errors import MegaliteError
        from megalite.launch import local
        try:
            local.run_local(steps, 4, (fault,), timeout=60)
        except MegaliteError as error:
            print(f"{type(error).__name__}: {error}")
"""
RAISED = "PipelineError: rank 1, stage 1, 1F2: KeyError: 'no such layer'"


@pytest.mark.parametrize(
    ("torchrun", "fault"),
    [
        pytest.param(False, "raise", id="run_local, raises", marks=pytest.mark.full),
        pytest.param(False, "die", id="run_local, dies"),
        pytest.param(True, "raise", id="torchrun, raises"),
        pytest.param(True, "die", id="torchrun, dies", marks=pytest.mark.full),
    ],
)
def test_all_ranks_end_soon_after_one_has_failed(tmp_path, torchrun, fault):
    """Of four ranks, two of which wait for the one that failed, and one for another that waits."""
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"] if torchrun else []
    command = [sys.executable, *launcher, str(tmp_path / "script.py"), fault]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seconds = time.time() - float(ran.stdout.partition("fault at ")[2].split()[0])
    print(f"{seconds:.1f} s from the fault to the end")
    assert seconds < WHOLE_RUN_ENDS
    if fault == "raise":
        assert RAISED in ran.stderr and ran.returncode != 0
        assert ran.stderr.count("no such layer") >= 1
    elif torchrun:
        assert "exitcode  : 3" in ran.stderr and ran.returncode != 0
    else:
        assert ran.stdout.splitlines()[-1].startswith("RankLost: rank 1 ")

"""Who is to blame, by hand-made reports of four ranks: dp 2 × tp 2."""

import pytest

from megalite.parallel.blame import Issued, Report, blame

GROUPS = {
    "tp": [(0, 1), (2, 3)],
    "dp": [(0, 2), (1, 3)],
    "pp": [(0, 1, 2, 3)],
    "world": [(0, 1, 2, 3)],
}


def peers(rank):
    return {axis: next(group for group in groups if rank in group) for axis, groups in GROUPS.items()}


def report(*calls, step=4, **more):
    """A rank that has issued these calls: "tp1 all_reduce f:3"."""
    issued = []
    for call in calls:
        name, what, *caller = call.split()
        issued.append(Issued(name.rstrip("0123456789"), int(name.lstrip("abcdefghijklmnopqrstuvwxyz")), what, *caller))
    return Report(step, {call.axis: call.sequence for call in issued}, issued, **more)


def verdict(*reports, silent=None):
    answered = {rank: each for rank, each in enumerate(reports) if each is not None}
    return blame(answered, silent or {}, 4, peers)


def test_who_did_not_enter_and_waits_for_nobody():
    waits = report("tp1 all_reduce", "tp2 all_reduce", in_call=True)
    sleeps = report("tp1 all_reduce", where="time.sleep")
    others = report("tp1 all_reduce", "tp2 all_reduce", "dp1 all_reduce", in_call=True)
    found = verdict(waits, sleeps, others, others)
    assert (found.rank, found.step) == (1, 4)
    assert found.message == (
        "rank 1 of 4 hangs, in step 5 in time.sleep; rank 0 waits for it in tp#2 all_reduce"
    )  # ranks 2 and 3 wait for 0 and 1 over dp, and 0 for 1


def test_blame_goes_down_a_chain():
    first = report("tp1 a", "dp1 b", in_call=True)  # waits for rank 2 over dp
    third = report("tp1 a", in_call=True)  # waits for rank 3 over tp
    fourth = report()
    assert verdict(first, first, third, fourth).rank == 3


def test_who_does_not_answer():
    found = verdict(
        report("dp1 a"),
        None,
        report("dp1 a"),
        report("dp1 a"),
        silent={1: report("tp1 all_gather", step=3, where="old")},
    )
    assert found.rank == 1
    assert "does not answer: it was ended or stopped, in step 5; rank 3 waits for it in dp#1 a" in found.message


@pytest.mark.parametrize("other", [0, 1, 2])
def test_another_collective_under_the_same_number(other):
    usual = report("world1 all_reduce[3]", in_call=True)
    reports = [usual] * 4
    reports[other] = report("world1 all_gather[5] megalite.loop:4", in_call=True)
    found = verdict(*reports)
    assert found.rank == other
    assert "its world#1 all_gather[5] of megalite.loop:4 stands against world#1 all_reduce[3] of rank" in found.message


def test_one_left_out_among_equals_is_found_by_who_asked():
    whole = [f"tp{i} all_reduce line:{i}" for i in range(1, 6)]
    left_out = [f"tp{i} all_reduce line:{i + (i > 2)}" for i in range(1, 5)]
    waits, skipped = report(*whole, in_call=True), report(*left_out, "world1 control", in_call=True)
    fine = report(*whole, "world1 control", in_call=True)
    for rank in 0, 1:
        found = verdict(*([skipped, waits] if rank == 0 else [waits, skipped]), fine, fine)
        assert found.rank == rank
        assert f"its tp#3 all_reduce of line:4 stands against tp#3 all_reduce of line:3 of rank {1 - rank}" in (
            found.message
        )


def test_a_stage_that_did_not_send():
    waits = [report(awaits=(f"{rank - 1}F0", rank - 1), action=f"{rank}F0", in_call=True) for rank in (1, 2, 3)]
    found = verdict(report(action="0F0", where="model.py:7"), *waits)
    assert found.message == "rank 0 of 4 hangs, in step 5 at 0F0 in model.py:7; rank 1 waits for it in 0F0"


def test_who_has_left_is_not_waited_for():
    done = report("tp1 a", finished=True)
    assert verdict(report("tp1 a", "tp2 a", where="sampling"), done, done, done).rank == 0

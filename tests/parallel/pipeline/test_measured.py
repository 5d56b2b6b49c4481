"""Costs, prediction and the file of measured steps: what was put in comes out, and damage is a line."""

import functools
import itertools
import json
import math
import statistics
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_check import published

from megalite.parallel.mesh import Mesh
from megalite.parallel.pipeline import (
    Costs,
    dualpipe_v,
    interleaved_1f1b,
    one_f_one_b,
    schedule_of,
    simulate,
    zb_h1,
    zb_v,
)
from megalite.parallel.pipeline.clock import Clock, gather, offset
from megalite.parallel.pipeline.executor import Pipeline
from megalite.parallel.pipeline.measured import KEPT, Recorder, costs, predicted
from megalite.parallel.pipeline.saved import TIMELINE, Saved, load, timeline, write
from megalite.parallel.pipeline.simulate import by_formula
from megalite.parallel.pipeline.timeline import Timeline
from megalite.testing import run_ranks

MILLISECONDS = Costs(2e-3, 1.5e-3, 1e-3, 1e-4, 2.2e-3)


def times_of(timeline):
    return [[time for span in spans for time in span[1:]] for spans in timeline.ranks]


@settings(deadline=None, max_examples=200)
@given(published(), st.lists(st.floats(0.1, 10), min_size=4, max_size=40), st.floats(0, 0.05))
def test_costs_that_were_simulated_are_found_again(schedule, given_times, send):
    f, b, w, bw = (
        [given_times[(4 * stage + i) % len(given_times)] for stage in range(schedule.stages)] for i in range(4)
    )
    made = simulate(schedule, Costs(f, b, w, send, bw))
    found = costs([made])
    kinds = {(action.kind, action.stage) for actions in schedule.ranks for action in actions}
    for stage in range(schedule.stages):
        assert found.forward[stage] == pytest.approx(f[stage])
        if ("B", stage) in kinds:
            assert (found.backward_input[stage], found.backward_weight[stage]) == pytest.approx((b[stage], w[stage]))
        else:
            assert found.backward_weight[stage] == 0
        if ("BW", stage) in kinds:
            assert found.backward[stage] == pytest.approx(bw[stage])
        else:
            assert found.backward[stage] == pytest.approx(b[stage] + w[stage])
        assert found.send[stage] == pytest.approx(send, abs=1e-9) or found.send[stage] == 0
    assert found.send[0] == pytest.approx(send, abs=1e-9) or len(schedule.ranks) == 1  # its first receiver waits
    again = predicted([made])
    assert again.end - again.start == pytest.approx(made.end - made.start)
    assert again.begin is again.finish is None


def test_a_send_is_of_messages_that_were_waited_for():
    """Rank 1 computes 0F1's message only after its own backward: that says nothing about the send."""
    schedule = schedule_of(["0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1"])
    times = [[0, 1, 1, 2, 6.5, 7, 9, 10], [1.25, 2, 2, 6, 6, 7, 7, 8.5]]
    assert costs([timeline(schedule, times)]).send == (0.25, 0.5)


def test_medians_pass_over_a_step_and_a_microbatch_that_took_long():
    schedule = one_f_one_b(2, 8)
    good = simulate(schedule, MILLISECONDS)
    slow = simulate(schedule, Costs(1.0, 1.0, 1.0))
    times = times_of(good)
    times[0][-1] += 5.0
    assert costs([good, slow, timeline(schedule, times)]).forward == pytest.approx((2e-3, 2e-3))


def test_the_prediction_has_data_and_optimizer():
    made = simulate(one_f_one_b(2, 4), MILLISECONDS)
    steps = [Timeline(made.schedule, made.ranks, -data, made.end + 2 * data) for data in (0.1, 0.2, 5.0)]
    bubble = predicted(steps).bubble()
    assert (bubble.data, bubble.optimizer) == pytest.approx((0.2, 0.4))


def test_the_recorder_says_the_bubble_that_the_timeline_has():
    schedule = zb_h1(3, 6)
    recorder = Recorder(schedule)
    for gap in (1.0, 1.5, 1.2):
        made = simulate(schedule, Costs(2e-3, 1.5e-3, 1e-3, gap * 1e-3))
        shares = recorder.add(times_of(made), made.start - 0.01, made.end + 0.02)
        assert shares.measured == pytest.approx(made.bubble().over_total)
    assert shares.predicted == pytest.approx(shares.measured)  # 1.2 is the median


def test_the_step_with_the_median_bubble_of_the_last_is_saved(tmp_path):
    schedule = one_f_one_b(2, 4)
    recorder = Recorder(schedule, ranks=4, cores=2, layers=[3, 2])
    assert recorder.saved is None
    recorder.save(tmp_path / TIMELINE)
    assert not list(tmp_path.iterdir())  # no step yet
    for send in (9.0, *(0.1 * (i % KEPT) for i in range(KEPT))):
        made = simulate(schedule, Costs(1.0, 1.0, 1.0, send))
        recorder.add([[1000 + time for time in row] for row in times_of(made)], 999.5, 1000 + made.end + 0.25)
    recorder.save(tmp_path / TIMELINE)
    assert [path.name for path in tmp_path.iterdir()] == [TIMELINE]
    found = load(tmp_path)
    middle = simulate(schedule, Costs(1.0, 1.0, 1.0, 0.1 * (KEPT // 2))).bubble()
    assert found.measured.bubble().over_total == pytest.approx(middle.over_total)
    assert (found.measured.begin, found.measured.finish) == (0, pytest.approx(0.75 + middle.step))
    assert found.predicted.bubble().over_total == pytest.approx(recorder_share(recorder))
    assert (found.steps, found.ranks, found.cores, found.layers) == (KEPT, 4, 2, (3, 2))
    assert found.measured.schedule == schedule


def recorder_share(recorder):
    return simulate(recorder.schedule, recorder.costs).over_total


@pytest.mark.parametrize("schedule", [one_f_one_b(1, 1), dualpipe_v(3, 7), interleaved_1f1b(2, 4, 2)], ids=str)
def test_a_file_gives_back_what_was_written(tmp_path, schedule):
    made = simulate(schedule, MILLISECONDS)
    saved = Saved(made, costs([made]), None, 0.5, 1, 1, None, tuple(range(1, schedule.stages + 1)))
    write(tmp_path / "a.json", saved)
    found = load(tmp_path / "a.json")
    assert found.layers == saved.layers
    assert found.measured.schedule == schedule
    for wrote, read in zip(times_of(made), times_of(found.measured), strict=True):
        assert read == pytest.approx(wrote, abs=1e-9)
    assert found.costs == Costs(*(tuple(saved.costs.of(n, schedule.stages)) for n in COSTS))
    assert (found.data, found.optimizer, found.steps, found.ranks, found.cores) == (None, 0.5, 1, 1, None)
    assert found.measured.begin is found.measured.finish is None


COSTS = ("forward", "backward_input", "backward_weight", "send", "backward")


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_file_is_a_line(tmp_path_factory, data):
    """Any value of the file replaced by another, taken away, or the file cut."""
    path = tmp_path_factory.mktemp("damaged") / TIMELINE
    made = simulate(one_f_one_b(2, 2), MILLISECONDS)
    write(path, Saved(made, costs([made]), 0.1, 0.5, 1, 1, None, (2, 3)))
    written = json.loads(path.read_text())
    branch = written
    while True:
        key = data.draw(st.sampled_from(sorted(branch) if isinstance(branch, dict) else range(len(branch))))
        if not isinstance(branch[key], dict | list) or not branch[key] or data.draw(st.booleans()):
            break
        branch = branch[key]
    anything = st.sampled_from([None, -1, 1e400, math.nan, "x", [], {}, [[]], True, 10**30, "0F0", "9F999999999"])
    if data.draw(st.booleans()):
        branch[key] = data.draw(anything)
    else:
        del branch[key]
    text = json.dumps(written)
    length = data.draw(st.one_of(st.just(len(text)), st.integers(0, len(text) - 1)))
    path.write_text(text[:length])
    message = ""
    try:
        load(path).measured.bubble()
    except ValueError as error:
        message = str(error)
    assert message.startswith(f"{path}: ") if length < len(text) else message[:1] in ("", "/")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([1], "layers of 3 stages cannot be (1,)"),
        ([1, 0, 2], "layers of 3 stages cannot be (1, 0, 2)"),
        ([1, 10**9, 1], "1000000000 is no number of layers"),
        ([1, True, 1], "True is no number of layers"),
        ("111", "'1' is no number of layers"),
    ],
)
def test_layers_that_cannot_be(tmp_path, layers, says):
    path = tmp_path / TIMELINE
    made = simulate(one_f_one_b(3, 2), MILLISECONDS)
    write(path, Saved(made, costs([made]), 0.1, 0.5, 1, 1, None))
    written = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in written.items() if name != "layers"}))
    assert load(path).layers == ()  # a file of before
    path.write_text(json.dumps(written | {"layers": layers}))
    with pytest.raises(ValueError, match="damaged or of another kind") as error:
        load(path)
    assert str(error.value).endswith(says)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "megalite timeline", "version": 2}', "\xff", "[" * 9999]
)
def test_a_foreign_file_is_a_line(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"a\.json: damaged or of another kind: ") as error:
        load(path)
    assert "\n" not in str(error.value)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"no timeline\.json in it; a run with mesh\.pp > 1 writes one"):
        load(tmp_path)
    with pytest.raises(ValueError, match="No such file"):
        load(tmp_path / "b.json")


def test_ranks_that_share_cores_are_remarked_on():
    made = simulate(one_f_one_b(2, 2), MILLISECONDS)

    def remark(ranks, cores):
        return Saved(made, MILLISECONDS, None, None, 1, ranks, cores).remark

    assert remark(4, 2).startswith("4 ranks took turns on 2 cores") and "on 1 core:" in remark(2, 1)
    assert remark(2, 2) == remark(8, None) == ""


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 7), interleaved_1f1b(3, 7, 2), zb_h1(3, 7)], ids=lambda s: s.name)
def test_formulas_are_what_equal_stages_and_free_sends_simulate_to(schedule):
    given_costs = Costs(1.0, 1.3, 0.6, backward=1.7)
    formula = by_formula(schedule, given_costs)
    bubble = simulate(schedule, given_costs).bubble()
    assert formula["over_total"] == pytest.approx(bubble.over_total)
    assert formula["over_ideal"] == pytest.approx(bubble.over_ideal)


def test_no_formula_where_none_is_meant():
    assert by_formula(schedule_of(str(one_f_one_b(2, 4)).split("\n"), "mine"), MILLISECONDS) == {}
    assert by_formula(schedule_of(["0F0 0BW0 0F1 0BW1", "1F0 1BW0 1F1 1BW1"], "1F1B"), MILLISECONDS) == {}
    assert by_formula(zb_h1(2, 8), Costs(1.0, 1.0, 2.0)) == {}


def sleepers(schedule, steps):
    """Runs on a rank: stages that sleep 5 ms forward and 10 ms backward, the last one half as long again."""
    axis = Mesh(pp=len(schedule.ranks)).pp
    last = schedule.stages - 1

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, slow):
            ctx.slow = slow
            time.sleep(5e-3 * slow)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(10e-3 * ctx.slow)
            return gradient, gradient.sum(), None

    def stage(number, x, microbatch):
        y = Sleep.apply(torch.ones(4, 4) if x is None else x, weights[number], 1.5 if number == last else 1.0)
        return y.sum() if number == last else y

    weights = {number: torch.ones((), requires_grad=True) for number in schedule.stages_of(axis.rank)}
    stages = {number: functools.partial(stage, number) for number in weights}
    pipeline, clock = Pipeline(schedule, axis, stages, torch.device("cpu")), Clock(torch.device("cpu"))
    lengths = [2 * len(actions) + 2 for actions in schedule.ranks]
    measured = []
    for _ in range(steps):
        begin = clock.mark()
        pipeline.step(lambda stage, microbatch: (4, 4), torch.float32)
        time.sleep(5e-3)
        marks = [begin, *itertools.chain(*pipeline.marks), clock.mark()]
        rows = gather(axis, [moment + offset(axis) for moment in clock.read(marks)], lengths)
        measured.append(([row[1:-1] for row in rows], min(row[0] for row in rows), max(row[-1] for row in rows)))
    return measured


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 6), zb_v(2, 4)], ids=lambda schedule: schedule.name)
def test_a_real_pipeline_is_predicted(schedule):
    """Sleeping takes no core, so that ranks may be more than cores."""
    recorder = Recorder(schedule)
    shares = [recorder.add(*step) for step in run_ranks(sleepers, len(schedule.ranks), schedule, 7)[0]]
    measured, expected = statistics.median(share.measured for share in shares), shares[-1].predicted
    print(f"{schedule.name}: measured {measured:.4f}, predicted {expected:.4f}; {recorder.costs}")
    assert measured == pytest.approx(expected, abs=0.03)
    last = schedule.stages - 1
    assert recorder.costs.forward == pytest.approx([5e-3] * last + [7.5e-3], rel=0.3)


def test_a_step_of_16_ranks_is_recorded_in_milliseconds():
    schedule = interleaved_1f1b(16, 64, 2)
    times = times_of(simulate(schedule, MILLISECONDS))
    recorder = Recorder(schedule)
    took = []
    for _ in range(20):
        begin = time.process_time()
        recorder.add(times)
        took.append(time.process_time() - begin)
    print(
        f"{sum(map(len, schedule.ranks))} actions: mean {sum(took) / 20 * 1e3:.2f} ms, largest {max(took) * 1e3:.1f} ms"
    )
    assert sum(took) / 20 < 0.02

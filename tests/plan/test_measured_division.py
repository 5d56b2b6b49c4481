"""Divisions by measured times: what was put in comes out, and the division found is held to all that there are."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stages import divisions

from megalite.parallel.pipeline import GENERATORS, Costs, load, one_f_one_b, schedule_of, simulate
from megalite.parallel.pipeline.measured import costs
from megalite.parallel.pipeline.saved import Saved
from megalite.plan.measured_division import Parts, advice, best_division, parts

LAYER, EMBEDDING, HEAD = (3e-3, 4e-3, 2e-3, 5.5e-3), (0.1e-3, 0.0, 0.7e-3, 0.7e-3), (4e-3, 5e-3, 4e-3, 8e-3)
SCHEDULES = [load(name, 2, 6) for name in GENERATORS] + [load(name, 3, 6) for name in ("1f1b", "zb-h1", "zb-v")]
SCHEDULES += [one_f_one_b(4, 8)]
MIXED = schedule_of(["0F0 0F1 0B0 0W0 0B1 0W1", "1F0 1BW0 1F1 1BW1"], "mixed")  # B and W apart on one stage only


def costs_of(division, layer=LAYER, embedding=EMBEDDING, head=HEAD):
    """Of stages with so many layers, from seconds of F, B, W and BW."""
    ends = [[0.0] * 4 for _ in division]
    ends[0], ends[-1] = list(embedding), [a + b for a, b in zip(ends[-1], head, strict=True)]
    table = [[n * x + y for x, y in zip(layer, end, strict=True)] for n, end in zip(division, ends, strict=True)]
    f, b, w, bw = zip(*table, strict=True)
    return Costs(f, b, w, 0.2e-3, bw)


def seconds(schedule, division, **more):
    timeline = simulate(schedule, costs_of(division, **more))
    return timeline.end - timeline.start


def worst(schedule, layers):
    """All layers on the last stage but those that other stages need."""
    return (1, *[1] * (schedule.stages - 2), layers - schedule.stages + 1)


def measured(schedule, division, noise):
    """Costs by the medians of simulated steps whose actions each take a little longer or less."""
    steps = []
    for step in range(5):
        draw = random.Random(step)
        made = costs_of(division)
        table = (made.forward, made.backward_input, made.backward_weight, made.send, made.backward)
        jitter = [draw.uniform(1 - noise, 1 + noise) for _ in range(5 * len(division))]
        times = [x if isinstance(x, float) else [t * jitter.pop() for t in x] for x in table]
        steps.append(simulate(schedule, Costs(*times)))
    return costs(steps)


@pytest.mark.parametrize("schedule", [*SCHEDULES, MIXED], ids=lambda schedule: f"{schedule.name} {schedule.stages}")
@pytest.mark.parametrize("extra", [2, 5])
def test_no_division_has_a_shorter_step(schedule, extra):
    """With a free embedding, which two stages cannot tell from layers."""
    free, layers = (0.0,) * 4, schedule.stages + extra
    steps = {d: seconds(schedule, d, embedding=free) for d in divisions(layers, schedule.stages)}
    for start in (worst(schedule, layers), (layers - schedule.stages + 2, *[1] * (schedule.stages - 2), 0)):
        found = best_division(schedule, start, costs_of(start, embedding=free))
        assert steps[found.layers] <= 1.01 * min(steps.values())
        assert found.faster == pytest.approx(steps[start] / steps[found.layers] - 1)  # what is foretold comes
        again = best_division(schedule, found.layers, costs_of(found.layers, embedding=free))
        assert again.faster < 0.01


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name} {schedule.stages}")
def test_noise_and_an_embedding_that_takes_time_do_little(schedule):
    layers = schedule.stages + 5
    steps = {d: seconds(schedule, d) for d in divisions(layers, schedule.stages)}
    start = worst(schedule, layers)
    found = best_division(schedule, start, measured(schedule, start, 0.05))
    assert steps[found.layers] <= 1.05 * min(steps.values())
    assert found.faster == pytest.approx(steps[start] / steps[found.layers] - 1, abs=0.2)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    *(st.floats(0, 9).map(lambda x: round(x, 3)) for _ in range(3)),
)
def test_seconds_that_were_put_in_are_found(layers, layer, embedding, head):
    embedding = 0.0 if len(layers) == 2 else embedding
    times = [n * layer for n in layers]
    times[0], times[-1] = times[0] + embedding, times[-1] + head
    assert parts(layers, times) == pytest.approx((layer, embedding, head), abs=1e-6)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 10)), min_size=2, max_size=6))
def test_no_other_seconds_explain_the_stages_better(stages):
    """The conditions of the least squares with nothing below 0: no slope down, and none at all where it is above 0."""
    layers, times = zip(*stages, strict=True)
    found = parts(layers, times)
    if not any(layers[:-1]):
        assert found is None
        return
    ends = [stage == 0 for stage in range(len(stages))], [stage == len(stages) - 1 for stage in range(len(stages))]
    basis = layers, *ends
    missed = [t - sum(x * column[i] for x, column in zip(found, basis, strict=True)) for i, t in enumerate(times)]
    for x, column in zip(found, basis, strict=True):
        slope = -sum(a * b for a, b in zip(column, missed, strict=True))
        assert x >= 0 and slope >= -1e-6 and x * slope <= 1e-5


def test_two_stages():
    assert parts((2, 3), (4.0, 9.0)) == Parts(2.0, 0.0, 3.0)  # a free embedding
    assert parts((2, 3), (4.0, 3.0)) == Parts(1.0, 2.0, 0.0)  # the layers would be dearer than the last stage
    assert parts((5, 0), (10.0, 3.0)) == Parts(2.0, 0.0, 3.0)
    assert parts((0, 5), (1.0, 10.0)) is None  # the layers or the head


def test_nothing_is_found_where_nothing_is_told():
    assert best_division(one_f_one_b(2, 4), (0, 5), costs_of((0, 5))) == ((0, 5), 0.0)
    assert best_division(one_f_one_b(2, 4), (2, 3), Costs(0.0, 0.0, 0.0)) == ((2, 3), 0.0)


def test_large_schedules_take_a_moment():
    """Few divisions are tried of one with many actions, and that of `divide` is the first of them."""
    schedule = load("interleaved-1f1b", 16, 128, 2)
    start = worst(schedule, 64)
    found = best_division(schedule, start, costs_of(start))
    assert seconds(schedule, found.layers) < 0.2 * seconds(schedule, start)
    assert sum(found.layers) == 64 and all(found.layers[1:-1])


def test_a_line_where_it_is_worth_one():
    schedule = one_f_one_b(2, 4)
    step = simulate(schedule, costs_of((1, 5)))
    saved = Saved(step, costs([step]), None, None, 1, 2, 2, (1, 5))
    found = best_division(schedule, (1, 5), saved.costs)
    assert advice(saved) == (
        f"by the times measured, mesh.division={list(found.layers)} would make the pipeline "
        f"{100 * found.faster:.0f} % faster"
    )
    assert advice(replace(saved, layers=())) == ""  # a file of before
    assert advice(replace(saved, cores=1)) == ""  # the ranks took turns
    assert advice(replace(saved, cores=None)) == advice(saved)  # GPUs
    almost = Costs((1.0, 1.015), 1.0, 1.0)
    assert 0 <= best_division(schedule, (2, 2), almost).faster < 0.02
    assert advice(replace(saved, layers=(2, 2), costs=almost)) == ""

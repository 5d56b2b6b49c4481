"""Stages: layers divided as evenly as can be, held to all divisions there are; what cannot run is one line."""

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import Config, MeshConfig, ModelConfig, TrainConfig, check, resolve
from megalite.errors import ConfigError
from megalite.launch import cli
from megalite.model.presets import PRESETS
from megalite.parallel.pipeline import GENERATORS, Costs, load, one_f_one_b, simulate
from megalite.plan.stages import divide, head_flops, layer_flops, plan_stages
from megalite.train.metrics import flops_per_token


def divisions(layers, stages):
    """All divisions in which every stage between the first and the last has a layer."""
    for counts in itertools.product(range(layers + 1), repeat=stages - 1):
        whole = (*counts, layers - sum(counts))
        if whole[-1] >= 0 and all(whole[1:-1]):
            yield whole


def of_ranks(division, rank_of, layer, head):
    """The costs of the stages, by rank."""
    costs = [count * layer for count in division]
    costs[-1] += head
    return [[cost for cost, at in zip(costs, rank_of, strict=True) if at == rank] for rank in range(max(rank_of) + 1)]


def squares(numbers):
    return sum(number**2 for number in numbers)


@st.composite
def cases(draw):
    """Layers, the rank of each stage, the costs of a layer and of the head."""
    stages = draw(st.integers(1, 5))
    holders = draw(st.permutations(range(stages)))
    ranks = draw(st.integers(1, stages))
    return (
        draw(st.integers(max(0, stages - 2), 7)),
        [rank % ranks for rank in holders],
        draw(st.integers(1, 5)),
        draw(st.integers(0, 20)),
    )


@settings(deadline=None)
@given(cases())
def test_no_division_has_a_cheaper_rank_or_evener_ranks_and_stages(case):
    layers, rank_of, layer, head = case
    made = divide(layers, rank_of, layer, head)
    every = list(divisions(layers, len(rank_of)))
    assert made in every
    work = [sum(costs) for costs in of_ranks(made, rank_of, layer, head)]
    others = [of_ranks(division, rank_of, layer, head) for division in every]
    assert max(work) == min(max(map(sum, other)) for other in others)
    assert squares(work) == min(squares(map(sum, other)) for other in others)
    within = [squares(costs) for costs in of_ranks(made, rank_of, layer, head)]
    same = [list(map(squares, other)) for other in others if list(map(sum, other)) == work]
    assert all(ours <= theirs for other in same for ours, theirs in zip(within, other, strict=True))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 8), st.integers(1, 5), st.integers(0, 20))
def test_with_a_stage_a_rank_no_division_has_a_cheaper_stage(stages, layers, layer, head):
    layers = max(layers, stages - 2)
    every = [of_ranks(division, range(stages), layer, head) for division in divisions(layers, stages)]
    made = of_ranks(divide(layers, range(stages), layer, head), range(stages), layer, head)
    assert max(made) == min(map(max, every))


@pytest.mark.parametrize("name", GENERATORS)
def test_steps_are_nearly_as_short_as_with_the_best_division(name):
    """By the simulator, F, B and W taking equally long. With ties the other way, 1F1B is 2 % behind."""
    schedule = load(name, 2, 6) if name in ("interleaved-1f1b", "zb-v", "dualpipe-v") else load(name, 3, 6)

    def seconds(division, head):
        costs = [2 * count for count in division]
        costs[-1] += head
        timeline = simulate(schedule, Costs(costs.__getitem__, costs.__getitem__, costs.__getitem__))
        return timeline.end - timeline.start

    behind = []
    for layers, head in itertools.product(range(2, 8), (0, 1, 2, 5)):
        best = min(seconds(division, head) for division in divisions(layers, schedule.stages))
        behind.append(seconds(divide(layers, schedule.rank_of, 2, head), head) / best)
    assert max(behind) < 1.1
    assert sum(behind) / len(behind) < 1.01


def test_few_layers():
    assert divide(2, range(4), 1, 0) == (0, 1, 1, 0)  # the ends have the embedding and the head
    assert divide(3, range(4), 1, 0) == (1, 1, 1, 0)
    assert divide(5, range(3), 2, 20) == (3, 2, 0)
    assert divide(1, range(2), 1, 0) == (1, 0)
    assert divide(5, [0], 1, 9) == (5,)
    with pytest.raises(ValueError, match="layers: 1 given; 2 or more would do for 4 stages"):
        divide(1, range(4), 1, 0)


def test_many_layers_take_a_moment():
    started = time.perf_counter()
    assert sum(divide(10_000, range(64), 12, 100)) == 10_000
    assert time.perf_counter() - started < 1


# --- of a config --------------------------------------------------------------------------------------------------


def config(pp=2, layers=4, model=None, train=None, **mesh):
    train = {"global_batch": 8, "seq_len": 32} | (train or {})
    return Config(ModelConfig(layers=layers, **model or {}), MeshConfig(1, pp, **mesh), train=TrainConfig(**train))


def planned(*args, **more):
    return plan_stages(resolve(check(config(*args, **more))))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("window", [0, 17])
def test_costs_of_stages_are_the_flops_of_the_model(preset, window):
    whole = config(4, train={"seq_len": 64})
    whole = replace(whole, model=ModelConfig(**{**PRESETS[preset], "window": window}))
    stages = plan_stages(resolve(check(whole)))
    assert sum(stage.cost for stage in stages.stages) == flops_per_token(whole.model, 64)
    assert stages.stages[0].cost == len(stages.stages[0].layers) * layer_flops(whole.model, 64)
    assert stages.stages[-1].cost == len(stages.stages[-1].layers) * layer_flops(whole.model, 64) + head_flops(
        whole.model
    )


@settings(deadline=None)
@given(st.sampled_from(list(GENERATORS)), st.integers(1, 5), st.integers(8, 30))
def test_every_layer_is_on_one_stage_in_order(name, pp, layers):
    stages = planned(pp, layers, schedule=name)
    assert [layer for stage in stages.stages for layer in stage.layers] == list(range(layers))
    assert stages.count == stages.schedule.stages == len(stages.stages)
    assert [stage.number for stage in stages.stages if stage.has_embedding] == [0]
    assert [stage.number for stage in stages.stages if stage.has_head] == [stages.count - 1]
    assert all(stage.rank == stages.schedule.rank_of[stage.number] for stage in stages.stages)
    held = [stages.of_rank(rank) for rank in range(pp)]
    assert {number: layers for of_rank in held for number, layers in of_rank.items()} == {
        stage.number: stage.layers for stage in stages.stages
    }
    assert all(list(of_rank) == stages.schedule.stages_of(rank) for rank, of_rank in enumerate(held))
    assert stages.imbalance >= 1


def test_without_a_pipeline_there_is_one_stage_and_its_settings_are_not_looked_at():
    stages = planned(1, 3, schedule="none", division=(1, 1), chunks=7, microbatches=4)
    assert stages.schedule == one_f_one_b(1, 4)
    assert stages.of_rank(0) == {0: range(3)}
    assert (stages.stages[0].has_embedding, stages.stages[0].has_head, stages.imbalance) == (True, True, 1)


def test_a_division_that_is_given_is_taken():
    assert planned(2, 7, division=(0, 7)).of_rank(1) == {1: range(7)}
    stages = planned(2, 7, schedule="zb-v", division=(1, 4, 2, 0))
    assert stages.of_rank(0) == {0: range(1), 3: range(7, 7)}
    assert stages.of_rank(1) == {1: range(1, 5), 2: range(5, 7)}


def test_the_schedule_is_what_the_settings_say(tmp_path):
    assert planned(2, 4, microbatches=4).schedule == one_f_one_b(2, 4)
    assert planned(2, 6, schedule="interleaved-1f1b", microbatches=4).schedule == load("interleaved-1f1b", 2, 4, 2)
    assert planned(2, 6, schedule="interleaved-1f1b", chunks=3).schedule == load("interleaved-1f1b", 2, 8, 3)
    path = tmp_path / "mine.csv"
    path.write_text(str(load("zb-v", 2, 4)))
    stages = planned(2, 4, schedule=str(path), train={"micro_batch": 2})
    assert (stages.schedule.ranks, stages.count) == (load("zb-v", 2, 4).ranks, 4)


def test_a_line_for_the_console():
    small = {"vocab_size": 1}
    assert str(planned(2, 5, model=small)) == (
        "stages: rank 0 embedding + layers 0–2 | rank 1 layers 3–4 + head; most over mean 1.20"
    )
    assert str(planned(2, 5, model=small, schedule="zb-v", division=(1, 3, 1, 0))) == (
        "stages: rank 0 embedding + layer 0, head | rank 1 layers 1–3, layer 4; most over mean 1.60"
    )
    many = str(planned(64, 70, model=small))
    assert many.startswith("stages: rank 0 embedding + layers 0–1 | rank 1 layers 2–3 | … | rank 63 layer 69 + head; ")
    many = str(planned(2, 70, model=small, schedule="interleaved-1f1b", chunks=32))
    assert len(many) < 160 and "…" in many


FILES = {
    "stuck.csv": "0F0 0BW0 0F1 0BW1\n1F1 1BW1 1F0 1BW0",
    "three.csv": "0F0 0F1 0BW0 0BW1\n1F0 1F1 1BW0 1BW1\n2F0 2F1 2BW0 2BW1",
    "halves.csv": "0F0 0F1 0B0 0W0 0B1\n1F0 1F1 1BW0 1BW1",
    "bad.csv": "0FO",
    "mine.py": """
from megalite.parallel.pipeline import Action, Schedule
def idle(stages, microbatches):
    return [[f"{kind}{m}" for m in range(microbatches) for kind in ("0F", "0BW")], []]
def broken(stages, microbatches):
    raise RuntimeError("two\\nlines")
def nowhere(stages, microbatches):
    return Schedule("own", ((), ()), (5,), microbatches)
""",
}
BAD = [
    (
        {"schedule": "stuck.csv"},
        "mesh.schedule: deadlock: rank 0 waits at 0BW0 for 1BW0 of rank 1, and rank 1 waits at 1F1",
    ),
    ({"schedule": "three.csv"}, "mesh.schedule: 'three.csv' given, of 3 ranks; one of mesh.pp=2 would do"),
    (
        {"schedule": "stuck.csv", "microbatches": 4},
        "mesh.schedule: 'stuck.csv' given, of 2 microbatches; one of mesh.microbatches=4 would do, or mesh.",
    ),
    ({"schedule": "halves.csv"}, "mesh.schedule: rank 0: 0W1 missing"),
    ({"schedule": "bad.csv"}, "mesh.schedule: bad.csv: rank 0: '0FO' given; an action like 2F0"),
    ({"schedule": "2f2b"}, "mesh.schedule: 2f2b: no such schedule and no such file; gpipe, 1f1b"),
    ({"schedule": "two\nlines"}, "mesh.schedule: two lines: no such schedule"),
    ({"schedule": "mine.py:idle"}, "mesh.schedule: 'mine.py:idle' given, in which rank 1 computes nothing"),
    ({"schedule": "mine.py:broken"}, "mesh.schedule: broken: RuntimeError: two lines"),
    ({"schedule": "mine.py:nowhere"}, "mesh.schedule: 'mine.py:nowhere' given, in which rank 0 computes nothing"),
    ({"schedule": "mine.py:no"}, "mesh.schedule: mine.py: no function no"),
    ({"division": (1, 1, 2)}, "mesh.division: 3 numbers given; 2 would do for the 2 stages of 1F1B on mesh.pp=2"),
    ({"division": (1, 2)}, "mesh.division: 3 layers given; as many as model.layers=4 would do"),
    ({"division": (-1, 5)}, "mesh.division: -1 given for stage 0; 0 or more would do"),
    ({"division": (2, 0, 2, 0), "schedule": "zb-v"}, "mesh.division: 0 given for stage 1; 1 or more would do"),
    (
        {"schedule": "interleaved-1f1b", "chunks": 4},
        "model.layers: 4 given; 6 or more would do for the 8 stages of interleaved 1F1B on mesh.pp=2",
    ),
]


@pytest.mark.parametrize(("mesh", "message"), BAD, ids=[" ".join(map(str, mesh.values())) for mesh, _ in BAD])
def test_what_cannot_run_is_one_line(mesh, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        planned(**{"microbatches": 2, **mesh})
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("command", ["train", "verify"])
def test_the_command_line_refuses_a_deadlock_before_it_starts_a_process(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("megalite.launch.local.warm", lambda: pytest.fail("ranks are being started"))
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "stuck.csv").write_text(FILES["stuck.csv"])
    settings = ["mesh.pp=2", "mesh.microbatches=2", f"mesh.schedule={tmp_path / 'stuck.csv'}"]
    with pytest.raises(SystemExit) as caught:
        cli.main([command, str(tmp_path / "config.toml"), *settings])
    assert caught.value.code == 78
    told = capsys.readouterr().err
    assert told.startswith("megalite: error: mesh.schedule: deadlock: rank 0 waits at 0BW0")
    assert len(told.splitlines()) == 1

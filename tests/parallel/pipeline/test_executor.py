"""Schedules run on ranks: the losses and gradients of one process; when weights' gradients, memory and messages go."""

import itertools
import random
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.parallel import weight_gradients
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.pipeline import (
    Action,
    Schedule,
    activations,
    check,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    schedule_of,
    zb_h1,
    zb_h2,
    zb_v,
)
from megalite.parallel.pipeline import executor as executing
from megalite.parallel.pipeline.executor import Pipeline, PipelineError
from megalite.parallel.pipeline.generators import one_after_another
from megalite.parallel.pipeline.schedule import messages
from megalite.parallel.tensor import ColumnParallelLinear
from megalite.parallel.traffic import traffic
from megalite.testing import RanksFailed, run_ranks

HIDDEN = 6
CPU = torch.device("cpu")
FLAT = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-h2": zb_h2}
SCHEDULES = {
    **FLAT,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
    "interleaved, 2 chunks": partial(interleaved_1f1b, chunks=2),
    "interleaved, 3 chunks": partial(interleaved_1f1b, chunks=3),
    "from the last rank to the first": lambda p, m: one_after_another((*reversed(range(p)),) * 2, m),
}


class Layers(nn.Module):
    """Of one stage: a norm, whose gradients autograd adds, and two linears, whose gradients can be put off."""

    def __init__(self, stage):
        super().__init__()
        torch.manual_seed(stage)
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = ColumnParallelLinear(HIDDEN, 3 * HIDDEN, Axis())
        self.down = ColumnParallelLinear(3 * HIDDEN, HIDDEN, Axis())

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model:
    """The stages of a schedule that this rank holds, and a batch whose microbatches have `rows` of i."""

    def __init__(self, schedule, held):
        torch.set_default_dtype(torch.float64)
        self.last = schedule.stages - 1
        self.layers = {stage: Layers(stage) for stage in held}
        self.rows = lambda microbatch: 3

    def stage(self, stage):
        def compute(x, microbatch):
            return self.compute(stage, x, microbatch)

        return compute

    def compute(self, stage, x, microbatch):
        assert (x is None) == (stage == 0)
        if stage == 0:
            x = torch.randn(self.rows(microbatch), HIDDEN, generator=torch.Generator().manual_seed(microbatch))
        y = self.layers[stage](x)
        return y.square().sum() if stage == self.last else y

    def shape(self, stage, microbatch):
        return self.rows(microbatch), HIDDEN

    def gradients(self):
        named = [(f"{stage}.{name}", p) for stage, part in self.layers.items() for name, p in part.named_parameters()]
        return {name: parameter.grad for name, parameter in named}

    def zero_grad(self):
        for part in self.layers.values():
            part.zero_grad()


def pipeline_of(schedule, pp=None, **more):
    """On a rank: the pipeline over all ranks, and its model. pp: their axis, where there is one"""
    pp = pp or Mesh(pp=dist.get_world_size()).pp
    model = Model(schedule, schedule.stages_of(pp.rank))
    return Pipeline(schedule, pp, {stage: model.stage(stage) for stage in model.layers}, CPU, **more), model


def alone(schedule, rows):
    """The same model in one process: its losses, and its gradients."""
    model = Model(schedule, range(schedule.stages))
    model.rows = rows
    losses = {}
    for microbatch in range(schedule.microbatches):
        x = None
        for stage in range(schedule.stages):
            x = model.compute(stage, x, microbatch)
        x.backward()
        losses[microbatch] = x.item()
    return losses, model.gradients()


def close(actual, expected):
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@contextmanager
def around_actions(before=lambda action: None, after=lambda action: None):
    """Call these before and after every action of this rank."""
    compute = executing._Run.compute

    def wrapped(run, action):
        before(action)
        compute(run, action)
        after(action)

    with mock.patch.object(executing._Run, "compute", wrapped):
        yield


# --- values -----------------------------------------------------------------------------------------------------------


def same_as_alone(schedule, pp):
    """Two steps of microbatches of other sizes each, and an evaluation between them, by one pipeline."""
    pipeline, model = pipeline_of(schedule, pp)
    own = list(range(schedule.microbatches)) if schedule.rank_of[-1] == pipeline.axis.rank else []
    for step in range(2):
        model.rows = lambda microbatch, step=step: 2 + (microbatch + step) % 3 + 3 * step
        expected, gradients = alone(schedule, model.rows)
        model.zero_grad()
        for run in (pipeline.step, pipeline.evaluate)[: 2 - step]:
            losses = run(model.shape, torch.float64)
            assert sorted(losses) == own
            assert not any(loss.requires_grad for loss in losses.values())
            close({i: loss.item() for i, loss in losses.items()}, expected)
            close(model.gradients(), gradients)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.ranks(1, 2, 3, 4)
def test_losses_and_gradients_are_those_of_one_process(name):
    p = dist.get_world_size()
    pp = Mesh(pp=p).pp
    for microbatches in {1, p, p + 1, 2 * p}:
        same_as_alone(SCHEDULES[name](p, microbatches), pp)


def random_schedule(ranks, seed):
    """Stages anywhere, also none on a rank, and actions in any order in which all can be computed."""
    draw = random.Random(seed)
    stages, microbatches = draw.randint(1, 2 * ranks + 1), draw.randint(1, 5)
    rank_of = [draw.randrange(ranks) for _ in range(stages)]
    rows, done = [[] for _ in range(ranks)], set()
    left = {("F", stage, i) for stage in range(stages) for i in range(microbatches)}

    def ready(kind, stage, i):
        if kind == "F":
            return stage == 0 or ("F", stage - 1, i) in done
        return kind == "W" or stage == stages - 1 or ("B", stage + 1, i) in done

    while left:
        kind, stage, i = draw.choice([action for action in sorted(left) if ready(*action)])
        rows[rank_of[stage]].append(Action(kind, stage, i))
        left.remove((kind, stage, i))
        done.add(("B" if kind == "BW" else kind, stage, i))
        if kind == "F":
            left.add((draw.choice(["B", "BW"]), stage, i))
        elif kind == "B":
            left.add(("W", stage, i))
    return Schedule(f"random {seed}", tuple(map(tuple, rows)), tuple(rank_of), microbatches)


@pytest.mark.ranks(2, 3, 4)
def test_any_schedule_that_passes_the_check_is_executed():
    out_of_order = 0
    pp = Mesh(pp=dist.get_world_size()).pp
    for seed in range(12):
        schedule = random_schedule(pp.size, seed)
        check(schedule)
        same_as_alone(schedule, pp)
        for (_, to), sent in messages(schedule).items():
            used = [schedule.ranks[to].index(by) for _, by in sent]
            out_of_order += used != sorted(used)
    assert out_of_order > 5  # or that messages are not used in the order in which they come is not tried


@pytest.mark.ranks(2)
def test_steps_without_clearing_add_up():
    schedule = zb_v(2, 3)
    pipeline, model = pipeline_of(schedule)
    _, expected = alone(schedule, model.rows)
    for times in (1, 2, 3):
        pipeline.step(model.shape, torch.float64)
        close(model.gradients(), {name: times * gradient for name, gradient in expected.items()})


@pytest.mark.ranks(3)
def test_a_frozen_stage_and_one_that_leaves_its_input_out():
    """Stage 0 has nothing to learn; stage 1's y does not depend on its x; the gradients of what is behind are zero."""
    for make in (one_f_one_b, zb_h1):
        for frozen, ignoring in ((0, None), (1, None), (None, 1), (0, 1), (None, 2)):
            schedule = make(3, 2)
            pp = Mesh(pp=3).pp
            weight = torch.full((HIDDEN,), 2.0 + pp.rank, requires_grad=pp.rank != frozen)

            def stage(x, i, pp=pp, weight=weight, ignoring=ignoring):
                x = torch.ones(4, HIDDEN) if x is None or pp.rank == ignoring else x
                return (x * weight).sum() if pp.rank == 2 else x * weight

            losses = Pipeline(schedule, pp, {pp.rank: stage}, CPU).step(lambda stage, i: (4, HIDDEN), torch.float32)
            first = ignoring or 0
            product = {0: 24.0, 1: 12.0, 2: 4.0}[first]
            assert all(loss == 4 * HIDDEN * product for loss in losses.values())
            if pp.rank == frozen:
                assert weight.grad is None
            else:
                expected = 2 * 4 * product / (2.0 + pp.rank) if pp.rank >= first else 0.0
                assert (weight.grad == expected).all()


# --- when ------------------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += func.overloadpacket in (aten.mm, aten.addmm, aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [zb_h1, zb_v, dualpipe_v, one_f_one_b])
@pytest.mark.ranks(1, 2)
def test_b_leaves_the_gradients_of_linears_for_w(make):
    """Two products in each of F, B and W; BW has four. What is no linear's has its gradient from B."""
    schedule = make(dist.get_world_size(), 4)
    pipeline, model = pipeline_of(schedule)
    model.zero_grad()
    kinds, before, products = set(), {}, Products()

    def note(action):
        products.count = 0
        before.update({name: None if g is None else g.clone() for name, g in model.gradients().items()})

    def look(action):
        kinds.add(action.kind)
        assert products.count == (4 if action.kind == "BW" else 2)
        for name, gradient in model.gradients().items():
            was, is_weight = before[name], name.endswith(("up.weight", "down.weight"))
            changed = gradient is not None and not (was is not None and torch.equal(gradient, was))
            computes = {"F": False, "BW": True, "W": is_weight, "B": not is_weight}[action.kind]
            assert changed == (computes and name.startswith(f"{action.stage}.")), f"{name} at {action}"

    with around_actions(note, look), products:
        pipeline.step(model.shape, torch.float64)
    assert kinds == {a.kind for a in schedule.ranks[pipeline.axis.rank]}
    assert kinds >= ({"F", "BW"} if make is one_f_one_b else {"F", "B", "W"})


@pytest.mark.ranks(1)
def test_a_gradient_of_one_microbatch_comes_by_way_of_autograd():
    """Nothing is added up, and hooks of parameters see it while backward runs."""
    for schedule, taken in ((one_f_one_b(1, 1), False), (one_f_one_b(1, 2), True), (zb_h1(1, 1), True)):
        pipeline, model = pipeline_of(schedule)
        with mock.patch.object(weight_gradients, "add", wraps=weight_gradients.add) as add:
            pipeline.step(model.shape, torch.float64)
        assert bool(add.call_count) == taken


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.ranks(2, 3)
def test_activations_are_let_go_as_soon_as_they_may_be(name):
    """What backward needs until B, what W needs until W, an output until its gradient has come; then all is gone."""
    schedule = SCHEDULES[name](dist.get_world_size(), 5)
    pipeline, model = pipeline_of(schedule)
    live = {"input": {}, "for B": {}, "for W": {}, "output": {}}
    held = {"input": set(), "for B": set(), "for W": set()}
    peak = dict.fromkeys(held, 0)

    def compute(stage, x, microbatch):
        part, key = model.layers[stage], (stage, microbatch)
        x = torch.randn(3, HIDDEN) if stage == 0 else x
        normed = part.norm(x)
        wide = part.up(normed)
        y = x + part.down(F.gelu(wide))
        live["input"][key], live["for B"][key], live["for W"][key] = ref(x), ref(wide), ref(normed)
        if stage == model.last:
            return y.square().sum()
        live["output"][key] = ref(y)
        return y

    def ref(x):
        return StorageWeakRef(x.untyped_storage())

    def look(action):
        kind, key = action.kind, action[1:]
        for what in held:
            if kind == "F":
                held[what].add(key)
            elif kind in ("BW", "W" if what == "for W" else "B"):
                held[what].remove(key)
            assert {k for k, r in live[what].items() if not r.expired()} == held[what], f"{what} after {action}"
            peak[what] = max(peak[what], len(held[what]))
        if kind in ("B", "BW") and key in live["output"]:
            assert live["output"][key].expired(), action

    with around_actions(after=look), mock.patch.object(model, "compute", compute):
        for _ in range(2):
            pipeline.step(model.shape, torch.float64)
            assert all(r.expired() for refs in live.values() for r in refs.values())
    rank, count = pipeline.axis.rank, len(model.layers)
    assert peak["for B"] == pytest.approx(activations(schedule, kept=0)[rank] * count)
    assert peak["for W"] == pytest.approx(activations(schedule)[rank] * count)


@pytest.mark.ranks(2, 3)
def test_evaluation_keeps_nothing():
    schedule = gpipe(dist.get_world_size(), 5)
    pipeline, model = pipeline_of(schedule)
    wide = []

    def compute(stage, x, microbatch):
        y = model.layers[stage](torch.randn(3, HIDDEN) if stage == 0 else x)
        assert not y.requires_grad
        wide.append(StorageWeakRef(y.untyped_storage()))
        return y.square().sum() if stage == model.last else y

    with mock.patch.object(model, "compute", compute):
        pipeline.evaluate(model.shape, torch.float64)
    assert len(wide) == 5 and all(ref.expired() for ref in wide)


@pytest.mark.ranks(2)
def test_every_backward_of_a_stage_is_announced_and_the_last_one_of_a_step_as_that():
    for make in SCHEDULES.values():
        schedule = make(2, 3)
        events = []

        @contextmanager
        def accumulating(last, events=events):
            events.append(("last" if last else "more", None))
            yield
            events.append(("done", None))

        pipeline, model = pipeline_of(
            schedule,
            accumulating=accumulating,
            complete=lambda *stage_and_last, events=events: events.append(stage_and_last),
        )
        with around_actions(before=events.append):
            pipeline.step(model.shape, torch.float64)
        expected = []
        actions = schedule.ranks[pipeline.axis.rank]
        for action, later in [(action, actions[i + 1 :]) for i, action in enumerate(actions)]:
            final = action.kind != "F" and not any(a.kind != "F" and a.stage == action.stage for a in later)
            expected.append(action)
            if action.kind in ("B", "BW"):
                expected += [("last" if final and action.kind == "BW" else "more", None), ("done", None)]
            if action.kind in ("W", "BW"):
                expected.append((action.stage, final))
        assert events == expected


@pytest.mark.ranks(2)
def test_every_action_is_measured():
    schedule = zb_v(2, 3)
    pipeline, model = pipeline_of(schedule)
    for _ in range(2):
        pipeline.step(model.shape, torch.float64)
        marks = [mark for pair in pipeline.marks for mark in pair]
        assert len(marks) == 2 * len(schedule.ranks[pipeline.axis.rank])
        assert marks == sorted(marks) and all(start < end for start, end in pipeline.marks)


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.ranks(2, 4)
def test_what_the_next_two_actions_take_has_its_place_before_an_action_begins(name):
    schedule = FLAT[name](dist.get_world_size(), 6)
    pipeline, model = pipeline_of(schedule)
    here = pipeline.axis.rank
    coming = {source: sent for (source, to), sent in messages(schedule).items() if to == here}
    laid_out, taken = dict.fromkeys(coming, 0), dict.fromkeys(coming, 0)
    irecv = dist.irecv

    def counting(x, group, group_src):
        laid_out[group_src] += 1
        return irecv(x, group=group, group_src=group_src)

    def look(action):
        assert laid_out == {source: min(len(sent), taken[source] + 2) for source, sent in coming.items()}, action
        for source, sent in coming.items():
            taken[source] += action in [used for _, used in sent]

    with mock.patch.object(dist, "irecv", counting), around_actions(before=look):
        pipeline.step(model.shape, torch.float64)
    assert taken == laid_out == dict.fromkeys(coming, 6)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.ranks(2, 3)
def test_bytes_on_the_wire_are_those_of_the_formula(name):
    """An activation and a gradient for each microbatch and each border between two ranks, from either side."""
    schedule = SCHEDULES[name](dist.get_world_size(), 5)
    pipeline, model = pipeline_of(schedule)
    borders = [pair for pair in itertools.pairwise(schedule.rank_of) if len(set(pair)) == 2]
    model.rows = lambda microbatch: 2 + microbatch
    size = sum(8 * HIDDEN * (2 + i) for i in range(5))
    traffic.reset()
    pipeline.step(model.shape, torch.float64)
    mine = sum(pipeline.axis.rank in pair for pair in borders)
    assert traffic.bytes == {("pp", "send"): mine * size} if mine else not traffic.bytes
    assert traffic.calls["pp", "send"] == 5 * mine
    traffic.reset()
    pipeline.evaluate(model.shape, torch.float64)
    forward = sum(pipeline.axis.rank == source for source, _ in borders)
    assert traffic.on("pp") == forward * size


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_what_does_not_fit_is_refused_before_anything_is_sent():
    pp = Mesh(pp=2).pp
    deadlock = schedule_of(["0F0 0BW0 0F1 0BW1", "1F1 1BW1 1F0 1BW0"])
    incomplete = schedule_of(["0F0", "1F0 1BW0"])
    cases = [
        (deadlock, {pp.rank: max}, "deadlock|wait"),
        (incomplete, {pp.rank: max}, "rank 0: 0B0 and 0W0 missing"),
        (one_f_one_b(3, 4), {pp.rank: max}, "schedule 1F1B of 3 ranks on an axis of 2"),
        (one_f_one_b(1, 4), {0: max}, "schedule 1F1B of 1 ranks on an axis of 2"),
        (one_f_one_b(2, 4), {}, rf"stages \[\] given; \[{pp.rank}\] would do on this rank"),
        (one_f_one_b(2, 4), {1 - pp.rank: max}, rf"stages \[{1 - pp.rank}\] given; \[{pp.rank}\] would do"),
        (zb_v(2, 4), {0: max, 3: max, 1: max, 2: max}, r"stages \[0, 1, 2, 3\] given; \["),
    ]
    traffic.reset()
    with mock.patch.object(dist, "isend") as isend, mock.patch.object(dist, "irecv") as irecv:
        for schedule, stages, says in cases:
            with pytest.raises(ValueError, match=says) as error:
                Pipeline(schedule, pp, stages, CPU)
            assert "\n" not in str(error.value)
    assert not (isend.called or irecv.called or traffic.calls)


@pytest.mark.parametrize(
    ("y", "says"),
    [
        (torch.zeros(4, 5), r"torch.float32 \[4, 5\] made; torch.float32 \[4, 6\] would do"),
        (torch.zeros(6, 4), r"torch.float32 \[6, 4\] made"),
        (torch.zeros(8, 6), r"torch.float32 \[8, 6\] made"),
        (torch.zeros(4, 6, dtype=torch.float64), r"torch.float64 \[4, 6\] made"),
    ],
    ids=["smaller", "turned", "larger", "float64"],
)
@pytest.mark.ranks(2)
def test_an_output_of_another_shape_is_not_sent(y, says):
    """The other rank would be ended by gloo, or take the bytes for something else."""
    pp = Mesh(pp=2).pp
    traffic.reset()
    if pp.rank == 0:
        pipeline = Pipeline(one_f_one_b(2, 2), pp, {0: lambda x, i: y}, CPU)
        with pytest.raises(PipelineError, match=rf"^rank 0, stage 0, 0F0: ValueError: {says}"):
            pipeline.step(lambda stage, i: (4, 6), torch.float32)
        assert not traffic.calls


# --- faults -----------------------------------------------------------------------------------------------------------


def broken(fault, microbatch, kind="F"):
    """On a rank of a pipeline of three whose stage 1 fails in an action."""
    pipeline, model = pipeline_of(zb_h1(3, 4))

    class Breaking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            fault()

    compute = model.compute

    def breaking(stage, x, i):
        y = compute(stage, x, i)
        if (stage, i) == (1, microbatch):
            if kind == "F":
                fault()
            y = Breaking.apply(y)
        return y

    with mock.patch.object(model, "compute", breaking):
        pipeline.step(model.shape, torch.float64)


@pytest.mark.parametrize("kind", [pytest.param("F", marks=pytest.mark.full), "B"])
def test_a_stage_that_raises_is_named_in_one_message(kind):
    def fault():
        raise KeyError("no such layer")

    with pytest.raises(RanksFailed) as caught:
        run_ranks(broken, 3, fault, 2, kind)
    error = f"PipelineError: rank 1, stage 1, 1{kind}2: KeyError: 'no such layer'"
    assert error in str(caught.value).splitlines()[0]
    assert "no such layer" in caught.value.failures[1] and "in fault" in caught.value.failures[1]


def test_what_did_not_come_is_named_where_a_rank_died():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(broken, 3, lambda: __import__("os")._exit(3), 2)
    failures = caught.value.failures
    assert failures[1].startswith("rank 1 died") or "exit" in failures[1].splitlines()[0]
    # rank 0 has sent 0F2 and waits for the gradient of microbatch 0 or 1, rank 2 for the forward of microbatch 2
    assert "PipelineError: rank 2, at 2F2: 1F2 did not come from pp rank 1: " in failures[2]
    assert "PipelineError: rank 0, at 0B" in failures[0] and " did not come from pp rank 1: " in failures[0]

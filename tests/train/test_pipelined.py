"""A GPT over the stages of a pipeline: tied weights, norms, validation, generation, and what is said where it fails."""

import math

import pytest
import torch
from trajectory import OPTIMIZER, Case, Way, dense

from megalite.errors import NumericError
from megalite.model.generate import generate
from megalite.model.gpt import GPT, Part
from megalite.parallel.mesh import rank_at
from megalite.parallel.pipeline import one_f_one_b, zb_v
from megalite.parallel.traffic import traffic
from megalite.testing import run_ranks
from megalite.train.pipelined import PipelinedGPT, parts_of
from megalite.train.step import TrainStep, microbatches
from megalite.train.verify import own_share

PIPELINES = {
    "1f1b": Way(pp=2, micro_batch=1),
    "zb-v": Way(pp=2, schedule="zb-v", micro_batch=1),
    "interleaved over three": Way(pp=3, schedule="interleaved-1f1b", chunks=2, micro_batch=2),
    "with dp": Way(dp=2, pp=2, schedule="zb-h1", micro_batch=1),
    "with tp": Way(pp=2, tp=2, schedule="zb-h2", micro_batch=1),
    "with sp": Way(pp=2, sp=2, schedule="dualpipe-v", micro_batch=1),
}
EVERY = pytest.mark.parametrize("way", PIPELINES.values(), ids=list(PIPELINES))
SOME = pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.full] * (name not in ("zb-v", "interleaved over three", "with tp")))
        for name, way in PIPELINES.items()
    ],
    ids=list(PIPELINES),
)


def case_of(way, style="llama tied", **more):
    return Case(style, layers=6, length=12 if way.sp > 1 else 11, batch=4 * way.dp, **more)


def made(way, case, **more):
    """On a rank: the step of a pipeline, and this rank's share of the batch."""
    torch.set_default_dtype(torch.float64)
    mesh = way.mesh()
    model = way.gpt(case, mesh)
    further = {"schedule": way.stages(case).schedule, "micro_batch": way.micro_batch, "bucket_mb": 0.02}
    return TrainStep(model, OPTIMIZER, **further | more), *own_share(case.data(), mesh, way.layout)[:2]


# --- training ---------------------------------------------------------------------------------------------------------


@EVERY
def test_both_copies_of_a_tied_embedding_stay_bitwise_equal(way):
    """The ranks of the first stage and of the last add the same two numbers; in a V there is one copy."""
    case = case_of(way, "gpt2")

    def trained():
        step, tokens, targets = made(way, case)
        norms = [step(tokens, targets).grad_norm for _ in range(4)]
        where = (step.mesh.dp.rank, step.mesh.sp.rank), step.mesh.tp.rank, step.mesh.pp.rank
        return where, step.model.embedding and step.model.embedding.weight.detach(), norms, step.pipelined.ends

    rows = run_ranks(trained, way.ranks)
    assert len({tuple(norms) for *_, norms, _ in rows}) == 1  # or clipping would part the copies
    ends = set(rows[0][3])
    assert len(ends) == (1 if way.schedule in ("zb-v", "dualpipe-v") else 2)
    copies = {}
    for (_, tp, pp), weight, *_ in rows:
        assert (weight is not None) == (pp in ends)
        if weight is not None:
            copies.setdefault(tp, []).append(weight)
    for alike in copies.values():
        assert len(alike) == len(ends) * way.dp * way.sp
        assert all(torch.equal(weight, alike[0]) for weight in alike)


@SOME
def test_the_norm_counts_a_tied_embedding_once(way):
    """One more would be seen: it has some percent of the norm."""
    case = case_of(way)
    expected = dense(case)

    def norm():
        step, tokens, targets = made(way, case)
        step.backward(tokens, targets)
        found = step.finish_gradients(clip=0)
        if step.model.has_copy_of_embedding:
            twice = math.sqrt(found**2 + step.model.embedding.weight.grad.square().sum().item())
            assert step.mesh.tp.size > 1 or twice > 1.01 * found
        return found

    assert run_ranks(norm, way.ranks) == pytest.approx([expected.norms[0]] * way.ranks, rel=1e-12)


@EVERY
def test_what_travels_over_pp(way):
    """An activation and a gradient a microbatch and border, the embedding's gradient both ways, two scalars."""
    case = case_of(way)

    def moved():
        step, tokens, targets = made(way, case)
        traffic.reset()
        step(tokens, targets)
        schedule, pp = step.pipelined.schedule, step.mesh.pp
        borders = zip(schedule.rank_of, schedule.rank_of[1:], strict=False)
        borders = sum(pp.rank in pair for pair in borders if len(set(pair)) == 2)
        rows, hidden = step.model.x_shape(tokens[: way.micro_batch])
        assert traffic.bytes["pp", "send"] == borders * schedule.microbatches * rows * hidden * 8
        tied = len(set(step.pipelined.ends)) == 2 and pp.rank in step.pipelined.ends
        assert traffic.bytes["pp", "shift"] == (step.model.embedding.weight.numel() * 8 if tied else 0)
        scalars = 2 * (2 * (pp.size - 1) * 8 // pp.size)  # the loss and the norm
        assert traffic.on("pp") == traffic.bytes["pp", "send"] + traffic.bytes["pp", "shift"] + scalars

    run_ranks(moved, way.ranks)


@pytest.mark.ranks(2)
def test_any_other_number_of_microbatches_is_refused_for_training():
    way = Way(pp=2, micro_batch=1)
    step, tokens, targets = made(way, case_of(way))
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"{count} microbatches given; 4 would do, as schedule 1F1B has"):
            step.backward(tokens[:count], targets[:count])
    assert all(parameter.grad is None for parameter in step.model.parameters())


@pytest.mark.ranks(2)
def test_a_schedule_of_other_stages_than_the_models_is_refused():
    way = Way(pp=2, micro_batch=1)
    torch.set_default_dtype(torch.float64)
    model = way.gpt(case_of(way), way.mesh())
    for schedule, says in (
        (zb_v(2, 4), "2 ranks and here 2 stages given; one of 2 ranks with 1 stages here would do"),
        (one_f_one_b(3, 4), "3 ranks and here 1 stages given; one of 2 ranks with 1 stages here"),
        (None, "1 ranks and here "),
    ):
        with pytest.raises(ValueError, match=says):
            PipelinedGPT(model, schedule)


# --- validation and generation ----------------------------------------------------------------------------------------


@SOME
def test_the_loss_of_any_batch_is_the_dense_models(way):
    """Other numbers of microbatches than the schedule's, of other sizes, also between training steps."""
    case = case_of(way, "gpt2 untied", window=5)
    of_first_step = dense(case).losses[0]

    def losses():
        step, tokens, targets = made(way, case)
        whole = GPT(case.model, seed=5)
        batch = case.data()
        for size in (1, 3, len(tokens), way.micro_batch):
            with torch.no_grad():
                expected = whole(batch.tokens, batch.targets, reduction="sum", z_loss=0.1).item()
            pieces = [{**m, "reduction": "sum", "z_loss": 0.1} for m in microbatches(size, tokens, targets)]
            own = step.pipelined.loss(pieces)
            assert own.dtype == torch.float64 and not own.requires_grad
            if step.mesh.pp.rank != step.pipelined.ends[1]:
                assert own == 0
            total = own.clone()
            torch.distributed.all_reduce(total)  # tp's ranks have the same one
            assert total.item() / way.tp == pytest.approx(expected, rel=1e-12)
            assert all(parameter.grad is None for parameter in step.model.parameters())
        assert step(tokens, targets).loss == pytest.approx(of_first_step, rel=1e-12)

    run_ranks(losses, way.ranks)


@SOME
def test_logits_are_the_dense_models_on_every_rank(way):
    """Of whole sequences of any number and length: generation has them."""
    case = case_of(way)

    def logits():
        step, *_ = made(way, case)
        whole = GPT(case.model, seed=5)
        for rows, length in ((1, 1), (3, 7), (2, 20)):
            tokens = torch.randint(1001, (rows, length), generator=torch.Generator().manual_seed(length))
            with torch.no_grad():
                expected = whole(tokens)[:, -1]
            actual = step.pipelined.logits(tokens)
            assert actual.shape == (rows, 1001) and not actual.requires_grad
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)

    run_ranks(logits, way.ranks)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["zb-v", "with tp"])
def test_what_is_generated_is_the_same_on_a_pipeline(name, temperature):
    way = PIPELINES[name]
    case = case_of(way)
    tokens = torch.arange(6).view(2, 3)

    def written():
        step, *_ = made(way, case)
        further = {"temperature": temperature, "top_k": 7, "seed": 1}
        alone = generate(GPT(case.model, seed=5), tokens, 9, **further)
        assert torch.equal(generate(step.model, tokens, 9, **further, logits_of=step.pipelined.logits), alone)
        return alone.tolist()

    rows = run_ranks(written, way.ranks)
    assert all(row == rows[0] for row in rows) and len(rows[0][0]) == 12


@pytest.mark.ranks(1)
def test_without_a_pipeline_it_is_the_model():
    torch.set_default_dtype(torch.float64)
    case = Case("gpt2")
    model, twin, batch = GPT(case.model, seed=5), GPT(case.model, seed=5), case.data()
    alone = PipelinedGPT(model)
    expected = twin(batch.tokens, batch.targets, reduction="sum") / 7
    expected.backward()
    for pieces in (1, 2, 4):
        pieces = [{**m, "reduction": "sum"} for m in microbatches(pieces, batch.tokens, batch.targets)]
        model.zero_grad()
        assert alone.forward_backward(pieces, 7).item() == pytest.approx(expected.item(), rel=1e-13)
        assert alone.loss(pieces).item() == pytest.approx(7 * expected.item(), rel=1e-13)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(alone.logits(batch.tokens), twin(batch.tokens)[:, -1].detach())
    assert alone.ends == (0, 0)


# --- faults -----------------------------------------------------------------------------------------------------------


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("bad_dp", [0, 1])
@pytest.mark.ranks(4)
def test_a_loss_that_is_no_number_names_the_rank_that_computed_it(schedule, bad_dp):
    way = Way(dp=2, pp=2, schedule=schedule, micro_batch=1)
    step, tokens, targets = made(way, case_of(way))
    step(tokens, targets)
    before = weights(step.model)
    mesh, last = step.mesh, {"1f1b": 1, "zb-v": 0}[schedule]
    if mesh.dp.rank == bad_dp and mesh.pp.rank == last:
        step.model.register_forward_hook(lambda module, given, y: y * math.nan if y.ndim == 0 else y)
    named = rank_at({"dp": bad_dp, "pp": last, "sp": 0, "tp": 0}, mesh.sizes)
    with pytest.raises(NumericError, match=rf"^the loss is nan at step 2 on rank {named} \(dp {bad_dp}, sp 0\); the w"):
        step(tokens, targets)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(step.model).items())


@pytest.mark.ranks(3)
def test_a_gradient_that_is_no_number_names_the_rank_that_holds_the_weight():
    way = Way(pp=3, micro_batch=1, division=(2, 2, 2))
    step, tokens, targets = made(way, case_of(way, "llama"))
    before = weights(step.model)
    if step.mesh.rank == 1:
        step.model.blocks[3].mlp_norm.weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(NumericError, match=r"the gradient is no number at step 1 on rank ") as caught:
        step(tokens, targets)
    held = "blocks.3.mlp_norm.weight" if step.mesh.rank == 1 else "none held by this rank"
    assert f"on rank {step.mesh.rank}, first in {held}; the weights are those of step 0" in str(caught.value)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(step.model).items())


def test_the_parts_of_a_rank_are_those_of_its_stages():
    way = Way(pp=2, schedule="zb-v", micro_batch=1, division=(0, 2, 1, 3))
    stages = way.stages(case_of(way))
    assert parts_of(stages, 0) == [Part(range(0), True, False), Part(range(3, 6), False, True)]
    assert parts_of(stages, 1) == [Part(range(2), False, False), Part(range(2, 3), False, False)]

"""One training step: the mean over the tokens of the global batch, and what happens when a number is none."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from trajectory import OPTIMIZER, Case, Way

from megalite.errors import NumericError
from megalite.model.gpt import GPT
from megalite.parallel.mesh import Mesh
from megalite.parallel.traffic import traffic
from megalite.train.step import TrainStep, microbatches
from megalite.train.verify import own_share


def made(mesh, case=None, **more):
    torch.set_default_dtype(torch.float64)
    case = case or Case(batch=4)
    step = TrainStep(GPT(case.model, mesh, seed=5), OPTIMIZER, **more)
    tokens, targets, _ = own_share(case.data(), mesh, "zigzag")[:3]
    return step, tokens, targets


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.ranks(1)
def test_steps_are_those_of_a_plain_loop(style):
    """F.cross_entropy, clip_grad_norm_ and torch's AdamW, with nothing of ours but the model."""
    case = Case(style)
    step, tokens, targets = made(Mesh(), case, micro_batch=3)
    plain = GPT(case.model, seed=5)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)
    for number in range(5):
        lr = 0.01 / (1 + number)
        result = step(tokens, targets, lr)
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), OPTIMIZER.clip)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-12)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-12)
        assert result.tokens == int((targets != -100).sum())
    expected = weights(plain)
    for name, weight in weights(step.model).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=1e-11)
    assert step.steps == 5
    assert all(parameter.grad is None for parameter in step.model.parameters())


@pytest.mark.ranks(2)
def test_the_mean_is_over_tokens_and_not_over_ranks():
    mesh = Mesh(dp=2)
    case = Case(batch=2)
    step, tokens, targets = made(mesh, case)
    whole, labels, _ = case.data()[:3]
    counts = (labels != -100).sum(1)
    assert counts.tolist() == [1, 11]
    logits = step.model(whole)
    by_tokens = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    by_ranks = sum(F.cross_entropy(logits[i], labels[i]).item() for i in range(2)) / 2
    assert abs(by_ranks / by_tokens - 1) > 1e-4  # the case tells them apart
    result = step(tokens, targets)
    assert result.loss == pytest.approx(by_tokens, rel=1e-13)
    assert result.tokens == 12


@pytest.mark.ranks(2)
def test_a_batch_of_which_no_token_counts_is_a_loss_of_zero():
    step, tokens, targets = made(Mesh(dp=2))
    result = step(tokens, torch.full_like(targets, -100))
    assert (result.loss, result.grad_norm, result.tokens) == (0.0, 0.0, 0)
    step, tokens, targets = made(Mesh(dp=2))
    if step.mesh.rank == 0:  # one rank without tokens changes nothing for the other
        targets = torch.full_like(targets, -100)
    assert math.isfinite(step(tokens, targets).loss)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("bad_dp", [0, 1])
@pytest.mark.ranks(4)
def test_a_loss_that_is_no_number_on_one_rank_stops_all_before_any_weight_changes(bad, bad_dp):
    mesh = Mesh(dp=2, tp=2)
    step, tokens, targets = made(mesh, micro_batch=1)
    step(tokens, targets)
    before = weights(step.model)
    if mesh.dp.rank == bad_dp:
        step.model.register_forward_hook(lambda module, arguments, loss: loss * bad)
    with pytest.raises(NumericError) as caught:
        step(tokens, targets)
    message = str(caught.value)
    assert caught.value.exit_code == 79
    assert message.startswith(f"the loss is {bad} at step 2 on rank {2 * bad_dp} (dp {bad_dp}, sp 0); ")
    assert "the weights are those of step 1" in message and message.splitlines() == [message]
    assert all(torch.equal(weight, before[name]) for name, weight in weights(step.model).items())


@pytest.mark.parametrize(
    "way", [Way(dp=2, sp=4), Way(dp=2, sp=2, tp=2, ulysses=2), Way(sp=4, tp=2, ulysses=2), Way(dp=4, sp=2)], ids=str
)
@pytest.mark.ranks(8)
def test_the_rank_of_a_loss_that_is_no_number_is_named_on_every_mesh(way):
    """Its share is not that of its neighbours in rank, which stand along tp, but that of dp and sp."""
    mesh = way.mesh()
    step, tokens, targets = made(mesh, Case(batch=4, heads=4, length=16, layers=1))
    mine = mesh.rank // mesh.tp.size
    step.model.register_forward_hook(lambda module, arguments, loss: loss * (math.nan if mine == bad else 1.0))
    for bad in range(mesh.replicas.size):  # no weight changes and no step is counted
        dp, sp = divmod(bad, mesh.sp.size)
        named = rf"the loss is nan at step 1 on rank {bad * mesh.tp.size} \(dp {dp}, sp {sp}\); "
        with pytest.raises(NumericError, match=named):
            step(tokens, targets)
        step.model.zero_grad()


@pytest.mark.ranks(4)
def test_a_gradient_that_is_no_number_on_one_rank_stops_all_before_any_weight_changes():
    mesh = Mesh(dp=2, tp=2)
    step, tokens, targets = made(mesh)
    before = weights(step.model)
    if mesh.rank == 3:
        step.model.blocks[1].mlp.down.weight.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(NumericError, match=r"the gradient is no number at step 1 on rank \d, first in ") as caught:
        step(tokens, targets)
    if mesh.tp.rank == 1:
        assert f"on rank {mesh.rank}, first in blocks.1.mlp.down.weight" in str(caught.value)
    assert "the weights are those of step 0" in str(caught.value)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(step.model).items())


@pytest.mark.ranks(1)
def test_a_learning_rate_of_none_is_the_optimizers():
    step, tokens, targets = made(Mesh())
    step(tokens, targets)
    assert {group["lr"] for group in step.optimizer.param_groups} == {OPTIMIZER.lr}
    step(tokens, targets, 0.125)
    assert {group["lr"] for group in step.optimizer.param_groups} == {0.125}


@pytest.mark.ranks(2)
def test_without_clipping_the_gradient_is_as_it_came():
    torch.set_default_dtype(torch.float64)
    case, mesh = Case(batch=2), Mesh(dp=2)
    tokens, targets, _ = own_share(case.data(), mesh, "zigzag")[:3]
    norms = []
    for clip in (0.0, 1e-3):
        step = TrainStep(GPT(case.model, mesh, seed=5), replace(OPTIMIZER, clip=clip))
        norms.append(step(tokens, targets).grad_norm)
    assert norms[0] == norms[1] > 1e-3  # what is reported is the norm before clipping


@pytest.mark.ranks(4)
def test_tokens_are_counted_over_dp_and_sp():
    """Each once, however unequally those that count lie."""
    case = Case(length=12, heads=4)
    expected = int((case.data().targets != -100).sum())
    for way in (Way(dp=2, sp=2), Way(sp=4, ulysses=2), Way(sp=2, tp=2)):
        step, tokens, targets = made(way.mesh(), case)
        assert step(tokens, targets).tokens == expected


@pytest.mark.parametrize(
    "ways",
    [
        (Way(dp=2, sp=2, tp=2), Way(sp=8)),
        pytest.param((Way(dp=2, sp=4), Way(sp=4, tp=2), Way(dp=4, tp=2)), marks=pytest.mark.full),
    ],
    ids=["few", "others"],
)
@pytest.mark.ranks(8)
def test_gradients_travel_once_over_dp_and_sp(ways):
    """2 (d − 1) / d of the weights, on the axis of all ranks that hold the same; the scalars are gathered."""
    for way in ways:
        mesh = way.mesh()
        step, tokens, targets = made(mesh, Case("gpt2", heads=4, length=16), micro_batch=1)
        traffic.reset()
        step(tokens, targets)
        weights = 8 * sum(parameter.numel() for parameter in step.model.parameters())
        d = mesh.replicas.size
        assert traffic.bytes[mesh.replicas.name, "all_reduce"] == 2 * (d - 1) * weights // d
        assert traffic.calls[mesh.replicas.name, "all_reduce"] == 1


@pytest.mark.parametrize(("size", "lengths"), [(0, [5]), (2, [2, 2, 1]), (5, [5]), (9, [5])])
def test_microbatches_are_what_the_model_takes(size, lengths):
    tokens, targets, documents = torch.arange(30).view(3, 5, 2)
    with_documents = list(microbatches(size, tokens, targets, documents))
    assert [len(part["tokens"]) for part in with_documents] == lengths
    for name, whole in (("tokens", tokens), ("targets", targets), ("documents", documents)):
        assert torch.equal(torch.cat([part[name] for part in with_documents]), whole)
    assert all(part.keys() == {"tokens", "targets"} for part in microbatches(size, tokens, targets))

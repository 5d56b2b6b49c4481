"""Weight gradients apart from the rest of backward: the same values as autograd's, at once or later."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalite.parallel import weight_gradients
from megalite.parallel.collectives import copy as copied
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.parameters import sum_partial_gradients
from megalite.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.vocab import vocab_parallel_linear_cross_entropy
from megalite.parallel.weight_gradients import add, linear, taking

LATER = pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])


@pytest.fixture(autouse=True)
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def backward(y, direction, later):
    """Within `taking`: weight gradients are there when this returns; what was put off."""
    if not later:
        y.backward(direction)
        return []
    with taking(later=True) as put_off:
        y.backward(direction)
    factors = list(put_off)
    add(put_off)
    return factors


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


@LATER
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 5, 4), (1, 4)], ids=str)
def test_linear_is_that_of_torch(shape, bias, later):
    """Value and all gradients, over three microbatches that add up."""
    weight, b = draw(7, 4).requires_grad_(), draw(7, seed=1).requires_grad_() if bias else None
    twin, twin_b = weight.detach().clone().requires_grad_(), draw(7, seed=1).requires_grad_() if bias else None
    with taking():
        for microbatch in range(3):
            x = draw(*shape, seed=microbatch).requires_grad_()
            twin_x = x.detach().clone().requires_grad_()
            direction = draw(*shape[:-1], 7, seed=9 + microbatch)
            y, twin_y = linear(x, weight, b), F.linear(twin_x, twin, twin_b)
            assert torch.equal(y, twin_y)
            factors = backward(y, direction, later)
            twin_y.backward(direction)
            assert len(factors) == later
            close(x.grad, twin_x.grad)
            close(weight.grad, twin.grad)
            if b is not None:
                close(b.grad, twin_b.grad)


def test_outside_of_taking_it_is_torchs():
    weight, x = draw(7, 4).requires_grad_(), draw(5, 4).requires_grad_()
    assert linear(x, weight).grad_fn.name() == F.linear(x, weight).grad_fn.name()
    assert not weight_gradients.taken()
    with taking():
        assert weight_gradients.taken()
        with taking(later=True):
            assert weight_gradients.taken()
        assert weight_gradients.taken()
    assert not weight_gradients.taken()
    with pytest.raises(RuntimeError, match="on purpose"), taking():
        raise RuntimeError("on purpose")
    assert not weight_gradients.taken()


@LATER
def test_what_needs_no_gradient_gets_none(later):
    for of_x, of_weight, of_bias in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0)):
        x, weight, bias = draw(5, 4), draw(7, 4, seed=1), draw(7, seed=2)
        for tensor, wanted in ((x, of_x), (weight, of_weight), (bias, of_bias)):
            tensor.requires_grad_(bool(wanted))
        with taking():
            factors = backward(linear(x, weight, bias), torch.ones(5, 7), later)
        assert len(factors) == (later and of_weight)
        assert (x.grad is None, weight.grad is None, bias.grad is None) == (not of_x, not of_weight, not of_bias)
        if of_weight:
            close(weight.grad, torch.ones(7, 5) @ x)
        if of_x:
            close(x.grad, torch.ones(5, 7) @ weight)
        if of_bias:
            close(bias.grad, torch.full((7,), 5.0))


def test_in_place_and_only_once_all_is_added():
    """`weight.grad` stays the same tensor, as buckets of gradients need; a weight used twice gets both."""
    weight, x = draw(4, 4).requires_grad_(), draw(5, 4)
    weight.grad = torch.ones(4, 4)
    grad = weight.grad
    with taking():
        y = linear(linear(x, weight), weight)
        with taking(later=True) as put_off:
            y.sum().backward()
    assert len(put_off) == 2 and (grad == 1).all()
    add(put_off[:1])
    between = grad.clone()
    add(put_off[1:])
    assert weight.grad is grad and not torch.equal(grad, between)
    twin = weight.detach().clone().requires_grad_()
    F.linear(F.linear(x, twin), twin).sum().backward()
    close(grad, 1 + twin.grad)


def test_what_is_put_off_goes_to_the_innermost_taking():
    weight, x = draw(7, 4).requires_grad_(), draw(5, 4)
    with taking() as outer, taking(later=True) as first:
        linear(x, weight).sum().backward()
        with taking(later=True) as second:
            linear(x, weight).sum().backward()
        with taking():
            linear(x, weight).sum().backward()  # at once
    assert (len(outer), len(first), len(second)) == (0, 1, 1)
    close(weight.grad, torch.ones(7, 5) @ x)


@LATER
def test_a_weight_that_is_computed_and_one_that_was_packed(later):
    """The first is left to autograd; the second, within what is computed again, is another tensor in backward."""
    first, second = nn.Parameter(draw(4, 6)), nn.Parameter(draw(4, 6, seed=1))
    twins = [copy.deepcopy(w) for w in (first, second)]
    x = draw(5, 4).requires_grad_()
    with taking():
        for _ in range(2):
            y = checkpoint(lambda x: linear(F.gelu(linear(x, first.T)), second), x, use_reentrant=False)
            assert len(backward(y, torch.ones(5, 4), later)) == later
    for _ in range(2):
        F.linear(F.gelu(F.linear(x.detach(), twins[0].T)), twins[1]).sum().backward()
    for weight, twin in zip((first, second), twins, strict=True):
        close(weight.grad, twin.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_added_in_its_own_dtype(dtype):
    weight, x = draw(7, 4).to(dtype).requires_grad_(), draw(5, 4).to(dtype)
    with taking():
        for _ in range(2):
            linear(x, weight).sum().backward()
    assert weight.grad.dtype == dtype
    exact = 2 * torch.ones(7, 5) @ x.double()
    torch.testing.assert_close(weight.grad.double(), exact, rtol=3 * torch.finfo(dtype).eps, atol=1e-2)


def test_gradients_put_off_keep_no_graph():
    """The factors only: neither the node that made x, nor what it had saved."""
    weight, x = draw(7, 4).requires_grad_(), draw(5, 4).requires_grad_()
    with taking():
        y = linear(x.sin(), weight)
        with taking(later=True) as put_off:
            y.sum().backward()
    (factors,) = put_off
    assert factors.weight is weight
    assert factors.x.grad_fn is None and factors.grad.grad_fn is None
    assert not factors.x.requires_grad


# --- over tp ----------------------------------------------------------------------------------------------------------


def pair(axis, bias, dim):
    torch.manual_seed(4)
    column = ColumnParallelLinear(6, 12, axis, bias, sequence_dim=dim)
    return nn.ModuleList([column, RowParallelLinear(12, 6, axis, bias, sequence_dim=dim)])


def gradients_of_pair(axis, bias, dim, microbatches):
    layers = pair(axis, bias, dim)
    of_x = []
    for i in range(microbatches):
        x = draw(6, 6, seed=i)
        x = (x if dim is None else x.chunk(axis.size)[axis.rank]).requires_grad_()
        y = layers[1](F.gelu(layers[0](x)))
        yield y.square().sum() / (axis.size if dim is None else 1)
        of_x.append(x.grad)
    for layer in layers:
        sum_partial_gradients([(name, p) for name, p in layer.named_parameters()], layer.shards, axis)
    yield [p.grad for p in layers.parameters()], of_x


@pytest.mark.parametrize("dim", [None, 0])
@pytest.mark.ranks(1, 2, 3)
def test_tensor_parallel_linears(dim):
    """Column and row, tokens split between them or not: with the weight gradients of autograd."""
    torch.set_default_dtype(torch.float64)
    axis = Mesh(tp=dist.get_world_size()).tp
    for bias, later in itertools.product((True, False), (False, True)):
        same_linears(axis, bias, dim, later)


def same_linears(axis, bias, dim, later):
    plain = gradients_of_pair(axis, bias, dim, 3)
    for _ in range(3):
        next(plain).backward()
    ours = gradients_of_pair(axis, bias, dim, 3)
    with taking():
        for _ in range(3):
            assert len(backward(next(ours), None, later)) == 2 * later
    (gradients, of_x), (expected, of_x_expected) = next(ours), next(plain)
    assert len(gradients) == 2 + 2 * bias
    for actual, wanted in zip(gradients + of_x, expected + of_x_expected, strict=True):
        close(actual, wanted)


@pytest.mark.parametrize("tokens", [3, 8, 9, 40])  # as many as x is wide, 8, and fewer keep the logits' gradient
@pytest.mark.ranks(1, 2, 3)
def test_the_vocabulary_head(tokens):
    """Losses, gradients of x and of the weight, over microbatches that add up; 11 words, padded on 2 and 3 ranks."""
    torch.set_default_dtype(torch.float64)
    axis = Mesh(tp=dist.get_world_size()).tp
    for z_loss, later in itertools.product((0.0, 1e-2), (False, True)):
        same_head(axis, tokens, z_loss, later)


def same_head(axis, tokens, z_loss, later):
    words, rows = 11, -(-11 // axis.size)
    whole = F.pad(draw(words, 8), (0, 0, 0, rows * axis.size - words))
    own = whole[axis.rank * rows :][:rows]

    def losses(weight):
        for microbatch in range(3):
            x = draw(tokens, 8, seed=5 + microbatch).requires_grad_()
            targets = torch.arange(tokens).add(microbatch) % words
            targets[:1] = -100
            loss = vocab_parallel_linear_cross_entropy(
                copied(x, axis), weight, targets, axis, vocab_size=words, z_loss=z_loss, reduction="sum"
            )
            yield loss / 7, x

    plain, taken = own.clone().requires_grad_(), own.clone().requires_grad_()
    expected = [(loss, x) for loss, x in losses(plain) if loss.backward() is None]
    put_off = 0
    with taking():
        actual = []
        for loss, x in losses(taken):
            put_off += len(backward(loss, None, later))
            actual.append((loss, x))
    assert put_off == (3 if later and tokens <= 8 else 0)
    for (loss, x), (expected_loss, expected_x) in zip(actual, expected, strict=True):
        close(loss, expected_loss)
        close(x.grad, expected_x.grad)
    close(taken.grad, plain.grad)
    dense = whole[:words].clone().requires_grad_()
    for microbatch in range(3):
        logits = draw(tokens, 8, seed=5 + microbatch) @ dense.T
        targets = torch.arange(tokens).add(microbatch) % words
        targets[:1] = -100
        z = z_loss * logits.logsumexp(1).square()[targets != -100].sum()
        ((F.cross_entropy(logits, targets, reduction="sum") + z) / 7).backward()
    padded = F.pad(dense.grad, (0, 0, 0, rows * axis.size - words))
    close(taken.grad, padded[axis.rank * rows :][:rows])


@pytest.mark.ranks(2)
def test_a_tied_weight_gets_what_both_of_its_uses_give():
    """The embedding by autograd, the head by its factors, in either order and put off or not."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = torch.arange(5), torch.arange(5) + 1
    results = []
    for how in ("plain", "at once", "later"):
        weight = draw(11, 8).requires_grad_()

        def loss(weight=weight):
            return vocab_parallel_linear_cross_entropy(F.embedding(tokens, weight).sin(), weight, targets, Axis())

        if how == "plain":
            for _ in range(2):
                loss().backward()
        else:
            with taking():
                for _ in range(2):
                    backward(loss(), None, how == "later")
        results.append(weight.grad)
    close(results[1], results[0])
    close(results[2], results[0])

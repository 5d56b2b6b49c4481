"""assert_matches_dense: passes what is right, and of what is not names the first tensor, its error and the bound."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from megalite.parallel.collectives import all_gather, copy, gather, reduce
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.sharding import Block, Shard
from megalite.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from megalite.testing import assert_matches_dense


class Handmade(nn.Module):
    """A column- and a row-parallel linear by hand, with a mistake of choice."""

    def __init__(self, axis, mistake=""):
        super().__init__()
        self.axis, self.mistake = axis, mistake
        self.up = nn.Parameter(torch.randn(12 // axis.size, 6))
        self.down = nn.Parameter(torch.randn(6, 12 // axis.size))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x):
        begin = (lambda x, axis: x) if self.mistake == "input gradient" else copy
        y = (begin(x, self.axis) @ self.up.T).relu()
        if self.mistake == "activation":
            y = y * (1 + 1e-7)
        if self.mistake == "bias on every rank":
            return reduce(y @ self.down.T + self.bias, self.axis)
        if self.mistake == "not summed":
            return y @ self.down.T + self.bias
        y = reduce(y @ self.down.T, self.axis) + self.bias
        return y * (1.0 if self.mistake != "NaN" else torch.nan)


class Spoilt(torch.autograd.Function):
    """The identity, whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


DENSE = Handmade(Axis())
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def test_a_right_layer_passes_on_any_number_of_ranks():
    assert_matches_dense(Handmade, DENSE, X, ranks=(1, 2, 3, 4))


@pytest.mark.parametrize(
    ("mistake", "first"),
    [
        ("input gradient", "gradient of input 0"),
        ("activation", "output"),
        ("bias on every rank", "output"),
        ("not summed", "output"),
        ("NaN", "output"),
    ],
)
def test_a_mistake_is_named_with_its_error_and_the_bound(mistake, first):
    with pytest.raises(AssertionError) as caught:
        assert_matches_dense(partial(Handmade, mistake=mistake), DENSE, X, ranks=(2,))
    message = str(caught.value).splitlines()[0]
    assert re.fullmatch(rf"{first}: relative error (inf|\d\.\d\de[+-]\d\d), allowed 1e-09 on 2 ranks", message)
    if mistake == "activation":
        assert 1e-8 < float(message.split()[3].rstrip(",")) < 2e-7  # a ten-millionth is seen, and told as such


def test_the_number_of_ranks_on_which_it_first_fails_is_told():
    def only_on_three(axis):
        return Handmade(axis, "bias on every rank" if axis.size == 3 else "")

    with pytest.raises(AssertionError, match="on 3 ranks"):
        assert_matches_dense(only_on_three, DENSE, X, ranks=(1, 2, 3))


def test_the_weights_copied_are_the_twins_and_the_twin_stays_as_it_was():
    before = {name: parameter.clone() for name, parameter in DENSE.named_parameters()}
    assert_matches_dense(Handmade, DENSE, X, ranks=(2,))
    for name, parameter in DENSE.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.grad is None and parameter.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    assert X.grad is None and not X.requires_grad


def test_a_wrong_gradient_of_one_parameter_is_named():
    class Wrong(Handmade):
        def forward(self, x):
            y = (copy(x, self.axis) @ self.up.T).relu()
            return reduce(y @ Spoilt.apply(self.down).T, self.axis) + self.bias

    with pytest.raises(AssertionError, match=r"gradient of down: relative error 1\.00e\+00, allowed 1e-09 on 2 ranks"):
        assert_matches_dense(Wrong, DENSE, X, ranks=(2,))


def test_a_wrong_step_is_named():
    class Odd(torch.optim.SGD):
        """Steps twice as far with what is one of two parts."""

        def __init__(self, parameters):
            parameters = list(parameters)
            super().__init__(parameters, lr=0.1 * 12 / parameters[0].shape[0])

    with pytest.raises(AssertionError, match="up after one step"):
        assert_matches_dense(Handmade, DENSE, X, ranks=(2,), optimizer=Odd)


def test_the_bound_is_the_users():
    assert_matches_dense(partial(Handmade, mistake="activation"), DENSE, X, ranks=(2,), bound=1e-6)


class Between(nn.Module):
    """Tokens split outside: the input along dim 0, the output too."""

    def __init__(self, axis):
        super().__init__()
        self.axis = axis
        self.up = ColumnParallelLinear(6, 12, axis, sequence_dim=0)
        self.down = RowParallelLinear(12, 6, axis, sequence_dim=0)

    def forward(self, x, scale):
        return self.down(self.up(x).sin()) * copy(scale, self.axis), gather(x, self.axis, 0) * 2


def test_split_inputs_whole_inputs_and_several_outputs():
    inputs = torch.randn(12, 6), torch.tensor(2.0)
    assert_matches_dense(Between, Between(Axis()), *inputs, ranks=(1, 2, 3, 4), input_dims=[0, None])


class WithStatistics(Handmade):
    """Beside its result it tells what has no gradient."""

    def forward(self, x):
        y = super().forward(x)
        return y, (y.detach() > 0).sum()


def test_an_output_without_a_gradient_is_compared_too():
    assert_matches_dense(WithStatistics, WithStatistics(Axis()), X, ranks=(2,))


class Names(nn.Module):
    """Its twin's weight under another name."""

    def __init__(self, axis):
        super().__init__()
        self.inner = ColumnParallelLinear(6, 12, axis)

    def forward(self, x):
        return self.inner(x)


def test_names_map_to_the_twins():
    names = {"inner.weight": "weight", "inner.bias": "bias"}
    assert_matches_dense(Names, nn.Linear(6, 12), X, ranks=(2,), names=names)
    with pytest.raises(Exception, match=r"the dense twin has no parameter 'inner\.bias'; it has \['bias', 'weight'\]"):
        assert_matches_dense(Names, nn.Linear(6, 12), X, ranks=(2,))
    with pytest.raises(Exception, match=r"the parallel module has no parameter for 'bias'; it has \['weight'\]"):
        assert_matches_dense(lambda axis: ColumnParallelLinear(6, 12, axis, False), nn.Linear(6, 12), X, ranks=(2,))


class Interleaved(nn.Module):
    """Two matrices in one, each cut for itself, which the shapes do not tell."""

    def __init__(self, axis):
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.randn(24 // axis.size, 6))

    def forward(self, x):
        first, second = (copy(x, self.axis) @ self.weight.T).chunk(2, -1)
        return gather(first * second, self.axis, -1)


def test_shards_say_how_a_parameter_is_cut():
    twin = Interleaved(Axis())
    shards = {"weight": Shard((24, 6), "tp", 2, 0, (Block(12, 2), Block(12, 2)))}
    assert_matches_dense(Interleaved, twin, X, ranks=(2,), shards=shards)
    with pytest.raises(AssertionError, match="output: relative error"):
        assert_matches_dense(Interleaved, twin, X, ranks=(2,))


def test_shapes_that_cannot_be_matched_are_errors():
    class Odd(nn.Module):
        def __init__(self, axis):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 6))

        def forward(self, x):
            return x

    with pytest.raises(
        Exception, match=r"weight: \[5, 6\] on each of 2 ranks and \[12, 6\] in the dense twin; shards="
    ):
        assert_matches_dense(Odd, nn.Linear(6, 12, bias=False), X, ranks=(2,))
    with pytest.raises(AssertionError, match=r"output: shape \[5, 6\] on each of 2 ranks, \[5, 9\] dense"):
        assert_matches_dense(lambda axis: nn.Identity(), nn.ConstantPad1d((0, 3), 0.0), X, ranks=(2,))


@pytest.mark.ranks(2)
def test_on_ranks_that_are_up_a_module_will_do():
    axis = Mesh(tp=2).tp
    assert_matches_dense(ColumnParallelLinear(6, 12, axis), nn.Linear(6, 12), torch.ones(5, 6), axis=axis)
    assert_matches_dense(lambda own: ColumnParallelLinear(6, 12, own), nn.Linear(6, 12), torch.ones(5, 6))


@pytest.mark.ranks(4)
def test_on_an_axis_of_a_larger_mesh():
    mesh = Mesh(dp=2, tp=2)
    assert_matches_dense(Handmade(mesh.tp), DENSE, X, axis=mesh.tp)
    with pytest.raises(AssertionError, match="output: relative error"):
        assert_matches_dense(Handmade(mesh.tp, "not summed"), DENSE, X, axis=mesh.tp)


def test_integer_inputs_have_no_gradient_and_unused_parameters_have_zero():
    class Lookup(nn.Module):
        def __init__(self, axis):
            super().__init__()
            self.axis = axis
            self.table, self.unused = nn.Embedding(7, 6), nn.Parameter(torch.ones(3))

        def forward(self, ids):
            return all_gather(self.table(ids).chunk(self.axis.size)[self.axis.rank], self.axis, 0)

    ids = torch.arange(6)
    shards = {"table.weight": Shard((7, 6), "tp", 2, partial=True)}
    with pytest.raises(AssertionError, match=r"gradient of table\.weight"):  # each rank has looked up its own
        assert_matches_dense(Lookup, Lookup(Axis()), ids, ranks=(2,))
    with pytest.raises(AssertionError, match=r"gradient of table\.weight: relative error 1\.00e\+00"):
        # all ranks go on to compute alike, so that all_gather sums what is one: gather is for that
        assert_matches_dense(Lookup, Lookup(Axis()), ids, ranks=(2,), shards=shards)

"""The check behind `megalite.testing.assert_matches_dense`: a parallel module against its dense twin, in float64.

dense weights ─▶ cut by each parameter's Shard ─▶ parallel module        same inputs, same cotangent
compared, in this order: outputs, input gradients, parameter gradients, weights after one optimizer step
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from megalite.parallel.compare import NOISE, Comparison, Row
from megalite.parallel.in_flight import own_slice
from megalite.parallel.mesh import Axis
from megalite.parallel.parameters import cut, shard_table, sum_partial_gradients
from megalite.parallel.sharding import Block, Shard

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def compare_with_dense(
    parallel: nn.Module,
    dense: nn.Module,
    inputs: Sequence[Tensor],
    axis: Axis,
    *,
    input_dims: Sequence[int | None],
    shards: Mapping[str, Shard],
    names: Mapping[str, str],
    bound: float,
    optimizer: Optimizer,
) -> list[Row]:
    """Rows of relative errors, worst over the ranks; `parallel` gets the dense weights. Runs on every rank."""
    parallel, dense = parallel.double(), copy.deepcopy(dense).double()
    expected = dict(dense.named_parameters(remove_duplicate=False))
    twins = {name: names.get(name, name) for name, _ in parallel.named_parameters()}
    _require_same_parameters(twins, dense)
    table = shard_table(parallel, axis)
    for name, parameter in parallel.named_parameters():
        table[name] = shards.get(name) or _checked(name, parameter, expected[twins[name]], table[name], axis)
        with torch.no_grad():
            parameter.copy_(cut(expected[twins[name]], table[name], axis.rank))

    def local(x: Tensor, dim: int | None) -> Tensor:
        return x if dim is None else own_slice(x, axis, dim)

    whole = [x.double() if x.is_floating_point() else x for x in inputs]
    mine = [local(x, dim).clone() for x, dim in zip(whole, input_dims, strict=True)]
    for x in (*whole, *mine):
        x.requires_grad_(x.is_floating_point())
    results, dense_results = _tuple(parallel(*mine)), _tuple(dense(*whole))
    dims = [_split_dim(y, dense_y, axis) for y, dense_y in zip(results, dense_results, strict=True)]

    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in dense_results]
    _backward(dense_results, directions)
    _backward(results, [local(d, dim) for d, dim in zip(directions, dims, strict=True)])
    sum_partial_gradients(parallel.named_parameters(), table, axis)

    comparison = Comparison()
    for i, (y, dense_y, dim) in enumerate(zip(results, dense_results, dims, strict=True)):
        comparison.add("output" if len(results) == 1 else f"output {i}", y, local(dense_y, dim), bound)
    for i, (x, dense_x, dim) in enumerate(zip(mine, whole, input_dims, strict=True)):
        if dense_x.grad is not None:
            comparison.add(f"gradient of input {i}", _grad(x), local(dense_x.grad, dim), bound)
    largest = max((_grad(p).abs().max().item() for p in dense.parameters()), default=0.0)
    for name, parameter in parallel.named_parameters():
        gradient = cut(_grad(expected[twins[name]]), table[name], axis.rank)
        comparison.add(f"gradient of {name}", _grad(parameter), gradient, bound, NOISE * largest)
    for module in (parallel, dense):
        if parameters := list(module.parameters()):
            optimizer(parameters).step()
    for name, parameter in parallel.named_parameters():
        weight = cut(expected[twins[name]].detach(), table[name], axis.rank)
        comparison.add(f"{name} after one step", parameter, weight, bound, least=1e-2)
    return comparison.over_ranks()


def _backward(results: Sequence[Tensor], directions: Sequence[Tensor]) -> None:
    """From all results that have a gradient; a module may also return what has none, such as counts."""
    pairs = [(y, direction) for y, direction in zip(results, directions, strict=True) if y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [direction for _, direction in pairs])


def _require_same_parameters(twins: Mapping[str, str], dense: nn.Module) -> None:
    there = dict(dense.named_parameters())
    lacking = sorted(set(twins.values()) - set(dict(dense.named_parameters(remove_duplicate=False))))
    if lacking:
        raise ValueError(
            f"the dense twin has no parameter {lacking[0]!r}; it has {sorted(there)}; names={{...}} maps them"
        )
    if left := sorted(set(there) - set(twins.values())):
        raise ValueError(f"the parallel module has no parameter for {left[0]!r}; it has {sorted(twins)}")


def _checked(name: str, parameter: Tensor, dense: Tensor, shard: Shard, axis: Axis) -> Shard:
    """The Shard that the layer states, or the one that the two shapes imply."""
    if shard.shape == tuple(dense.shape) and shard.local_shape == tuple(parameter.shape):
        return shard
    dim = _cut_dim(tuple(parameter.shape), tuple(dense.shape), axis.size)
    if dim is None:
        raise ValueError(
            f"{name}: {list(parameter.shape)} on each of {axis.size} ranks and {list(dense.shape)} in the dense twin; "
            f"shards={{{name!r}: Shard(...)}} says how it is cut"
        )
    return Shard(tuple(dense.shape), axis.name, axis.size, dim, (Block(dense.shape[dim], axis.size),))


def _split_dim(y: Tensor, dense: Tensor, axis: Axis) -> int | None:
    if y.shape == dense.shape:
        return None
    dim = _cut_dim(tuple(y.shape), tuple(dense.shape), axis.size)
    if dim is None:
        raise AssertionError(f"output: shape {list(y.shape)} on each of {axis.size} ranks, {list(dense.shape)} dense")
    return dim


def _cut_dim(local: tuple[int, ...], whole: tuple[int, ...], ranks: int) -> int | None:
    """The one dim along which `local` is one of `ranks` equal slices of `whole`."""
    if len(local) != len(whole):
        return None
    differing = [dim for dim in range(len(whole)) if local[dim] != whole[dim]]
    if len(differing) == 1 and local[differing[0]] * ranks == whole[differing[0]]:
        return differing[0]
    return None


def _tuple(results: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _grad(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad

"""Checking parallel code on a laptop: run a function on N ranks, compare a parallel module with its dense twin.

    from megalite.testing import assert_matches_dense, run_ranks

    def total():
        x = torch.ones(3)
        dist.all_reduce(x)
        return x

    assert all((x == 4).all() for x in run_ranks(total, 4))

    assert_matches_dense(
        lambda axis: ColumnParallelLinear(8, 12, axis), torch.nn.Linear(8, 12), torch.randn(5, 8), ranks=(1, 2, 4)
    )

The ranks are processes that stay warm between calls, so that only the first call waits for PyTorch to be imported. With
pytest, `@pytest.mark.ranks(2, 4)` runs the body of a test on two ranks and then on four.
"""

import copyreg
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.dense_twin import Optimizer, compare_with_dense
from megalite.parallel.compare import Row
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.sharding import Shard
from megalite.rank_pool import GUILT, OUTCOMES, Failed, RankPool, Returned

STEP: Optimizer = partial(torch.optim.AdamW, lr=0.01)

# a function that calls torch.ops.aten.… is pickled with these two, which cannot be
copyreg.pickle(type(torch.ops), lambda _: (getattr, (torch, "ops")))
copyreg.pickle(type(torch.ops.aten), lambda namespace: (getattr, (torch.ops, namespace.name)))

_pool: RankPool | None = None


class RanksFailed(AssertionError):
    """Some ranks did not return. The message names the first cause, and then tells of each rank what it did and where.

    failures: the same by rank
    """

    def __init__(self, failures: Mapping[int, Failed], world_size: int) -> None:
        self.failures = {rank: f"rank {rank} {failed.how}\n{failed.stack}" for rank, failed in failures.items()}
        alike: dict[tuple[int, str, str], list[str]] = {}
        for rank, failed in failures.items():
            alike.setdefault((GUILT.index(failed.kind), failed.how, failed.stack), []).append(str(rank))
        parts = []
        for (_, how, stack), ranks in sorted(alike.items()):
            parts.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} of {world_size} {how}\n{stack}")
        super().__init__("\n".join(parts))


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `world_size` ranks at once; return what each of them returns, in rank order.

    In the function the default process group is up (gloo, on the CPU) and generators are seeded alike on all ranks.
    It may be a closure, a lambda, a test or a cell of a notebook: it and its arguments are sent by value, as is what
    they use of the module that defines them; other modules are imported in the ranks by name.

    Raises RanksFailed where a rank raises, dies, or still runs after `timeout` seconds. Skips, as by pytest.skip or
    pytest.xfail, where a rank asks for it and none fails.
    """
    __tracebackhide__ = True  # pytest shows the message, which has the ranks' stacks, and not this frame
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: needs at least one rank")
    global _pool
    if _pool is None or _pool.closed:
        _pool = RankPool()
    outcomes = _pool.call(_pickled(function, args, kwargs), world_size, timeout)
    failures = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failed)}
    guilty = {rank: failed for rank, failed in failures.items() if failed.kind in GUILT}
    asked = [failed for failed in failures.values() if failed.kind in OUTCOMES]
    if asked and all(failed.kind == "hung" for failed in guilty.values()):  # those wait for the ranks that skipped
        getattr(sys.modules["pytest"], asked[0].kind)(asked[0].how)
    if guilty:
        raise RanksFailed(guilty, world_size)
    return [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]


def assert_matches_dense(
    parallel: nn.Module | Callable[[Axis], nn.Module],
    dense: nn.Module,
    *inputs: Tensor,
    ranks: Sequence[int] = (1, 2, 4),
    axis: Axis | None = None,
    input_dims: Sequence[int | None] | None = None,
    shards: Mapping[str, Shard] | None = None,
    names: Mapping[str, str] | None = None,
    bound: float = 1e-9,
    optimizer: Optimizer = STEP,
) -> None:
    """A parallel module computes what its dense twin does: outputs, all gradients, one optimizer step.

    parallel: makes the module for an axis, e.g. `lambda axis: MyLayer(32, axis)`; on ranks already up, a module will do
    dense: the twin, whose weights are cut and copied into the parallel module     inputs: whole, as the twin takes them
    ranks: how many ranks to try, one after the other; where a process group is up, its ranks (and `axis`) are taken
    input_dims: for each input the dim along which the parallel module takes it split; None: replicated (the default)
    shards: how parameters are cut whose layers do not say so (attribute `shards`) and whose shapes do not tell
    names: the twin's name of a parameter, where it has another      bound: allowed relative error, in float64
    optimizer: makes the optimizer of the one step from parameters

    An output of another shape than the twin's must be split along one dim. Gradients of parameters whose Shard is
    partial are summed, as the training step does. Raises AssertionError naming the first tensor that diverges, its
    relative error and the allowed one; where parameters of the two cannot be matched, ValueError (within RanksFailed
    where it starts the ranks itself).
    """
    __tracebackhide__ = True

    def rows() -> list[Row]:
        here = axis or Mesh(tp=dist.get_world_size()).tp
        torch.set_default_dtype(torch.float64)
        return compare_with_dense(
            parallel if isinstance(parallel, nn.Module) else parallel(here),
            dense,
            inputs,
            here,
            input_dims=[None] * len(inputs) if input_dims is None else input_dims,
            shards=shards or {},
            names=names or {},
            bound=bound,
            optimizer=optimizer,
        )

    if dist.is_initialized():
        tried = {dist.get_world_size(): rows()}
    else:
        tried = {size: run_ranks(rows, size)[0] for size in ranks}
    for size, compared in tried.items():
        for row in compared:
            assert row.passed, f"{row} on {size} rank{'s' * (size > 1)}"


def _pickled(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The call as bytes that a rank can load without importing the modules of a test or a notebook."""
    modules = {_module(thing) for thing in (function, *args, *kwargs.values())}
    own = {name for name in modules if name and not _installed(name)} - cloudpickle.list_registry_pickle_by_value()
    for name in own:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        return cloudpickle.dumps((function, args, kwargs))
    finally:
        for name in own:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])


def _module(thing: object) -> str:
    """The name of the loaded module that defines a function, a class, or the class of an object; "" where none does."""
    while isinstance(thing, partial):
        thing = thing.func
    name = getattr(thing, "__module__", None)
    return name if isinstance(name, str) and name in sys.modules else ""


@cache
def _installed(name: str) -> bool:
    """Whether every process of this Python can import the module: it is Python's own or part of a distribution."""
    file = getattr(sys.modules[name], "__file__", None)
    if file is None or name == "__main__":  # built in; cloudpickle sends __main__ by value anyway
        return True
    folders = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    if any(Path(file).is_relative_to(folder) for folder in folders):
        return True
    package = name.partition(".")[0]
    try:
        return package == __package__ or metadata.distribution(package) is not None
    except metadata.PackageNotFoundError:
        return False

"""Checking parallel code on a laptop: run a function on N ranks.

    from megalite.testing import run_ranks

    def total():
        x = torch.ones(3)
        dist.all_reduce(x)
        return x

    assert all((x == 4).all() for x in run_ranks(total, 4))

The ranks are processes that stay warm between calls, so that only the first call waits for PyTorch to be imported. With
pytest, `@pytest.mark.ranks(2, 4)` runs the body of a test on two ranks and then on four.
"""

import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import cloudpickle

from megalite.rank_pool import GUILT, OUTCOMES, Failed, RankPool, Returned

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

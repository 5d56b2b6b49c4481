"""`@pytest.mark.ranks(2, 4)`: the body of a test runs on two ranks, and in a second test on four.

    @pytest.mark.ranks(2, 4)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_total(dtype):                                                     # test_total[2 ranks-dtype0] ...
        x = torch.ones(3, dtype=dtype)
        dist.all_reduce(x)
        assert (x == dist.get_world_size()).all()

Fixtures and parameters are made by pytest in its own process and sent to the ranks, so they have to be picklable.
pytest loads this file wherever megalite is installed: it imports nothing heavy before a marked test runs.
"""

from functools import partial

import pytest

SIZE = "megalite world size"  # no test can have a parameter of that name


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ranks(*sizes, timeout=60): run the test once for each size, its body on that many ranks at once"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    if not marker.args or not all(isinstance(size, int) and size > 0 for size in marker.args):
        pytest.fail(f"ranks{marker.args}: needs the numbers of ranks, as in ranks(2, 4)", pytrace=False)
    if unknown := set(marker.kwargs) - {"timeout"}:
        pytest.fail(f"ranks knows timeout=, not {', '.join(unknown)}=", pytrace=False)
    metafunc.fixturenames.append(SIZE)
    metafunc.parametrize(SIZE, marker.args, ids=[f"{n} rank{'s' * (n > 1)}" for n in marker.args])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    from megalite.testing import RanksFailed, run_ranks  # imports torch

    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    size = pyfuncitem.callspec.params[SIZE]
    assert isinstance(size, int)
    try:
        run_ranks(partial(pyfuncitem.obj, **arguments), size, **marker.kwargs)
    except RanksFailed as failed:
        message = str(failed)
    else:
        return True
    pytest.fail(message, pytrace=False)  # the message has the stacks of the ranks; ours would say nothing

"""Records which combinations have passed: see combinations.py."""

from collections.abc import Generator
from pathlib import Path

import pytest
from combinations import Combination, combination, read, write

PASSED: set[Combination] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    mark = item.get_closest_marker("combination")
    if mark and report.when == "call" and report.passed:
        PASSED.add(combination(mark.kwargs, item.callspec.params))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if path := session.config.getoption("--record-combinations"):
        write(Path(path), read(Path(path)) | PASSED)

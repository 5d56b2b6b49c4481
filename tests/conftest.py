"""Lets the GPU tests run where megalite is not installed: `PYTHONPATH=. python3 -m pytest -m gpu`."""

from pathlib import Path

import pytest

from megalite import pytest_plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-combinations", metavar="FILE", help="add what has passed, see tests/train/combinations.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.is_registered(pytest_plugin):
        config.pluginmanager.register(pytest_plugin, "megalite")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Only what runs on a GPU, so that the other tests' dependencies need not be there."""
    if config.option.markexpr == "gpu" and collection_path.is_file() and collection_path.name != "test_gpu.py":
        return True
    return None

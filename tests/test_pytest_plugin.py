"""The marker `ranks`, in a pytest of its own."""

import subprocess
import sys

pytest_plugins = ["pytester"]

TESTS = """
import pytest
import torch.distributed as dist


@pytest.fixture
def three():
    return 3


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("base", [10, 20])
def test_sizes(request_free, three, base):
    sizes = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, (dist.get_rank(), three, base))
    assert sizes == [(rank, 3, base) for rank in range(len(sizes))]


@pytest.fixture
def request_free(request):
    return request.node.name


class TestClass:
    @pytest.mark.ranks(2)
    def test_method(self):
        assert type(self).__name__ == "TestClass"


@pytest.mark.ranks(2)
def test_fails():
    print("a word before")
    assert dist.get_rank() == 0


@pytest.mark.ranks(2)
def test_skips():
    pytest.skip("not here")


@pytest.mark.ranks(2, timeout=0.5)
def test_hangs():
    if dist.get_rank():
        dist.barrier()


def test_unmarked():
    assert not dist.is_initialized()
"""


def test_marked_tests_run_on_ranks(pytester):
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess(
        "-v", "--strict-markers", "--import-mode=importlib", "-p", "no:cacheprovider"
    )
    result.assert_outcomes(passed=6, failed=2, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_sizes[[]1 rank-10] PASSED*",
            "*::test_sizes[[]2 ranks-20] PASSED*",
            "*::TestClass::test_method[[]2 ranks] PASSED*",
            "*_ test_fails[[]2 ranks] _*",
            "rank 1 of 2 raised AssertionError: assert 1 == 0",
            "    assert dist.get_rank() == 0",
            "*Captured stdout call*",
            "rank 0: a word before",
            "rank 1: a word before",
            "*_ test_hangs[[]2 ranks] _*",
            "rank 1 of 2 did not finish within 0.5 s; latest call first:",
            "*in test_hangs",
        ]
    )
    result.stdout.no_fnmatch_line("*rank_pool.py*")


def test_a_wrong_marker_is_told_in_a_line(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.ranks()\ndef test(): pass\n")
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["ranks(): needs the numbers of ranks, as in ranks(2, 4)"])


def test_the_plugin_does_not_import_torch():
    script = "import megalite.pytest_plugin, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"

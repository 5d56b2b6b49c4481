"""The tables of docs/combinations.md are of tests that ran, of all of them and of no others."""

import test_exactness
import test_muon
import test_offload
import test_precision
import test_small_state
from combinations import PAGE, RECORD, Combination, axes, declared, page, read, tables, write

MODULES = test_exactness, test_muon, test_offload, test_precision, test_small_state
AGAIN = "pytest --record-combinations, then tests/train/combinations.py, would do"


def test_what_is_recorded_is_what_the_tests_try():
    tried = {one for module in MODULES for one in declared(module)}
    recorded = read(RECORD)
    assert not tried - recorded, f"never seen to pass: {sorted(tried - recorded)[:3]}; {AGAIN}"
    assert not recorded - tried, f"no longer tried: {sorted(recorded - tried)[:3]}; {AGAIN}"


def test_the_page_is_made_of_the_record():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, read(RECORD)) == text, AGAIN


def test_zero_and_recomputation_are_tried_on_every_kind_of_mesh():
    """What the page claims by its first table: no cell of it is empty."""
    exact = [one for one in read(RECORD) if one.optimizer == "adamw" and one.dtype == "float64"]
    kinds = {axes(one) for one in exact}
    assert len(kinds) == 15  # of four axes all but all at once, which would be 16 ranks
    assert {(axes(one), one.zero) for one in exact} == {(kind, zero) for kind in kinds for zero in range(4)}
    assert {(one.recompute, one.zero) for one in exact} == {
        (recompute, zero) for recompute in test_exactness.RECOMPUTE for zero in range(4)
    }


def test_a_record_is_read_back_and_a_table_counts_it(tmp_path):
    some = {
        Combination(2, 1, 1, 1, 1, 0, "none", "", "float64", "adamw"),
        Combination(2, 1, 1, 1, 1, 2, "full", "", "float64", "adamw"),
        Combination(1, 2, 1, 1, 0, 0, "none", "zb-v", "float32", "adamw offloaded"),
    }
    write(tmp_path / "record.csv", some)
    assert read(tmp_path / "record.csv") == some
    lines = tables(some).splitlines()
    assert "| dp |  | 2 |  |  |" in lines and "| float32, adamw offloaded | 1 |  |  |  |" in lines
    assert not any("zb-v" in line for line in lines)  # not exact, and so of the last table only
    assert read(tmp_path / "none.csv") == set()

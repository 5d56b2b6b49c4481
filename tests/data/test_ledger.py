"""The record of consumed samples, and what an audit of it finds."""

import json

import numpy as np
import pytest

from megalite.data import Sampler, TokenFile, TokenWriter
from megalite.data.ledger import Ledger, audit, begin_attempt
from megalite.errors import DataError

BATCH = 6


@pytest.fixture
def sampler(tmp_path):
    with TokenWriter(tmp_path / "tokens", 50, 0) as writer:
        writer.write(np.random.default_rng(0).integers(50, size=400))
    return Sampler([TokenFile(tmp_path / "tokens")], 7, seed=3)


def take(run, sampler, attempt, steps, dp=2, ranks=None):
    for rank in range(dp) if ranks is None else ranks:
        ledger = Ledger(run, rank, attempt)
        for step in steps:
            rows = BATCH // dp
            samples = sampler.ids(step - 1, BATCH)[rank * rows : (rank + 1) * rows]
            ledger.add(step, samples, sampler.batch(step - 1, BATCH, rank, dp).crc32)


def test_a_run_without_faults_over_more_than_an_epoch(tmp_path, sampler):
    assert begin_attempt(tmp_path, 0) == 1
    take(tmp_path, sampler, 1, range(1, 21))
    assert len(sampler) < 20 * BATCH
    found = audit(tmp_path, sampler, BATCH)
    assert (found.steps, found.samples, found.attempts, found.repeated, found.torn) == (20, 120, 1, 0, False)
    assert found.problems == ()


def test_steps_taken_again_count_once_whatever_the_mesh(tmp_path, sampler):
    take(tmp_path, sampler, begin_attempt(tmp_path, 0), range(1, 8), dp=3)
    take(tmp_path, sampler, begin_attempt(tmp_path, 4), range(5, 10), dp=2)
    take(tmp_path, sampler, begin_attempt(tmp_path, 4), range(5, 12), dp=1)
    found = audit(tmp_path, sampler, BATCH)
    assert (found.steps, found.attempts, found.repeated, found.problems) == (11, 3, 5, ())


def test_the_step_in_which_a_run_was_killed_is_torn(tmp_path, sampler):
    attempt = begin_attempt(tmp_path, 0)
    take(tmp_path, sampler, attempt, range(1, 4))
    take(tmp_path, sampler, attempt, [4], ranks=[1])
    with (tmp_path / "samples" / "dp-0000.jsonl").open("a") as file:
        file.write('{"attempt": 1, "st')
    found = audit(tmp_path, sampler, BATCH)
    assert (found.steps, found.torn, found.problems) == (3, True, ())


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda lines: lines.pop(2), "step 3: 3 samples lost, the first is 12"),
        (lambda lines: lines.append(lines[2]), "step 3: 3 samples repeated, the first is 12"),
        (lambda lines: lines[2].update(first=13), "step 3: 1 samples lost, the first is 12"),
        (lambda lines: lines[2].update(crc32=1), "step 3: samples from 12 on were other tokens than the data has now"),
    ],
    ids=["lost", "repeated", "shifted", "other tokens"],
)
def test_what_is_wrong_is_named(tmp_path, sampler, edit, problem):
    take(tmp_path, sampler, begin_attempt(tmp_path, 0), range(1, 6))
    path = tmp_path / "samples" / "dp-0000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert audit(tmp_path, sampler, BATCH).problems[0] == problem


def test_a_window_that_comes_too_often_is_named(tmp_path, sampler, monkeypatch):
    locate = sampler.locate
    monkeypatch.setattr(sampler, "locate", lambda sample: locate(sample // 2))
    take(tmp_path, sampler, begin_attempt(tmp_path, 0), range(1, 5))
    (problem,) = audit(tmp_path, sampler, BATCH).problems
    assert "one window was seen 2 times, another 0" in problem


def test_no_record_is_a_data_error(tmp_path, sampler):
    with pytest.raises(DataError, match="no record of samples"):
        audit(tmp_path, sampler, BATCH)

"""Batches: every window once an epoch, no leak into validation, the same tokens on every mesh."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data import Sampler, TokenFile, TokenWriter, unigram_entropy
from megalite.errors import DataError


def corpus(folder, count: int, first: int = 0, vocab_size: int = 70_000) -> TokenFile:
    """A token file whose ids count up from `first`, so that each id tells where it came from."""
    with TokenWriter(folder, vocab_size) as writer:
        writer.write(np.arange(first, first + count))
    return TokenFile(folder)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("long") / "t", 10_007)


def test_shapes_types_and_shift(long):
    tokens, targets = Sampler([long], seq_len=33, seed=0).batch(step=5, global_batch=6, rank=1, ranks=3)
    assert tokens.shape == targets.shape == (2, 33)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous() and targets.is_contiguous()
    assert torch.equal(targets, tokens + 1)  # the corpus counts up


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 12])
def test_the_global_batch_is_the_same_for_every_number_of_ranks(long, ranks):
    sampler = Sampler([long], seq_len=17, seed=3)
    for step in (0, 1, 977):
        whole = sampler.batch(step, 12)
        for part, expected in zip(
            zip(*(sampler.batch(step, 12, rank, ranks) for rank in range(ranks)), strict=True), whole, strict=True
        ):
            assert torch.equal(torch.cat(part), expected)


def test_steps_need_no_history_and_batches_of_other_sizes_keep_the_order(long):
    sampler, fresh = Sampler([long], 16, seed=9), Sampler([long], 16, seed=9)
    order = torch.cat([sampler.batch(step, 4)[0] for step in range(6)])
    assert torch.equal(fresh.batch(5, 4)[0], order[20:])
    assert torch.equal(torch.cat([fresh.batch(step, 8)[0] for step in range(3)]), order)
    assert sampler.ids(5, 4) == range(20, 24)


def test_an_epoch_visits_every_window_once_and_the_next_in_another_order(long):
    sampler, other_seed = Sampler([long], seq_len=50, seed=1), Sampler([long], seq_len=50, seed=2)
    epoch = [sampler.locate(sample)[1] for sample in range(2 * len(sampler))]
    first, second = epoch[: len(sampler)], epoch[len(sampler) :]
    assert sorted(first) == sorted(second) == [50 * window for window in range(len(sampler))]
    assert first != second
    assert first != [other_seed.locate(sample)[1] for sample in range(len(sampler))]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(4, 400), seq_len=st.integers(1, 40), validation=st.sampled_from([0.001, 0.01, 0.1, 0.5, 0.97]))
def test_no_token_of_validation_is_a_token_or_target_of_train(tmp_path_factory, count, seq_len, validation):
    file = corpus(tmp_path_factory.mktemp("split") / "t", count)
    try:
        train, held_out = (
            Sampler([file], seq_len, 0, split=split, validation=validation) for split in ("train", "validation")
        )
    except DataError:
        assert count < 2 * seq_len + 2  # one window each, a last target, and the token between the splits
        return
    seen = []
    for sampler in (train, held_out):
        tokens, targets = sampler.batch(0, len(sampler))
        assert len(tokens.unique()) == tokens.numel()  # windows do not overlap
        seen.append(set(tokens.flatten().tolist()) | set(targets.flatten().tolist()))
    assert not seen[0] & seen[1]
    assert max(seen[0]) < min(seen[1])
    windows = len(train) + len(held_out)
    assert count - 2 - seq_len < windows * seq_len <= count - 2  # all but a remainder is used
    assert abs(len(held_out) - validation * windows) <= 1


def test_without_validation_train_takes_all(long):
    assert len(Sampler([long], 100, 0, validation=0)) == 100
    with pytest.raises(DataError, match="a validation fraction of 0 leaves no validation window"):
        Sampler([long], 100, 0, split="validation", validation=0)


def test_sources_are_blended_by_weight_and_by_size_when_no_weight_is_given(tmp_path, long):
    other = corpus(tmp_path / "t", 2_000, first=20_000)

    def share(weights):
        tokens, _ = Sampler([long, other], 10, seed=0, weights=weights).batch(0, 10_000)
        return (tokens >= 20_000).float().mean().item()

    assert share((1, 3)) == pytest.approx(0.75, abs=1e-4)
    assert share((2, 0)) == 0
    assert share((0, 0.1)) == 1
    assert share(()) == pytest.approx(1 / 6, abs=2e-3)
    assert len(Sampler([long, other], 10, 0, weights=(0, 1), validation=0)) == 199


def test_every_source_keeps_its_own_epochs(tmp_path, long):
    other = corpus(tmp_path / "t", 1_000, first=20_000)
    sampler = Sampler([long, other], 10, seed=4, weights=(1, 1))
    starts = [first for file, first in map(sampler.locate, range(1000)) if file is other]
    windows = sampler.sources[1].windows
    assert sorted(starts[:windows]) == sorted(starts[windows : 2 * windows]) == [10 * w for w in range(windows)]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0,), r"weights: 1 given for 2 token files; one for each"),
        ((1.0, -0.5), r"weights: \[1.0, -0.5\] given; numbers of at least 0"),
        ((0, 0), "not all of them 0"),
        ((1.0, float("nan")), "nan"),
        ((1.0, float("inf")), "inf"),
    ],
)
def test_weights_that_do_not_fit_are_refused(long, weights, message):
    with pytest.raises(DataError, match=message):
        Sampler([long, long], 16, seed=0, weights=weights)


def test_a_sequence_longer_than_the_data_says_both_numbers_and_what_would_do(tmp_path):
    file = corpus(tmp_path / "t", 100)
    with pytest.raises(
        DataError, match=r"100 tokens are too few for seq_len 64 .* 130 tokens or a seq_len of at most 49"
    ):
        Sampler([file], 64, 0)
    assert len(Sampler([file], 49, 0)) == len(Sampler([file], 49, 0, split="validation")) == 1
    with pytest.raises(DataError, match=r"100 tokens .* seq_len 100 .* 101 tokens or a seq_len of at most 99"):
        Sampler([file], 100, 0, validation=0)
    assert len(Sampler([file], 99, 0, validation=0)) == 1


def test_mistakes_of_the_caller_are_value_errors(long):
    sampler = Sampler([long], 16, 0)
    for arguments in [(0, 5, 0, 2), (0, 4, 2, 2), (-1, 4), (0, 0)]:
        with pytest.raises(ValueError, match="would do"):
            sampler.batch(*arguments)
    for options in [{"seq_len": 0}, {"validation": 1.0}, {"validation": -0.1}]:
        with pytest.raises(ValueError, match="would do"):
            Sampler([long], **{"seq_len": 16, "seed": 0} | options)
    with pytest.raises(DataError, match="no token file"):
        Sampler([], 16, 0)


def test_ids_beyond_the_models_vocabulary_are_refused_at_once(long):
    with pytest.raises(DataError, match=r"tokens.bin: token ids up to 10006 are beyond the vocabulary of 4096"):
        Sampler([long], 16, 0, vocab_size=4096)
    Sampler([long], 16, 0, vocab_size=10_007)


def test_an_id_damaged_on_disk_is_found_when_its_batch_is_read(tmp_path):
    file = corpus(tmp_path / "t", 400, vocab_size=1000)
    with file.path.open("r+b") as raw:
        raw.seek(2 * 123)
        raw.write((4321).to_bytes(2, "little"))
    sampler = Sampler([TokenFile(tmp_path / "t")], 10, seed=0, vocab_size=1000)
    hit = {step for step in range(len(sampler)) if sampler.locate(step)[1] == 120}
    for step in set(range(len(sampler))) - hit:
        sampler.batch(step, 1)
    for step in hit:
        with pytest.raises(DataError, match=r"tokens.bin: token id 4321 at byte 246 is beyond the vocabulary of 1000"):
            sampler.batch(step, 1)
    assert len(hit) == 1


def test_unigram_entropy(tmp_path):
    with TokenWriter(tmp_path / "a", 8) as writer:
        writer.write(np.tile([0, 1, 2, 3], 100))
    with TokenWriter(tmp_path / "b", 16) as writer:
        writer.write(np.tile([9], 400))
    a, b = TokenFile(tmp_path / "a"), TokenFile(tmp_path / "b")
    assert unigram_entropy(a) == pytest.approx(np.log(4))
    assert unigram_entropy(b) == 0
    assert unigram_entropy(Sampler([a], 4, 0)) == pytest.approx(np.log(4))
    mixed = Sampler([a, b], 4, 0, weights=(3, 1))
    assert unigram_entropy(mixed) == pytest.approx(0.75 * np.log(4 / 0.75) + 0.25 * np.log(4))

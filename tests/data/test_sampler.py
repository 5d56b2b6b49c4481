"""Batches: every window once an epoch, no leak into validation, the same tokens on every mesh."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data import Sampler, TokenFile, TokenWriter, unigram_entropy
from megalite.errors import DataError
from megalite.parallel.layout import LAYOUTS, own_positions


def corpus(folder, count: int, first: int = 0, vocab_size: int = 70_000) -> TokenFile:
    """A token file whose ids count up from `first`, so that each id tells where it came from."""
    with TokenWriter(folder, vocab_size) as writer:
        writer.write(np.arange(first, first + count))
    return TokenFile(folder)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("long") / "t", 10_007)


def test_shapes_types_and_shift(long):
    tokens, targets, documents, _ = Sampler([long], seq_len=33, seed=0).batch(step=5, global_batch=6, rank=1, ranks=3)
    assert documents is None
    assert tokens.shape == targets.shape == (2, 33)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous() and targets.is_contiguous()
    assert torch.equal(targets, tokens + 1)  # the corpus counts up


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 12])
def test_the_global_batch_is_the_same_for_every_number_of_ranks(long, ranks):
    sampler = Sampler([long], seq_len=17, seed=3)
    for step in (0, 1, 977):
        whole, parts = sampler.batch(step, 12), [sampler.batch(step, 12, rank, ranks) for rank in range(ranks)]
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


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
        tokens, targets, *_ = sampler.batch(0, len(sampler))
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
        tokens = Sampler([long, other], 10, seed=0, weights=weights).batch(0, 10_000).tokens
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


# --- a cut sequence, separate documents -----------------------------------------------------------------------------

END = 7


def packed(folder, count=3_000, seed=0, end=END) -> TokenFile:
    """Random tokens below 20, of which about one in ten ends a document."""
    ids = np.random.default_rng(seed).integers(20, size=count)
    ids[np.random.default_rng(seed + 1).random(count) < 0.1] = END
    with TokenWriter(folder, 20, end) as writer:
        writer.write(ids)
    return TokenFile(folder)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return packed(tmp_path_factory.mktemp("packed") / "t")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (1, 3), (2, 1), (2, 3), (4, 2)])
def test_a_rank_has_its_positions_of_the_whole_batch(documents, layout, ring, ulysses):
    sampler = Sampler([documents], 48, seed=1, separate_documents=True)
    whole = sampler.batch(3, 4, 1, 2)
    cut = [own_positions(layout, ring, ulysses, rank, 48) for rank in range(ring * ulysses)]
    parts = [sampler.batch(3, 4, 1, 2, positions) for positions in cut]
    for positions, part in zip(cut, parts, strict=True):
        for mine, every in zip(part[:3], whole[:3], strict=True):
            assert mine.dtype == torch.int64 and mine.is_contiguous()
            assert torch.equal(mine, every[:, torch.from_numpy(positions)])
    order = torch.from_numpy(np.concatenate(cut)).argsort()
    assert torch.equal(torch.cat([part.targets for part in parts], 1)[:, order], whole.targets)


def test_an_end_of_text_belongs_to_the_document_that_it_ends(documents):
    tokens, _, numbers, _ = Sampler([documents], 48, seed=1, separate_documents=True).batch(0, 16)
    for row, expected in zip(tokens.tolist(), numbers.tolist(), strict=True):
        assert expected == [row[:i].count(END) for i in range(48)]
    assert (numbers[:, -1] > 1).any()


def test_every_source_has_its_own_end_of_text(tmp_path, documents):
    """Ids are alike in both; in the second another one ends a document."""
    other = packed(tmp_path / "t", seed=5, end=3)
    sampler = Sampler([documents, other], 48, seed=1, separate_documents=True)
    tokens, _, numbers, _ = sampler.batch(0, 16)
    ends = [sampler.locate(sample)[0].end_of_text for sample in range(16)]
    assert set(ends) == {END, 3}
    for row, end, expected in zip(tokens.tolist(), ends, numbers.tolist(), strict=True):
        assert expected == [row[:i].count(end) for i in range(48)]


def test_a_sequence_of_one_is_one_document(documents):
    batch = Sampler([documents], 1, seed=1, separate_documents=True).batch(0, 5)
    assert torch.equal(batch.documents, torch.zeros(5, 1, dtype=torch.int64))


def test_documents_that_cannot_be_told_apart_are_refused_at_once(tmp_path, documents, long):
    with pytest.raises(DataError, match=r"tokens.bin: no end_of_text tells where .*data.separate_documents=false"):
        Sampler([documents, long], 16, 0, separate_documents=True)
    Sampler([documents, long], 16, 0, weights=(1, 0), separate_documents=True)  # it takes no part


def test_a_batch_moves_as_one(documents):
    for separate in (False, True):
        batch = Sampler([documents], 8, 0, separate_documents=separate).batch(0, 2)
        moved = batch.to(torch.device("meta"))
        assert moved.tokens.is_meta and moved.targets.is_meta and (moved.documents is not None) == separate

"""Which tokens the model sees at which step: a pure function of (seed, step), with nothing to save or to lose.

    step ──▶ global sample g ──▶ source, running index r ──▶ epoch, window ──▶ tokens [first + w * seq_len, + seq_len]
          × batch           blend                  divmod, permute

The global batch of a step is the samples [step * B, (step + 1) * B), and each data-parallel rank takes its contiguous
slice; where sequences are cut over ranks too, a rank says which positions are its own. So a resumed run, a run on
another mesh and a run that skips ahead all see the same tokens, and no rank keeps a list of indices: the shuffle is a
permutation that is computed, one element at a time, from a key.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.data.order import Blend, key_of, permute
from megalite.data.tokens import TokenFile
from megalite.errors import DataError

Split = Literal["train", "validation"]

ENTROPY_TOKENS = 2**28  # unigram_entropy counts no more of a source: its value has long settled by then


class Source(NamedTuple):
    """The windows of one file that belong to a split: window w reads tokens [first + w * seq_len, + seq_len + 1)."""

    file: TokenFile
    first: int
    windows: int


class Batch(NamedTuple):
    """A rank's share of a batch, int64 `[rows, positions]` each.

    targets: the tokens that follow   documents: in which document of its row each token is, counted from 0; or None
    crc32: of what was read of the data, whole rows: int64, little-endian, `[rows, seq_len + 1]`
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None = None
    crc32: int = 0

    def to(self, device: torch.device) -> "Batch":
        """The same on `device`."""
        documents = None if self.documents is None else self.documents.to(device)
        return Batch(self.tokens.to(device), self.targets.to(device), documents, self.crc32)


class Sampler:
    """Batches of one split of one or several token files.

    Each file is cut into windows that do not overlap; the last `validation` of them (a fraction, at least one window)
    are the validation split, and no token of theirs is ever a token or a target of the train split. Files are blended
    by `weights`, by default in proportion to their windows; weight 0 leaves a file out. A file that is used up starts
    over in a new order. `vocab_size` is the model's; by default the largest of the files'. With `separate_documents`
    batches tell which tokens are of one document.

    Raises DataError when a file is too short for `seq_len`, holds ids beyond `vocab_size`, or does not mark where
    documents end that are to be told apart, or the weights do not fit.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        seq_len: int,
        seed: int,
        weights: Sequence[float] = (),
        split: Split = "train",
        validation: float = 0.01,
        vocab_size: int | None = None,
        separate_documents: bool = False,
    ) -> None:
        if seq_len < 1 or not 0 <= validation < 1:
            raise ValueError(f"seq_len {seq_len} and validation {validation}: at least 1, and within [0, 1), would do")
        files, weights = _weighted(files, weights)
        self.seq_len, self.seed, self.split, self.separate_documents = seq_len, seed, split, separate_documents
        self.vocab_size = vocab_size or max(file.vocab_size for file in files)
        for file in files:
            if (largest := file.index.max_token) >= self.vocab_size:
                raise DataError(
                    f"{file.path}: token ids up to {largest} are beyond the vocabulary of {self.vocab_size}; "
                    f"a vocabulary of {largest + 1} would do, or the model's own tokenizer"
                )
            if separate_documents and file.end_of_text is None:
                raise DataError(
                    f"{file.path}: no end_of_text tells where a document ends, for data.separate_documents; tokens "
                    "made by `megalite data` would do, or data.separate_documents=false"
                )
        self.sources = [Source(file, *windows_of(file, seq_len, split, validation)) for file in files]
        self.weights = weights or [float(source.windows) for source in self.sources]
        self._blend = Blend(self.weights, key_of(seed, split, "blend"))

    def __len__(self) -> int:
        """Windows in an epoch, over all sources."""
        return sum(source.windows for source in self.sources)

    def ids(self, step: int, global_batch: int) -> range:
        """The global sample numbers of a step; steps count from 0."""
        if step < 0 or global_batch < 1:
            raise ValueError(f"step {step}, global batch {global_batch}: at least 0 and at least 1 would do")
        return range(step * global_batch, (step + 1) * global_batch)

    def locate(self, sample: int) -> tuple[TokenFile, int]:
        """The file of a global sample and the position of its first token there."""
        number, running = self._blend.at(sample)
        source = self.sources[number]
        epoch, index = divmod(running, source.windows)
        window = permute(index, source.windows, key_of(self.seed, self.split, number, epoch))
        return source.file, source.first + window * self.seq_len

    def batch(
        self, step: int, global_batch: int, rank: int = 0, ranks: int = 1, positions: NDArray[np.integer] | None = None
    ) -> Batch:
        """This data-parallel rank's tokens of a step, `[global_batch // ranks, seq_len]`.

        positions: of the sequence, those that the rank holds, in its order; None: all. Targets are the tokens shifted
        by one; documents (None unless they are separate) are how many ends of text stand before a token in its row.
        Both are of the whole row, before it is cut. DataError names file, byte offset and id of one >= vocab_size.
        """
        if global_batch % ranks or not 0 <= rank < ranks:
            raise ValueError(f"global batch {global_batch} on rank {rank} of {ranks}: a multiple of {ranks} would do")
        rows = global_batch // ranks
        samples = self.ids(step, global_batch)[rank * rows : (rank + 1) * rows]
        block = self._read(samples)
        documents = np.zeros((rows, self.seq_len), dtype=np.int64) if self.separate_documents else None
        if documents is not None:
            ends = np.array([[self.locate(sample)[0].end_of_text] for sample in samples])
            documents[:, 1:] = np.cumsum(block[:, :-2] == ends, 1)
        own = np.arange(self.seq_len) if positions is None else positions
        tokens, targets = (torch.from_numpy(block.take(where, 1)) for where in (own, own + 1))
        cut = None if documents is None else torch.from_numpy(documents.take(own, 1))
        return Batch(tokens, targets, cut, zlib.crc32(block.data))

    def checksum(self, samples: Sequence[int]) -> int:
        """The crc32 of a batch of these global samples."""
        return zlib.crc32(self._read(samples).data)

    def _read(self, samples: Sequence[int]) -> NDArray[np.int64]:
        """Tokens and the one that follows them, `[len(samples), seq_len + 1]`."""
        block = np.empty((len(samples), self.seq_len + 1), dtype="<i8")
        for row, sample in enumerate(samples):
            file, first = self.locate(sample)
            block[row] = file.read(first, first + self.seq_len + 1, self.vocab_size)
        return block


def windows_of(file: TokenFile, seq_len: int, split: Split, validation: float) -> tuple[int, int]:
    """(first token, number of windows) of a split of a file; DataError when not one window fits."""
    # A window's last target is the next window's first token. Where the splits meet, one token is given up, so that
    # the last target of train is not the first token of validation.
    gap = 1 if validation else 0
    needed = 1 + gap
    total = (len(file) - 1 - gap) // seq_len
    if total < needed:
        longest = (len(file) - 1 - gap) // needed
        remedy = f" or a seq_len of at most {longest}" if longest > 0 else ""
        raise DataError(
            f"{file.path}: {len(file)} tokens are too few for seq_len {seq_len} with a validation fraction of "
            f"{validation:g}; {needed * seq_len + 1 + gap} tokens{remedy} would do"
        )
    held_out = min(max(1, round(total * validation)), total - 1) if validation else 0
    if split == "train":
        return 0, total - held_out
    if not held_out:
        raise DataError(f"{file.path}: a validation fraction of 0 leaves no validation window; 0.01 would do")
    return (total - held_out) * seq_len + 1, held_out


def unigram_entropy(data: Sampler | TokenFile) -> float:
    """Entropy of the token frequencies, in nats per token: the loss of the best model that ignores the context.

    Over a sampler's own split, its sources mixed by weight, or over a whole file; at most 2**28 tokens of each source.
    """
    if isinstance(data, TokenFile):
        spans, weights = [(data, 0, len(data))], [1.0]
    else:
        spans = [(file, first, first + windows * data.seq_len) for file, first, windows in data.sources]
        weights = data.weights
    mixture = np.zeros(max(file.vocab_size for file, _, _ in spans))
    for (file, start, stop), weight in zip(spans, weights, strict=True):
        counts = file.histogram(start, min(stop, start + ENTROPY_TOKENS))
        mixture[: len(counts)] += counts / counts.sum() * (weight / math.fsum(weights))
    seen = mixture[mixture > 0]
    return float(-(seen * np.log(seen)).sum())


def _weighted(files: Sequence[TokenFile], weights: Sequence[float]) -> tuple[list[TokenFile], list[float]]:
    """The files that take part and their weights; no weights stay no weights."""
    if not files:
        raise DataError("no token file given; at least one would do")
    if not weights:
        return list(files), []
    if len(weights) != len(files):
        raise DataError(f"weights: {len(weights)} given for {len(files)} token files; one for each would do")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise DataError(f"weights: {list(weights)} given; numbers of at least 0, not all of them 0, would do")
    taking_part = [(file, float(weight)) for file, weight in zip(files, weights, strict=True) if weight]
    return [file for file, _ in taking_part], [weight for _, weight in taking_part]

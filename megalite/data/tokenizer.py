"""Text to ids, a thin layer over `tokenizers`: byte-level BPE, so that every text has ids and every id has bytes.

Memory stays constant because no document is ever encoded whole: `cut` hands it on in pieces. Pre-tokenizers of the
GPT-2 and Llama 3 kind split a text by a regular expression before they merge bytes, and always between `x` and ` y`,
or after the newline of `x\\ny`, when x and y are not space themselves. Cut only there, and the ids of the pieces are
the ids of the whole. After *any* newline would be wrong: the two of `x\\n\\ny` are two tokens within a text but may be
one at its end.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megalite.errors import DataError

END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # what others call theirs

PIECE = 2**16  # characters: small enough that a batch has work for every core
LONGEST = 2**24  # characters without a safe place to cut, after which any place will do
BATCH = 2**20  # characters encoded together

BOUNDARY = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")


class Piece(NamedTuple):
    """A part of a document: its text, whether the document ends with it, and the bytes of input it accounts for."""

    text: str
    ends: bool
    size: int


def cut(blocks: Iterable[str], length: int = PIECE) -> Iterator[Piece]:
    """A document that arrives in blocks, as pieces of about `length` characters that may be encoded one by one.

    Exact wherever a lone space or newline turns up within 2**24 characters; text without one is cut there regardless,
    which can change the ids next to that cut.
    """
    text = ""
    for block in blocks:
        text += block
        while len(text) > length:
            found = BOUNDARY.search(text, length)
            if found is None and len(text) < LONGEST:
                break  # the next block may bring one
            at = found.start() if found else LONGEST
            yield Piece(text[:at], False, len(text[:at].encode()))
            text = text[at:]
    yield Piece(text, True, len(text.encode()))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with GPT-2's pre-tokenizer and `<|endoftext|>` as id 0; the same texts give the same tokenizer.

    `vocab_size` is an upper bound: few texts yield fewer merges. DataError below 257, the bytes and the end of text.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise DataError(f"vocab_size {vocab_size}: a byte-level tokenizer needs at least {len(alphabet) + 1}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, ours or Hugging Face's; DataError when it is missing or broken."""
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file; a tokenizer.json would do")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{path}: not a tokenizer.json ({error})") from error


def id_count(tokenizer: Tokenizer) -> int:
    """Rows an embedding needs: the largest id plus one, which exceeds the number of tokens where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """The id that ends a document, or None when the tokenizer has none by a name we know."""
    ids = (tokenizer.token_to_id(name) for name in ENDS)
    return next((token for token in ids if token is not None), None)


def encode_documents(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> Iterator[tuple[list[int], int]]:
    """Streams (ids, bytes of input) batch by batch, in order, the end-of-text id after each document.

    Parallel over the cores and in constant memory. A text that spells out `<|endoftext|>` is encoded as the letters it
    is: only the end of a document ends a document.
    """
    tokenizer = Tokenizer.from_str(tokenizer.to_str())  # the caller's keeps its own settings
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = end_of_text(tokenizer)
    for batch in _batches(pieces):
        ids: list[int] = []
        encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            ids += encoding.ids
            if piece.ends and end is not None:
                ids.append(end)
        yield ids, sum(piece.size for piece in batch)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch

"""Which tokens the model sees, from text on disk to the batch of a step.

    corpus.py       text files, JSONL, the standard library  ─▶  documents, tokenize
    tokenizer.py    documents  ─▶  ids                            train_bpe, load_tokenizer
    tokens.py       ids in a memory-mapped folder                 TokenWriter, TokenFile
    index.py        what tokens are there, as JSON
    order.py        a permutation and a blend, computed and not stored
    sampler.py      (seed, step)  ─▶  batch                       Sampler, unigram_entropy
    ledger.py       which samples were consumed, and the proof that none was lost or repeated

What a user can get wrong raises `DataError`: one line with the file, what was found and what would do.
"""

from megalite.data.corpus import documents, standard_library, tokenize
from megalite.data.sampler import Batch, Sampler, unigram_entropy
from megalite.data.tokenizer import load_tokenizer, train_bpe
from megalite.data.tokens import TokenFile, TokenWriter

__all__ = [
    "Batch",
    "Sampler",
    "TokenFile",
    "TokenWriter",
    "documents",
    "load_tokenizer",
    "standard_library",
    "tokenize",
    "train_bpe",
    "unigram_entropy",
]

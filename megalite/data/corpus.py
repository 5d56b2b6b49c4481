"""From text files to a token folder: read in pieces, encode in batches, write as they come.

A text file of any kind is one document; a .jsonl file holds one a line, under the key "text"; a folder stands for the
files in it. The corpus that is always there is the source text of Python's own standard library: ten megabytes or so
of English and code, no download.
"""

import codecs
import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer

from megalite.data.tokenizer import Piece, cut, encode_documents, end_of_text, id_count, train_bpe
from megalite.data.tokens import TokenFile, TokenWriter, check_free
from megalite.errors import DataError

BLOCK = 2**20  # bytes read together
SAMPLE = 2**24  # bytes of text, spread over the corpus, that a BPE of ours is trained on
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}


def standard_library() -> list[Path]:
    """The .py files of the running Python's standard library, without its tests; sorted, the same at every call."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    # _sysconfigdata describes the machine that built this Python, and config-* holds a script that does.
    kept = (
        path
        for path in found
        if NOT_LIBRARY.isdisjoint(path.parts) and not path.parts[0].startswith(("_sysconfigdata", "config-"))
    )
    return [root / path for path in sorted(kept)]


def files(paths: Sequence[str | Path]) -> list[Path]:
    """The files that `paths` stand for: folders opened recursively, sorted, hidden files and __pycache__ left out.

    DataError when a path does not exist, or when there is no text in any of the files.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = (inner for inner in path.rglob("*") if inner.is_file())
            found += sorted(
                inner
                for inner in inside
                if not any(part.startswith(".") or part == "__pycache__" for part in inner.relative_to(path).parts)
            )
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"{path}: no such file or folder; text files, .jsonl files or folders of them would do")
    if not any(path.stat().st_size for path in found):
        given = ", ".join(map(str, paths)) or "no path given"
        raise DataError(f"{given}: holds no text; at least one file that is not empty would do")
    return found


def documents(paths: Sequence[str | Path]) -> Iterator[Piece]:
    """Streams the documents of files and folders in order, each as one or more pieces; empty ones are passed over.

    Memory is constant for text files and that of one line for .jsonl. DataError names the file and the byte or line
    where text is not UTF-8, a line is not JSON, or a line has no "text".
    """
    for path in files(paths):
        try:
            if path.suffix == ".jsonl":
                yield from _lines(path)
            elif path.stat().st_size:
                yield from cut(_blocks(path))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def tokenize(
    paths: Sequence[str | Path],
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> TokenFile:
    """Make the token folder `folder` from text, in constant memory and parallel over the cores.

    Without a `tokenizer`, a BPE of at most `vocab_size` tokens is trained on the text first. The tokenizer is kept in
    the folder, and its end-of-text id follows each document. `progress(done, total)` is told the bytes of input
    encoded so far. Raises DataError as `documents` and `TokenWriter` do; then there is no folder.
    """
    check_free(Path(folder))  # before the work, not after it
    total = sum(path.stat().st_size for path in files(paths))
    tokenizer = tokenizer or train_bpe(_sample(paths, total), vocab_size)
    end, source = end_of_text(tokenizer), f"{total} bytes of text"
    with TokenWriter(folder, id_count(tokenizer), end, tokenizer=tokenizer.to_str(), source=source) as writer:
        done = 0
        for ids, size in encode_documents(tokenizer, documents(paths)):
            writer.write(ids)
            done += size
            if progress:
                progress(done, total)
    return TokenFile(folder)


def _sample(paths: Sequence[str | Path], total: int) -> Iterator[str]:
    """Every k-th piece of the corpus, k such that they come to about SAMPLE bytes: all of a small corpus."""
    stride = -(-total // SAMPLE)
    return (piece.text for number, piece in enumerate(documents(paths)) if number % stride == 0)


def _blocks(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        for block in chain(iter(lambda: file.read(BLOCK), b""), [b""]):
            pending = len(decoder.getstate()[0])
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                at = file.tell() - len(block) - pending + error.start
                raise DataError(f"{path}: byte {at} is not UTF-8 text; convert the file or leave it out") from error


def _lines(path: Path) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                document = json.loads(line.decode())
                text = document["text"]
                text.encode()  # JSON can spell half a surrogate pair, which is no character
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: line {number} is not JSON in UTF-8 ({error})") from error
            except (KeyError, TypeError, AttributeError) as error:
                raise DataError(f'{path}: line {number} has no text; {{"text": "..."}} would do') from error
            if text:
                *parts, last = cut([text])
                yield from (part._replace(size=0) for part in parts)
                yield last._replace(size=len(line))

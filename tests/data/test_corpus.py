"""From text to a token folder: documents are found, read in pieces, and refused with the place of the damage."""

import json
import tracemalloc

import pytest

from megalite.data import TokenFile, documents, load_tokenizer, standard_library, tokenize, train_bpe
from megalite.data import corpus as corpus_module
from megalite.errors import DataError


def texts(paths) -> list[str]:
    """The documents, put together from their pieces."""
    whole, parts = [], []
    for piece in documents(paths):
        parts.append(piece.text)
        if piece.ends:
            whole.append("".join(parts))
            parts = []
    assert not parts
    return whole


def test_standard_library_is_python_source_without_tests():
    paths = standard_library()
    assert paths == standard_library() == sorted(paths)
    names = {path.name for path in paths}
    assert {"os.py", "argparse.py", "dataclasses.py"} <= names
    assert not {"test", "tests", "site-packages", "__pycache__"} & {part for path in paths for part in path.parts}
    assert 5e6 < sum(path.stat().st_size for path in paths) < 30e6


def test_files_folders_and_jsonl_in_order(tmp_path):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / ".git").mkdir()
    (tmp_path / "folder" / "__pycache__").mkdir()
    (tmp_path / "folder" / "b.txt").write_text("bee\r\n", newline="")
    (tmp_path / "folder" / "a.py").write_text("ay")
    (tmp_path / "folder" / "empty.txt").touch()
    (tmp_path / "folder" / "deep" / "c.md").write_text("naïve 数\n")
    (tmp_path / "folder" / ".git" / "x").write_bytes(b"\xff")
    (tmp_path / "folder" / "__pycache__" / "a.pyc").write_bytes(b"\xff")
    lines = [{"text": "one\n"}, {"text": ""}, {"text": "two", "other": 1}]
    (tmp_path / "d.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    assert texts([tmp_path / "d.jsonl", tmp_path / "folder"]) == ["one\n", "two", "ay", "bee\r\n", "naïve 数\n"]


def test_long_documents_come_in_pieces_and_characters_split_by_a_block_survive(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "BLOCK", 7)
    text = "数字 naïve 🙂 " * 20_000
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert texts([tmp_path]) == [text, text]
    for name in ("long.txt", "long.jsonl"):
        pieces = list(documents([tmp_path / name]))
        assert len(pieces) > 2
        assert sum(piece.size for piece in pieces) == (tmp_path / name).stat().st_size


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.txt", b"fine \xff", r"bad.txt: byte 5 is not UTF-8"),
        ("cut.txt", b"ok \xe6\x95", r"cut.txt: byte 3 is not UTF-8"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": ', r"bad.jsonl: line 2 is not JSON"),
        ("bad.jsonl", b'\n{"text": "\xff"}', r"bad.jsonl: line 2 is not JSON in UTF-8"),
        ("bad.jsonl", b'{"text": "\\ud800"}', r"bad.jsonl: line 1 is not JSON in UTF-8"),
        ("bad.jsonl", b"[" * 100_000, r"bad.jsonl: line 1 is not JSON"),
        ("bad.jsonl", b'{"txt": "a"}', r'bad.jsonl: line 1 has no text; {"text": "..."} would do'),
        ("bad.jsonl", b'{"text": null}', r"bad.jsonl: line 1 has no text"),
        ("bad.jsonl", b'["text"]', r"bad.jsonl: line 1 has no text"),
    ],
)
def test_damaged_text_is_refused_with_its_place(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(corpus_module, "BLOCK", 4)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(documents([tmp_path / name]))
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=message):
        tokenize([tmp_path / name], tmp_path / "out", vocab_size=300)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_missing_and_empty_input_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.jsonl").write_text('\n{"text": ""}\n')
    for paths, message in [
        ([tmp_path / "absent"], "absent: no such file or folder"),
        ([tmp_path / "empty.txt"], "empty.txt: holds no text"),
        ([tmp_path / "empty.jsonl"], "no token was written"),
        ([], "no path given: holds no text"),
    ]:
        with pytest.raises(DataError, match=message):
            tokenize(paths, tmp_path / "out", vocab_size=300)
    assert not (tmp_path / "out").exists()


def test_tokenize_round_trip_with_progress(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("hello world\n\nhello <|endoftext|> there " * 50)
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n{"text": "third"}\n')
    reports: list[tuple[int, int]] = []
    paths = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    file = tokenize(paths, tmp_path / "out", vocab_size=280, progress=lambda done, total: reports.append((done, total)))
    tokenizer = load_tokenizer(file.tokenizer_path)
    assert file.vocab_size == tokenizer.get_vocab_size() <= 280
    assert (file.end_of_text, file.index.documents) == (0, 3)
    decoded = tokenizer.decode(file.tokens.tolist(), skip_special_tokens=False)
    assert decoded == "".join(text + "<|endoftext|>" for text in texts(paths))
    total = sum(path.stat().st_size for path in paths)
    assert reports == [(total, total)]
    again = tokenize(paths, tmp_path / "again", vocab_size=280)
    assert again.path.read_bytes() == file.path.read_bytes()


def test_a_tokenizer_that_is_given_is_used_and_kept(tmp_path):
    (tmp_path / "a.txt").write_text("abc abc")
    tokenizer = train_bpe(["other words"], 270)
    file = tokenize([tmp_path / "a.txt"], tmp_path / "out", tokenizer=tokenizer, vocab_size=9)
    assert file.vocab_size == tokenizer.get_vocab_size()
    assert load_tokenizer(file.tokenizer_path).to_str() == tokenizer.to_str()
    with pytest.raises(DataError, match="out: exists and is not empty"):
        tokenize([tmp_path / "absent"], tmp_path / "out")


def test_a_large_corpus_trains_its_tokenizer_on_a_sample_from_all_of_it(tmp_path, monkeypatch):
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(f"{name}{name} " * 100)
    monkeypatch.setattr(corpus_module, "SAMPLE", 1000)
    tokenizer = load_tokenizer(tokenize([tmp_path], tmp_path.parent / "sampled", vocab_size=400).tokenizer_path)
    assert [name for name in "abcdefgh" if f"{name}{name}" in tokenizer.get_vocab()] == ["a", "d", "g"]


def test_memory_does_not_grow_with_the_file(tmp_path):
    def peak(copies: int) -> int:
        (tmp_path / "big.txt").write_text("a line of some words\n" * copies)
        tracemalloc.start()
        for _ in documents([tmp_path / "big.txt"]):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak(1_000_000) < 1.1 * peak(250_000) < 20e6


def test_the_folder_is_an_ordinary_token_folder(tmp_path):
    (tmp_path / "a.txt").write_text("x " * 100)
    tokenize([tmp_path / "a.txt"], tmp_path / "out", vocab_size=260)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["index.json", "tokenizer.json", "tokens.bin"]
    TokenFile(tmp_path / "out").check_ids(260)

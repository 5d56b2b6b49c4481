"""Text to ids: pieces encode like the whole, every text survives, and only the end of a document ends one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from megalite.data import load_tokenizer, train_bpe
from megalite.data import tokenizer as tokenizer_module
from megalite.data.tokenizer import Piece, cut, encode_documents, end_of_text, id_count
from megalite.errors import DataError

TEXTS = [f"def f{n}(x):\n\n\treturn  x + {n}  # it's a line; naïve—数字\n" for n in range(40)]
BPE = train_bpe(TEXTS, 400)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def llama3() -> Tokenizer:
    """The same merges behind Llama 3's way of splitting."""
    tokenizer = Tokenizer.from_str(BPE.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return tokenizer


def encode(tokenizer, pieces):
    return [token for ids, _ in encode_documents(tokenizer, pieces) for token in ids]


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from("ab1é数,'s  \n\n\r\t\u00a0\u2028\u3000\x1c\x85\u0301"), max_size=80)
    | st.text(max_size=40),
    length=st.integers(1, 20),
    block=st.integers(1, 30),
    tokenizer=st.sampled_from([BPE, llama3()]),
)
def test_pieces_encode_to_the_ids_of_the_whole(text, length, block, tokenizer):
    blocks = [text[at : at + block] for at in range(0, len(text), block)]
    pieces = list(cut(blocks, length))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum(piece.size for piece in pieces) == len(text.encode())
    assert encode(tokenizer, pieces) == encode(tokenizer, [Piece(text, True, 0)])


def test_pieces_are_about_as_long_as_asked():
    pieces = [piece.text for piece in cut(["some words and\nlines " * 5000], 1000)]
    assert 100 <= len(pieces) <= 105
    assert max(map(len, pieces)) < 1010


def test_text_without_a_place_to_cut_is_cut_all_the_same(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "LONGEST", 50)
    pieces = [piece.text for piece in cut(["x" * 30] * 4, 10)]
    assert pieces == ["x" * 50, "x" * 50, "x" * 20]


def test_training_twice_gives_the_same_tokenizer():
    again = train_bpe(iter(TEXTS), 400)
    assert again.to_str() == BPE.to_str()
    assert BPE.get_vocab_size() == id_count(BPE) <= 400
    assert BPE.token_to_id("<|endoftext|>") == end_of_text(BPE) == 0


@given(st.text())
def test_every_text_survives(text):
    assert BPE.decode(BPE.encode(text).ids, skip_special_tokens=False) == text


def test_a_vocabulary_below_the_bytes_is_refused():
    assert id_count(train_bpe([], 257)) == 257
    with pytest.raises(DataError, match="vocab_size 256: a byte-level tokenizer needs at least 257"):
        train_bpe(TEXTS, 256)


def test_documents_end_and_texts_that_spell_the_end_do_not():
    pieces = [Piece("a<|endoftext|>", False, 1), Piece(" b", True, 2), Piece("c", True, 3)]
    ids = encode(BPE, pieces)
    assert ids.count(0) == 2 and ids[-1] == 0
    assert BPE.decode(ids, skip_special_tokens=False) == "a<|endoftext|> b<|endoftext|>c<|endoftext|>"
    assert BPE.encode("<|endoftext|>").ids == [0]  # the caller's tokenizer was left as it was


def test_settings_of_a_foreign_tokenizer_do_not_cut_or_pad_the_corpus():
    foreign = Tokenizer.from_str(BPE.to_str())
    foreign.enable_truncation(4)
    foreign.enable_padding(length=64)
    assert encode(foreign, [Piece("x y z " * 20, True, 1)]) == [*BPE.encode("x y z " * 20).ids, 0]


def test_batches_are_bounded_and_account_for_every_byte(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "BATCH", 100)
    sizes = [size for _, size in encode_documents(BPE, cut(["word " * 200], 40))]
    assert len(sizes) > 5 and max(sizes) < 200 and sum(sizes) == 1000


def test_a_tokenizer_without_an_end_lets_documents_run_on():
    bare = Tokenizer(models.BPE({letter: n for n, letter in enumerate("abc")} | {"gap": 9}, []))
    bare.decoder = decoders.ByteLevel()
    assert end_of_text(bare) is None
    assert id_count(bare) == 10
    assert encode(bare, [Piece("ab", True, 2), Piece("c", True, 1)]) == [0, 1, 2]


def test_load_tokenizer(tmp_path):
    BPE.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").to_str() == BPE.to_str()
    with pytest.raises(DataError, match=r"absent.json: no such file; a tokenizer.json would do"):
        load_tokenizer(tmp_path / "absent.json")
    for broken in ["", "{", json.dumps({"model": 3}), "\x00"]:
        (tmp_path / "broken.json").write_text(broken)
        with pytest.raises(DataError, match=r"broken.json: not a tokenizer.json"):
            load_tokenizer(tmp_path / "broken.json")

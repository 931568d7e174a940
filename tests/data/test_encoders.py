"""Tokenizers of the package `tokenizers`: no setting changes a text, and blocks give the ids of whole documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparse.data import text as text_module
from lightning_sparse.data.text import Tokenizer, encode_in_blocks, tokenizer_of

tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
END = "<|endoftext|>"
TEXT = "the first word, the second word; and the third — ein schönes Wort 😀!\n\n  Now {0} lines, 1234 and\ttabs. "


@pytest.fixture
def words(tmp_path: Path) -> Any:
    """Return a tokenizer of whole words."""
    found = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({END: 0, "[PAD]": 1, "?": 2, "a": 3, "b": 4}, unk_token="?")
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    found.add_special_tokens([END, "[PAD]"])
    return found


def saved(tokenizer: Any, folder: Path) -> Tokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer_of(f"tokenizers:{folder / 'tokenizer.json'}")


def encoded(tokenizer: Tokenizer, text: str, size: int = 1 << 30) -> list[int]:
    data = text.encode()
    blocks = (data[first : first + size] for first in range(0, len(data), size))
    return [each for ids in tokenizer.encode(blocks) for each in ids.tolist()]


def test_truncation_and_padding_of_a_tokenizer_do_not_change_documents(words: Any, tmp_path: Path) -> None:
    words.enable_truncation(3)
    words.enable_padding(length=8, pad_id=1, pad_token="[PAD]")
    found = saved(words, tmp_path)
    assert encoded(found, "a b b b a") == [3, 4, 4, 4, 3]
    assert encoded(found, "a") == [3]


def test_dropout_of_a_tokenizer_is_off(tmp_path: Path) -> None:
    merges = [("a", "b"), ("ab", "ab")]
    vocabulary = {END: 0, "a": 1, "b": 2, "ab": 3, "abab": 4}
    model = tokenizers.models.BPE(vocabulary, merges, dropout=0.9)
    assert encoded(saved(tokenizers.Tokenizer(model), tmp_path), "ab" * 40) == [4] * 20


@pytest.mark.parametrize("is_special", [True, False])
def test_document_with_the_end_token_in_its_text_is_not_split(words: Any, tmp_path: Path, is_special: bool) -> None:
    if not is_special:
        words = tokenizers.Tokenizer.from_str(words.to_str().replace('"special":true', '"special":false'))
    found = saved(words, tmp_path)
    assert found.end == 0
    assert 0 not in encoded(found, f"a {END} b {END}")


def test_tokenizer_config_names_the_end_token(words: Any, tmp_path: Path) -> None:
    for token in ("b", {"content": "b", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert saved(words, tmp_path).end == 4
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    with pytest.raises(ValueError, match=r"tokenizer.json has no token '<end>': put a tokenizer_config.json, as"):
        saved(words, tmp_path)


def test_tokenizer_without_a_known_end_token_is_refused(tmp_path: Path) -> None:
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<stop>": 0, "a": 7}, unk_token="a"))
    with pytest.raises(ValueError, match="names no token for the end of a document: put a tokenizer_config.json"):
        saved(found, tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<stop>"}')
    named = saved(found, tmp_path)
    assert (named.end, named.vocab_size) == (0, 8), "ids have a gap"


def byte_pairs() -> Any:
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    found.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=[END], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    found.train_from_iterator([TEXT] * 10, trainer)
    return found


def sentence_pieces() -> Any:
    found = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    found.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[END, "?"], max_token_length=8)
    found.train_from_iterator(TEXT.split(" "), trainer)
    return found


def word_pieces() -> Any:
    found = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="?"))
    found.normalizer = tokenizers.normalizers.BertNormalizer()
    found.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    found.train_from_iterator(
        [TEXT] * 5, tokenizers.trainers.WordPieceTrainer(vocab_size=200, special_tokens=[END, "?"])
    )
    return found


def random_text(rng: np.random.Generator, characters: int) -> str:
    parts = [TEXT, "\n", "   ", "x" * 70, " word", "日本語の文章。", END, "é" * 5, "😀😀", "\r\n\r\n", "the "]
    found = ""
    while len(found) < characters:
        found += str(rng.choice(parts)) * int(rng.integers(1, 4))
    return found


@pytest.mark.parametrize("make", [byte_pairs, sentence_pieces, word_pieces])
def test_document_encoded_in_blocks_has_the_ids_of_the_whole_document(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, rng = saved(make(), tmp_path), np.random.default_rng(3)
    for _ in range(25):
        text = random_text(rng, int(rng.integers(1, 6000)))
        monkeypatch.setattr(text_module, "BLOCK", 1 << 30)
        whole = encoded(found, text)
        monkeypatch.setattr(text_module, "BLOCK", int(rng.integers(200, 900)))
        monkeypatch.setattr(text_module, "OVERLAP", 150)
        assert encoded(found, text, size=int(rng.integers(1, 700))) == whole


def test_tiktoken_in_blocks_gives_the_ids_of_the_whole_document(monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="the package tiktoken is not installed")
    ranks = {bytes([each]): each for each in range(256)} | {b"th": 256, b"the": 257, b" the": 258, b"wo": 259}
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    small = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END: 260})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: small)
    found, rng = tokenizer_of("tiktoken:small"), np.random.default_rng(4)
    for _ in range(25):
        text = random_text(rng, int(rng.integers(1, 6000)))
        monkeypatch.setattr(text_module, "BLOCK", int(rng.integers(200, 900)))
        monkeypatch.setattr(text_module, "OVERLAP", 150)
        assert encoded(found, text, size=int(rng.integers(1, 700))) == small.encode_ordinary(text)
    assert found.end == 260
    assert found.end not in encoded(found, END)


def test_token_longer_than_a_block_is_not_split(words: Any, tmp_path: Path, monkeypatch: Any) -> None:
    found = saved(words, tmp_path)
    monkeypatch.setattr(text_module, "BLOCK", 100)
    monkeypatch.setattr(text_module, "OVERLAP", 10)
    assert encoded(found, f"a {'x' * 1000} b " * 3, size=64) == [3, 2, 4] * 3


def test_utf8_error_names_the_position_in_the_document() -> None:
    blocks = iter([b"abc\xc3", b"\xa9de", b"f\xff"])
    with pytest.raises(UnicodeDecodeError) as caught:
        list(
            encode_in_blocks(
                blocks, encode=lambda text: (np.zeros(0), np.zeros(0, int)), encode_whole=lambda text: np.zeros(0)
            )
        )
    assert caught.value.start == 8

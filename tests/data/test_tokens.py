"""Files of token ids: written from text, mapped, split into windows, and refused if their description is wrong."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparse.cli import main
from lightning_sparse.data.config import DataError
from lightning_sparse.data.tokens import TokenStream, files_of, prepare
from tests.data.programs import run
from tests.helpers.data import corpus_of, counted


def test_bytes_tokenizer_gives_the_bytes_as_ids(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("héllo")
    (tmp_path / "b.txt").write_text("x")
    out = prepare([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "made" / "train")
    assert out == tmp_path / "made" / "train.bin"
    assert bytes(np.fromfile(out, "<u2").astype(np.uint8)) == "héllox".encode()
    (file,) = files_of(out)
    assert (file.tokens, file.vocab_size, file.dtype.name) == (7, 256, "uint16")
    assert sorted(path.name for path in out.parent.iterdir()) == ["train.bin", "train.json"]


@pytest.mark.parametrize("returned", [[0.0, 1.0], [[0, 1]], [[0], [1, 2]], {"input_ids": [0]}, None])
def test_tokenizer_that_returns_no_list_of_ids_is_refused(tmp_path: Path, returned: Any) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"the tokenizer returns .* for .*a\.txt: return a list of ids"):
        prepare([tmp_path / "a.txt"], tmp_path / "t.bin", lambda _: returned, 10)
    assert not (tmp_path / "t.bin").exists()


def test_custom_tokenizer_with_a_large_vocabulary_uses_uint32(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("7 70000 3")
    out = prepare([tmp_path / "a.txt"], tmp_path / "t.bin", lambda text: [int(w) for w in text.split()], 100_000)
    assert np.fromfile(out, "<u4").tolist() == [7, 70000, 3]
    assert files_of(out)[0].dtype.name == "uint32"


def test_command_line_writes_token_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("abc")
    assert main(["tokens", str(tmp_path / "a.bin"), str(tmp_path / "a.txt")]) == 0
    assert "3 tokens, vocabulary of 256, uint16" in capsys.readouterr().out
    given = [str(tmp_path / "b"), str(tmp_path / "a.txt"), "--tokenizer", "builtins:sum", "--vocab-size", "9"]
    with pytest.raises(TypeError):  # raised by the callable itself
        main(["tokens", *given])
    with pytest.raises(SystemExit):
        main(["tokens", *given[:3], "no.such:function"])
    assert "cannot be imported as MODULE:FUNCTION" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["tokens", *given[:3], "json"])
    assert "'json' is not a function: give MODULE:FUNCTION" in capsys.readouterr().err
    assert not list(tmp_path.glob("b*")), "a partial file is left"


def test_windows_continue_over_the_ends_of_files(tmp_path: Path) -> None:
    counted(tmp_path / "0.bin", 11)
    counted(tmp_path / "1.bin", 4, 100)
    counted(tmp_path / "2.bin", 0, 200)
    stream = TokenStream(corpus_of(tmp_path), context=3)
    assert len(stream) == 4, "14 inputs, of which two are left over"
    inputs, targets = stream.windows(np.array([3, 0, 2]))
    assert inputs.tolist() == [[9, 10, 100], [0, 1, 2], [6, 7, 8]]
    assert targets.tolist() == [[10, 100, 101], [1, 2, 3], [7, 8, 9]]
    assert TokenStream(corpus_of(tmp_path), context=2).fingerprint != stream.fingerprint


def test_id_outside_of_the_vocabulary_names_its_file(tmp_path: Path) -> None:
    stream = TokenStream(corpus_of(counted(tmp_path / "0.bin", 20, 990)), context=4)
    assert stream.windows(np.array([1]))[1].tolist() == [[995, 996, 997, 998]]
    with pytest.raises(DataError, match=r"0\.bin: id 1006 is not below vocab_size=1000"):
        stream.windows(np.array([0, 3]))


def test_file_with_a_wrong_description_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a file of token ids nor a folder"):
        files_of(tmp_path)
    with pytest.raises(ValueError, match=r"absent\.bin does not exist\. Check the path\.$"):
        files_of(tmp_path / "absent.bin")
    with pytest.raises(ValueError, match="give cache_dir, a local folder"):
        files_of(tmp_path / "train-*.parquet")
    path = counted(tmp_path / "a.bin", 10)
    with pytest.raises(ValueError, match=r"context=10 needs 11 tokens or more, but there are 10"):
        TokenStream(corpus_of(path), context=10)
    beside = path.with_suffix(".json")
    numbers = ("1e999", "true", "50257.9", '3, "end": 1.5', '3, "checksum": false')
    some = [f'{{"dtype": "uint16", "vocab_size": {each}}}' for each in numbers]
    for said in ('{"dtype": "int8", "vocab_size": 3}', "[" * 100_000, *some):
        beside.write_text(said)
        with pytest.raises(ValueError, match=r"a\.json must describe a\.bin"):
            files_of(path)
    beside.write_text('{"dtype": "uint16", "vocab_size": 3, "tokens": 11}')
    with pytest.raises(ValueError, match=r"20 bytes, but \w+\.json describes 11 uint16 tokens"):
        files_of(path)
    beside.write_text('{"dtype": "uint16", "vocab_size": 65537}')
    with pytest.raises(ValueError, match="vocab_size=65537 must be between"):
        files_of(path)
    beside.unlink()
    with pytest.raises(ValueError, match=r"must describe .*FileNotFoundError"):
        files_of(path)
    counted(tmp_path / "a.bin", 10)
    (tmp_path / ".b.txt").write_text("b")
    prepare([tmp_path / ".b.txt"], tmp_path / "b.bin")
    with pytest.raises(ValueError, match=r"b\.bin has vocab_size 256, but .*a\.bin has 1000"):
        files_of(tmp_path)
    (tmp_path / "c.bin").symlink_to("gone.bin")
    with pytest.raises(ValueError, match=r"c\.bin is a link to gone\.bin, which does not exist"):
        files_of(tmp_path)


def test_unsupported_texts_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "empty.txt").touch()
    texts, out = [tmp_path / "latin.txt"], tmp_path / "out.bin"
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        prepare(texts, out, lambda text: [0], 1)
    with pytest.raises(ValueError, match=r"ids from 3 to 4, but vocab_size=4 allows 0 to 3"):
        prepare([tmp_path / "empty.txt"], out, lambda text: [3, 4], 4)
    with pytest.raises(ValueError, match=r"1 text file\(s\) contain no tokens"):
        prepare([tmp_path / "empty.txt"], out)
    with pytest.raises(ValueError, match="vocab_size=0 must be"):
        prepare(texts, out, vocab_size=0)
    assert not list(tmp_path.glob("out*"))


def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    script = (
        "import os, signal, sys; from lightning_sparse.data.tokens import prepare;"
        "prepare([sys.argv[1]], sys.argv[2], lambda text: os.kill(os.getpid(), signal.SIGKILL))"
    )
    assert run(script, tmp_path / "a.txt", tmp_path / "out.bin").status == -signal.SIGKILL
    (left,) = tmp_path.glob("out*")
    others = [left.with_name(f"{left.name.rsplit('.', 2)[0]}.{os.getppid()}.tmp"), left.with_name("out.bin.b.1.tmp")]
    for each in others:
        each.touch()
    prepare([tmp_path / "a.txt"], tmp_path / "out.bin")
    assert sorted(tmp_path.glob("out*")) == sorted([*others, tmp_path / "out.bin", tmp_path / "out.json"])

"""Documents in windows of tokens, separate or packed, and the windows within a limit. Files and streams only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from lightning_sparse.data.id_files import Corpus, token_files
from lightning_sparse.data.tokens import cu_seqlens, document_mask, prepare
from lightning_sparse.data.windows import IGNORED, Documents, PackedStream, SelectedWindows, TokenStream, pack
from lightning_sparse.flavours.pytorch_lightning import TokenDataModule
from tests.helpers.data import corpus_of, counted

TEXTS = ["abc", "defghijklmnop", "q", "rs", "tuvw"]
CONTEXT = 6


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file whose documents are `TEXTS`."""
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "empty.txt").touch()
    texts = [tmp_path / f"{number}.txt" for number in range(len(TEXTS))]
    return prepare([*texts, tmp_path / "empty.txt"], tmp_path / "all", end=0)


def windows(file: Path, documents: Documents, context: int = CONTEXT) -> list[tuple[Any, ...]]:
    """Return (inputs, targets, positions) of each window, with ids as characters and the end as a point."""
    kind = PackedStream if documents == "packed" else TokenStream
    stream = kind(corpus_of(file), context, documents)
    rows = zip(*stream.windows(np.arange(len(stream))), strict=True)
    return [(shown(inputs), shown(targets), positions.tolist()) for inputs, targets, positions in rows]


def shown(ids: Any) -> str:
    return "".join({0: ".", IGNORED: "_"}.get(each, chr(each % 256)) for each in ids.tolist())


def test_separate_documents_have_own_positions_and_targets(file: Path) -> None:
    assert windows(file, "separate") == [
        ("abc.de", "bc._ef", [0, 1, 2, 3, 0, 1]),
        ("fghijk", "ghijkl", [0, 1, 2, 3, 4, 5]),
        ("lmnop.", "mnop._", [0, 1, 2, 3, 4, 5]),
        ("q.rs.t", "._s._u", [0, 1, 0, 1, 2, 0]),
    ]


def test_packed_documents_are_complete_and_fill_windows(file: Path) -> None:
    found = windows(file, "packed")
    pairs = sorted(pair for inputs, targets, _ in found for pair in zip(inputs, targets, strict=True))
    expected = sorted(pair for text in TEXTS for pair in zip(text, f"{text[1:]}.", strict=True))
    assert [pair for pair in pairs if pair[1] != "_"] == expected, "each token is a target once"
    for text in TEXTS:
        pieces = [text[first : first + CONTEXT] for first in range(0, len(text), CONTEXT)]
        assert all(any(piece in inputs for inputs, _, _ in found) for piece in pieces)
    assert len(found) == 4, "23 inputs into windows of 6"
    assert ("rstuvw", "s.uvw.", [0, 1, 0, 1, 2, 3]) in found
    assert found[-1] == ("abcpq.", "bc..._", [0, 1, 2, 0, 0, 0]), "padded with an end that is no input"


def test_unknown_document_ends_are_refused_with_the_fix(tmp_path: Path) -> None:
    for documents in ("separate", "packed"):
        with pytest.raises(
            ValueError, match=rf'documents={documents!r} needs the same id .* has end=None: write "end": ID into'
        ):
            windows(counted(tmp_path / "0.bin", 20), documents)  # type: ignore[arg-type]
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="end=256 must be an id of the vocabulary"):
        prepare([tmp_path / "a.txt"], tmp_path / "a", end=256)
    prepare([tmp_path / "a.txt"], tmp_path / "ended", vocab_size=257, end=256)
    prepare([tmp_path / "a.txt"], tmp_path / "other", vocab_size=257, end=5)
    with pytest.raises(ValueError, match=r"the same id at the end of all documents, but other\.bin has end=5"):
        TokenStream(Corpus("", token_files([tmp_path / "ended.bin", tmp_path / "other.bin"])), 1, "separate")


class Attention(nn.Module):
    """A model of one layer with positions within a document."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, 8), nn.Embedding(CONTEXT, 8)

    def forward(self, inputs: Any, positions: Any) -> Any:
        x = self.token(inputs) + self.position(positions)
        seen = scaled_dot_product_attention(*[x[:, None]] * 3, attn_mask=document_mask(positions))[:, 0]
        return seen @ self.token.weight.T


def test_packed_document_has_the_loss_of_a_separate_document(file: Path) -> None:
    torch.manual_seed(0)
    model = Attention().double()
    stream = PackedStream(corpus_of(file), CONTEXT, "packed")
    inputs, targets, positions = map(torch.from_numpy, stream.windows(np.arange(len(stream))))
    together = cross_entropy(model(inputs, positions).flatten(0, 1), targets.flatten(), reduction="sum")
    alone = torch.zeros((), dtype=torch.float64)
    for text in TEXTS:
        for first in range(0, len(text), CONTEXT):
            ids = torch.tensor([*text.encode(), 0])[first : first + CONTEXT + 1]
            logits = model(ids[None, :-1], torch.arange(len(ids) - 1)[None])
            alone = alone + cross_entropy(logits[0], ids[1:], reduction="sum")
    torch.testing.assert_close(together, alone)
    lengths = cu_seqlens(positions).diff()
    assert int(lengths.sum()) == inputs.numel()
    assert int(lengths.max()) <= CONTEXT


@given(
    st.integers(1, 40).flatmap(
        lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), min_size=1, max_size=80))
    )
)
def test_packing_leaves_no_window_that_fits_into_another(case: tuple[int, list[int]]) -> None:
    room, lengths = case
    found = pack(np.array(lengths, np.int64), room)
    used = np.bincount(found, lengths)
    assert len(found) == len(lengths)
    assert (used > 0).all()
    assert (used <= room).all()
    assert sum(sorted(used)[:2]) > room or len(used) < 2


def test_selected_windows_are_renumbered_and_have_their_own_fingerprint(tmp_path: Path) -> None:
    stream = TokenStream(corpus_of(counted(tmp_path / "0.bin", 21)), context=4)
    part = SelectedWindows(stream, np.array([3, 1]))
    assert (len(part), part.context) == (2, 4)
    assert part.windows(np.array([1, 0]))[0][:, 0].tolist() == [4, 12]
    assert len({stream.fingerprint, part.fingerprint, SelectedWindows(stream, np.array([1, 3])).fingerprint}) == 3


def firsts(data: TokenDataModule, epoch: int = 0) -> list[int]:
    """Return the first ids of the training windows."""
    data.setup("fit")
    stream = data._streams["train"]
    found: list[int] = stream.windows(np.arange(len(stream)), epoch)[0][:, 0].tolist()
    data.teardown("fit")
    return found


def test_limit_selects_the_same_windows_in_each_run(tmp_path: Path) -> None:
    file = counted(tmp_path / "0.bin", 401)

    def with_limit(limit: float, **more: Any) -> list[int]:
        return firsts(TokenDataModule(file, context=4, limit=limit, **more))

    assert with_limit(10) == with_limit(0.1) == with_limit(10, seed=5)
    assert len(with_limit(10)) == 10
    assert set(with_limit(10)) < set(with_limit(0.4)), "a lower limit leaves a subset of the windows of a higher limit"
    assert len(with_limit(0.5, val_fraction=0.2)) == 40
    with pytest.raises(ValueError, match="limit=101 is more than the 100 samples to train on: omit it"):
        with_limit(101)


def test_val_fraction_of_a_mixture_holds_out_a_part_of_each_source(tmp_path: Path) -> None:
    one, other = counted(tmp_path / "0.bin", 401), counted(tmp_path / "1.bin", 201, 500)
    data = TokenDataModule({str(one): 2, str(other): 1}, context=4, val_fraction=0.1, batch_size=3)
    trained = firsts(data)
    data.setup("fit")
    held_out = sorted({each for inputs, _ in data.val_dataloader() for each in inputs[:, 0].tolist()})
    assert (sum(each < 500 for each in held_out), sum(each >= 500 for each in held_out)) == (10, 5)
    assert sorted([*trained, *held_out]) == [*range(0, 400, 4), *range(500, 700, 4)]
    data.teardown("fit")


def test_limit_of_a_mixture_keeps_its_proportions(tmp_path: Path) -> None:
    one, other = counted(tmp_path / "0.bin", 401), counted(tmp_path / "1.bin", 401, 500)
    data = TokenDataModule({str(one): 3, str(other): 1}, context=4, limit=20)
    whole = [each for epoch in range(3) for each in firsts(data, epoch)]
    assert sum(each >= 500 for each in whole) == 3 * 5
    assert len(whole) == 3 * 20
    assert len(set(whole)) == 15 + 15, "windows of the second source are used in turn"

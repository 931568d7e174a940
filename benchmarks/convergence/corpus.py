"""Text that every Python brings along: the source of its own library, as numbers of characters. Nothing is downloaded.

The files are those of the library's modules whose names begin with a letter, in order of name: what begins with an
underscore may belong to one machine. Another Python version has another text, so its version and a digest of the
characters are part of a table's settings.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CHARACTERS = 2_000_000
VALIDATION = 65_536  # at the end


@dataclass(frozen=True)
class Corpus:
    train_N: Tensor  # uint8: positions in the sorted alphabet
    val_N: Tensor
    num_symbols: int

    def windows(self, start_B: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """What is read and what is to be predicted, one character later: int64 [B, length] each."""
        both_BL = self.train_N[start_B[:, None] + torch.arange(length + 1)].long()
        return both_BL[:, :-1], both_BL[:, 1:]

    def val_windows(self, length: int) -> tuple[Tensor, Tensor]:
        """All of the validation text, window after window, each character predicted once but the first."""
        count = (len(self.val_N) - 1) // length
        x_N, y_N = self.val_N[: count * length].long(), self.val_N[1 : count * length + 1].long()
        return x_N.view(count, length), y_N.view(count, length)


def start_of_windows(corpus: Corpus, seed: int, epoch: int, shape: tuple[int, int], length: int) -> Tensor:
    """Where the windows of an epoch begin, [steps, batch]: a pure function of (seed, epoch), with repetition."""
    generator = torch.Generator().manual_seed(seed * 10_007 + epoch)
    return torch.randint(len(corpus.train_N) - length, shape, generator=generator)


def read_library() -> bytes:
    """ASCII; every other character is a question mark.

    Raises:
        ValueError: this Python's library is not there as source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in folder.glob("*.py") if file.name[0].isalpha())
    text = "".join(file.read_text("utf-8") for file in files)[:CHARACTERS]
    if len(text) < CHARACTERS:
        raise ValueError(
            f"{folder} holds {len(text):,} characters of source in {len(files)} files; {CHARACTERS:,} are needed. "
            "Use a Python that was installed with its library's source."
        )
    return text.encode("ascii", "replace")


def described(text: bytes) -> str:
    digest = hashlib.sha256(text).hexdigest()[:12]
    return f"library of Python {platform.python_version()} ({len(text):,} characters, sha256 {digest})"


def corpus_of(text: bytes) -> Corpus:
    """`text` as positions in its alphabet, in two parts."""
    alphabet, position_N = torch.unique(torch.frombuffer(bytearray(text), dtype=torch.uint8), return_inverse=True)
    position_N = position_N.to(torch.uint8)
    return Corpus(position_N[:-VALIDATION].clone(), position_N[-VALIDATION:].clone(), len(alphabet))


def save_corpus(text: bytes, folder: Path) -> Path:
    """The file in `folder` with the Corpus of `text`."""
    file = folder / "corpus.pt"
    torch.save(corpus_of(text), file)
    return file

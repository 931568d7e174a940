"""Validation loss of hierarchical top-k communication compared with dense training: a character Transformer with AdamW.

    python -m benchmarks.convergence.text --tune                # once: learning rate, on dense training alone
    python -m benchmarks.convergence.text                       # the whole table; again after an interruption

The text is the source of Python's library; its last 65,536 characters are held out. The metric is bits per character:
the mean cross-entropy of the held-out characters, each predicted from the 1 to 64 characters before it.

Everything else is as in images.py, with its caveats: paired by seed, one learning rate from dense training (times a
factor if the name has one), and only 600 steps. This table is about an optimizer that divides by the size of recent
gradients. An entry that is sent once in 1/density steps arrives as a few large gradients among zeros. The mean of
g/density once in 1/density steps is g, but its root mean square is g/sqrt(density), and AdamW divides by that. So rows
with other learning rates show whether the loss is only one of step size.

An epoch is 40 steps of windows from all of the text; warm-up counts epochs. Gradients are not clipped. Each finished
(configuration, seed) is a file ``runs/<configuration>-seed<seed>.json`` and is not run again. The summary is
results.md, results.json and results.svg in the same folder.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.convergence import report
from benchmarks.convergence.report import Metric
from benchmarks.convergence.runs import ALONE, SPARSE, Arguments, Learner, Run, Settings, Task, run_command
from benchmarks.gpu.models import Block

OUT = "runs/convergence-text"
CONTEXT = 64

BITS = Metric(
    key="val_bits",
    name="bits",
    label="validation loss, bits per character",
    digits=3,
    higher_is_better=False,
)

UPDATES = {"way": "updates", "density": 0.01}
CONFIGS: dict[str, Arguments] = {
    "dense": None,
    "one node alone": ALONE,
    "dense16": {"exchange": "dense16"},
    "1%": {**SPARSE, "density": 0.01},
    "1%-warmup": {**SPARSE, "density": 0.01, "warmup_epochs": 2},
    "1%-warmup4": {**SPARSE, "density": 0.01, "warmup_epochs": 4},
    "1%-exclude": {**SPARSE, "density": 0.01, "exclude": "vectors"},
    "1%-lr-x2": {**SPARSE, "density": 0.01, "lr_times": 2.0},
    "1%-lr-x0.5": {**SPARSE, "density": 0.01, "lr_times": 0.5},
    "1%-lr-x0.25": {**SPARSE, "density": 0.01, "lr_times": 0.25},
    "1%-warmup8": {**SPARSE, "density": 0.01, "warmup_epochs": 8},
    "default": {"exchange": "sparse", "warmup_epochs": 4},  # "auto" would see loopback
    "default-lr-x0.5": {"exchange": "sparse", "warmup_epochs": 4, "lr_times": 0.5},
    "default-exclude": {"exchange": "sparse", "warmup_epochs": 4, "exclude": "vectors"},
    "4%": {**SPARSE, "density": 0.04},
    "10%": {**SPARSE, "density": 0.1},
    "0.1%": {**SPARSE, "density": 0.001},
    "updates 1%": UPDATES,
    "updates 1%, bfloat16": {**UPDATES, "value_dtype": "bfloat16"},
    "updates 1%, 2 bits": {**UPDATES, "value_dtype": "2bit"},
    "updates 2.4%, 2 bits": {**UPDATES, "density": 0.024, "value_dtype": "2bit"},  # the bytes of 1% in bfloat16
    "updates 0.1%": {**UPDATES, "density": 0.001},
    "updates 3%": {**UPDATES, "density": 0.03},
    "updates 10%": {**UPDATES, "density": 0.1},
    "updates 3% every 30": {**UPDATES, "density": 0.03, "sync_every": 30},
    "updates 3% every 30, ahead 0.5": {**UPDATES, "density": 0.03, "sync_every": 30, "step_ahead": 0.5},
    "updates 10% every 30": {**UPDATES, "density": 0.1, "sync_every": 30},
    "updates 3% every 10": {**UPDATES, "density": 0.03, "sync_every": 10},
    "updates 1%, delay 0": {**UPDATES, "delay": 0},
    "updates 1%, ahead 0.125": {**UPDATES, "step_ahead": 0.125},
    "updates 1%, ahead 0.25": {**UPDATES, "step_ahead": 0.25},
    "updates 1%, ahead 0.5": {**UPDATES, "step_ahead": 0.5},
    "updates 1%, ahead 1": {**UPDATES, "step_ahead": 1},
    "updates 1%, lr-x1.4": {**UPDATES, "lr_times": 1.4},
    "updates dense": {**UPDATES, "exchange": "dense"},
    "average every 100": {"way": "average", "every": 100},
    "average every 50": {"way": "average", "every": 50},
    "post-local every 50": {"way": "post-local", "every": 50, "start": 60},
    "post-local every 100": {"way": "post-local", "every": 100, "start": 60},
    "bf16 hook": {"way": "hooked", "hook": "bf16"},
    "PowerSGD r1": {"way": "hooked", "hook": "PowerSGD"},
    "DiLoCo every 100": {"way": "average", "every": 100, "outer_lr": 0.7, "outer_momentum": 0.9},
    "DiLoCo every 50": {"way": "average", "every": 50, "outer_lr": 0.7, "outer_momentum": 0.9},
}


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    text: str  # identifies the text
    steps_per_epoch: int = 40
    global_batch: int = 64  # windows of CONTEXT characters
    lr_warmup_steps: int = 40
    weight_decay: float = 0.01


# --- the text: the source of Python's own library, as numbers of characters
#
# The files are the library's modules whose names begin with a letter, sorted. Other modules may belong to one machine.
# Another Python version has another text, so its version and a digest of the characters are part of the settings.

CHARACTERS = 2_000_000
VALIDATION = 65_536  # at the end


@dataclass(frozen=True)
class Corpus:
    train_N: Tensor  # uint8: positions in the sorted alphabet
    val_N: Tensor
    num_symbols: int

    def to(self, device: torch.device) -> Corpus:
        """Copy the text to a device."""
        return replace(self, train_N=self.train_N.to(device), val_N=self.val_N.to(device))

    def windows(self, start_B: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, one character later: int64 [B, length] each. `start_B` is on the text's device."""
        both_BL = self.train_N[start_B[:, None] + torch.arange(length + 1, device=start_B.device)].long()
        return both_BL[:, :-1], both_BL[:, 1:]

    def val_windows(self, length: int) -> tuple[Tensor, Tensor]:
        """Return all of the validation text in windows. Each character except the first is predicted once."""
        count = (len(self.val_N) - 1) // length
        x_N, y_N = self.val_N[: count * length].long(), self.val_N[1 : count * length + 1].long()
        return x_N.view(count, length), y_N.view(count, length)


def start_of_windows(corpus: Corpus, seed: int, epoch: int, shape: tuple[int, int], length: int) -> Tensor:
    """Return the first characters of the windows of an epoch, [steps, batch]: a pure function of (seed, epoch)."""
    generator = torch.Generator().manual_seed(seed * 10_007 + epoch)
    return torch.randint(len(corpus.train_N) - length, shape, generator=generator)


def read_library(whole: bool = False) -> bytes:
    """Return the source of Python's library as ASCII, with question marks for other characters.

    Args:
        whole: everything that is installed, with tests, about 30 million characters; else `CHARACTERS`.

    Raises:
        ValueError: if this Python has no source of its library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    found = folder.rglob("*.py") if whole else folder.glob("*.py")
    files = sorted(file for file in found if file.name[0].isalpha() and "site-packages" not in file.parts)
    text = "".join(file.read_text("utf-8", "replace") for file in files)[: None if whole else CHARACTERS]
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
    """Return `text` as indices in its alphabet, in two parts."""
    alphabet, position_N = torch.unique(torch.frombuffer(bytearray(text), dtype=torch.uint8), return_inverse=True)
    position_N = position_N.to(torch.uint8)
    return Corpus(position_N[:-VALIDATION].clone(), position_N[-VALIDATION:].clone(), len(alphabet))


def save_corpus(text: bytes, folder: Path) -> Path:
    """Return the file in `folder` with the Corpus of `text`."""
    file = folder / "corpus.pt"
    torch.save(corpus_of(text), file)
    return file


# --- the model


class CharacterTransformer(nn.Module):
    """[B, L] characters -> [B, L, num_symbols] logits of the next characters. 116,576 parameters for 96 characters."""

    def __init__(self, num_symbols: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.symbol, self.position = nn.Embedding(num_symbols, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_symbols)
        for embedding in (self.symbol, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x_BL: Tensor) -> Tensor:
        x_BLD = self.symbol(x_BL) + self.position.weight[: x_BL.shape[1]]
        logits_BLS: Tensor = self.head(self.norm(self.blocks(x_BLD)))
        return logits_BLS


# --- one run, on every rank


def scale(step: int, warmup: int, steps: int) -> float:
    """Return the factor of the learning rate: linear warm-up, and a cosine to zero over all steps."""
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))


class TextLearner(Learner):
    """The Transformer, AdamW with warm-up and a cosine schedule, and the windows of this rank."""

    def __init__(self, run: Run, corpus: Corpus, rank: int) -> None:
        self.settings: TextSettings = run.settings
        self.seed, self.corpus, self.rank, self._epoch = run.seed, corpus, rank, -1
        self.model = CharacterTransformer(corpus.num_symbols)
        lr, decay = self.settings.lr * run.option("lr_times", 1.0), self.settings.weight_decay
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr, weight_decay=decay, foreach=True)
        self.steps = self.settings.steps_per_epoch
        at = partial(scale, warmup=self.settings.lr_warmup_steps, steps=self.settings.epochs * self.steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, at)

    def losses(self, model: nn.Module, epoch: int) -> Iterator[Tensor]:
        return (self.loss(model, epoch * self.steps + step) for step in range(self.steps))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Return the loss of one step."""
        epoch, row = divmod(step, self.steps)
        if epoch != self._epoch:
            shape = (self.steps, self.settings.global_batch)
            self._epoch, self._starts = epoch, start_of_windows(self.corpus, self.seed, epoch, shape, CONTEXT)
        x_BL, y_BL = self.corpus.windows(self._starts[row, self.rank :: self.settings.world_size], CONTEXT)
        return F.cross_entropy(model(x_BL).flatten(0, 1), y_BL.flatten())

    @torch.no_grad()
    def validate(self) -> float:
        """Return bits per character. Each rank takes its share of the windows. A collective."""
        x_NL, y_NL = self.corpus.val_windows(CONTEXT)
        mine = slice(self.rank, None, dist.get_world_size())
        nats = F.cross_entropy(self.model(x_NL[mine]).flatten(0, 1), y_NL[mine].flatten(), reduction="sum").double()
        dist.all_reduce(nats)
        return nats.item() / y_NL.numel() / math.log(2)


TASK = Task(
    metric=BITS, configs=CONFIGS, learner=TextLearner, settings=TextSettings, tune_lrs=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
)


def plot(record: dict[str, Any], file: Path) -> None:
    report.plot(record["runs"], BITS, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = read_library()
    parser.add_argument("--batch", type=int, default=TextSettings.global_batch, help="windows per step, over all ranks")
    batch = parser.parse_known_args()[0].batch
    task = replace(TASK, settings=partial(TextSettings, text=described(text), global_batch=batch))
    run_command(task, parser, OUT, lambda options: save_corpus(text, options.out))


if __name__ == "__main__":
    main()

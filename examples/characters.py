"""Train a small Transformer with AdamW to predict the characters of Python's standard library.

python examples/characters.py --strategy mstopk_local     # or ddp, mstopk_hier
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from demo_training import fit, parse_arguments, take_share
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 2
SYMBOLS = 128  # ASCII


def library_text(characters: int) -> Tensor:
    """Return the first characters of the library's source, as integers below `SYMBOLS`."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= characters:
            break
    return torch.frombuffer(text[:characters], dtype=torch.uint8).long().clamp(max=SYMBOLS - 1)


class Windows(Dataset[Tensor]):
    """Consecutive windows of [CONTEXT + 1] characters."""

    def __init__(self, text: Tensor) -> None:
        self.rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class CharacterModel(pl.LightningModule):
    """Predict each character from the characters before it."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.symbol, self.position = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def loss(self, rows: Tensor) -> Tensor:
        """Return nats per character."""
        x = self.symbol(rows[:, :-1]) + self.position.weight
        return F.cross_entropy(
            self.head(self.layers(x, self.mask, is_causal=True)).flatten(0, 1), rows[:, 1:].flatten()
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) / math.log(2), sync_dist=True)  # bits per character

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Characters(pl.LightningDataModule):
    """Windows of the library's text. Every 20th is for validation, because the last files may be unlike the others."""

    def __init__(self, characters: int, batch_size: int, share: float) -> None:
        super().__init__()
        windows = Windows(library_text(characters))
        self.train = take_share(Subset(windows, [each for each in range(len(windows)) if each % 20]), share)
        self.val = Subset(windows, range(0, len(windows), 20))
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, 64)


def main() -> None:
    args = parse_arguments(__doc__, steps=300, learning_rate=0.008, characters=1_500_000)
    pl.seed_everything(1, verbose=False)
    fit(CharacterModel(args.learning_rate), Characters(args.characters, args.batch_size, args.share), args)


if __name__ == "__main__":
    main()

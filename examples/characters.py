"""Train a small Transformer with AdamW on the source code of Python's own library, character by character.

python examples/characters.py --strategy mstopk_local     # or ddp, mstopk_hier
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from digits_common import Recorder, cluster
from pytorch_lightning.callbacks import TQDMProgressBar
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
SYMBOLS = 128  # ASCII


def library_text(characters: int) -> Tensor:
    """The beginning of the library's source, as numbers below `SYMBOLS`."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= characters:
            break
    return torch.frombuffer(text[:characters], dtype=torch.uint8).long().clamp(max=SYMBOLS - 1)


class Windows(Dataset[Tensor]):
    """[CONTEXT + 1] characters, one window behind the other."""

    def __init__(self, text: Tensor) -> None:
        self.rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class CharacterModel(pl.LightningModule):
    """Predicts each character from those before it."""

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
        """Nats per character."""
        x = self.symbol(rows[:, :-1]) + self.position.weight
        return F.cross_entropy(
            self.head(self.layers(x, self.mask, is_causal=True)).flatten(0, 1), rows[:, 1:].flatten()
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        bits = self.loss(batch) / torch.log(torch.tensor(2.0))
        self.log("val_bits", bits, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="mstopk_local")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of the text that an epoch takes")
    parser.add_argument("--batch-size", type=int, default=16, help="windows a rank and step")
    parser.add_argument("--characters", type=int, default=1_500_000)
    parser.add_argument("--learning-rate", type=float, default=0.008)
    parser.add_argument("--result", type=Path, default=Path("runs/result"), help="folder for what Recorder measured")
    args = parser.parse_args()
    pl.seed_everything(1, verbose=False)
    windows = Windows(library_text(args.characters))
    held_out = range(0, len(windows), 20)  # of all files: the last ones alone may be unlike the others
    train, val = Subset(windows, [each for each in range(len(windows)) if each % 20]), Subset(windows, held_out)
    trainer = pl.Trainer(
        **cluster(),
        strategy=args.strategy,
        max_epochs=args.epochs,
        limit_train_batches=args.share,
        callbacks=[TQDMProgressBar(), Recorder(args.result, "val_bits")],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    loaders = DataLoader(train, args.batch_size, shuffle=True), DataLoader(val, args.batch_size)
    trainer.fit(CharacterModel(args.learning_rate), *loaders)
    if trainer.is_global_zero:
        print(f"validation bits per character: {float(trainer.callback_metrics['val_bits']):.3f}")


if __name__ == "__main__":
    main()

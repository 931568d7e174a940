"""Train a small model with AdamW on two emulated nodes.

lightning-sparse lab --no-net --nodes 2 --devices 1 -- quickstart.py
"""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


x = torch.randn(8192, 64, generator=torch.Generator().manual_seed(0))
data = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=32, shuffle=True)
trainer = pl.Trainer(num_nodes=2, devices=1, max_epochs=3, strategy="mstopk_local")
trainer.fit(Classifier(), data)

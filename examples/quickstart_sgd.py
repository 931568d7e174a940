"""Train a small convolutional network with SGD on two emulated nodes (needs scikit-learn).

lightning-sparse lab --no-net --nodes 2 --devices 1 -- quickstart_sgd.py
"""

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_sparse import MSTopKHierStrategy


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        accuracy = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


digits = load_digits()  # 1,797 images of 8 x 8 pixels, which scikit-learn contains
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
train, val = random_split(TensorDataset(images, labels), [0.8, 0.2], torch.Generator().manual_seed(0))
# The default exchange="auto" would measure the network, and use dense rounds if they are as fast.
strategy = MSTopKHierStrategy(density=0.01, exchange="sparse", momentum_correction=True)
trainer = pl.Trainer(num_nodes=2, devices=1, max_epochs=5, strategy=strategy)
trainer.fit(Digits(), DataLoader(train, batch_size=16, shuffle=True), DataLoader(val, batch_size=64))

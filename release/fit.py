"""What release/check.py trains on two ranks: the strategy by its name, with no import of ours."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel


class Model(BoringModel):
    def on_train_end(self) -> None:
        weights = self.all_gather(self.layer.weight.detach())
        assert torch.equal(weights[0], weights[1]), "ranks ended with different weights"


trainer = pl.Trainer(
    accelerator="cpu",
    devices=1,
    num_nodes=2,
    strategy="mstopk_hier",
    max_epochs=1,
    limit_val_batches=0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model())
print(f"rank {trainer.global_rank} trained {trainer.global_step} steps with {trainer.strategy}")

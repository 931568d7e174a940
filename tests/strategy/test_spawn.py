"""Ranks that Lightning spawns from the program itself: the strategy travels to them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import warnings
import pytorch_lightning as pl
from tests.strategy.trainers import data
from torch import nn


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(13, 5)

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        from torch.optim import SGD
        return SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="mstopk_hier_spawn", max_steps=2, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )
    trainer.fit(Module(), data())
    print("it", trainer.state.status.value)
"""


@pytest.mark.slow
def test_it_trains_and_says_once_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "it finished" in done.stdout
    assert done.stderr.count("1 node(s) x 2 device(s)") == 1, done.stderr

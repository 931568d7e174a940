"""Momentum correction in a real Trainer, 2 nodes x 2 devices on Gloo: DDP's result where all is sent."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.distributed import run_ranks
from tests.strategy.trainers import dense_one, ours, plain_module, sparse, trainer, weights

FLAVOUR = "pytorch_lightning"
STEPS = 24


@pytest.mark.slow
def test_a_trainer_trains_as_with_ddp(tmp_path: Path) -> None:
    for each in run_ranks(trained, str(tmp_path), nodes=2, devices=2, timeout=120, init=False):
        for name, (ddp, corrected) in each["runs"].items():
            torch.testing.assert_close(corrected, ddp, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)
        assert each["saved"] == {"momentum": each["saved"]["momentum"], "weight_decay": 0.01, "nesterov": True}
        assert each["saved"]["momentum"] > 0.5
        assert each["masked and shared"]


def trained(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    warnings.simplefilter("ignore")

    def optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)  # momentum cycles, too
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    def run(strategy: Any, **options: Any) -> tuple[Any, Tensor]:
        module = plain_module(FLAVOUR, by_step=True)
        type(module).configure_optimizers = optimizers
        t = trainer(FLAVOUR, strategy, max_steps=STEPS, max_epochs=-1, **options)
        t.fit(module)
        return t, weights(module)

    def twice(strategy: Any) -> Tensor:
        """The second fit has an optimizer of its own."""
        module = plain_module(FLAVOUR)
        t = trainer(FLAVOUR, strategy, max_epochs=1, max_steps=-1)
        t.fit(module)
        t.fit_loop.max_epochs = 2
        t.fit(module)
        return weights(module)

    exact = {"momentum_correction": True, "warmup_epochs": 0}
    runs = {"second fit": [twice("ddp"), twice(dense_one(FLAVOUR, **exact))]}
    for name, make in {
        "plain": dict,
        "accumulated": lambda: {"accumulate_grad_batches": 2},
        "shared step": lambda: {"callbacks": [ours(FLAVOUR).PTOCallback("node")]},
    }.items():
        runs[name] = [run("ddp", **make())[1], run(dense_one(FLAVOUR, **exact), **make())[1]]
    t, _ = run(sparse(FLAVOUR, **exact))
    t.save_checkpoint("corrected.ckpt")
    group = torch.load("corrected.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"][0]
    shared = run(sparse(FLAVOUR, **exact), callbacks=[ours(FLAVOUR).PTOCallback("node")])[1]
    alone = run(sparse(FLAVOUR, **exact))[1]
    return {
        "runs": runs,
        "saved": {name: group[name] for name in ("momentum", "weight_decay", "nesterov")},
        "masked and shared": torch.equal(shared, alone),
    }

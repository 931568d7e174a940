"""`strategy="mstopk_fsdp"` in Fabric, in both flavours, on real ranks."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fsdp.runs import Blocks, loss_of, whole
from tests.fsdp.test_trainer import fsdp
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import Lines
from tests.strategy.test_fabric import FLAVOURS, STEPS, fabric_with, of_class

ours = partial(of_class, "MSTopKFSDPStrategy")


def prepared(flavour: str, strategy: Any, seed: int = 0) -> tuple[Any, Any, Any]:
    fabric = fabric_with(flavour, strategy)
    model = fabric.setup_module(Blocks(seed))
    return fabric, model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))


def train(fabric: Any, model: Any, optimizer: Any, begin: int, end: int) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, step, fabric.global_rank))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()


def by_name(flavour: str) -> tuple[Tensor, Tensor, Tensor]:
    """Shared weights, this node's own, and those at the end."""
    fabric, model, optimizer = prepared(flavour, "mstopk_fsdp")
    train(fabric, model, optimizer, 0, STEPS)
    with fabric.strategy.global_weights():
        shared = whole(model).clone()
    own = whole(model).clone()
    fabric.strategy.finish()
    return shared, own, whole(model).clone()


def resumed(flavour: str, folder: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    os.chdir(folder)
    fabric, model, optimizer = prepared(flavour, ours(flavour, **options))
    train(fabric, model, optimizer, 0, 5)
    with torch.no_grad():
        loss_of(model, 0, fabric.global_rank)  # which leaves the root gathered
    with fabric.strategy.global_weights():
        fabric.save("validated", {"model": model, "optimizer": optimizer})
    fabric.save("saved", {"model": model, "optimizer": optimizer, "step": 5})
    train(fabric, model, optimizer, 5, STEPS)
    other, again, its = prepared(flavour, ours(flavour, **options), seed=7)
    state = {"model": again, "optimizer": its, "step": 0}
    other.load("saved", state)
    assert state["step"] == 5
    train(other, again, its, 5, STEPS)
    return whole(model).clone(), whole(again).clone()


def scheduled(flavour: str, folder: str) -> tuple[Tensor, Tensor, int]:
    """Weights of a run with a scheduler, and of a run that resumes from its folder; the loaded epoch."""
    os.chdir(folder)
    runs = []
    for seed in (0, 7):
        fabric, model, optimizer = prepared(flavour, ours(flavour), seed)
        runs.append((fabric, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)))
    ends, loaded = [], 0
    for fabric, model, optimizer, scheduler in runs:
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
        if ends:
            fabric.load("saved", state)
            assert state["scheduler"] is scheduler
            loaded = scheduler.last_epoch
        for step in range(5 if ends else 0, STEPS):
            if step == 5 and not ends:
                fabric.save("saved", state)
            train(fabric, model, optimizer, step, step + 1)
            scheduler.step()
        ends.append(whole(model).clone())
    return ends[0], ends[1], loaded


def test_fabric_scheduler_in_a_folder_resumes(tmp_path: Path) -> None:
    results = run_ranks(scheduled, "lightning_fabric", str(tmp_path), nodes=2, devices=2, timeout=120, init=False)
    for ends, again, loaded in results:
        assert loaded == 5
        assert torch.equal(ends, again)


SAVED: list[dict[str, Any]] = [{}, {"save_distributed_checkpoint": False}, {"send": "gradients", "exchange": "sparse"}]


@pytest.mark.slow
@pytest.mark.parametrize("flavour", list(FLAVOURS))
def test_fabric(flavour: str, tmp_path: Path) -> None:
    many: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 120, "init": False}
    results = run_ranks(by_name, flavour, **many)
    for shared, _, ends in results:
        assert torch.equal(shared, results[0][0])
        assert torch.equal(ends, results[0][2])
    assert not torch.equal(results[0][1], results[2][1])
    for number, options in enumerate(SAVED):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = run_ranks(resumed, flavour, str(folder), options, **many)
        for ends, again in found:
            assert torch.equal(ends, again)
        same = torch.equal(found[0][0], found[2][0])
        assert same == (options.get("send") == "gradients"), "nodes hold the same weights where gradients are sent"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"send": "both"}, "send='both' must be 'updates' or 'gradients'"),
        ({"send": "gradients", "delay": 0}, "delay=0 says how updates are exchanged"),
        ({"send": "gradients", "outer_lr": 1.5}, "outer_lr=1.5 says how updates are exchanged"),
        ({"shard_optimizer": True}, "shard_optimizer=True cannot be combined with .*FSDP2 shards the optimizer"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    for make in (partial(ours, "lightning_fabric"), partial(fsdp, "pytorch_lightning")):
        with pytest.raises(ValueError, match=said):
            make(**options)


def made_before_sharding() -> dict[str, str]:
    """Errors about optimizers that were made too early, and log lines about a valid optimizer."""
    flavour, said = "lightning_fabric", {}
    for send in ("gradients", "updates"):
        for together in (True, False):
            fabric, model = fabric_with(flavour, ours(flavour, send=send)), Blocks()
            optimizer = torch.optim.AdamW(model.parameters())
            with pytest.raises(ValueError, match="16 of 16 parameters of AdamW are in no module") as error:
                early(fabric, model, optimizer, together)
            said[f"{send} {together}"] = str(error.value)
    lines = Lines()
    fabric, model, optimizer = prepared(flavour, ours(flavour, send="gradients"))
    fabric.strategy.set_epoch(3)
    train(fabric, model, optimizer, 0, 2)
    assert fabric.strategy.engines[0].epoch == 3
    return {**said, "lines": "\n".join(lines.lines)}


def early(fabric: Any, model: Any, optimizer: Any, together: bool) -> None:
    if together:
        fabric.setup(model, optimizer)
    else:
        fabric.setup_module(model)
        fabric.setup_optimizers(optimizer)


def test_fabric_optimizer_made_before_sharding_is_refused() -> None:
    said = run_ranks(made_before_sharding, nodes=2, devices=2, timeout=120, init=False)[0]
    lines = said.pop("lines")
    assert all("fabric.setup_module(model) first" in error for error in said.values())
    assert "AdamW divides by the size of recent gradients" in lines
    assert "no density warm-up" in lines

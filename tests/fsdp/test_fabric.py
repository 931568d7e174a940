"""`strategy="mstopk_fsdp"` in Fabric, with both Lightning packages, on real ranks."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fsdp.runs import Blocks, loss_of, whole
from tests.fsdp.test_trainer import fsdp
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import Lines
from tests.strategy.test_fabric import STEPS, fabric_with, of_class

ours = partial(of_class, "MSTopKFSDPStrategy")


def prepared(package: str, strategy: Any, seed: int = 0) -> tuple[Any, Any, Any]:
    fabric = fabric_with(package, strategy)
    model = fabric.setup_module(Blocks(seed))
    return fabric, model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))


def train(fabric: Any, model: Any, optimizer: Any, begin: int, end: int) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, step, fabric.global_rank))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()


def by_name(package: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the global weights, this node's own weights, and the final weights."""
    fabric, model, optimizer = prepared(package, "mstopk_fsdp")
    train(fabric, model, optimizer, 0, STEPS)
    with fabric.strategy.global_weights():
        shared = whole(model).clone()
    own = whole(model).clone()
    fabric.strategy.finish()
    return shared, own, whole(model).clone()


def scheduled(package: str, folder: str) -> tuple[Tensor, Tensor, int]:
    """Return the weights of a run with a scheduler, the weights of a resumed run, and the loaded epoch."""
    os.chdir(folder)
    runs = []
    for seed in (0, 7):
        fabric, model, optimizer = prepared(package, ours(package), seed)
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
                with torch.no_grad():
                    loss_of(model, 0, fabric.global_rank)
                with fabric.strategy.global_weights():  # also right after a forward pass
                    fabric.save("validated", {"model": model, "optimizer": optimizer})
            train(fabric, model, optimizer, step, step + 1)
            scheduler.step()
        ends.append(whole(model).clone())
    return ends[0], ends[1], loaded


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"send": "both"}, "send='both' must be 'updates' or 'gradients'"),
        ({"send": "gradients", "delay": 0}, "delay=0 applies to updates"),
        ({"send": "gradients", "outer_lr": 1.5}, "outer_lr=1.5 applies to updates"),
        ({"shard_optimizer": True}, "shard_optimizer=True cannot be combined with .*FSDP2 always shards"),
    ],
)
def test_fsdp_invalid_options_are_refused(options: dict[str, Any], said: str) -> None:
    for make in (partial(ours, "lightning_fabric"), partial(fsdp, "pytorch_lightning")):
        with pytest.raises(ValueError, match=said):
            make(**options)


def made_before_sharding(package: str) -> dict[str, str]:
    """Return the errors for optimizers created too early, and the log lines for a valid optimizer."""
    said = {}
    for send in ("gradients", "updates"):
        for together in (True, False):
            fabric, model = fabric_with(package, ours(package, send=send)), Blocks()
            optimizer = torch.optim.AdamW(model.parameters())
            with pytest.raises(ValueError, match="16 of 16 parameters of AdamW are in no module") as error:
                early(fabric, model, optimizer, together)
            said[f"{send} {together}"] = str(error.value)
    lines = Lines()
    fabric, model, optimizer = prepared(package, ours(package, send="gradients"))
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


@pytest.fixture(scope="module", params=["lightning_fabric", pytest.param("lightning.fabric", marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("fabric"))
    return run_ranks(everything, request.param, folder, nodes=2, devices=2, timeout=120, init=False)


def everything(package: str, folder: str) -> dict[str, Any]:
    return {
        "by name": by_name(package),
        "scheduled": scheduled(package, folder),
        "early": made_before_sharding(package),
    }


def test_fabric_strategy_by_name_gives_all_nodes_the_global_weights(results: list[dict[str, Any]]) -> None:
    of_ranks = [each["by name"] for each in results]
    for shared, _, ends in of_ranks:
        assert torch.equal(shared, of_ranks[0][0])
        assert torch.equal(ends, of_ranks[0][2])
    assert not torch.equal(of_ranks[0][1], of_ranks[2][1]), "each node trains its own model"


def test_fabric_scheduler_in_a_folder_resumes(results: list[dict[str, Any]]) -> None:
    for ends, again, loaded in (each["scheduled"] for each in results):
        assert loaded == 5
        assert torch.equal(ends, again)


def test_fabric_optimizer_made_before_sharding_is_refused(results: list[dict[str, Any]]) -> None:
    said = dict(results[0]["early"])
    lines = said.pop("lines")
    assert all("fabric.setup_module(model) first" in error for error in said.values())
    assert "AdamW divides by the size of recent gradients" in lines
    assert "no density warm-up" in lines

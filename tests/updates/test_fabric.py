"""`strategy="mstopk_local"` in Fabric, with both Lightning packages, on real ranks."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.distributed import run_ranks
from tests.strategy.models import batch, flat_parameters, mlp
from tests.strategy.test_fabric import STEPS, fabric_with, of_class, train

ours = partial(of_class, "MSTopKLocalStrategy")


def prepared(fabric: Any) -> tuple[Any, Any]:
    model = mlp()
    return fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))  # type: ignore[no-any-return]


def everything(package: str, folder: str) -> dict[str, Any]:
    os.chdir(folder)
    found: dict[str, Any] = {}
    fabric = fabric_with(package, "mstopk_local", precision="bf16-mixed")
    model, optimizer = prepared(fabric)
    train(fabric, model, optimizer, 0, STEPS, accumulate=2)
    with fabric.strategy.global_weights():
        shared = flat_parameters(model).clone()
    own = flat_parameters(model).clone()
    fabric.strategy.finish()
    found["by name"] = [shared, flat_parameters(model).clone(), own]
    found["one optimizer of two modules"] = one_optimizer_of_two_modules(package)
    found["loads something else"] = loads_something_else(package)
    found["two optimizers"] = one_optimizer_after_another(package)
    fabric = fabric_with(package, ours(package))
    other = mlp()
    with pytest.raises(ValueError, match="has no parameters of a module that was set up"):
        fabric.setup_optimizers(torch.optim.SGD(other.parameters(), lr=0.1))
    return found


def one_optimizer_of_two_modules(package: str) -> Tensor:
    """Train two modules with one optimizer, from initial weights that differ by rank."""
    fabric = fabric_with(package, ours(package))
    torch.manual_seed(fabric.global_rank)
    modules = [fabric.setup_module(each) for each in (nn.Linear(13, 7), nn.Linear(7, 5))]
    parameters = [p for each in modules for p in each.parameters()]
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(parameters, lr=0.01))
    for step in range(4):
        optimizer.zero_grad()
        fabric.backward(modules[1](modules[0](batch(step, fabric.global_rank)[0])).square().mean())
        optimizer.step()
    fabric.save("two.ckpt", {"first": modules[0], "last": modules[1], "optimizer": optimizer})
    fabric.strategy.finish()
    return torch.cat([p.detach().flatten() for p in parameters])


def one_optimizer_after_another(package: str) -> float:
    """Replace the optimizer. Return the distance of the new start from the mean of the nodes' models."""
    fabric = fabric_with(package, ours(package, step_ahead=1))
    model, optimizer = prepared(fabric)
    train(fabric, model, optimizer, 0, 4)
    mean = flat_parameters(model).double()
    torch.distributed.all_reduce(mean)
    fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    assert len(fabric.strategy.engines) == 1
    return float((flat_parameters(model) - mean / fabric.world_size).abs().max())


def loads_something_else(package: str) -> Tensor:
    """Return the final weights of a run that loads another module during training and reads a file."""
    fabric = fabric_with(package, ours(package))
    model, optimizer = prepared(fabric)
    train(fabric, model, optimizer, 0, 4)
    other = nn.Linear(2, 2)
    fabric.save("other.ckpt", {"other": other})
    fabric.load("other.ckpt", {"other": other})
    fabric.load("other.ckpt")
    train(fabric, model, optimizer, 4, 6)
    fabric.strategy.finish()
    return flat_parameters(model).clone()


@pytest.mark.parametrize("package", ["lightning.fabric", pytest.param("lightning_fabric", marks=pytest.mark.slow)])
def test_fabric_updates_keep_ranks_equal(package: str, tmp_path: Any) -> None:
    results = run_ranks(everything, package, str(tmp_path), nodes=2, devices=2, timeout=120, init=False)
    for each in results:
        assert torch.equal(each["one optimizer of two modules"], results[0]["one optimizer of two modules"])
        assert torch.equal(each["loads something else"], results[0]["loads something else"])
        assert each["two optimizers"] < 1e-6
        assert all(map(torch.equal, each["by name"][:2], results[0]["by name"][:2]))
    assert not torch.equal(results[0]["by name"][2], results[2]["by name"][2])

"""Parameters that take part in some backward passes only.

Cases: unused branches, static graphs, layers that are unfrozen or added during a run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.lines import raised
from tests.helpers.scenarios import Scenarios
from tests.helpers.training import results_in_one_start
from tests.strategy.models import batch, flat_parameters, mlp
from tests.strategy.test_fabric import fabric_with, of_class
from tests.strategy.trainers import data, ddp, fitted, lightning_of, ours, trainer, weights
from tests.strategy.trainers import ranks as cluster

PACKAGE = "pytorch_lightning"
LATE_AT = 4


def local(**options: Any) -> Any:
    return ours(PACKAGE).MSTopKLocalStrategy(**{"density": 0.05, "bucket_cap_mb": 0.002, **options})


def hier(**options: Any) -> Any:
    given = {"density": 1.0, "exchange": "sparse", "value_dtype": "float32", "bucket_cap_mb": 0.002}
    return ours(PACKAGE).MSTopKHierStrategy(**{**given, **options})


WHOLE = {"exchange": "dense", "delay": 0}
"""Options of updates that make a run equal DDP's."""


class Branching(nn.Module):
    """`sometimes` takes part in every third call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.calls = nn.Linear(13, 5), nn.Linear(13, 5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.always(x)
        return out + self.sometimes(x) if self.calls % 3 == 1 else out


def module(net: nn.Module, manual: bool = False, momentum: float = 0.0) -> Any:
    class Module(lightning_of(PACKAGE).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = net, not manual

        def training_step(self, x: Tensor, index: int) -> Tensor | None:
            loss = self.net(x + self.global_rank).square().mean()
            if self.automatic_optimization:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def train_dataloader(self) -> Any:
            return data()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=momentum)

    return Module()


SCENARIOS, OF_ONE_DEVICE = Scenarios(), Scenarios()
results = results_in_one_start(SCENARIOS, devices=2, timeout=250)
on_one_device = results_in_one_start(OF_ONE_DEVICE)
Results = list[dict[str, Any]]


@OF_ONE_DEVICE.add
def one_device(_: str) -> dict[str, Tensor]:
    """Return the weights of runs on one device per node."""
    found = {}
    for manual in (False, True):
        kind = "manual" if manual else "automatic"
        for option in ({"find_unused_parameters": True}, {"static_graph": True}, {}):
            net = mlp() if "static_graph" in option else Branching()
            strategy = local(**option)
            found[f"{kind} {option}"] = weights(fitted(PACKAGE, strategy, module(net, manual), **cluster()))
    strategy = of_class("MSTopKLocalStrategy", "lightning_fabric", static_graph=True)
    fabric = import_module("lightning_fabric").Fabric(accelerator="cpu", strategy=strategy, **cluster())
    fabric.launch()
    net = mlp()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(3):
        fabric.backward(net(batch(step, fabric.global_rank)[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    fabric.strategy.finish()
    found["fabric"] = flat_parameters(net)
    return found


def test_local_with_unused_branches_and_static_graphs_on_one_device_per_node(on_one_device: Results) -> None:
    first = on_one_device[0]["one_device"]
    for found in (each["one_device"] for each in on_one_device):
        for name, ends in found.items():
            assert torch.equal(ends, first[name]), name
            assert torch.equal(ends, found[name.replace("manual", "automatic")]), name


def test_local_static_graph_with_accumulation_is_refused(results: Results) -> None:
    assert all("static_graph=True with accumulate_grad_batches=2" in each["refused"] for each in results)


@SCENARIOS.add
def refused(_: str) -> str:
    return raised(fitted, PACKAGE, local(static_graph=True), module(mlp()), accumulate_grad_batches=2)


# -- layers that are added or unfrozen late ----------------------------------------------------------------------------


class Late(nn.Module):
    """Unfreezes a layer at a step and adds another there, whose initial weights differ by rank."""

    def __init__(self, add: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.add = nn.Linear(13, 7), nn.Linear(7, 5), add
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        out: Tensor = self.last(x)
        return out + self.extra(x) if hasattr(self, "extra") else out

    def wake(self, optimizer: Any) -> None:
        self.first.requires_grad_(True)
        if self.add:
            torch.manual_seed(dist.get_rank())
            self.extra = nn.Linear(7, 5)
            optimizer.add_param_group({"params": list(self.extra.parameters()), "lr": 0.05})


class Waking(Late):
    """The plain DDP baseline: the layer requires gradients from the start, which are dropped until that step."""

    def __init__(self) -> None:
        super().__init__(add=False)
        self.first.requires_grad_(True)


def late_run(strategy: Any, net: Late, **options: Any) -> Tensor:
    pl, seen = lightning_of(PACKAGE), list[int]()

    class Wake(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if trainer.global_step == LATE_AT and not seen:
                seen.append(index)
                net.wake(trainer.optimizers[0])

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if isinstance(net, Waking) and trainer.global_step < LATE_AT:
                net.first.zero_grad()

    return weights(fitted(PACKAGE, strategy, module(net), callbacks=[Wake()], **options))


@SCENARIOS.add
def late_runs(_: str) -> dict[str, Tensor]:
    found = {"refused": torch.zeros(1)}
    for name, options in {"clipped": {"gradient_clip_val": 0.1}, "accumulated": {"accumulate_grad_batches": 2}}.items():
        found[f"{name} ddp"] = late_run(ddp(PACKAGE), Waking(), **options)
        found[f"{name} hier"] = late_run(hier(), Late(add=False), **options)
    found["accumulated local"] = late_run(local(**WHOLE), Late(add=False), accumulate_grad_batches=2)
    found["added hier"] = late_run(hier(), Late(add=True))
    found["added local"] = late_run(local(), Late(add=True))
    corrected = module(Late(add=False), momentum=0.9)
    corrected.on_train_batch_start = lambda _, index: index == 2 and corrected.net.first.requires_grad_(True)
    with pytest.raises(ValueError, match=r"net\.first\.weight.*momentum_correction=True keeps momentum"):
        trainer(PACKAGE, hier(momentum_correction=True)).fit(corrected)
    return found


def test_layers_unfrozen_or_added_are_averaged_and_ranks_end_equal(results: Results) -> None:
    for found in (each["late_runs"] for each in results):
        for name, ends in found.items():
            assert torch.equal(ends, results[0]["late_runs"][name]), name
            of_ddp = found.get(f"{name.split()[0]} ddp")
            if of_ddp is not None:
                torch.testing.assert_close(ends, of_ddp, rtol=1e-5, atol=1e-6)


@SCENARIOS.add
def late_in_fabric(_: str) -> dict[str, Tensor]:
    found = {}
    hier_options = {"density": 1.0, "exchange": "sparse", "value_dtype": "float32", "warmup_steps": 0}
    for name, options in (("MSTopKHierStrategy", hier_options), ("MSTopKLocalStrategy", WHOLE)):
        fabric = fabric_with("lightning_fabric", of_class(name, "lightning_fabric", **options))
        net = Late(add=True)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for step in range(7):
            if step == LATE_AT:
                net.wake(optimizer)
            for part in range(2):
                with fabric.no_backward_sync(model, enabled=part == 0):
                    fabric.backward(model(batch(2 * step + part, fabric.global_rank)[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        fabric.strategy.finish()
        found[name] = flat_parameters(net)
    return found


def test_layers_unfrozen_or_added_in_fabric_are_averaged(results: Results) -> None:
    for found in (each["late_in_fabric"] for each in results):
        assert all(torch.equal(ends, results[0]["late_in_fabric"][name]) for name, ends in found.items())
        torch.testing.assert_close(found["MSTopKHierStrategy"], found["MSTopKLocalStrategy"], rtol=1e-5, atol=1e-6)

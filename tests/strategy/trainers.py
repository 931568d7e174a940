"""Modules, Trainers and fixtures for tests of the strategy with either Lightning package."""

import importlib
import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_ranks
from tests.helpers.scenarios import Scenarios, returned
from tests.strategy.models import mlp

PACKAGES = ["pytorch_lightning", pytest.param("lightning", marks=pytest.mark.slow)]
Results = list[dict[str, Any]]


def results_of(scenarios: Scenarios) -> Any:
    """Return a fixture that runs all wanted scenarios with each Lightning package on 2 x 2 ranks: results by rank."""

    @pytest.fixture(scope="module", params=PACKAGES)
    def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
        folder = str(tmp_path_factory.mktemp("scenarios"))
        wanted = scenarios.wanted(request)
        return run_ranks(run_scenarios, wanted, request.param, folder, nodes=2, devices=2, timeout=280, init=False)

    return results


def run_scenarios(scenarios: dict[str, Any], package: str, folder: str) -> dict[str, Any]:
    os.chdir(folder)
    warnings.simplefilter("ignore")
    return returned(scenarios, package)


def lightning_of(package: str) -> Any:
    return importlib.import_module("pytorch_lightning" if package == "pytorch_lightning" else "lightning.pytorch")


def ours(package: str) -> Any:
    return importlib.import_module(f"lightning_sparse.flavours.{package}")


def plain_module(package: str, net: nn.Module | None = None, by_step: bool = False) -> Any:
    """Return a LightningModule around `net`.

    Args:
        by_step: Make each batch from the global step and ignore the loader. A plain DataLoader restarts its epoch when
            a run resumes, so only this option gives both runs the same batches.
    """
    pl = lightning_of(package)

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp() if net is None else net

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            if by_step:
                seed = 100 * self.trainer.global_step + self.global_rank
                batch = torch.randn(4, 13, generator=torch.Generator().manual_seed(seed))
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Tensor, _: int) -> None:
            self.log("val", self.net(batch).square().mean(), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Tensor, _: int) -> Tensor:
            return self.net(batch)

        def train_dataloader(self) -> Any:
            return data()

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    return Module()


def data(count: int = 96) -> DataLoader[Tensor]:
    return DataLoader(torch.randn(count, 13, generator=torch.Generator().manual_seed(3)), batch_size=4)  # type: ignore


def trainer(package: str, strategy: Any, **options: Any) -> Any:
    pl = lightning_of(package)
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "devices": 2, "num_nodes": 2, "max_steps": 10, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "num_sanity_val_steps": 0, "limit_val_batches": 0,
    }  # fmt: skip
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


def ranks() -> dict[str, int]:
    """Return the launcher's cluster as options of a Trainer."""
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    return {"devices": devices, "num_nodes": int(os.environ["WORLD_SIZE"]) // devices}


def fitted(package: str, strategy: Any, module: Any = None, **options: Any) -> Any:
    module = plain_module(package) if module is None else module
    trainer(package, strategy, **options).fit(module)
    return module


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def dense_one(package: str, **options: Any) -> Any:
    """Return a strategy whose sparse messages hold all entries, so that it must equal DDP up to rounding."""
    given = {"density": 1.0, "exchange": "sparse", "value_dtype": "float32", "bucket_cap_mb": 0.002}
    return ours(package).MSTopKHierStrategy(**{**given, **options})


def sparse(package: str, **options: Any) -> Any:
    given = {"density": 0.05, "exchange": "sparse", "warmup_epochs": 0, "bucket_cap_mb": 0.002}
    return ours(package).MSTopKHierStrategy(**{**given, **options})


def ddp(package: str, **options: Any) -> Any:
    strategies = importlib.import_module(lightning_of(package).__name__ + ".strategies")
    return strategies.DDPStrategy(**{"bucket_cap_mb": 0.002, "gradient_as_bucket_view": True, **options})


def same_on_all_ranks(results: Results, name: str, key: str = "weights") -> bool:
    return all(torch.equal(each[name][key], results[0][name][key]) for each in results)


class Branches(nn.Module):
    """Rank 0 alone uses `sometimes`; no rank uses `never` once `stop` is set; `frozen` does not require gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(13, 11), nn.Linear(11, 7)
        self.never, self.frozen = nn.Linear(11, 7), nn.Linear(7, 3)
        self.frozen.requires_grad_(False)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        hidden = self.always(x)
        out = hidden.sum(1, keepdim=True).expand(-1, 7)
        if torch.distributed.get_rank() == 0:
            out = out + self.sometimes(hidden)
        if self.steps < 7:
            out = out + self.never(hidden)
        return self.frozen(out)


def gan(package: str, toggled: bool) -> Any:
    pl = lightning_of(package)

    class Gan(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(1)
            self.generator, self.critic = nn.Linear(13, 13), nn.Sequential(nn.Linear(13, 9), nn.Tanh(), nn.Linear(9, 1))

        def train_dataloader(self) -> Any:
            return data()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.generator, self.critic)]

    class Toggled(Gan):
        def training_step(self, batch: Tensor, _: int) -> None:
            g, c = self.optimizers()
            self.toggle_optimizer(g)
            self.step(g, self.critic(self.generator(batch)).square().mean())
            self.untoggle_optimizer(g)
            self.toggle_optimizer(c)
            real, fake = self.critic(batch), self.critic(self.generator(batch).detach())
            self.step(c, (real - 1).square().mean() + fake.square().mean())
            self.untoggle_optimizer(c)

        def step(self, optimizer: Any, loss: Tensor) -> None:
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    class Untoggled(Toggled):
        def toggle_optimizer(self, *_: Any) -> None: ...
        def untoggle_optimizer(self, *_: Any) -> None: ...

    return (Toggled if toggled else Untoggled)()

"""Elastic nodes with Trainer and with a Fabric loop, in processes that tests kill.

Each prints a line of JSON after each step. Unnamed options are options of the strategy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_sparse.elastic import ElasticSampler
from lightning_sparse.flavours import lightning_fabric, pytorch_lightning
from lightning_sparse.flavours.pytorch_lightning import CommStatsCallback, TokenDataModule
from tests.fsdp.runs import whole
from tests.helpers.lines import raised

log = logging.getLogger(__name__)
SAMPLES, BATCH = 1024, 32
PAUSE_S = 0.02


def setup(options: dict[str, Any]) -> None:
    os.environ.update(options.pop("env", {}))
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)


def samples() -> TensorDataset:
    """Inputs, targets and the index of each sample."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 16)
    return TensorDataset(x, torch.tanh(x @ torch.randn(16, 4)), torch.arange(SAMPLES))


class Norm(nn.BatchNorm1d):
    """Accepts a batch of one sample, the rest of an epoch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if len(x) > 1 else torch.cat([x, -x]))[: len(x)]


def new_net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), Norm(64), nn.Tanh(), nn.Linear(64, 4))


def report(updates: Any, net: nn.Module, lr: float, is_zero: bool, **more: Any) -> None:
    """Print the state of the node. Every device calls it, and the first one prints."""
    with updates.global_weights():
        token, number, *_ = updates.version
        weights = whole(net)
    digest = hashlib.sha1(weights.float().numpy().tobytes()).hexdigest()[:12]
    state = {"token": token, "number": number, "digest": digest, "lr": lr, "mean": float(weights.mean())}
    if is_zero:
        print(json.dumps({**more, **state, **updates.gauges()}), flush=True)


def new_strategy(package: Any, name: str, lighthouse: str, options: dict[str, Any]) -> Any:
    """Return the strategy of a node, with the rest of the options."""
    kind = package.MSTopKElasticFSDPStrategy if options.pop("fsdp", False) else package.MSTopKElasticStrategy
    return kind(lighthouse=lighthouse, node_name=options.pop("node", name), **options)


# -- Trainer -----------------------------------------------------------------------------------------------------------


class Toy(pl.LightningModule):
    """Fits a teacher.

    Args:
        release: a file. Validation waits until it exists.
        begins_with: the value that a hook gives all weights.
        frozen: do not train the first layer. The optimizer gets the other layers.
    """

    def __init__(self, release: str | None, begins_with: float | None, frozen: bool = False) -> None:
        super().__init__()
        self.release, self.begins_with = release, begins_with
        self.net = new_net()
        if frozen:
            self.net[0].requires_grad_(False)  # type: ignore[index]

    def on_train_start(self) -> None:
        if self.begins_with is not None:
            for parameter in self.parameters():
                parameter.data.fill_(self.begins_with)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, self.drawn = batch
        return nn.functional.mse_loss(self.predict(x), y)

    def predict(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.net(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        if self.release and not self.trainer.sanity_checking:
            report_trainer(self.trainer, validates=True)
            while not Path(self.release).exists():
                time.sleep(PAUSE_S)
        self.log("val_loss", nn.functional.mse_loss(self.predict(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)]


class Finetuned(Toy):
    """Has a backbone, which `BackboneFinetuning` trains later."""

    def __init__(self, release: str | None, begins_with: float | None, frozen: bool = False) -> None:
        super().__init__(release, begins_with, frozen)
        self.backbone, *head = self.net.children()
        self.net = nn.Sequential(*head)

    def predict(self, x: Tensor) -> Tensor:
        return super().predict(self.backbone(x))


class TwoOptimizers(Toy):
    """Trains its layers with two optimizers; the second steps every second time."""

    def __init__(self, release: str | None, begins_with: float | None, frozen: bool = False) -> None:
        super().__init__(release, begins_with, frozen)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        self.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers()[: 1 + batch_idx % 2]:  # type: ignore[index]
            optimizer.step()
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
                scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = two_optimizers(self.net)
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.99) for each in optimizers]


def two_optimizers(net: nn.Module) -> list[torch.optim.Optimizer]:
    first, norm, _, last = net.children()
    adamw = torch.optim.AdamW([*first.parameters(), *norm.parameters()], lr=1e-2)
    return [adamw, torch.optim.SGD(last.parameters(), lr=0.01, momentum=0.9)]


class Reader(pl.LightningModule):
    """Reads windows of eight tokens. Each token is the number of its window."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Embedding(512, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn = batch[0][:, 0]
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)  # asks for the loader before there are other nodes
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]


class Report(pl.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        states = trainer.optimizers[0].state.values()
        moments = [float(whole_tensor(each["exp_avg"]).norm()) for each in states if "exp_avg" in each]
        if trainer.is_global_zero:
            log.info("moments %s", json.dumps(moments))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        time.sleep(PAUSE_S)
        more = {"epoch": trainer.current_epoch, "drawn": pl_module.drawn.tolist(), "alike": are_alike(pl_module)}
        # Lightning steps schedules per epoch before this hook.
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        report_trainer(trainer, schedule_steps=trainer.current_epoch + is_last, **more)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        report_trainer(trainer)


def are_alike(module: nn.Module) -> bool:
    """Return whether all devices of the node hold equal parameters, if these are not sharded."""
    parameters = list(module.parameters())
    if any(isinstance(each, DTensor) for each in parameters):
        return True
    sums: list[Any] = [[float(each.double().sum()) for each in parameters]] * dist.get_world_size()
    dist.all_gather_object(sums, sums[0])
    return all(each == sums[0] for each in sums)


def whole_tensor(tensor: Any) -> Tensor:
    """Return all elements of a tensor that the devices may shard."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def report_trainer(trainer: Any, **more: Any) -> None:
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    if "validates" not in more:
        more["step"] = trainer.global_step
    report(trainer.strategy.elastic, trainer.lightning_module, lr, trainer.is_global_zero, **more)


def train(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """Run a node with Trainer."""
    setup(options)
    folder, tokens = Path(options.pop("folder")), options.pop("tokens", None)
    unfreezes_at = options.pop("unfreezes_at", None)
    kind: type[Toy] = Toy if unfreezes_at is None else Finetuned
    kind = TwoOptimizers if options.pop("optimizers", 1) == 2 else kind
    toy = kind(options.pop("release", None), options.pop("begins_with", None), options.pop("frozen", False))
    data: Any = samples()
    if options.pop("short", False) and os.environ["LOCAL_RANK"] == "1":
        data = Subset(data, range(3 * SAMPLES // 4))
    data = Subset(data, range(options.pop("samples", len(data))))
    order: dict[str, Any] = (
        {"sampler": ElasticSampler(data, seed=options.pop("seed", 0))}
        if options.pop("deal", True)
        else {"shuffle": True}
    )
    saver = pl.callbacks.ModelCheckpoint(
        folder, save_last=True, every_n_train_steps=options.pop("every", 10), save_top_k=1
    )
    callbacks: list[pl.Callback] = []
    if options.pop("stops_early", False):
        callbacks.append(pl.callbacks.EarlyStopping("val_loss", patience=10**6))
    if unfreezes_at is not None:
        callbacks.append(pl.callbacks.BackboneFinetuning(unfreezes_at, train_bn=False))
    trainer = pl.Trainer(
        accelerator="cpu",
        precision=options.pop("precision", "32-true"),
        devices=options.pop("devices", 1),
        max_steps=options.pop("steps", -1),
        limit_train_batches=options.pop("limit", 1.0),
        max_epochs=options.pop("epochs", -1),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Report(), CommStatsCallback(), *callbacks, saver],
        strategy=new_strategy(pytorch_lightning, name, lighthouse, options),
    )
    saved = folder / "last.ckpt"
    resume = str(saved) if saved.exists() else None
    if tokens is not None:
        trainer.fit(Reader(), datamodule=TokenDataModule(tokens, context=8, batch_size=8), ckpt_path=resume)
    else:
        loader = DataLoader(data, batch_size=BATCH, **order)
        trainer.fit(toy, loader, DataLoader(data, batch_size=SAMPLES), ckpt_path=resume)


class Counting(Toy):
    """Saves the number of its batches. The inputs of one batch are NaN."""

    batches, breaks_at, refuses = 0, -1, False

    def __init__(self, release: str | None, begins_with: float | None, frozen: bool = False) -> None:
        super().__init__(release, begins_with, frozen)
        self.save_hyperparameters()

    def predict(self, x: Tensor) -> Tensor:
        return super().predict(x * float("nan") if self.batches == self.breaks_at else x)

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1
        finite = all(bool(each.isfinite().all()) for each in self.state_dict().values())
        print(json.dumps({"batches": self.batches, "finite": finite}), flush=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self.batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.refuses:
            raise ValueError("this state is not for me")
        self.batches = checkpoint["batches"]
        assert checkpoint["hyper_parameters"] == {"release": None, "begins_with": None, "frozen": False}
        assert checkpoint["state_dict"].keys() == self.state_dict().keys()


class CountingData(pl.LightningDataModule):
    """Saves the number of its saves."""

    saves = 0

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=BATCH, shuffle=True)

    def state_dict(self) -> dict[str, Any]:
        self.saves += 1
        return {"saves": self.saves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saves = state["saves"]


class Averages(pl.callbacks.EMAWeightAveraging):
    """Reports its averages when it saves them, and when a fit begins."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._report("begun", trainer, pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        self._report("saved", trainer, pl_module)

    def _report(self, event: str, trainer: Any, module: Counting) -> None:
        sums = [float(each.double().sum()) for each in self._average_model.module.parameters()]  # type: ignore[union-attr]
        print(json.dumps({event: [module.batches, trainer.datamodule.saves, sums]}), flush=True)


def train_with_states(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """Run a node whose module, data and callback have states that Lightning saves."""
    setup(options)
    module = Counting(None, None)
    module.breaks_at, module.refuses = options.pop("breaks_at", -1), options.pop("refuses", False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Report(), CommStatsCallback(), Averages()],
        strategy=new_strategy(pytorch_lightning, name, lighthouse, options),
    )
    before = set(threading.enumerate())
    try:
        trainer.fit(module, datamodule=CountingData())
    except ValueError as error:
        left = [thread.name for thread in set(threading.enumerate()) - before]
        print(json.dumps({"refused": str(error), "threads": left}), flush=True)


# -- Fabric ------------------------------------------------------------------------------------------------------------


def loop(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """Run a node with a Fabric loop."""
    setup(options)
    path, devices, every = (
        Path(options.pop("folder")) / "last.ckpt",
        options.pop("devices", 1),
        options.pop("every", 10),
    )
    two, limit = options.pop("optimizers", 1) == 2, options.pop("limit", sys.maxsize)
    strategy = new_strategy(lightning_fabric, name, lighthouse, options)
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
    fabric: Any = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    data = samples()
    loader = DataLoader(data, batch_size=BATCH, sampler=ElasticSampler(data))
    torch.manual_seed(int.from_bytes(name.encode(), "big"))  # each node begins with its own weights
    net = new_net()
    model = fabric.setup_module(net)
    optimizers: Any = two_optimizers(net) if two else [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.99)
    state: dict[str, Any] = {"model": model, "scheduler": scheduler, "global_step": 0, "epoch": 0}
    named = {f"optimizer{place}": each for place, each in enumerate(optimizers)}
    state |= named
    if path.exists():
        fabric.load(path, state)
    optimizers = fabric.setup_optimizers(*optimizers)
    optimizers = optimizers if two else [optimizers]
    state |= zip(named, optimizers, strict=True)
    strategy.sync_state(state)
    strategy.shard_loader(loader)

    def ends() -> bool:
        return bool(strategy.elastic.any_device(bool(leaving))[0])

    while not ends():
        loader.sampler.set_epoch(state["epoch"])
        for inputs, targets, drawn in islice(loader, limit):
            fabric.backward(nn.functional.mse_loss(model(inputs), targets))
            for optimizer in optimizers[: 1 + state["global_step"] % 2]:
                optimizer.step()
            model.zero_grad()
            state["global_step"] += 1
            time.sleep(PAUSE_S)
            if state["global_step"] % every == 0:
                fabric.save(path, state)
            epoch = state["epoch"]
            more = {"step": state["global_step"], "epoch": epoch, "schedule_steps": epoch, "drawn": drawn.tolist()}
            report(strategy.elastic, net, scheduler.get_last_lr()[0], fabric.is_global_zero, **more)
            if ends():
                break
        else:
            state["epoch"] += 1
            scheduler.step()
    strategy.finish()


def two_runs(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """Run a node with a Fabric loop twice, and report errors of wrong calls. The second run loads the weights alone."""
    path, seeds = Path(options["folder"]) / "last.ckpt", []
    data = TensorDataset(torch.randn(64, 16), torch.arange(64))
    for run in range(2):
        strategy = lightning_fabric.MSTopKElasticStrategy(lighthouse=lighthouse, node_name=name)
        fabric: Any = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        seeds.append(fabric.setup_dataloaders(DataLoader(data, shuffle=True))._dataloader.sampler.seed)
        net, other = new_net(), new_net()
        model, other = fabric.setup_module(net), fabric.setup_module(other)
        if run:
            fabric.load(path, {"model": model}, strict=False)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters()))
        loader = DataLoader(data, batch_size=8, sampler=ElasticSampler(data))
        strategy.shard_loader(loader)
        drawn: list[int] = []
        for inputs, indices in loader:
            drawn += indices.tolist()
            fabric.backward(model(inputs).square().mean())
            optimizer.step()
        shown: list[bool] = []
        filters = dict.fromkeys(
            ("model", "other"), lambda *_, shown=shown, of=strategy: shown.append(of.elastic._shown)
        )
        fabric.save(path.with_name("filtered.ckpt"), {"model": model, "other": other}, filter=filters)
        fabric.save(path, {"model": model, "optimizer": optimizer})
        refused = [
            raised(strategy.shard_loader, DataLoader(data, shuffle=True)),
            raised(strategy.shard_loader, loader, 0),
            raised(strategy.sync_state, {"epoch": 0, "folder": path}),
        ]
        strategy.elastic.progress = {"epoch": 3}  # as if it had joined other nodes
        refused.append(raised(optimizer.step))
        strategy.finish()
        print(json.dumps({"drawn": drawn, "shown": shown, "refused": refused}), flush=True)
    print(json.dumps({"seeds": seeds}), flush=True)

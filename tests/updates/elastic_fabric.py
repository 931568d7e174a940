"""A node as a loop of Fabric has it, in a process that tests kill; it prints a line of JSON after each step."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse.elastic import ElasticSampler
from lightning_sparse.flavours.lightning_fabric import MSTopKElasticStrategy
from tests.updates.elastic_trainer import net_of


def main(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    path, devices = Path(options.pop("folder")) / "last.ckpt", options.pop("devices", 1)
    strategy = MSTopKElasticStrategy(lighthouse=lighthouse, node_name=options.pop("node", name), **options.pop("with"))
    os.environ.update(options.pop("env", {}))
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
    fabric: Any = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    x = torch.randn(1024, 16)
    data = TensorDataset(x, torch.tanh(x @ torch.randn(16, 4)), torch.arange(1024))
    loader = DataLoader(data, batch_size=32, sampler=ElasticSampler(data))
    torch.manual_seed(int.from_bytes(name.encode(), "big"))  # nodes begin with weights of their own
    net = net_of()
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(adam, 0.99)
    model = fabric.setup_module(net)
    state: dict[str, Any] = {"model": model, "optimizer": adam, "scheduler": scheduler, "step": 0, "epoch": 0}
    if path.exists():
        fabric.load(path, state)
    optimizer = state["optimizer"] = fabric.setup_optimizers(adam)
    strategy.sync_state(state)
    strategy.shard_loader(loader)
    while not leaving:
        loader.sampler.set_epoch(state["epoch"])
        for inputs, targets, drawn in loader:
            fabric.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            time.sleep(0.02)
            if state["step"] % 10 == 0:
                fabric.save(path, state)
            if fabric.is_global_zero:
                told = {"step": state["step"], "epoch": state["epoch"], "drawn": drawn.tolist(), **seen(strategy, net)}
                print(json.dumps({**told, "lr": scheduler.get_last_lr()[0]}), flush=True)
            else:
                seen(strategy, net)
            if leaving:
                break
        else:
            state["epoch"] += 1
            scheduler.step()
    strategy.finish()
    print(json.dumps({"ends": state["step"]}), flush=True)


def alone(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """Two runs of one node: the second takes the weights of the first, and what only a loop can get wrong is told."""
    path, seeds = Path(options["folder"]) / "last.ckpt", []
    data = TensorDataset(torch.randn(64, 16), torch.arange(64))
    for run in range(2):
        strategy = MSTopKElasticStrategy(lighthouse=lighthouse, node_name=name)
        fabric: Any = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        seeds.append(fabric.setup_dataloaders(DataLoader(data, shuffle=True))._dataloader.sampler.seed)
        net, other = net_of(), net_of()
        model, other = fabric.setup_module(net), fabric.setup_module(other)
        if run:
            fabric.load(path, {"model": model}, strict=False)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters()))
        loader = DataLoader(data, batch_size=8, sampler=ElasticSampler(data))
        strategy.shard_loader(loader)
        drawn: list[int] = []
        for inputs, samples in loader:
            drawn += samples.tolist()
            fabric.backward(model(inputs).square().mean())
            optimizer.step()
        shown: list[bool] = []
        filters = dict.fromkeys(
            ("model", "other"), lambda *_, shown=shown, of=strategy: shown.append(of.elastic._shown)
        )
        fabric.save(path.with_name("filtered.ckpt"), {"model": model, "other": other}, filter=filters)
        fabric.save(path, {"model": model, "optimizer": optimizer})
        refused = [
            refusal(strategy.shard_loader, DataLoader(data, shuffle=True)),
            refusal(strategy.shard_loader, loader, 0),
            refusal(strategy.sync_state, {"epoch": 0, "folder": path}),
        ]
        strategy.elastic.snapshot = {"extra": {"epoch": 3}}  # as if it had joined others
        refused.append(refusal(optimizer.step))
        strategy.finish()
        print(json.dumps({"drawn": drawn, "shown": shown, "refused": refused}), flush=True)
    print(json.dumps({"seeds": seeds}), flush=True)


def refusal(call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def seen(strategy: Any, net: nn.Module) -> dict[str, Any]:
    token, number, *_ = strategy.elastic.version
    with strategy.global_weights():
        weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    digest = hashlib.sha1(weights.numpy().tobytes()).hexdigest()[:12]
    return {"token": token, "number": number, "digest": digest, **strategy.elastic.gauges()}

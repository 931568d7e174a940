"""The trainings of digests.py: DDP's hook, updates, FSDP2, the sharded step, and strategies that resume in a Trainer.

A run adds its results to a `Trail`, in order. Sizes of models divide by no convenient number.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.digests_cases import SMALL_MB, Case
from lightning_sparse.exchange import ExchangeConfig
from lightning_sparse.fsdp import ShardedGradients, mesh_of, shard
from lightning_sparse.gradients import HierConfig, HierState, hier_hook
from lightning_sparse.pto import ShardedStep, communicator_of
from lightning_sparse.sharding import local_of
from lightning_sparse.updates import LocalUpdates, UpdatesConfig

STEPS, JOINS = 10, 4
"""Steps of a run (not one of gradients), and the step before which it gets a parameter group, skips one, or resumes."""


class Trail:
    """Digest of the added tensors; for gradients also the digest of residuals, and the entries by path."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()
        self.residual, self.paths = "", dict[str, int]()

    def add(self, *values: Any) -> None:
        """Add tensors by their elements in the order of dims; of a sharded tensor, this rank's shard."""
        for value in values:
            if isinstance(value, DTensor):
                value = value.to_local()
            if isinstance(value, Tensor):
                value = raw(value)
            self._hasher.update(value if isinstance(value, bytes) else repr(value).encode())

    def add_tree(self, tree: Any) -> None:
        """Add the contents of a state_dict, in its order."""
        if isinstance(tree, dict):
            for key, value in tree.items():
                self.add(key)
                self.add_tree(value)
        elif isinstance(tree, (list, tuple)):
            for value in tree:
                self.add_tree(value)
        else:
            self.add(tree)

    def digest(self) -> str:
        return self._hasher.hexdigest()


OPTIMIZERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=3e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.03, momentum=0.9),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.03, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.03),
}


def raw(tensor: Tensor) -> bytes:
    """Return the bytes in the order of dims, with -0.0 as 0.0."""
    flat = (tensor.detach() + 0.0).reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().tobytes()


def batch(step: int, part: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a batch, equal in every run."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * part + rank)
    x, y = torch.randn(6, 3, 8, 8, generator=generator), torch.randn(6, 7, generator=generator)
    return x.to(dtype), y.to(dtype)


# -- gradients ---------------------------------------------------------------------------------------------------------

ROUNDS, BAD_STEP = 20, 8


class Net(nn.Module):
    """A model of 19,000 parameters.

    It has channels_last convolutions, a linear layer that fills a bucket, a branch that may be unused, and a parameter
    of one element.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.Conv2d(3, 13, 3, padding=1)
        self.second = nn.Conv2d(13, 23, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(1, 23)
        self.wide = nn.Linear(23 * 16, 41)
        self.out = nn.Linear(41, 7)
        self.side = nn.Linear(41, 7)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, side: bool) -> Tensor:
        x = self.first(x).tanh()
        x = self.norm(self.second(x)).tanh().flatten(1)
        x = self.wide(x).tanh()
        y: Tensor = self.out(x) * self.scale
        return y + self.side(x).tanh() if side else y


def train_gradients(case: Case, topology: Any, trail: Trail) -> None:
    rank, module = dist.get_rank(), Net().to(case.dtype)
    config = HierConfig(**{"density": 0.05, "warmup_epochs": 0, **case.config})
    unused = bool(case.ddp.get("find_unused_parameters", False))
    state = HierState(module, config, topology, find_unused_parameters=unused)
    ddp = wrap(case, module, state)
    optimizer = grouped(case.optimizer, module)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5, enabled="scaler" in case.events)
    if scaler.is_enabled():
        state.loss_scale = scaler._get_scale_async
    if case.watch:
        state.watch([optimizer])
    for step in range(ROUNDS):
        if "epochs" in case.events:
            state.epoch = step // 3
        if step == ROUNDS // 2:
            if "rewrap" in case.events:
                ddp = wrap(case, module, state, bucket_cap_mb=3 * SMALL_MB)
            if "flat" in case.events:
                make_inside_slow(state)
        optimizer.zero_grad()
        backward(case, ddp, state, scaler, step, rank)
        dropped = drop(case, module, step)
        if not (dropped and "throw away" in case.events):
            scaler.step(optimizer)
        scaler.update() if scaler.is_enabled() else None
        trail.add(*module.parameters())
    check_finite(module)
    state.before_backward()  # settles the last round
    for parameter in module.parameters():
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            trail.add(name.encode(), value)
    trail.residual, trail.paths = residual_digest(state), dict(state.exchange.stats.paths)
    state.release_optimizers()


def wrap(case: Case, module: nn.Module, state: Any, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(module, **{**case.ddp, **options})
    ddp.register_comm_hook(state, hier_hook)
    return ddp


def backward(case: Case, ddp: DistributedDataParallel, state: Any, scaler: Any, step: int, rank: int) -> None:
    """Run the backward passes of a step.

    With "several", DDP reduces each pass, and with "accumulate" only the last pass.
    """
    passes = 2 if "several" in case.events else 3 if "accumulate" in case.events else 1
    for part in range(passes):
        x, y = batch(step, part, rank, case.dtype)
        last = part == passes - 1
        side = "unused" not in case.events or step % 4 in (0, 3) or (step % 4 == 2 and rank == 0)
        with ddp.no_sync() if "accumulate" in case.events and not last else nullcontext():
            if case.watch:
                bypass = "bypass" in case.events and step in (BAD_STEP, BAD_STEP + 1)
                state.before_backward(*(["as the case wants it"] if bypass else []))
            loss = nn.functional.mse_loss(ddp(x, side), y)
            if "scaler" in case.events and step == BAD_STEP and rank == dist.get_world_size() - 1:
                loss = loss + float("inf") * ddp.module.wide.weight.flatten()[7]
            scaler.scale(loss).backward()


def drop(case: Case, module: nn.Module, step: int) -> bool:
    """Drop the widest layer's gradient, or all gradients. Such rounds must not change residuals."""
    events = {event for event in case.events if event == "throw away" or event.startswith("drop")}
    if not events or step < 6 or step % 3:
        return False
    assert isinstance(module, Net)
    weight = module.wide.weight
    if "drop none" in events:
        weight.grad = None
    return True


def residual_digest(state: HierState) -> str:
    """Return the digest of residuals and velocities. None and zeros are equal."""
    found = []
    for store in state.stores:
        one = hashlib.sha256()
        for group in sorted(store.committed, key=lambda each: each.names):
            if torch.count_nonzero(store.committed[group]):
                one.update(repr(group.names).encode())
                one.update(raw(store.committed[group]))
        for name in sorted(store.by_name):
            if torch.count_nonzero(store.by_name[name]):
                one.update(name.encode())
                one.update(raw(store.by_name[name]))
        found.append(one.hexdigest())
    return hashlib.sha256("".join(sorted(set(found))).encode()).hexdigest()


def make_inside_slow(state: HierState) -> None:
    """Let the network inside a node cost one second per byte, so that "auto" all-reduces over all ranks."""
    choice = state.exchange.choice
    assert choice.rates is not None
    choice.rates = replace(choice.rates, intra=replace(choice.rates.intra, seconds_per_byte=1.0))


def grouped(name: str, module: nn.Module) -> Optimizer:
    """Return the optimizer of this name. Optimizers with momentum have two groups."""
    if name in ("adamw", "sgd"):
        return OPTIMIZERS[name](list(module.parameters()))
    weights = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": 0.01}, {"params": rest}]
    return torch.optim.SGD(groups, lr=0.03, momentum=0.9, nesterov=name == "nesterov")


# -- updates -----------------------------------------------------------------------------------------------------------


class Normed(Net):
    """A model with buffers that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(23)  # type: ignore[assignment]


def train_updates(case: Case, topology: Any, trail: Trail) -> None:
    rank = dist.get_rank()
    module = Normed().to(case.dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1 + rank / 8)  # ranks start with the values of rank 0
    added = list(module.side.parameters()) if "group" in case.events else []
    first = [p for p in module.parameters() if all(p is not each for each in added)]
    halves = [first[::2], first[1::2]] if "two optimizers" in case.events else [first]
    optimizers = [OPTIMIZERS[case.optimizer](half) for half in halves]
    config = UpdatesConfig(**{"density": 0.05, **case.config})
    updates = LocalUpdates(module, optimizers, config, topology)
    ddp = DistributedDataParallel(module, process_group=topology.intra, find_unused_parameters=True)

    def loss_of(step: int) -> Tensor:
        x, y = batch(step, 0, rank, case.dtype)
        return nn.functional.mse_loss(ddp(x, True), y)

    run_updates(case, topology, trail, module, optimizers, updates, loss_of, added)


def train_sharded_updates(case: Case, topology: Any, trail: Trail) -> None:
    model = sharded(case, topology)
    optimizer = OPTIMIZERS[case.optimizer](list(model.parameters()))
    config = UpdatesConfig(**{"density": 0.05, **case.config})
    updates = LocalUpdates(model, optimizer, config, topology)
    loss_of = loss_of_blocks(case, model)
    run_updates(case, topology, trail, model, [optimizer], updates, loss_of, [])


def run_updates(
    case: Case,
    topology: Any,
    trail: Trail,
    module: nn.Module,
    optimizers: list[Optimizer],
    updates: Any,
    loss_of: Callable[[int], Tensor],
    added: list[nn.Parameter],
) -> None:
    """Run the loop. Record the trained weights after each step, and the global weights in the middle and at the end."""
    for step in range(STEPS):
        if added and step == JOINS:
            optimizers[0].add_param_group({"params": added, "lr": 0.01})
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(step).backward()  # type: ignore[no-untyped-call]
        skips = "skip" in case.events and step == JOINS and topology.node_index == 0
        for optimizer in optimizers:
            updates.before_step(optimizer) if skips else optimizer.step()
        updates.step()
        trail.add(*module.parameters())
        if step in (STEPS // 2, STEPS - 1):
            with updates.global_weights():
                trail.add(*module.parameters(), *module.buffers())
            trail.add(*module.parameters(), *module.buffers())
    updates.finish()
    trail.add(*module.parameters(), *module.buffers())
    check_finite(module)
    updates.release_optimizers()
    updates.close()


def check_finite(module: nn.Module) -> None:
    if not all(bool(local_of(p).isfinite().all()) for p in module.parameters()):
        raise FloatingPointError("parameters are not finite: the case says nothing")


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Repeated blocks between two layers, whose sizes no number of devices divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(13, 29), nn.BatchNorm1d(29)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(29, 31), nn.Tanh(), nn.Linear(31, 29)) for _ in range(3))
        self.last = nn.Linear(29, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.last(x)
        return y


def sharded(case: Case, topology: Any) -> nn.Module:
    model = Blocks().to(case.dtype)
    if "frozen" in case.events:
        model.blocks[1].requires_grad_(False)
    shard(model, mesh_of(topology))
    return model


def loss_of_blocks(case: Case, model: nn.Module) -> Callable[[int], Tensor]:
    def loss_of(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x, y = torch.randn(8, 13, generator=generator), torch.randn(8, 5, generator=generator)
        return nn.functional.mse_loss(model(x.to(case.dtype)), y.to(case.dtype))

    return loss_of


def train_fsdp(case: Case, topology: Any, trail: Trail) -> None:
    model = sharded(case, topology)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](trained)
    config = ExchangeConfig(**{"density": 0.05, **case.config})
    gradients = ShardedGradients(model, config, topology)
    loss_of = loss_of_blocks(case, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        passes = 3 if "accumulate" in case.events else 1
        for part in range(passes):
            with gradients.accumulating() if part < passes - 1 else nullcontext():
                loss_of(10 * step + part).backward()  # type: ignore[no-untyped-call]
        trail.add(*(p.grad for p in trained))
        optimizer.step()
        gradients.step()
        trail.add(*model.parameters())
    gradients.swap_in_global_weights()
    trail.add(*model.buffers())
    check_finite(model)


# -- the shared step ---------------------------------------------------------------------------------------------------


def train_pto(case: Case, topology: Any, trail: Trail) -> None:
    """Train with random gradients, equal on all ranks, as a reduction would leave them."""
    communicator = communicator_of(topology, case.config["scope"])
    parameters = pto_parameters("big" in case.events)
    late = parameters.pop() if "group" in case.events else None

    def start() -> Any:
        optimizer = OPTIMIZERS[case.optimizer](
            [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.003}],
        )
        ShardedStep(optimizer, communicator)
        return optimizer

    optimizer = start()
    for step in range(STEPS):
        if step == JOINS and late is not None:
            optimizer.add_param_group({"params": [late]})
            parameters.append(late)
        if step == JOINS and "resume" in case.events:
            saved = whole_state(optimizer)
            optimizer = start()
            optimizer.load_state_dict(saved)
        set_gradients(parameters, step)
        optimizer.step((lambda: 0.0) if "closure" in case.events else None)
        trail.add(*parameters, *(p.grad for p in parameters))
    trail.add_tree(whole_state(optimizer))


def pto_parameters(big: bool) -> list[nn.Parameter]:
    """Return more parameters than ranks, none a multiple of another, with one that is large enough to be divided."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(37, 13), (37,), (29, 37), (29,), (5, 29), (5,), (), (3, 2, 5, 5), *([(301, 67)] if big else []), (11, 7)]
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    made[7].data = made[7].data.to(memory_format=torch.channels_last)
    made[5].data = made[5].data.to(torch.bfloat16)
    return made


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """Set the gradients. One parameter is unused in every third step."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, p in enumerate(parameters):
        grad = torch.empty_like(p.data).copy_(torch.randn(p.shape, generator=generator))
        p.grad = None if step % 3 == 1 and index == 3 else grad


def whole_state(optimizer: Any) -> Any:
    """Return the state_dict as rank 0 saves it, on all ranks."""
    optimizer.consolidate_state_dict()
    held = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held)
    return held[0]


# -- strategies in a Trainer -------------------------------------------------------------------------------------------

SAVED, LAST = 3, 6


def train_resumed(case: Case, topology: Any, trail: Trail) -> None:
    """Train to LAST with a save at SAVED, and from SAVED to LAST in a new Trainer."""
    os.environ |= environment(topology)
    folder: list[str] = [tempfile.mkdtemp(prefix="digests-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    path, before = Path(folder[0], "saved.ckpt"), os.getcwd()
    os.chdir(folder[0])
    warnings.simplefilter("ignore")
    try:
        for resumed in (False, True):
            module, trainer = fit(case, topology, None if resumed else path)
            trainer.fit(module, ckpt_path=str(path) if resumed else None)
            trail.add(*module.parameters())
            check_finite(module)
    finally:
        os.chdir(before)
    dist.barrier()  # all ranks have read it
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def environment(topology: Any) -> dict[str, str]:
    """Set the environment as torchrun does, for ranks that have a process group."""
    values = {
        "RANK": topology.rank, "LOCAL_RANK": topology.device_index, "GROUP_RANK": topology.node_index,
        "WORLD_SIZE": topology.world_size, "LOCAL_WORLD_SIZE": topology.num_devices,
        "GROUP_WORLD_SIZE": topology.num_nodes, "TORCHELASTIC_RUN_ID": "digests",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def fit(case: Case, topology: Any, save: Path | None) -> tuple[Any, Any]:
    """Return a module, and a Trainer that saves it at SAVED."""
    import pytorch_lightning as pl

    from lightning_sparse.flavours import pytorch_lightning as classes

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Blocks()

        def training_step(self, _: Tensor, index: int) -> Tensor:
            # independent of the loader's batch, which a resume changes
            return loss_of_blocks(case, self.net)(self.trainer.global_step)

        def configure_optimizers(self) -> Optimizer:
            return OPTIMIZERS[case.optimizer](list(self.parameters()))

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if save is not None and trainer.global_step == SAVED:
                trainer.save_checkpoint(save)

    options = dict(case.config)
    strategy = getattr(classes, options.pop("strategy"))(**options)
    callbacks = [Save(), *([classes.PTOCallback(scope="world")] if "pto" in case.events else [])]
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=topology.num_devices, num_nodes=topology.num_nodes,
        max_steps=LAST, max_epochs=-1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, use_distributed_sampler=False, callbacks=callbacks,
    )  # fmt: skip
    module = Module()
    module.train_dataloader = lambda: DataLoader(torch.zeros(LAST, 1))  # type: ignore[arg-type, method-assign]
    return module, trainer


ENGINES: dict[str, Callable[[Case, Any, Trail], None]] = {
    "gradients": train_gradients,
    "updates": train_updates,
    "fsdp": train_fsdp,
    "fsdp-updates": train_sharded_updates,
    "pto": train_pto,
    "trainer": train_resumed,
}

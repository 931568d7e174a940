"""What digests.py trains beside DDP's hook: updates, FSDP2, the shared step, and strategies that resume in a Trainer.

A run gives what it computed, in order, to a `Trail`. Everything goes through public names.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.digests_cases import PATHS, TOPOLOGIES, Net, batch, raw

STEPS, JOINS = 10, 4
"""Of a run, and the step before which it gets a parameter group, skips a step, or goes on from its state."""


def found(name: str, *modules: str) -> Any:
    """A public name of the code under test, in the first module that has it."""
    for module in modules:
        try:
            return getattr(importlib.import_module(f"lightning_sparse.{module}"), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise LookupError(f"no {name} in {modules}")


def method(held: Any, *names: str) -> Any:
    """A method of an object by the first name that it has."""
    return getattr(held, next(name for name in names if hasattr(held, name)))


class Trail:
    """Digest of what is added to it."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()

    def add(self, *values: Any) -> None:
        """Tensors by their elements in the order of dims; of a sharded one, those of this rank."""
        for value in values:
            if isinstance(value, DTensor):
                value = value.to_local()
            self._hasher.update(raw(value) if isinstance(value, Tensor) else repr(value).encode())

    def add_tree(self, tree: Any) -> None:
        """What a state_dict holds, in its order."""
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


@dataclass(frozen=True)
class EngineCase:
    """One training run.

    Args:
        name: what differs from others, without engine and topology.
        topology: one of TOPOLOGIES.
        engine: what is trained: a key of ENGINES.
        config: options of the engine.
        dtype: of parameters.
        optimizer: a key of OPTIMIZERS.
        events: what else happens.
    """

    name: str
    topology: str
    engine: str
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    optimizer: str = "adamw"
    events: frozenset[str] = frozenset()

    @property
    def title(self) -> str:
        """Names the case in files."""
        return f"{self.engine} {self.topology} {self.name}"

    @property
    def world_size(self) -> int:
        """P."""
        return sum(map(len, TOPOLOGIES[self.topology]))

    def run(self, topology: Any) -> str:
        """Digest of this rank."""
        trail = Trail()
        ENGINES[self.engine](self, topology, trail)
        return trail.digest()


OPTIMIZERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=3e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.03, momentum=0.9),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.03, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.03),
}


# -- updates -----------------------------------------------------------------------------------------------------------


class Normed(Net):
    """With buffers, of which each rank has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(23)  # type: ignore[assignment]


def train_updates(case: EngineCase, topology: Any, trail: Trail) -> None:
    rank = dist.get_rank()
    module = Normed().to(case.dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1 + rank / 8)  # ranks begin with what the first one has
    added = list(module.side.parameters()) if "group" in case.events else []
    first = [p for p in module.parameters() if all(p is not each for each in added)]
    halves = [first[::2], first[1::2]] if "two optimizers" in case.events else [first]
    optimizers = [OPTIMIZERS[case.optimizer](half) for half in halves]
    config = found("UpdatesConfig", "updates")(**{"density": 0.05, **case.config})
    updates = found("LocalUpdates", "updates")(module, optimizers, config, topology)
    ddp = DistributedDataParallel(module, process_group=topology.intra, find_unused_parameters=True)

    def loss_of(step: int) -> Tensor:
        x, y = batch(step, 0, rank, case.dtype)
        return nn.functional.mse_loss(ddp(x, True), y)

    run_updates(case, topology, trail, module, optimizers, updates, loss_of, added)


def train_sharded_updates(case: EngineCase, topology: Any, trail: Trail) -> None:
    model = sharded(case, topology)
    optimizer = OPTIMIZERS[case.optimizer](list(model.parameters()))
    config = found("UpdatesConfig", "updates")(**{"density": 0.05, **case.config})
    updates = found("LocalUpdates", "updates")(model, optimizer, config, topology)
    loss_of = loss_of_blocks(case, model)
    run_updates(case, topology, trail, model, [optimizer], updates, loss_of, [])


def run_updates(
    case: EngineCase,
    topology: Any,
    trail: Trail,
    module: nn.Module,
    optimizers: list[Optimizer],
    updates: Any,
    loss_of: Callable[[int], Tensor],
    added: list[nn.Parameter],
) -> None:
    """The loop, with what was trained after each step, shared weights in the middle and at the end, and finish()."""
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
            with updates.shared_weights():
                trail.add(*module.parameters(), *module.buffers())
            trail.add(*module.parameters(), *module.buffers())
    updates.finish()
    trail.add(*module.parameters(), *module.buffers())
    check_finite(module)
    updates.detach()
    updates.end()


def check_finite(module: nn.Module) -> None:
    if not all(bool(local(p).isfinite().all()) for p in module.parameters()):
        raise FloatingPointError("parameters are not finite: the case says nothing")


def local(tensor: Tensor) -> Tensor:
    """This rank's elements."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Blocks that repeat between two layers, of sizes that no number of devices divides."""

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


def sharded(case: EngineCase, topology: Any) -> nn.Module:
    shard = found("shard", "fsdp", "sharding", "gradients", "updates", "topology")
    mesh_of = found("mesh_of", "fsdp", "sharding", "gradients", "updates", "topology")
    model = Blocks().to(case.dtype)
    if "frozen" in case.events:
        model.blocks[1].requires_grad_(False)
    sharded: nn.Module = shard(model, mesh_of(topology))
    return sharded


def loss_of_blocks(case: EngineCase, model: nn.Module) -> Callable[[int], Tensor]:
    def loss_of(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x, y = torch.randn(8, 13, generator=generator), torch.randn(8, 5, generator=generator)
        return nn.functional.mse_loss(model(x.to(case.dtype)), y.to(case.dtype))

    return loss_of


def train_fsdp(case: EngineCase, topology: Any, trail: Trail) -> None:
    model = sharded(case, topology)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](trained)
    config = found("ExchangeConfig", "exchange")(**{"density": 0.05, **case.config})
    gradients = found("ShardedGradients", "fsdp", "gradients", "gradients.fsdp")(model, config, topology)
    loss_of = loss_of_blocks(case, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        passes = 3 if "accumulate" in case.events else 1
        for part in range(passes):
            with gradients.accumulating() if part < passes - 1 else nullcontext():
                loss_of(10 * step + part).backward()  # type: ignore[no-untyped-call]
        trail.add(*(p.grad for p in trained))
        optimizer.step()
        method(gradients, "step", "end_round")()
        trail.add(*model.parameters())
    method(gradients, "show_shared", "average_buffers")()
    trail.add(*model.buffers())
    check_finite(model)


# -- the shared step ---------------------------------------------------------------------------------------------------


def train_pto(case: EngineCase, topology: Any, trail: Trail) -> None:
    """Gradients are made up, the same on all ranks, as a reduction would leave them."""
    communicator = found("communicator_of", "pto")(topology, case.config["scope"])
    parameters = pto_parameters("big" in case.events)
    late = parameters.pop() if "group" in case.events else None

    def start() -> Any:
        optimizer = OPTIMIZERS[case.optimizer](
            [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.003}],
        )
        found("ShardedStep", "pto")(optimizer, communicator)
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
    """More than there are ranks, none a multiple of another; one so big that it is divided."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(37, 13), (37,), (29, 37), (29,), (5, 29), (5,), (), (3, 2, 5, 5), *([(301, 67)] if big else []), (11, 7)]
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    made[7].data = made[7].data.to(memory_format=torch.channels_last)
    made[5].data = made[5].data.to(torch.bfloat16)
    return made


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """One parameter is unused in every third step."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, p in enumerate(parameters):
        grad = torch.empty_like(p.data).copy_(torch.randn(p.shape, generator=generator))
        p.grad = None if step % 3 == 1 and index == 3 else grad


def whole_state(optimizer: Any) -> Any:
    """The state_dict as rank 0 saves it, given to all ranks."""
    optimizer.consolidate_state_dict()
    held = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held)
    return held[0]


# -- strategies in a Trainer -------------------------------------------------------------------------------------------

SAVED, LAST = 3, 6


def train_resumed(case: EngineCase, topology: Any, trail: Trail) -> None:
    """Steps to LAST with a save at SAVED; and from there to LAST in a new Trainer."""
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
    dist.barrier()  # all have read it
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def environment(topology: Any) -> dict[str, str]:
    """As torchrun sets it, for ranks that have joined their process group already."""
    values = {
        "RANK": topology.rank, "LOCAL_RANK": topology.device_index, "GROUP_RANK": topology.node_index,
        "WORLD_SIZE": topology.world_size, "LOCAL_WORLD_SIZE": topology.num_devices,
        "GROUP_WORLD_SIZE": topology.num_nodes, "TORCHELASTIC_RUN_ID": "digests",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def fit(case: EngineCase, topology: Any, save: Path | None) -> tuple[Any, Any]:
    """A module, and a Trainer that saves it at SAVED."""
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Blocks()

        def training_step(self, _: Tensor, index: int) -> Tensor:
            return loss_of_blocks(case, self.net)(self.trainer.global_step)  # whatever the loader says: a resume

        def configure_optimizers(self) -> Optimizer:
            return OPTIMIZERS[case.optimizer](list(self.parameters()))

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if save is not None and trainer.global_step == SAVED:
                trainer.save_checkpoint(save)

    classes = importlib.import_module("lightning_sparse.flavours.pytorch_lightning")
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


ENGINES: dict[str, Callable[[EngineCase, Any, Trail], None]] = {
    "updates": train_updates,
    "fsdp": train_fsdp,
    "fsdp-updates": train_sharded_updates,
    "pto": train_pto,
    "trainer": train_resumed,
}


# -- the cases ---------------------------------------------------------------------------------------------------------


def engine_cases() -> list[EngineCase]:
    """All of them."""
    every = [case for group in (_updates(), _fsdp(), _pto(), _trainers()) for case in group]
    titles = [case.title for case in every]
    assert len(titles) == len(set(titles)), "a name stands for two cases"
    return every


def _updates() -> Iterator[EngineCase]:
    def case(name: str, topology: str, config: dict[str, Any], *events: str, **options: Any) -> EngineCase:
        return EngineCase(name, topology, "updates", config, events=frozenset(events), **options)

    for topology, path, delay in itertools.product(("2x1", "2x2", "4x1"), PATHS, (0, 1)):
        yield case(f"{path} delay {delay}", topology, {"exchange": path, "delay": delay})
    for path in PATHS:
        replicated = {"exchange": path, "shard_optimizer": False}
        yield case(f"{path} replicated", "2x2", replicated)
        yield case(f"{path} momentum", "2x2", {"exchange": path}, optimizer="momentum")
        yield case(f"{path} sync_every 2", "2x2", {"exchange": path, "sync_every": 2})
        yield case(f"{path} bfloat16", "2x2", {"exchange": path}, dtype=torch.bfloat16)
        yield case(f"{path} bfloat16 replicated", "2x2", replicated, dtype=torch.bfloat16, optimizer="momentum")
    for topology in ("2x1", "4x1"):
        yield case("sparse momentum", topology, {}, optimizer="momentum")
        yield case("sparse sync_every 2", topology, {"sync_every": 2})
        yield case("sparse step_ahead", topology, {"step_ahead": 0.6})
        yield case("sparse step_ahead sync_every 2 delay 0", topology, {"step_ahead": 0.3, "sync_every": 2, "delay": 0})
    yield case("regional step_ahead", "4x1", {"exchange": "regional", "step_ahead": 0.6})
    yield case("sparse auto ahead momentum", "4x1", {"density": 0.3}, optimizer="momentum")
    for value_dtype in ("float32", "float16"):
        yield case(f"sparse values {value_dtype}", "2x2", {"value_dtype": value_dtype})
    for sharded in (True, False):
        name = "" if sharded else " replicated"
        yield case(f"sparse group{name}", "2x2", {"shard_optimizer": sharded}, "group")
        yield case(f"regional group{name}", "2x2", {"exchange": "regional", "shard_optimizer": sharded}, "group")
        yield case(f"sparse skip{name}", "2x2", {"shard_optimizer": sharded}, "skip")
        yield case(f"sparse two optimizers{name}", "2x2", {"shard_optimizer": sharded}, "two optimizers")
    yield case("sparse group", "2x1", {}, "group", optimizer="momentum")
    yield case("dense without overlap", "2x2", {"exchange": "dense", "overlap": False})
    yield case("sparse without overlap", "2x2", {"overlap": False})


def _fsdp() -> Iterator[EngineCase]:
    for topology, path in itertools.product(("2x2", "2x1"), PATHS):
        config = {"exchange": path}
        yield EngineCase(path, topology, "fsdp", config, optimizer="momentum")
        yield EngineCase(
            f"{path} accumulate", topology, "fsdp", config, optimizer="momentum", events=frozenset({"accumulate"})
        )
        yield EngineCase(path, topology, "fsdp-updates", config)
    for path in ("dense16", "sparse"):
        config = {"exchange": path}
        yield EngineCase(f"{path} frozen", "2x2", "fsdp", config, events=frozenset({"frozen"}))
        yield EngineCase(f"{path} bfloat16", "2x2", "fsdp", config, torch.bfloat16, "momentum")
        yield EngineCase(f"{path} bfloat16", "2x2", "fsdp-updates", config, torch.bfloat16)
        yield EngineCase(
            f"{path} momentum delay 0", "2x2", "fsdp-updates", {**config, "delay": 0}, optimizer="momentum"
        )


def _pto() -> Iterator[EngineCase]:
    for topology, scope in (("2x2", "node"), ("2x2", "world"), ("1x2", "node"), ("1x2", "world")):
        for optimizer in ("adam", "adamw", "momentum", "nesterov", "adagrad"):
            yield EngineCase(f"{scope} {optimizer}", topology, "pto", {"scope": scope}, optimizer=optimizer)
        for event in ("big", "group", "resume", "closure"):
            config = {"scope": scope}
            events = frozenset({event, "big"} if event == "resume" else {event})
            yield EngineCase(f"{scope} {event}", topology, "pto", config, optimizer="adam", events=events)
        yield EngineCase(
            f"{scope} big momentum", topology, "pto", {"scope": scope}, optimizer="momentum", events=frozenset({"big"})
        )


def _trainers() -> Iterator[EngineCase]:
    sparse = {"density": 0.05, "exchange": "sparse"}
    hier = {"strategy": "MSTopKHierStrategy", "warmup_epochs": 0, **sparse}
    updates = {"strategy": "MSTopKLocalStrategy", **sparse}
    fsdp = {"strategy": "MSTopKFSDPStrategy", **sparse}
    yield EngineCase("mstopk_hier", "2x1", "trainer", hier, optimizer="momentum")
    corrected = {**hier, "momentum_correction": True}
    yield EngineCase("mstopk_hier corrected", "2x1", "trainer", corrected, optimizer="momentum")
    yield EngineCase("mstopk_hier pto", "2x1", "trainer", hier, optimizer="momentum", events=frozenset({"pto"}))
    yield EngineCase("mstopk_local", "2x1", "trainer", updates)
    yield EngineCase("mstopk_local dense16", "2x1", "trainer", {**updates, "exchange": "dense16"})
    yield EngineCase("mstopk_local regional", "2x2", "trainer", {**updates, "exchange": "regional"})
    yield EngineCase("mstopk_local", "2x2", "trainer", updates)
    yield EngineCase("mstopk_fsdp", "2x1", "trainer", fsdp)
    yield EngineCase("mstopk_fsdp", "2x2", "trainer", fsdp)
    whole = {**fsdp, "save_distributed_checkpoint": False}
    yield EngineCase("mstopk_fsdp in one file", "2x1", "trainer", whole)
    gradients = {**fsdp, "send": "gradients"}
    yield EngineCase("mstopk_fsdp gradients", "2x1", "trainer", gradients, optimizer="momentum")

"""One training per strategy in a Trainer, in Fabric and in a loop, with the same data, saves and resumes."""

import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.engine import Engine
from lightning_sparse.exchange import ExchangeConfig
from lightning_sparse.fsdp import ShardedGradients, mesh_of, shard
from lightning_sparse.gradients import HierConfig, HierState
from lightning_sparse.strategy import hier_hook, resume
from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.helpers.distributed import groups_of_its_own, run_ranks
from tests.helpers.scenarios import Scenarios
from tests.strategy.models import node_residual, sum_over_nodes

dcp: Any = import_module("torch.distributed.checkpoint")  # exports its functions without types
CLASSES = {"hier": "MSTopKHierStrategy", "local": "MSTopKLocalStrategy", "fsdp": "MSTopKFSDPStrategy"}
# Each kind: its class, and the options that distinguish it.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "hier": ("hier", {"exchange": "sparse"}),
    "momentum": ("hier", {"exchange": "sparse", "momentum_correction": True}),
    "local": ("local", {}),
    "fsdp-updates": ("fsdp", {}),
    "fsdp-gradients": ("fsdp", {"send": "gradients", "exchange": "sparse"}),
}


@dataclass(frozen=True)
class Case:
    """A strategy on a host.

    Attributes:
        kind: One of `KINDS`.
        host: "trainer", "fabric" or "loop".
        form: The form of checkpoints, "file" or "folder".
        options: More options of the strategy.
        precision: The precision of a Trainer or of Fabric.
        seed: The seed of the initial weights.
        momentum: The momentum of SGD, which then replaces the kind's usual optimizer.
    """

    kind: str
    host: str
    form: str
    options: dict[str, Any] = field(default_factory=dict)
    precision: str = "32-true"
    seed: int = 0
    momentum: float | None = None

    def __str__(self) -> str:
        others = [f"{name}={value}" for name, value in self.options.items()]
        others += [self.precision] if self.precision != "32-true" else []
        return " ".join([self.kind, self.host, self.form, *others])

    @property
    def sends_gradients(self) -> bool:
        return self.kind in ("hier", "momentum", "fsdp-gradients")

    def exchange_options(self) -> dict[str, Any]:
        """Return the options of the exchange."""
        return {"density": 0.05, **KINDS[self.kind][1], **self.options}

    def strategy(self, package: str, **options: Any) -> Any:
        """Return the strategy for a Trainer or for Fabric."""
        name = KINDS[self.kind][0]
        given = self.exchange_options()
        if self.host == "trainer" or name == "fsdp":
            given["save_distributed_checkpoint"] = self.form == "folder"
        if name == "hier":
            given["bucket_cap_mb"] = 0.0005  # several buckets, which DDP rebuilds after the first round
            if self.host == "trainer":
                given["warmup_steps"] = 0
        module = import_module(f"lightning_sparse.flavours.{package}")
        return getattr(module, CLASSES[name])(**{**given, **options})

    def net(self) -> nn.Module:
        return Net(self.seed)

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.momentum is not None:
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=self.momentum)
        if self.sends_gradients:  # a loop does not save the optimizer's state
            momentum = 0.0 if self.host == "loop" and self.kind != "momentum" else 0.9
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        return torch.optim.AdamW(model.parameters(), lr=0.01)


class Net(nn.Module):
    """Repeated blocks between two layers, and batch norm. No size is a multiple of 2 or 3 devices."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm = nn.Linear(13, 11), nn.BatchNorm1d(11)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 11)) for _ in range(2))
        self.last = nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.last(x)
        return out


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    batch = torch.randn(8, 13, generator=torch.Generator().manual_seed(1000 * step + rank))
    dtype = next(p.dtype for p in model.parameters())
    loss: Tensor = model(batch.to(dtype)).square().mean()
    return loss


def flat(model: nn.Module, *, buffers: bool = False) -> Tensor:
    """Return all parameters, and optionally the buffers. A collective inside the node if parameters are sharded."""
    tensors = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    tensors += [each.float() for each in model.buffers()] if buffers else []
    return torch.cat([each.detach().flatten() for each in tensors])


@dataclass
class Look:
    """The global weights, unsent gradients or updates, and sums of the optimizer's state between two steps."""

    weights: Tensor
    pending: Tensor
    moments: Tensor
    rounds: int


def look(engine: Engine, model: nn.Module, optimizer: Optimizer) -> Look:
    """Look at an engine. A collective."""
    with engine.global_weights():
        weights = flat(model).clone()
    pending = _pending(engine, model) if engine.active else torch.zeros(0)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    moments = torch.zeros(len(params), 2, 2, dtype=torch.float64)  # parameter, quantity, sums
    for of_one, p in zip(moments, params, strict=True):
        state = [each for _, each in sorted(optimizer.state.get(p, {}).items())]
        tensors = [each for each in state if isinstance(each, Tensor) and each.dim()]
        for sums, value in zip(of_one, tensors, strict=False):
            whole = (value.full_tensor() if isinstance(value, DTensor) else value).double()
            sums += torch.stack([whole.sum(), whole.abs().sum()])
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    if not sharded and any(not one.division.is_replicated for one in getattr(engine, "optimizers", ())):
        dist.all_reduce(moments, group=engine.topology.intra)
    return Look(weights, pending, moments, engine.rounds)


def _pending(engine: Any, model: nn.Module) -> Any:
    """Return the mean over nodes of unsent updates or gradients; with DDP the sum. A collective."""
    if isinstance(engine, HierState):
        engine.commit_round()
        wrapped: Any = engine.parameters.module
        return sum_over_nodes(node_residual(wrapped, engine), engine)
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    starts, at = {}, 0
    for name, p in engine.module.named_parameters():
        starts[name], at = at, at + p.numel()
    for piece in engine.state().pieces.get("residual", ()):
        total[starts[piece.name] + piece.begin : starts[piece.name] + piece.end] += piece.tensor
    for one in getattr(engine, "optimizers", ()):
        slices = one.state.slices
        for (name, begin, end), piece in zip(slices.named(engine.names), slices.of(one.state.pending_S), strict=True):
            total[starts[name] + begin : starts[name] + end] += piece
    dist.all_reduce(total)
    return total / engine.topology.num_nodes


@dataclass
class Trained:
    """The result of a training: weights, with buffers where the host saves the buffers of each rank."""

    weights: Tensor
    looks: dict[int, Look]
    rounds: int


def train(
    case: Case,
    steps: int,
    *,
    start: str | None = None,
    save: tuple[int, str] | None = None,
    look_at: Collection[int] = (),
    **options: Any,
) -> Trained:
    """Train on all ranks.

    Args:
        case: The strategy and its host.
        steps: The number of the last step.
        start: The checkpoint to resume from.
        save: The step after which to save, and the path of the checkpoint.
        look_at: Steps after which to call `look`.
        options: More options of the strategy.
    """
    warnings.simplefilter("ignore")
    looks: dict[int, Look] = {}
    run = {"trainer": _in_a_trainer, "fabric": _in_fabric, "loop": _in_a_loop}[case.host]

    def note(step: int, engine: Engine, model: nn.Module, optimizer: Optimizer) -> None:
        if step in look_at:
            looks[step] = look(engine, model, optimizer)

    with groups_of_its_own():
        model, engine = run(case, steps, start, save or (-1, ""), note, options)
        return Trained(flat(model, buffers=case.host != "loop").clone(), looks, engine.rounds)


def results_in_one_start(scenarios: Scenarios, nodes: int = 2, devices: int = 1, timeout: float = 150) -> Any:
    """Return a fixture: by rank, the result of each scenario, called with the path of its own folder."""

    @pytest.fixture(scope="module")
    def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
        folder, wanted = tmp_path_factory.mktemp("scenarios"), scenarios.wanted(request)
        for name in wanted:
            (folder / name).mkdir()
        return run_ranks(_run_scenarios, wanted, str(folder), nodes=nodes, devices=devices, timeout=timeout)

    return results


def _run_scenarios(scenarios: dict[str, Any], folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"folder": folder}
    for name, scenario in scenarios.items():
        try:
            with groups_of_its_own():
                found[name] = scenario(f"{folder}/{name}")
        except Exception as error:
            raise RuntimeError(f"scenario {name} raised; the next scenarios did not run") from error
    return found


Note = Callable[[int, Engine, nn.Module, Optimizer], None]
Save = tuple[int, str]


def cluster() -> dict[str, int]:
    """Return the cluster of the launcher, as options of a Trainer or of Fabric."""
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    return {"devices": devices, "num_nodes": int(os.environ["WORLD_SIZE"]) // devices}


def module_of(case: Case, package: str = "pytorch_lightning") -> Any:
    """Return a LightningModule that makes its batches from the global step, so that a resumed run gets them, too."""
    pl = import_module("pytorch_lightning" if package == "pytorch_lightning" else "lightning.pytorch")

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = case.net()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return loss_of(self.net, self.trainer.global_step, self.global_rank)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.zeros(96, 1), batch_size=4)  # type: ignore[arg-type]

        def configure_optimizers(self) -> Optimizer:
            return case.optimizer(self)

    return Module()


def _in_a_trainer(
    case: Case, steps: int, start: str | None, save: Save, note: Note, options: dict[str, Any]
) -> tuple[nn.Module, Engine]:
    pl = import_module("pytorch_lightning")

    class Visit(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            note(trainer.global_step, trainer.strategy.engine, module, trainer.optimizers[0])

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == save[0]:
                trainer.save_checkpoint(save[1])

    module, strategy = module_of(case), case.strategy("pytorch_lightning", **options)
    plugins, precision = [], {"precision": case.precision}
    if case.precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        plugins, precision = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)], {}
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, max_steps=steps, max_epochs=-1, logger=False, plugins=plugins,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, callbacks=[Visit()],
        **precision, **cluster(),
    )  # fmt: skip
    trainer.fit(module, ckpt_path=start)
    return module, strategy.engine


def _in_fabric(
    case: Case, steps: int, start: str | None, save: Save, note: Note, options: dict[str, Any]
) -> tuple[nn.Module, Engine]:
    strategy = case.strategy("lightning_fabric", **options)
    fabric = import_module("lightning_fabric").Fabric(
        accelerator="cpu", strategy=strategy, precision=case.precision, **cluster()
    )
    fabric.launch()
    net = case.net()
    if "fsdp" in case.kind:
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(case.optimizer(model))
    else:
        model, optimizer = fabric.setup(net, case.optimizer(net))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if start is not None:
        fabric.load(start, state)
    (engine,) = strategy.engines
    for step in range(state["step"], steps):
        note(step, engine, model, optimizer.optimizer)
        optimizer.zero_grad()
        fabric.backward(loss_of(model, step, fabric.global_rank))
        optimizer.step()
        if step + 1 == save[0]:
            fabric.save(save[1], {**state, "step": step + 1})
    strategy.finish()
    return model, engine


@contextmanager
def loop_of(case: Case) -> Iterator[tuple[nn.Module, Optimizer, Engine]]:
    """Yield a wrapped model, its optimizer and its engine, without Lightning."""
    topology, options, kind = discover(), case.exchange_options(), case.kind
    model = case.net().to(torch.bfloat16 if case.precision == "bf16-true" else torch.float32)
    options.pop("send", None)
    if "fsdp" in kind:
        model = shard(model, mesh_of(topology))
    optimizer = case.optimizer(model)
    engine: Engine
    if kind == "fsdp-gradients":
        engine = ShardedGradients(model, ExchangeConfig(**options), topology)
    elif case.sends_gradients:
        engine = HierState(model, HierConfig(**{"warmup_steps": 0, **options}), topology)
        model = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        model.register_comm_hook(engine, hier_hook)
        engine.watch([optimizer])
    else:
        engine = LocalUpdates(model, optimizer, UpdatesConfig(**options), topology)
        if "fsdp" not in kind:
            model = DistributedDataParallel(model, process_group=topology.intra)
    yield model, optimizer, engine
    engine.close()


def train_loop(model: nn.Module, optimizer: Optimizer, engine: Engine, begin: int, end: int) -> None:
    """Take some steps without Lightning."""
    for step in range(begin, end):
        optimizer.zero_grad()
        engine.before_backward()
        loss_of(model, step, dist.get_rank()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        engine.step()


def save_loop(model: nn.Module, engine: Engine, folder: str, background: bool = False) -> Any:
    """Save a loop with torch.distributed.checkpoint; return a future if it is saved in the background."""
    with engine.global_weights():
        state = {"model": model.state_dict(), "engine": engine}
        if background:  # its collectives overlap the training's
            return dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        dcp.save(state, checkpoint_id=folder)
    return None


def load_loop(model: nn.Module, engine: Engine, folder: str) -> None:
    """Load what `save_loop` saved."""
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    model.load_state_dict(state)
    resume(engine, folder, "engine")


def _in_a_loop(
    case: Case, steps: int, start: str | None, save: Save, note: Note, options: dict[str, Any]
) -> tuple[nn.Module, Engine]:
    begin = 0
    with loop_of(case) as (model, optimizer, engine):
        if start is not None:
            begin = int(start.rsplit("-", 1)[1])
            train_loop(model, optimizer, engine, 0, 1)  # creates state that loading must replace
            load_loop(model, engine, start)
        for step in range(begin, steps):
            note(step, engine, model, optimizer)
            train_loop(model, optimizer, engine, step, step + 1)
            if step + 1 == save[0]:
                save_loop(model, engine, save[1])
    return model, engine

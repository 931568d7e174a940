"""The ways of peers.py to bring gradients together: torch's own, two published ones from a checkout, and ours.

A way is made from (model, topology, recipe) and gives a `Stepper`: what is called for the loss, what comes between
backward and the optimizer's step, and the optimizer. All but DeMo, which is an optimizer of its own, use the same SGD.

======================= ==============================================================================================
one node alone          DDP inside each node and nothing between nodes: a node's share of each batch, as many steps.
                        Accuracy is the mean over nodes, whose parameters do differ
DDP, fp16, bf16 hooks   torch's, default buckets
PowerSGD r1             torch's, one bucket: on Gloo it crashes with more
post-local SGD          torch's: all-reduce in the node every step, parameters of all ranks averaged every 4 steps
GRACE top-k, QSGD       grace_dl.dist: parameter by parameter, after backward; top-k keeps residuals, QSGD has 64 levels
DeMo                    an optimizer; matrices of [out, in * height * width] for convolutions, whose layout it lacks
ours 1 %                exchange="sparse" without warm-up
..., momentum           the same with momentum_correction=True
ours, default           exchange="auto", warm-up over three tenths of the steps. Its first round measures both networks,
                        once, with tens of megabytes, which are in its bytes
======================= ==============================================================================================
"""

# No "from __future__ import annotations": DDP looks at the annotations of a hook.
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.optim import Optimizer

from benchmarks.convergence.ways import wrap
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import Topology

PERIOD = 4  # steps between two averages of post-local SGD


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all ways share."""

    lr: float
    demo_lr: float
    steps: int
    momentum: float = 0.9
    weight_decay: float = 5e-4


@dataclass
class Stepper:
    loss: nn.Module
    optimizer: Any
    exchange: Callable[[], None] = lambda: None
    group: ProcessGroup | None = None  # who has the same parameters; None: everyone
    at: Callable[[int], None] = lambda step: None


Make = Callable[[nn.Module, Topology, Recipe], Stepper]


def sgd(model: nn.Module, recipe: Recipe) -> Optimizer:
    return torch.optim.SGD(
        model.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay, foreach=True
    )


def hooked(state: Callable[[], Any], hook: Any, **options: Any) -> Make:
    """DDP with a hook; None for none."""

    def make(model: nn.Module, _: Topology, recipe: Recipe) -> Stepper:
        ddp = wrap(model, **options)
        if hook is not None:
            ddp.register_comm_hook(state(), hook)
        return Stepper(ddp, sgd(model, recipe))

    return make


def alone(model: nn.Module, topology: Topology, recipe: Recipe) -> Stepper:
    loss = wrap(model, process_group=topology.intra)
    return Stepper(loss, sgd(model, recipe), group=topology.intra)


def post_local(model: nn.Module, topology: Topology, recipe: Recipe) -> Stepper:
    # The remainder makes averages fall on the last step before each validation.
    begin = recipe.steps // 10 // PERIOD * PERIOD + PERIOD - 1
    ddp = wrap(model)
    state = post_localSGD_hook.PostLocalSGDState(None, topology.intra, start_localSGD_iter=begin)  # type: ignore[no-untyped-call]
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=begin)
    return Stepper(ddp, PostLocalSGDOptimizer(sgd(model, recipe), averager))


def grace(kind: str) -> Make:
    def make(model: nn.Module, _: Topology, recipe: Recipe) -> Stepper:
        def of(module: str) -> Any:
            return importlib.import_module(f"grace_dl.dist.{module}")

        if kind == "top-k":
            compressor, memory = of("compressor.topk").TopKCompressor(0.01), of("memory.residual").ResidualMemory()
        else:
            compressor, memory = of("compressor.qsgd").QSGDCompressor(64), of("memory.none").NoneMemory()
        communicator = of("communicator.allgather").Allgather(compressor, memory, dist.get_world_size())

        def exchange() -> None:
            for name, parameter in model.named_parameters():
                parameter.grad = communicator.step(parameter.grad, name)

        return Stepper(model, sgd(model, recipe), exchange)

    return make


def demo(model: nn.Module, _: Topology, recipe: Recipe) -> Stepper:
    views = [nn.Parameter(p.detach().view(len(p), -1) if p.ndim > 2 else p.detach()) for p in model.parameters()]
    optimizer = importlib.import_module("demo").DeMo(views, lr=recipe.demo_lr)

    def exchange() -> None:
        for view, parameter in zip(views, model.parameters(), strict=True):
            view.grad = None if parameter.grad is None else parameter.grad.reshape(view.shape)

    return Stepper(model, optimizer, exchange)


def ours(warmup: int, **options: Any) -> Make:
    """`warmup`: tenths of the steps over which density falls, an "epoch" of the schedule each; 0 for none."""

    def make(model: nn.Module, topology: Topology, recipe: Recipe) -> Stepper:
        ddp, tenth = wrap(model), max(1, recipe.steps // 10)
        state = HierState(ddp.module, HierConfig(warmup_epochs=warmup, **options), topology)
        ddp.register_comm_hook(state, hier_hook)
        optimizer = sgd(model, recipe)
        state.watch([optimizer])

        def at(step: int) -> None:
            state.epoch = step // tenth
            state.before_backward()

        return Stepper(ddp, optimizer, at=at)

    return make


WAYS: dict[str, Make] = {
    "one node alone": alone,
    "DDP": hooked(lambda: None, None),
    "fp16 hook": hooked(lambda: None, default_hooks.fp16_compress_hook),
    "bf16 hook": hooked(lambda: None, default_hooks.bf16_compress_hook),
    "PowerSGD r1": hooked(
        lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
        bucket_cap_mb=1000,
    ),
    "post-local SGD": post_local,
    "GRACE top-k 1 %": grace("top-k"),
    "GRACE QSGD": grace("qsgd"),
    "DeMo": demo,
    "ours 1 %": ours(0, exchange="sparse"),
    "ours 1 %, momentum": ours(0, exchange="sparse", momentum_correction=True),
    "ours, default": ours(3),
}


def available(grace_path: Path | None, demo_path: Path | None) -> tuple[list[str], list[str]]:
    """Names of the ways that can run, and why the others cannot. Checkouts become importable."""
    names, missing = list(WAYS), []
    for prefix, path, module in (("GRACE", grace_path, "grace_dl.dist"), ("DeMo", demo_path, "demo")):
        reason = f"no --{prefix.lower()} PATH of a checkout"
        if path is not None:
            sys.path.insert(0, str(path))
            try:
                importlib.import_module(module)
                continue
            except ImportError as error:
                reason = str(error)
        names = [name for name in names if not name.startswith(prefix)]
        missing.append(f"{prefix} left out: {reason}")
    return names, missing


def same_start(model: nn.Module) -> None:
    """Parameters contiguous, as DeMo's views need them, and rank 0's everywhere. A collective."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.contiguous()
        dist.broadcast(tensor.data, 0)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])

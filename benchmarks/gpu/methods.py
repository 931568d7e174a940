"""The training methods of the parts `nccl` and `parity`, as users write them with Lightning Fabric.

================ ======================================================================================================
DDP              DistributedDataParallel, fp32 gradients
bf16 hook        DDP with torch's hook that sends gradients in bfloat16
PowerSGD r4      DDP with torch's PowerSGD hook, rank 4
averaging        torch's PeriodicModelAverager: averaged parameters every `PERIOD` steps instead of gradients. DiLoCo
                 sends as many bytes
mstopk_hier      the largest 1% of the gradients in each step
mstopk_local     the largest 1% of the updates in each step
mstopk_fsdp      the largest 1% of the updates in each step. FSDP2 shards the model inside each node
================ ======================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.strategy import Strategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.claims import DDP
from lightning_sparse.flavours.lightning_fabric import MSTopKFSDPStrategy, MSTopKHierStrategy, MSTopKLocalStrategy
from lightning_sparse.topology import Topology

PERIOD = 30

Loss = Callable[[nn.Module, Tensor], Tensor]


class HookedDDPStrategy(DDPStrategy):
    """DDP with a communication hook.

    Args:
        register: registers the hook with the wrapped module.
    """

    def __init__(self, register: Callable[[DistributedDataParallel], None], **kwargs: Any) -> None:
        super().__init__(gradient_as_bucket_view=True, **kwargs)
        self._register = register

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module, and register the hook."""
        wrapped = super().setup_module(module)
        self._register(wrapped)
        return wrapped


def _bf16_hook(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)


def _power_sgd_hook(ddp: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _power_sgd() -> Strategy:
    # torch's hook crashes on Gloo with more than one bucket
    one_bucket = {} if torch.cuda.is_available() else {"bucket_cap_mb": 4000}
    return HookedDDPStrategy(_power_sgd_hook, **one_bucket)


@dataclass(frozen=True)
class Method:
    """A training method.

    Args:
        strategy: makes Fabric's strategy.
        precision: Fabric's precision.
        period: number of steps between two averages of the parameters; 0 for methods that exchange in each step.
    """

    strategy: Callable[[], Strategy]
    precision: Any = "32-true"
    period: int = 0


def _hier(**options: Any) -> Callable[[], Strategy]:
    return lambda: MSTopKHierStrategy(warmup_steps=0, **options)


def _local(**options: Any) -> Callable[[], Strategy]:
    return lambda: MSTopKLocalStrategy(**options)


def _fsdp(**options: Any) -> Callable[[], Strategy]:
    if options.get("send") == "gradients":
        options["warmup_steps"] = 0
    return lambda: MSTopKFSDPStrategy(**options)


def _ddp() -> Strategy:
    return DDPStrategy(gradient_as_bucket_view=True)


METHODS = {
    DDP: Method(_ddp),
    "bf16 hook": Method(lambda: HookedDDPStrategy(_bf16_hook)),
    "PowerSGD r4": Method(_power_sgd),
    f"averaging every {PERIOD}": Method(_ddp, period=PERIOD),
    "mstopk_hier 1%": Method(_hier(exchange="sparse", density=0.01)),
    "mstopk_local 1%": Method(_local(exchange="sparse", density=0.01)),
    "mstopk_fsdp 1%": Method(_fsdp(exchange="sparse", density=0.01)),
}
EXACT = {
    "mstopk_hier, dense": Method(_hier(exchange="dense")),
    "mstopk_fsdp, dense gradients": Method(_fsdp(send="gradients", exchange="dense")),
}
"""Methods whose losses equal those of DDP."""
VARIANTS = {
    "mstopk_hier, regional": Method(_hier(exchange="regional", density=0.05)),
    "mstopk_local every 5 steps": Method(_local(exchange="sparse", density=0.05, sync_every=5)),
    "mstopk_fsdp, sparse gradients": Method(_fsdp(send="gradients", exchange="sparse", density=0.05)),
    "mstopk_hier, bf16-mixed": Method(_hier(exchange="sparse", density=0.05), "bf16-mixed"),
    "mstopk_local, bf16-mixed": Method(_local(exchange="sparse", density=0.05), "bf16-mixed"),
}
COMPARED = {name: METHODS[name] for name in METHODS if not METHODS[name].period} | EXACT | VARIANTS
"""Methods whose losses are compared with those of DDP and of the CPU. Averaged models differ between averages."""


@dataclass
class Training:
    """The training of a model with one method. All ranks create their trainings in the same order.

    Args:
        fabric: Fabric of this method.
        model, optimizer: as Fabric wraps them.
        loss: returns the loss of the model on a batch.
        averager: averages the parameters; None for other methods.
    """

    fabric: Fabric
    model: Any
    optimizer: Any
    loss: Loss
    averager: PeriodicModelAverager | None
    losses: list[Tensor] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        method: Method,
        topology: Topology,
        device: torch.device,
        build: Callable[[], nn.Module],
        loss: Loss,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    ) -> Training:
        """Wrap a model and its optimizer. A collective."""
        fabric = Fabric(
            accelerator="cuda" if device.type == "cuda" else "cpu",
            devices=topology.num_devices,
            num_nodes=topology.num_nodes,
            strategy=method.strategy(),
            precision=method.precision,
        )
        fabric.launch()
        torch.manual_seed(0)
        model = fabric.setup_module(build())
        averager = PeriodicModelAverager(method.period) if method.period else None
        return cls(fabric, model, fabric.setup_optimizers(optimizer(model)), loss, averager)

    def step(self, batch: Tensor) -> None:
        """Train on a batch of this rank."""
        with self.fabric.no_backward_sync(self.model, enabled=self.averager is not None):
            loss = self.loss(self.model, batch)
            self.fabric.backward(loss)
        self.optimizer.step()
        if self.averager is not None:
            self.averager.average_parameters(self.model.parameters())  # skips parameters without a gradient
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def finish(self) -> None:
        """Send all pending updates. A collective."""
        finish = getattr(self.fabric.strategy, "finish", None)
        if finish is not None:
            finish()

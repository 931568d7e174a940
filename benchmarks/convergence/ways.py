"""Training methods for several nodes. Each row of a convergence table is one method.

================ =====================================================================================================
none             plain DDP over all ranks
"hooked"         plain DDP with a communication hook of torch: "bf16", or "PowerSGD" of rank 1
"alone"          the single-node baseline: plain DDP on one node, on its ranks' share of each batch
"gradients"      DDP with `hier_hook` and the options of HierConfig; the default
"updates"        DDP inside the node, and `LocalUpdates` with the options of UpdatesConfig
"average"        DDP inside the node, and the mean of the nodes' models every ``every`` steps. With ``outer_lr``, DiLoCo
                 (Douillard et al. 2023): an outer SGD with Nesterov momentum uses the change of the mean as gradient
"post-local"     "average" after ``start`` steps of plain DDP (torch's post_localSGD_hook)
"each alone"     all nodes train separately, at the same time; the model of the first node counts
"grace"          grace_dl.dist of a checkout of sands-lab/grace, parameter by parameter, after backward: "top-k" of 1%
                 with residuals, or "qsgd" with 64 levels
"demo"           the optimizer DeMo of a checkout of bloc97/DeMo. It does not support the layout of convolutions, so
                 their parameters are matrices of [out, in * height * width]
================ =====================================================================================================

Validation uses the global weights, or the mean of the nodes' models.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.exchange import TensorSpec
from lightning_sparse.exchange.paths import Dense
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import Topology
from lightning_sparse.updates import LocalUpdates, UpdatesConfig


def wrap(
    model: nn.Module, bucket_cap_mb: float = 25, process_group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """Return DDP with local batch statistics, as for a cluster with a slow link."""
    # torch 2.15 renames the option and warns about the old name.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    local: dict[str, Any] = {sync_buffers: False}
    local["process_group"] = process_group
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb, **local)


class Way:
    """Plain DDP, and hooks for other methods.

    Args:
        model: model to train.
        optimizer: its optimizer.
        topology: topology of the ranks.
        options: options of the row.
    """

    group: ClassVar[str] = "world"

    def __init__(self, model: nn.Module, optimizer: Optimizer, topology: Topology, options: dict[str, Any]) -> None:
        self.model, self.optimizer, self.topology = model, optimizer, topology
        inside = None if self.group == "world" else topology.intra
        self.ddp = wrap(model, options.pop("bucket_cap_mb", 25), inside)
        if self.group == "node" and topology.num_devices == 1:
            self.ddp.require_backward_grad_sync = False  # as in the strategy, there is nothing to average
        self.numel = sum(p.numel() for p in model.parameters())
        self.rounds = 0

    def begin_epoch(self, epoch: int) -> None:
        """Prepare an epoch."""

    def before_backward(self) -> None:
        """Run between forward and backward."""

    def step(self) -> None:
        """Run the optimizer's step."""
        self.optimizer.step()

    def after_step(self) -> None:
        """Run after the optimizer's step."""
        self.rounds += 1

    def receive(self) -> None:
        """Wait until nothing is in flight."""

    @contextmanager
    @torch.no_grad()
    def shown(self) -> Iterator[None]:
        """Return a context in which the model holds the weights for a user."""
        parameters: list[Tensor] = list(self.model.parameters())
        own = [p.detach().clone() for p in parameters]
        self.finish()
        yield
        torch._foreach_copy_(parameters, own)

    def finish(self) -> None:
        """Give all ranks equal weights, at the end."""

    def bytes_per_node(self) -> float:
        """Return the bytes that a node's devices received from other nodes so far. A collective."""
        if self.topology.num_nodes == 1:
            return 0.0
        # The bytes of a dense exchange in this hierarchy. DDP's flat ring takes 1.5 times as many.
        work = TensorSpec(self.topology.num_nodes, self.topology.num_devices, self.numel)
        return self.rounds * self.topology.num_devices * Dense(work).bytes()


class Hooked(Way):
    """DDP with a communication hook of torch."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, topology: Topology, options: dict[str, Any]) -> None:
        hook = options.pop("hook")
        super().__init__(model, optimizer, topology, {"bucket_cap_mb": 1000})  # PowerSGD on Gloo crashes with more
        self.low_rank: powerSGD_hook.PowerSGDState | None = None
        if hook == "bf16":
            self.ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        else:
            self.low_rank = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            self.ddp.register_comm_hook(self.low_rank, powerSGD_hook.powerSGD_hook)

    def bytes_per_node(self) -> float:
        if self.low_rank is None:
            return super().bytes_per_node() / 2
        before, after = self.low_rank.total_numel_before_compression, self.low_rank.total_numel_after_compression
        return super().bytes_per_node() * (after / before if before else 1.0)


class Gradients(Way):
    """The paper's method, which exchanges the largest gradients."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, topology: Topology, options: dict[str, Any]) -> None:
        super().__init__(model, optimizer, topology, options)
        self.state = HierState(model, HierConfig(**options), topology)
        self.state.watch([optimizer])
        self.ddp.register_comm_hook(self.state, hier_hook)

    def begin_epoch(self, epoch: int) -> None:
        self.state.epoch = epoch

    def before_backward(self) -> None:
        self.state.before_backward()

    def bytes_per_node(self) -> float:
        return received(self.state.exchange.stats.bytes_between_nodes, self.topology)


class Updates(Way):
    """Exchanges the largest updates, after the optimizer's step."""

    group = "node"

    def __init__(self, model: nn.Module, optimizer: Optimizer, topology: Topology, options: dict[str, Any]) -> None:
        super().__init__(model, optimizer, topology, options)
        self.updates = LocalUpdates(model, optimizer, UpdatesConfig(**options), topology)

    def after_step(self) -> None:
        self.updates.step()

    def receive(self) -> None:
        for node in self.updates.optimizers:
            node.state.receive()

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self.updates.global_weights():
            yield

    def finish(self) -> None:
        self.updates.finish()

    def bytes_per_node(self) -> float:
        return received(self.updates.exchange.stats.bytes_between_nodes, self.topology)


class Average(Way):
    """Averages the models every ``every`` steps. DiLoCo, with an outer optimizer."""

    group = "node"

    def __init__(self, model: nn.Module, optimizer: Optimizer, topology: Topology, options: dict[str, Any]) -> None:
        super().__init__(model, optimizer, topology, options)
        self.every: int = options.pop("every")
        self.steps = 0
        self.outer: Optimizer | None = None
        self.shared = [p.detach().clone() for p in model.parameters()]
        if options:
            self.outer = torch.optim.SGD(self.shared, options["outer_lr"], options["outer_momentum"], nesterov=True)

    @torch.no_grad()
    def after_step(self) -> None:
        self.steps += 1
        if self.steps % self.every:
            return
        self.rounds += 1
        means = self.means()
        if self.outer is not None:
            for shared, mean in zip(self.shared, means, strict=True):
                shared.grad = shared - mean
            self.outer.step()
            means = self.shared
        torch._foreach_copy_(list(self.model.parameters()), means)

    def means(self) -> list[Tensor]:
        """Return the means of all ranks' parameters. A collective."""
        parameters = list(self.model.parameters())
        flat = torch.cat([p.detach().flatten() for p in parameters])
        dist.all_reduce(flat)
        flat /= self.topology.world_size
        pieces = torch.split(flat, [p.numel() for p in parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]

    @torch.no_grad()
    def finish(self) -> None:
        torch._foreach_copy_(list(self.model.parameters()), self.means())


class PostLocal(Average):
    """Plain DDP for the first steps, then averaged models."""

    group = "world"

    def __init__(self, model: nn.Module, optimizer: Optimizer, topology: Topology, options: dict[str, Any]) -> None:
        self.start: int = options.pop("start")
        super().__init__(model, optimizer, topology, options)
        state = post_localSGD_hook.PostLocalSGDState(None, topology.intra, self.start)  # type: ignore[no-untyped-call]
        self.ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)

    def after_step(self) -> None:
        if self.steps < self.start:
            self.steps += 1
            self.rounds += 1
            return
        super().after_step()


class EachAlone(Way):
    """All nodes train separately; the first node's model is validated."""

    group = "node"

    @torch.no_grad()
    def finish(self) -> None:
        for parameter in self.model.parameters():
            dist.broadcast(parameter, 0)


class Grace(Way):
    """GRACE."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, topology: Topology, options: dict[str, Any]) -> None:
        super().__init__(model, optimizer, topology, {})
        self.ddp.require_backward_grad_sync = False

        def of(module: str) -> Any:
            return importlib.import_module(f"grace_dl.dist.{module}")

        if options["kind"] == "top-k":
            compressor, memory = of("compressor.topk").TopKCompressor(0.01), of("memory.residual").ResidualMemory()
        else:
            compressor, memory = of("compressor.qsgd").QSGDCompressor(64), of("memory.none").NoneMemory()
        self.communicator = of("communicator.allgather").Allgather(compressor, memory, topology.world_size)

    def step(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.communicator.step(parameter.grad, name)
        super().step()


class DeMo(Way):
    """DeMo, whose learning rate follows the schedule of the optimizer that it replaces."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, topology: Topology, options: dict[str, Any]) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        super().__init__(model, optimizer, topology, {})
        self.ddp.require_backward_grad_sync = False
        self.views = [nn.Parameter(p.detach().flatten(1) if p.ndim > 2 else p.detach()) for p in model.parameters()]
        self.lr: float = options["demo_lr"]
        self.theirs = importlib.import_module("demo").DeMo(self.views, lr=self.lr)

    def step(self) -> None:
        for view, parameter in zip(self.views, self.model.parameters(), strict=True):
            view.grad = None if parameter.grad is None else parameter.grad.reshape(view.shape)
        of = self.optimizer.param_groups[0]
        self.theirs.param_groups[0]["lr"] = self.lr * of["lr"] / of["initial_lr"]
        self.theirs.step()


WAYS: dict[str, type[Way]] = {
    "ddp": Way,
    "hooked": Hooked,
    "gradients": Gradients,
    "updates": Updates,
    "average": Average,
    "post-local": PostLocal,
    "each alone": EachAlone,
    "grace": Grace,
    "demo": DeMo,
}


def received(here: float, topology: Topology) -> float:
    """Return the bytes received by all devices of a node, given the bytes of this device. A collective."""
    total = torch.tensor(here, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / topology.num_nodes

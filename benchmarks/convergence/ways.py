"""Ways to train on several nodes, for the convergence benchmarks: what a row of their tables is made of.

================ =====================================================================================================
none             plain DDP over all ranks
"hooked"         the same with one of torch's hooks: "bf16", or "PowerSGD" of rank 1
"alone"          plain DDP on one node, on its ranks' share of each batch: whoever loses to that had better not talk to
                 other nodes at all
"gradients"      DDP with `hier_hook`; the default, options are those of HierConfig
"updates"        DDP inside the node and `LocalUpdates`; options are those of UpdatesConfig
"cyclic"         the same, but all nodes send the same entries, the next ones of one shared pseudo-random order, by an
                 all-reduce: no selection, no indices, and a volume that does not grow with the number of nodes
"average"        DDP inside the node, and the mean of the nodes' models every ``every`` steps; with ``outer_lr`` it is
                 DiLoCo (Douillard et al. 2023): an outer SGD with Nesterov momentum takes the mean's change as gradient
"post-local"     the same, after ``start`` steps of plain DDP (torch's post_localSGD_hook)
================ =====================================================================================================

Validation sees what a user would get: the shared weights, or the mean of the nodes' models.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Self

from lightning_sparse.exchange import HierCommunicator, Path, Shard, Work
from lightning_sparse.exchange.paths import Dense, num_selected
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import Topology
from lightning_sparse.updates import LocalUpdates, UpdatesConfig


def wrap(
    model: nn.Module, bucket_cap_mb: float = 25, process_group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """DDP whose batch statistics stay local while training, as a cluster that minds its slow link would have them."""
    # torch 2.15 renames the option and warns about the old name.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    local: dict[str, Any] = {sync_buffers: False}
    local["process_group"] = process_group
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb, **local)


class Way:
    """Plain DDP, and what the others do besides.

    Args:
        model: to train.
        optimizer: that steps it.
        topology: of the ranks.
        options: of the row.
    """

    group: ClassVar[str] = "world"

    def __init__(self, model: nn.Module, optimizer: Optimizer, topology: Topology, options: dict[str, Any]) -> None:
        self.model, self.topology = model, topology
        inside = None if self.group == "world" else topology.intra
        self.ddp = wrap(model, options.pop("bucket_cap_mb", 25), inside)
        if self.group == "node" and topology.num_devices == 1:
            self.ddp.require_backward_grad_sync = False  # as the strategy does: there is nothing to average
        self.numel = sum(p.numel() for p in model.parameters())
        self.rounds = 0

    def begin_epoch(self, epoch: int) -> None:
        """Before the first step of an epoch."""

    def before_backward(self) -> None:
        """Between forward and backward."""

    def after_step(self) -> None:
        """After the optimizer's step."""
        self.rounds += 1

    def receive(self) -> None:
        """Wait until nothing is under way."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The model holds what a user would get."""
        yield

    def finish(self) -> None:
        """At the end: all ranks hold the same."""

    def bytes_per_node(self) -> float:
        """Received by a node's devices from other nodes so far. Collective."""
        if self.topology.num_nodes == 1:
            return 0.0
        # What the dense exchange of the same hierarchy would; DDP's flat ring takes half as much again.
        work = Work(self.topology.num_nodes, self.topology.num_devices, self.numel)
        return self.rounds * self.topology.num_devices * Dense(work).bytes()


class Hooked(Way):
    """DDP with a hook of torch's."""

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
    """The paper: the largest gradients."""

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
    """The largest updates, after the optimizer."""

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
        with self.updates.shared_weights():
            yield

    def finish(self) -> None:
        self.updates.finish()

    def bytes_per_node(self) -> float:
        return received(self.updates.exchange.stats.bytes_between_nodes, self.topology)


class CyclicUpdates(Updates):
    """Updates without selection."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, topology: Topology, options: dict[str, Any]) -> None:
        super().__init__(model, optimizer, topology, {**options, "exchange": "regional"})  # keeps what is pending apart
        choice, steps = self.updates.exchange.choice, iter(range(10**9))

        def path(work: Work, density: float, **_: Any) -> Path:
            return Cyclic(work, num_selected(density, work.shard_numel), next(steps))

        choice.path = path  # type: ignore[method-assign]


@dataclass(frozen=True)
class Cyclic(Path):
    """The next ``k`` entries of one pseudo-random order of the shard, the same on all nodes, by an all-reduce."""

    name = "cyclic"
    leaves = "entries"

    k: int
    step: int

    @classmethod
    def of(cls, work: Work, density: float, value_dtype: torch.dtype) -> Self | None:
        raise NotImplementedError

    @property
    def sent(self) -> int:
        return self.k

    @property
    def applied(self) -> float:
        return self.k

    def bytes(self) -> float:
        nodes = self.work.num_nodes
        return 2 * (nodes - 1) / nodes * self.k * 2  # as 16-bit values, though Gloo adds fp32 here

    def next_indices(self, device: torch.device) -> Tensor:
        """i * stride mod S visits each entry once before it repeats one, if the two have no common divisor."""
        numel = self.work.shard_numel
        stride = int(numel * 0.6180339887) | 1
        while gcd(stride, numel) != 1:
            stride += 1
        at = torch.arange(self.step * self.k, (self.step + 1) * self.k, device=device)
        return at % numel * stride % numel

    def select(self, comm: HierCommunicator, shard: Shard) -> Tensor:
        assert shard.next_S is not None
        index_K = self.next_indices(shard.sum_S.device)
        shard.next_S.copy_(shard.sum_S)[index_K] = 0
        return shard.sum_S[index_K]

    def transfer(self, comm: HierCommunicator, sent: Tensor, shard: Shard) -> Tensor:
        comm.all_reduce(sent)
        return sent

    def apply(self, arrived: Tensor, shard: Shard) -> Tensor:
        index_K = self.next_indices(shard.sum_S.device)
        return torch.zeros_like(shard.sum_S).index_copy_(0, index_K, arrived)


class Average(Way):
    """Models averaged now and then; DiLoCo with an outer optimizer."""

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
        """Of all ranks' parameters. Collective."""
        parameters = list(self.model.parameters())
        flat = torch.cat([p.detach().flatten() for p in parameters])
        dist.all_reduce(flat)
        flat /= self.topology.world_size
        pieces = torch.split(flat, [p.numel() for p in parameters])
        return [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]

    @contextmanager
    @torch.no_grad()
    def shown(self) -> Iterator[None]:
        parameters: list[Tensor] = list(self.model.parameters())
        own = [p.detach().clone() for p in parameters]
        torch._foreach_copy_(parameters, self.means())
        yield
        torch._foreach_copy_(parameters, own)

    @torch.no_grad()
    def finish(self) -> None:
        torch._foreach_copy_(list(self.model.parameters()), self.means())


class PostLocal(Average):
    """Plain DDP for the first steps, then models averaged now and then."""

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


WAYS: dict[str, type[Way]] = {
    "ddp": Way,
    "hooked": Hooked,
    "gradients": Gradients,
    "updates": Updates,
    "cyclic": CyclicUpdates,
    "average": Average,
    "post-local": PostLocal,
}


def received(here: float, topology: Topology) -> float:
    """Bytes of all devices of a node, given this device's. Collective."""
    total = torch.tensor(here, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / topology.num_nodes

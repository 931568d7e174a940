"""Engines: the interface between a training loop, or a strategy, and the exchange between nodes.

=================== ========================================= ==================== =========================
kind                engine                                    nodes exchange       inside a node
=================== ========================================= ==================== =========================
gradients           `lightning_sparse.gradients.HierState`    gradients, in a hook DDP over all ranks
updates             `lightning_sparse.updates.LocalUpdates`   parameter updates    DDP of the node, or FSDP2
elastic             `lightning_sparse.elastic.ElasticUpdates` parameter updates    DDP of the node, or FSDP2
gradients of shards `lightning_sparse.fsdp.ShardedGradients`  gradients of shards  FSDP2
=================== ========================================= ==================== =========================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.checkpoint.state import VERSION, State, for_folder
from lightning_sparse.exchange import Exchange
from lightning_sparse.messages import LogOnce
from lightning_sparse.sharding import parameters_of
from lightning_sparse.topology import Topology


class Engine(ABC):
    """Exchanges gradients or updates of one module between nodes.

    Every rank calls the methods of training, weights and loading. A method that an engine does not need does nothing.

    Attributes:
        exchange: the exchange between nodes; exists if ``active``.
        active: whether nodes exchange anything; False on one node.
        requires_all_ranks: a restore needs the state of every rank. Otherwise, a rank without state starts anew.
        has_local_weights: each node trains local weights; validation uses the global weights.
        in_step: all nodes take the same steps.
        batches: number of batches begun, if counted. It shows whether a node skipped a step.
    """

    kind: ClassVar[str]
    reshard_message: ClassVar[str]  # log line: state that another number of nodes keeps
    loss_message: ClassVar[str]  # log line: consequence of missing files
    requires_all_ranks: ClassVar[bool] = False
    has_local_weights: ClassVar[bool] = False
    in_step: ClassVar[bool] = True

    config: Any
    module: nn.Module
    steps = batches = 0
    exchange: Exchange
    topology: Topology
    active: bool
    log_once: LogOnce

    def __getstate__(self) -> NoReturn:
        # A copy of a DDP module also copies the state of its hook.
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, because it holds process groups. Copy the module "
            f"without its wrapper: copy.deepcopy(ddp.module). To save this state, use state_dict()."
        )

    @property
    def rounds(self) -> int:
        """Number of exchanges, or steps, so far."""
        return self.steps

    # -- training ------------------------------------------------------------------------------------------------------

    def before_backward(self, reason_for_dense: str = "") -> None:
        """Prepare for a backward pass.

        Args:
            reason_for_dense: reason to reduce the next round's gradients as DDP does; empty for none.
        """
        return

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        return

    def step(self, optimizer: Optimizer | None = None) -> None:
        """Follow a step of one optimizer, or of all. Call it even if this rank skipped the step."""
        return

    def keep_global_weights(self) -> None:
        """Count changes of the weights as updates from now on, even before the first step."""
        return

    def send_unsent(self) -> None:
        """Exchange steps for which ``step()`` was not called. Call it after each batch."""
        return

    def finish(self) -> None:
        """Send all pending updates; afterwards all ranks have equal weights."""
        return

    def warn_of_no_step(self) -> None:
        return

    # -- weights that the world sees -----------------------------------------------------------------------------------

    def swap_in_global_weights(self, wait: bool = True) -> None:
        """Write the global weights and averaged buffers into the module.

        Args:
            wait: False writes the weights without messages in flight, keeps this rank's own buffers, and sends nothing.
        """
        return

    def swap_in_local_weights(self) -> None:
        """Restore this node's own weights."""
        return

    def adopt_changes(self) -> None:
        """Add changes of the shown global weights to the global weights."""
        return

    def average_changes(self) -> None:
        """If nodes changed the global weights differently, replace them by their mean."""
        return

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Return a context in which the module holds the global weights and averaged buffers."""
        self.swap_in_global_weights()
        try:
            yield
        finally:
            self.swap_in_local_weights()

    def shared_weights(self) -> AbstractContextManager[None]:
        """Deprecated name of `global_weights`, until version 0.3."""
        return self.global_weights()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def saves(self) -> bool:
        return self.active

    def metadata(self) -> dict[str, Any]:
        """Return the checkpoint entries that are equal on all ranks, in plain types."""
        return {"steps": self.steps}

    def checkpoint_metadata(self) -> dict[str, Any]:
        nodes = [list(node) for node in self.topology.nodes]
        entries = {"version": VERSION, "kind": self.kind, "nodes": nodes, "config": self.config.to_dict()}
        return {**entries, **(self.metadata() if self.saves else {})}

    def state_dict(self) -> dict[str, Any]:
        """Return this device's part for ``torch.distributed.checkpoint.save`` and ``async_save``."""
        mine = {f"rank{self.topology.rank}": self.device_state()} if self.saves else {}
        return {"metadata": (self.checkpoint_metadata(),), **mine}

    def device_state(self) -> dict[str, Any]:
        return {"engine": for_folder(self.state())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError: ``lightning_sparse.strategy.resume`` loads the state."""
        # ``torch.distributed.checkpoint.load`` must know the entries of a checkpoint before it reads them.
        raise ValueError(
            f"torch.distributed.checkpoint.load cannot load {type(self).__name__}, because it does not know the saved "
            f"nodes and pieces. Omit it, and call lightning_sparse.strategy.resume(engine, folder, key) afterwards."
        )

    @abstractmethod
    def state(self) -> State:
        """Return the state that only this device has."""

    @abstractmethod
    def fits(self, metadata: Mapping[str, Any], state: State) -> bool:
        """Return whether this device can continue exactly from that state."""

    @abstractmethod
    def load(self, metadata: Mapping[str, Any], state: State | None) -> None:
        """Continue from this device's state, on the same nodes; None: with nothing pending."""

    @abstractmethod
    def load_from(self, metadata: Mapping[str, Any], nodes: Sequence[Sequence[State]]) -> None:
        """Continue from the states of all devices of another cluster, by node."""

    def global_parts(self) -> list[Tensor]:
        """Return tensors that are equal on devices with the same index of all nodes, to check a restore."""
        return []

    def restart(self) -> None:
        """Start from the weights in the module, with nothing pending."""
        return

    def owns_any(self, parameters: Collection[int]) -> bool:
        """Return whether the module has one of these parameters, given by ``id()``."""
        return any(id(p) in parameters for p in self.module.parameters())

    def tracks_optimizer(self, optimizer: Optimizer) -> bool:
        return self.owns_any({id(parameter) for parameter in parameters_of(optimizer)})

    # -- numbers for callbacks -----------------------------------------------------------------------------------------

    def norms(self) -> dict[str, Tensor]:
        """Return L2 norms of the unsent state, by name: 0-dim tensors, without a host wait."""
        return {}

    def gauges(self) -> dict[str, float]:
        """Return other numbers of the last round, by name."""
        return {}

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove hooks from the module and end threads. Training may start again."""
        return

    def end(self) -> None:
        """Deprecated name of `close`, until version 0.3."""
        self.close()

    def release_optimizers(self, reused: Sequence[Optimizer] = ()) -> None:
        """Release module and optimizers. ``reused`` optimizers get all their state."""
        self.close()

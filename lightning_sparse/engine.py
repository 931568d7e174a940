"""What a training loop calls, and a strategy on its behalf: the same methods, whatever is exchanged between nodes.

========= ============================================== ===================== ===============================
kind      engine                                         between nodes travel  inside a node
========= ============================================== ===================== ===============================
gradients `lightning_sparse.gradients.HierState`         gradients, in a hook  DDP over all ranks
updates   `lightning_sparse.updates.LocalUpdates`        parameter updates     DDP of the node, or FSDP2
shards    `lightning_sparse.fsdp.ShardedGradients`       gradients of shards   FSDP2
========= ============================================== ===================== ===============================

A method that an engine has no use for does nothing. A checkpoint holds the `State` of each device: flat pieces of
parameters, so that another number of nodes or devices can take them up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.checkpoint.state import VERSION, State, for_folder
from lightning_sparse.exchange import Exchange
from lightning_sparse.messages import LogOnce
from lightning_sparse.sharding import parameters_of
from lightning_sparse.topology import Topology


class Engine(ABC):
    """Exchanges gradients or updates of one module between nodes.

    Attributes:
        exchange: between nodes; it exists where ``active``.
        active: whether there is anything to exchange; False on one node.
        requires_all_ranks: a restore needs the state of every rank. Otherwise a rank without its own begins anew.
        has_local_weights: each node trains local weights; validation sees the global weights.
        in_step: all nodes take the same steps.
        batches: number of batches begun, if counted. Nodes then notice that a node skipped a step.
    """

    kind: ClassVar[str]
    reshard_message: ClassVar[str]  # for the log: state that another number of nodes keeps
    loss_message: ClassVar[str]  # for the log: consequence of missing files
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

    @property
    def rounds(self) -> int:
        """Exchanges, or steps, so far."""
        return self.steps

    # -- training ------------------------------------------------------------------------------------------------------

    def before_backward(self, reason_for_dense: str = "") -> None:
        """Call it before each backward pass, on all ranks.

        Args:
            reason_for_dense: a reason to reduce the next round's gradients as DDP would; empty for none.
        """
        return

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Call it before a step of the optimizer, or of all."""
        return

    def step(self, optimizer: Optimizer | None = None) -> None:
        """Call it after a step of the optimizer, or of all. Every rank does, those that skipped the step included."""
        return

    def send_unsent(self) -> None:
        """Exchange steps for which ``step()`` was not called. Every rank calls it, after each batch."""
        return

    def finish(self) -> None:
        """Send everything that is pending; afterwards all ranks hold the same weights. Every rank calls it."""
        return

    def warn_of_no_step(self) -> None:
        """Log once that batches were trained without an optimizer step."""
        return

    # -- weights that the world sees -----------------------------------------------------------------------------------

    def swap_in_global_weights(self, wait: bool = True) -> None:
        """Put the global weights into the module, and buffers averaged over all ranks. Every rank calls it.

        Args:
            wait: False shows the weights without messages in flight, and this rank's own buffers. Nothing is sent.
        """
        return

    def swap_in_local_weights(self) -> None:
        """Put this node's own weights back. Every rank calls it."""
        return

    def adopt_changes(self) -> None:
        """Add changes of the module to the global weights that it shows. Every rank calls it."""
        return

    def average_changes(self) -> None:
        """If nodes changed the global weights differently, replace them by their mean. Every rank calls it."""
        return

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Hold the global weights inside, and averaged buffers, as in validation. Every rank enters it."""
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
        """Whether there is anything to save."""
        return self.active

    def metadata(self) -> dict[str, Any]:
        """Return what a checkpoint says of all ranks alike, in plain types."""
        return {"steps": self.steps}

    def checkpoint_metadata(self) -> dict[str, Any]:
        """Return the metadata, with the entries that all engines have."""
        nodes = [list(node) for node in self.topology.nodes]
        told = {"version": VERSION, "kind": self.kind, "nodes": nodes, "config": self.config.to_dict()}
        return {**told, **(self.metadata() if self.saves else {})}

    def state_dict(self) -> dict[str, Any]:
        """Return what ``torch.distributed.checkpoint.save`` and ``async_save`` write of this device, given the engine
        itself; ``lightning_sparse.strategy.resume`` reads it. Every rank calls it."""
        mine = {f"rank{self.topology.rank}": self.device_state()} if self.saves else {}
        return {"metadata": (self.checkpoint_metadata(),), **mine}

    def device_state(self) -> dict[str, Any]:
        """Return what a loop without Lightning saves of this device."""
        return {"engine": for_folder(self.state())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse it: ``torch.distributed.checkpoint.load`` wants to know what a checkpoint holds before it reads.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{type(self).__name__} is not among what torch.distributed.checkpoint.load can fill, which knows neither "
            f"the nodes nor the pieces that were saved: leave it out, and call "
            f"lightning_sparse.strategy.resume(engine, folder, key) afterwards."
        )

    @abstractmethod
    def state(self) -> State:
        """Return what this device alone knows."""

    @abstractmethod
    def fits(self, metadata: Mapping[str, Any], state: State) -> bool:
        """Return whether this device can go on exactly where that state was saved."""

    @abstractmethod
    def load(self, metadata: Mapping[str, Any], state: State | None) -> None:
        """Go on where this device was saved, on the same nodes; None: with nothing pending. Every rank calls it."""

    @abstractmethod
    def load_from(self, metadata: Mapping[str, Any], nodes: Sequence[Sequence[State]]) -> None:
        """Take up what another cluster saved, or this one under other options: the states of its devices, by node.
        Every rank calls it."""

    def global_parts(self) -> list[Tensor]:
        """Return tensors that devices of the same place hold alike on all nodes, to be compared after a restore."""
        return []

    def restart(self) -> None:
        """Go on from the weights that the module holds now, with nothing pending. Every rank calls it."""
        return

    def owns_any(self, parameters: Collection[int]) -> bool:
        """Return whether one of these parameters, given by ``id()``, is of this engine's module."""
        return any(id(p) in parameters for p in self.module.parameters())

    def tracks_optimizer(self, optimizer: Optimizer) -> bool:
        """Return whether it is to be told of the optimizer's steps."""
        return self.owns_any({id(parameter) for parameter in parameters_of(optimizer)})

    # -- what a callback reports ---------------------------------------------------------------------------------------

    def norms(self) -> dict[str, Tensor]:
        """Return L2 norms of what this device has not sent, by name: 0-dim tensors (no host sync)."""
        return {}

    def gauges(self) -> dict[str, float]:
        """Return other numbers of the last round, by name."""
        return {}

    # -- the end -------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Take hooks off the module and end threads, for training is over; it may begin again."""
        return

    def detach(self, reused: Sequence[Optimizer] = ()) -> None:
        """Leave module and optimizers to another engine. ``reused`` optimizers get all their state: collectives of the
        node."""
        self.end()

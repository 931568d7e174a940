"""One optimizer of a node: replicated on the node's devices, or each steps its slice of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.exchange import Exchange, HierCommunicator
from lightning_sparse.exchange.paths import Sparse
from lightning_sparse.pto import ShardedStep
from lightning_sparse.pto.gather import FlatGather
from lightning_sparse.pto.optimizers import is_tested
from lightning_sparse.pto.ownership import Parts, divide, loads_of
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.difference import DifferenceState
from lightning_sparse.updates.pending import PendingState
from lightning_sparse.updates.slices import Slices
from lightning_sparse.updates.state import UpdateState


class NodeOptimizer:
    """Exchanges the updates of one optimizer.

    Args:
        optimizer: of this node; its parameters hold the shared weights.
        names: of parameters by ``id()``.
        uncut: ``id()`` of each parameter with sparse gradients; an optimizer that steps one is not shared.
        exchange: between nodes.
        inside: collectives of the node.
        config: of the updates.

    Attributes:
        sharded: the shared step of the node's devices; None where each device does the whole step.
        state: of this device's slice.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[int, str],
        uncut: frozenset[int],
        exchange: Exchange,
        inside: HierCommunicator,
        config: UpdatesConfig,
    ) -> None:
        self.optimizer, self.steps = optimizer, 0
        self._names, self._exchange, self._inside, self._config = names, exchange, inside, config
        self._hook = optimizer.register_step_pre_hook(lambda *_: self.follow_groups())
        self.sharded: ShardedStep | None = None
        dense = uncut.isdisjoint(map(id, parameters_of(optimizer)))
        if config.shard_optimizer and inside.topology.num_devices > 1 and dense and can_shard(optimizer):
            self.sharded = ShardedStep(optimizer, inside, names, gather=False)
        self.parameters: list[Tensor] = []
        self._parts: list[Parts] = []
        self.state = self._divide()
        self._shown_S: Tensor | None = None
        self._own_S: Tensor | None = None

    def detach(self, reused: bool) -> None:
        """Leave the optimizer alone from now on. One used again gets all its state: a collective of the node."""
        self._hook.remove()
        if self.sharded is not None and reused:
            self.sharded.release()

    def step(self) -> None:
        """After the optimizer's."""
        self.follow_groups()
        self.steps += 1
        if self.steps % self._config.sync_every == 0:
            self.state.advance()
        elif self.sharded is None:
            return  # all devices did the whole step
        self.gather()

    def flush(self) -> None:
        """Send everything that is pending."""
        self.state.flush()
        self.gather()

    def gather(self) -> None:
        """Share the slices inside the node."""
        self._gather(self._inside)

    # -- weights that the world sees -----------------------------------------------------------------------------------

    def show_shared(self) -> None:
        """Put the shared weights into the parameters."""
        self.state.receive()
        self._own_S = self.state.slices.read()
        self.state.slices.write(self.state.shared_S)
        self._shown_S = self.state.slices.read()  # as the parameters' dtypes hold them
        self.gather()

    def show_own(self) -> None:
        """Put this node's back, and add what was changed meanwhile."""
        self.state.slices.write(self._now())
        self._own_S = self._shown_S = None
        self.gather()

    def _now(self) -> Tensor:
        """This node's weights, with what was changed while the shared ones were shown."""
        now_S = self.state.slices.read()
        if self._own_S is None or self._shown_S is None:
            return now_S
        return now_S.sub_(self._shown_S).add_(self._own_S)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Of this device's slice, on the CPU. Waits for messages under way."""
        self.state.receive()
        return {name: tensor.cpu() for name, tensor in self.state.state_dict(self._now()).items()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Go on where it was saved."""
        self.state.load_state_dict(saved)
        self.gather()

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's ``state_dict()``, on the first device of the node; empty on the others. A collective of the
        node."""
        if self.sharded is None:
            return dict(self.optimizer.state_dict())
        topology = self._inside.topology
        first = topology.nodes[topology.node_index][0]
        self.sharded.consolidate_state_dict(to=first)
        return dict(self.optimizer.state_dict()) if topology.rank == first else {}

    def restart(self) -> None:
        """Go on from what the parameters hold, with nothing pending."""
        self.state.receive()
        self._own_S = self._shown_S = None
        self.state = self._divide()

    # -- parameters ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def follow_groups(self) -> None:
        """Take up parameters of ``add_param_group()``; all ranks begin with those of rank 0."""
        known = self.parameters
        now = parameters_of(self.optimizer)
        if len(now) == len(known) and all(map(is_, now, known)):
            return
        if self.sharded is not None:
            self.sharded.follow_groups()
        ids = set(map(id, known))
        for parameter in now:
            if id(parameter) not in ids:
                self._exchange.communicator.world_broadcast(parameter.data)
        before = self.state
        self.state = self._divide()
        self.state.take_over(before)
        self.gather()

    def _divide(self) -> UpdateState:
        index, size = self._inside.topology.device_index, self._inside.topology.num_devices
        if self.sharded is not None:
            self.parameters, self._parts = self.sharded.parameters, self.sharded.parts
        else:
            self.parameters, self._parts = self._whole_step_parts(size)
        self._gather = FlatGather(self.parameters, self._parts, index, size)
        mine = [next((part for part in parts if part.owner == index), None) for parts in self._parts]
        return state_of(Slices(self.parameters, mine), self._exchange, self._config)

    def _whole_step_parts(self, size: int) -> tuple[list[Tensor], list[Parts]]:
        """Any division will do where each device does the whole step; known parameters keep theirs."""
        of = {id(p): parts for p, parts in zip(self.parameters, self._parts, strict=True)}
        now = parameters_of(self.optimizer)
        kept, new = [p for p in now if id(p) in of], [p for p in now if id(p) not in of]
        loads = loads_of([of[id(p)] for p in kept], [p.numel() for p in kept], size)
        numels = [p.numel() for p in new]
        of.update(zip(map(id, new), divide(numels, numels, loads, [True] * len(new)), strict=True))
        return now, [of[id(p)] for p in now]


def state_of(slices: Slices, exchange: Exchange, config: UpdatesConfig) -> UpdateState:
    """The lean state where the path allows it."""
    kind = DifferenceState if config.path is Sparse else PendingState
    return kind(slices, exchange, config)


def can_shard(optimizer: Optimizer) -> bool:
    """Whether devices of a node can share its step, with the result of a whole one."""
    return is_tested(optimizer) and not any(group.get("max_grad_norm") for group in optimizer.param_groups)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer whose updates cannot be exchanged."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS builds its search direction from earlier parameters, and those of a node change with what other "
            "nodes send: use a first-order optimizer, or strategy='ddp'."
        )
    if callable(getattr(optimizer, "consolidate_state_dict", None)):
        raise ValueError(
            f"the step of {type(optimizer).__name__} is shared already (PTOCallback, ZeroRedundancyOptimizer): remove "
            f"that; with shard_optimizer=True each device steps its slice anyway."
        )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """In the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]

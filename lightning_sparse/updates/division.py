"""How the devices of a node divide the step of one optimizer: which part of each parameter a device exchanges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sparse.exchange import HierCommunicator
from lightning_sparse.pto import ShardedStep
from lightning_sparse.pto.gather import FlatGather
from lightning_sparse.pto.optimizers import is_tested
from lightning_sparse.sharding import Part, Parts, divide, loads_of, parameters_of, part_of, sparse_parameters


class Division(ABC):
    """Of one optimizer's parameters over the devices of a node.

    Attributes:
        parameters: in the order of the optimizer's groups.
        mine: of each parameter the part that this device exchanges, or None.
        steps_all: each device does the whole step, so that they hold the same after it.
    """

    steps_all = False

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[Tensor] = []
        self.mine: list[Part | None] = []

    @abstractmethod
    def follow_groups(self) -> None:
        """Take up what the optimizer steps now."""

    @abstractmethod
    def gather(self) -> None:
        """Bring the parts of all devices to all devices. A collective of the node."""

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's ``state_dict()``, at least on the first device of the node. A collective of the node."""
        return dict(self.optimizer.state_dict())

    def release(self) -> None:
        """The optimizer steps everything again. A collective of the node."""
        return  # as it does but for `SharedStep`


class WholeStep(Division):
    """Each device does the whole step, and exchanges any part of the result."""

    steps_all = True

    def __init__(self, optimizer: Optimizer, inside: HierCommunicator) -> None:
        super().__init__(optimizer)
        self._inside = inside
        self._parts: list[Parts] = []
        self.follow_groups()

    def follow_groups(self) -> None:
        """Known parameters keep their parts."""
        size = self._inside.topology.num_devices
        of = {id(p): parts for p, parts in zip(self.parameters, self._parts, strict=True)}
        now = parameters_of(self.optimizer)
        kept, new = [p for p in now if id(p) in of], [p for p in now if id(p) not in of]
        loads = loads_of([of[id(p)] for p in kept], [p.numel() for p in kept], size)
        numels = [p.numel() for p in new]
        of.update(zip(map(id, new), divide(numels, numels, loads, [True] * len(new)), strict=True))
        self.parameters, self._parts = now, [of[id(p)] for p in now]
        self.mine = owned(self._parts, self._inside.topology.device_index)
        self._gather = gather_of(self.parameters, self._parts, self._inside)

    def gather(self) -> None:
        self._gather(self._inside)


class SharedStep(Division):
    """Each device steps its part alone, and keeps the optimizer's state of that alone."""

    def __init__(self, optimizer: Optimizer, inside: HierCommunicator, names: Mapping[int, str]) -> None:
        super().__init__(optimizer)
        self._inside = inside
        self._step = ShardedStep(optimizer, inside, names, gather=False)
        self.follow_groups()

    def follow_groups(self) -> None:
        self._step.follow_groups()
        self.parameters, parts = self._step.parameters, self._step.parts
        self.mine = owned(parts, self._inside.topology.device_index)
        self._gather = gather_of(self.parameters, parts, self._inside)

    def gather(self) -> None:
        self._gather(self._inside)

    def optimizer_state(self) -> dict[str, Any]:
        """On the first device of the node; empty on the others."""
        topology = self._inside.topology
        first = topology.nodes[topology.node_index][0]
        self._step.consolidate_state_dict(to=first)
        return dict(self.optimizer.state_dict()) if topology.rank == first else {}

    def release(self) -> None:
        self._step.release()


class Shards(Division):
    """The parameters are sharded themselves (FSDP2): each device has its part alone."""

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        super().__init__(optimizer)
        self._module = module
        self.follow_groups()

    def follow_groups(self) -> None:
        self.parameters = parameters_of(self.optimizer)
        self.mine = [part_of(p) for p in self.parameters]

    def gather(self) -> None:
        """FSDP2 does that in the next forward pass, unless it kept what an evaluation gathered: drop that."""
        for each in self._module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()


def division_of(
    optimizer: Optimizer, module: nn.Module, inside: HierCommunicator, names: Mapping[int, str], share: bool
) -> Division:
    """How the step of an optimizer is divided.

    Args:
        optimizer: of this node.
        module: whose parameters it steps; an optimizer that steps one with sparse gradients is not shared.
        inside: collectives of the node.
        names: of parameters by ``id()``.
        share: let each device step its part, if the optimizer allows it.
    """
    parameters = parameters_of(optimizer)
    if any(isinstance(p, DTensor) for p in parameters):
        return Shards(optimizer, module)
    dense = sparse_parameters(module).isdisjoint(map(id, parameters))
    if share and inside.topology.num_devices > 1 and dense and can_shard(optimizer):
        return SharedStep(optimizer, inside, names)
    return WholeStep(optimizer, inside)


def can_shard(optimizer: Optimizer) -> bool:
    """Whether devices of a node can share its step, with the result of a whole one."""
    return is_tested(optimizer) and not any(group.get("max_grad_norm") for group in optimizer.param_groups)


def owned(parts: Sequence[Parts], index: int) -> list[Part | None]:
    """Of each parameter the part of one device."""
    return [next((part for part in of if part.owner == index), None) for of in parts]


def gather_of(parameters: list[Tensor], parts: list[Parts], inside: HierCommunicator) -> FlatGather:
    """The gather inside the node."""
    return FlatGather(parameters, parts, inside.topology.device_index, inside.topology.num_devices)

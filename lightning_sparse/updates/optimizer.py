"""One optimizer of a node: how the node's devices divide its step, and the exchange of its updates.

Each device exchanges its slice of the parameters, whatever it steps: it does the whole step, or its part alone, or the
parameters are sharded themselves (FSDP2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sparse.exchange import Exchange, HierCommunicator
from lightning_sparse.pto import ShardedStep
from lightning_sparse.pto.gather import FlatGather
from lightning_sparse.pto.optimizers import is_tested
from lightning_sparse.sharding import (
    Part,
    Parts,
    divide_new,
    in_order_of,
    local_of,
    parameters_of,
    part_of,
    sparse_parameters,
    trained_by,
)
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.slices import Slices
from lightning_sparse.updates.state import UpdateState, state_of


class LocalOptimizer:
    """Exchanges the updates of one optimizer.

    Args:
        optimizer: of this node; its parameters hold the shared weights.
        make_state: returns the state of a device's slice.

    Attributes:
        division: of the step over the node's devices.
        state: of this device's slice.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        names: Mapping[int, str],
        exchange: Exchange,
        inside: HierCommunicator,
        config: UpdatesConfig,
        make_state: Callable[[Slices, Exchange, UpdatesConfig], UpdateState] = state_of,
    ) -> None:
        self.optimizer, self.steps = optimizer, 0
        self._hook = optimizer.register_step_pre_hook(lambda *_: self.follow_groups())
        self.division = division_of(optimizer, module, inside, names, config.shard_optimizer)
        self._exchange, self._config, self._make_state = exchange, config, make_state
        self.state = self._new_state()
        self._frozen: set[int] = set()  # by ``id()``, of what is exchanged
        self._own: list[Tensor] | None = None  # pieces of this node's weights while the shared ones are shown
        self._looked = type(optimizer).__module__.startswith("torch.optim")  # which step the parameters themselves

    @property
    def parameters(self) -> list[Tensor]:
        """What is exchanged, in the order of the optimizer's groups: all but what is frozen."""
        return self.division.parameters

    def stepped(self) -> list[tuple[Tensor, Part]]:
        """Return the part of each parameter that this device steps."""
        if self.division.steps_all:
            return [(parameter, Part(0, 0, parameter.numel())) for parameter in self.parameters]
        return self.state.slices.pieces

    def detach(self, reused: bool) -> None:
        """Leave the optimizer alone from now on. One used again gets all its state: a collective of the node."""
        self._hook.remove()
        if reused:
            self.division.release()

    def step(self, occasion: int) -> None:
        """After the optimizer's.

        Args:
            occasion: the same on all nodes that step.

        Raises:
            ValueError: at the first one, for an optimizer that keeps weights of its own.
        """
        self.follow_groups()
        self._leave_frozen()
        if not self._looked:
            self._looked = True
            refuse_own_weights(self.optimizer, self.state.slices, self.state.shared_S)
        self.steps += 1
        since = self.steps % self._config.sync_every
        if since == 0:
            self.state.advance(occasion)
        else:
            self.state.settle(since)
            if self.division.steps_all and not self.state.may_settle(since):
                return  # devices hold the same
        self.gather()

    def flush(self) -> None:
        """Send everything that is pending."""
        self.state.flush()
        self.gather()

    def gather(self) -> None:
        """Share the slices inside the node."""
        self.division.gather()

    # -- weights that the world sees -----------------------------------------------------------------------------------

    def show_shared(self) -> None:
        """Put the shared weights into the parameters."""
        self._own = [piece.clone() for piece in self.state.slices.in_parameters()]
        self.state.slices.write(self.state.read_shared())
        self.gather()

    def show_own(self) -> None:
        """Put this node's back, and add what was changed meanwhile."""
        for piece, now in zip(self.state.slices.in_parameters(), self._now(), strict=True):
            piece.copy_(now)
        self._own = None
        self.gather()

    def _now(self) -> Iterator[Tensor]:
        """Yield the pieces of this node's weights, with what was changed while the shared ones were shown."""
        slices = self.state.slices
        if self._own is None:
            yield from slices.in_parameters()
            return
        shared = slices.of(self.state.read_shared())
        for piece, shown, own in zip(slices.in_parameters(), shared, self._own, strict=True):
            wide = torch.promote_types(piece.dtype, torch.float32)
            yield (piece.to(wide) - shown.to(piece.dtype).to(wide)).add_(own.to(wide))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of this device's slice, on the CPU, where it is made, too. Waits for messages under way."""
        self.state.receive()
        now = [piece.cpu() for piece in self._now()]
        now_S = torch.cat([piece.float() for piece in now]) if now else torch.empty(0)
        wide = [piece for piece in now if piece.dtype == torch.float64]
        return {**self.state.state_dict(now_S), **({"wide": torch.cat(wide)} if wide else {})}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Go on where it was saved."""
        if self.state.load_state_dict(saved) and "wide" in saved:  # between two exchanges these hold more than fp32
            pieces = [piece for piece in self.state.slices.in_parameters() if piece.dtype == torch.float64]
            for piece, now in zip(pieces, torch.split(saved["wide"], list(map(len, pieces))), strict=True):
                piece.copy_(now)
        self.gather()

    def restart(self) -> None:
        """Go on from what the parameters hold, with nothing pending."""
        self.state.receive()
        self._own = None
        self.state = self._new_state()

    # -- parameters ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def follow_groups(self) -> None:
        """Take up parameters of ``add_param_group()``, and those that are frozen no more; all ranks begin with those of
        rank 0. Parameters that were taken out of the optimizer keep the global weights."""
        known = self.parameters
        ids = set(map(id, known))
        now = trained_by(self.optimizer, ids)
        if len(now) == len(known) and all(map(is_, now, known)):
            return
        self._drop_pending(ids - set(map(id, now)))
        self.division.follow_groups()
        self._exchange.communicator.begin_with_first(p for p in now if id(p) not in ids)
        before = self.state
        self.state = self._new_state()
        self.state.take_over(before)
        self.gather()

    def _leave_frozen(self) -> None:
        """Have parameters that were frozen since the last step keep the global weights: as long as some of their
        updates are pending, these weights would still change."""
        frozen = {id(p) for p in self.parameters if not (p.requires_grad or _has_gradient(p))}
        new, self._frozen = frozen - self._frozen, frozen
        self._drop_pending(new)

    def _drop_pending(self, parameters: set[int]) -> None:
        if parameters:
            self.state.drop_pending(parameters)
            self.gather()

    def _new_state(self) -> UpdateState:
        return self._make_state(Slices(self.parameters, self.division.mine), self._exchange, self._config)


def _has_gradient(parameter: Tensor) -> bool:
    """Whether the step of an optimizer changes the parameter."""
    return parameter.grad is not None and bool(local_of(parameter.grad).any())


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


# -- the division of the step ------------------------------------------------------------------------------------------


class Division:
    """How the devices of a node divide the step of one optimizer.

    Args:
        step: shares the step: each device steps its part alone, and keeps the optimizer's state of that alone. None:
            each device does the whole step, and exchanges any part of the result.

    Attributes:
        parameters: that are trained, in the order of the optimizer's groups.
        mine: of each parameter the part that this device exchanges, or None.
        steps_all: each device does the whole step, so that they hold the same after it.
    """

    def __init__(self, optimizer: Optimizer, inside: HierCommunicator, step: ShardedStep | None = None) -> None:
        self.optimizer, self._inside, self._step = optimizer, inside, step
        self.steps_all = step is None
        self.parameters: list[Tensor] = []
        self.mine: list[Part | None] = []
        self._parts: list[Parts] = []
        self.follow_groups()

    def follow_groups(self) -> None:
        """Take up what the optimizer steps now."""
        here, size = self._inside.node.place, self._inside.node.size
        now = trained_by(self.optimizer, set(map(id, self.parameters)))
        if self._step is not None:
            self._step.follow_groups()
            known = {id(p): parts for p, parts in zip(self._step.parameters, self._step.parts, strict=True)}
            self._parts = [known[id(p)] for p in now]
        else:
            known = {id(p): parts for p, parts in zip(self.parameters, self._parts, strict=True)}
            self._parts = divide_new(now, known, size, cost=Tensor.numel, cuttable=lambda _: True)
        self.parameters = now
        self.mine = [next((part for part in of if part.owner == here), None) for of in self._parts]
        self._gather = FlatGather(now, self._parts, here, size)

    def gather(self) -> None:
        """Bring the parts of all devices to all devices. A collective of the node."""
        self._gather(self._inside)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's ``state_dict()``, of a shared step on the node's first device alone. A collective of
        the node."""
        node = self._inside.node
        if self._step is not None:
            self._step.consolidate_state_dict(to=node.ranks[0])
            if node.place > 0:
                return {}
        return dict(self.optimizer.state_dict())

    def release(self) -> None:
        """The optimizer steps everything again. A collective of the node."""
        if self._step is not None:
            self._step.release()


class Shards(Division):
    """The parameters are sharded themselves (FSDP2): each device has its part alone."""

    def __init__(self, optimizer: Optimizer, inside: HierCommunicator, module: nn.Module) -> None:
        self._module = module
        super().__init__(optimizer, inside)
        self.steps_all = False

    def follow_groups(self) -> None:
        self.parameters = trained_by(self.optimizer, set(map(id, self.parameters)))
        self.mine = [part_of(p) for p in self.parameters]

    def gather(self) -> None:
        """FSDP2 does that in the next forward pass, unless it kept what an evaluation gathered: drop that."""
        for each in self._module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()


def division_of(
    optimizer: Optimizer, module: nn.Module, inside: HierCommunicator, names: Mapping[int, str], share: bool
) -> Division:
    """Return how the step of an optimizer is divided.

    Args:
        module: whose parameters it steps; an optimizer that steps one with sparse gradients is not shared.
        share: let each device step its part, if the optimizer allows it with the result of a whole step.
    """
    parameters = parameters_of(optimizer)
    if any(isinstance(p, DTensor) for p in parameters):
        return Shards(optimizer, inside, module)
    dense = sparse_parameters(module).isdisjoint(map(id, parameters))
    exact = is_tested(optimizer) and not any(group.get("max_grad_norm") for group in optimizer.param_groups)
    if share and inside.node.size > 1 and dense and exact:
        return Division(optimizer, inside, ShardedStep(optimizer, inside, names, gather=False))
    return Division(optimizer, inside)


def refuse_own_weights(optimizer: Optimizer, slices: Slices, shared_S: Tensor) -> None:
    """Raise ValueError for an optimizer that steps a copy of the weights (fp32 master weights, say) and overwrites the
    parameters with it: it would undo what other nodes sent.

    Such a copy equals the parameter as its dtype rounds it, after the step or before it.
    """
    for (parameter, part), now, before in zip(slices.pieces, slices.in_parameters(), slices.of(shared_S), strict=True):
        for name, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if value.shape == parameter.shape and not isinstance(value, DTensor):
                value = in_order_of(parameter, value)[part.begin : part.end]
            copy = local_of(value).detach().reshape(-1).to(now.device, now.dtype)
            if now.any() and (torch.equal(copy, now) or torch.equal(copy, before.to(now.dtype))):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps weights of its own (its state {name!r} equals a parameter of "
                    f"shape {tuple(parameter.shape)}), so its next step would undo what other nodes sent: use an "
                    f"optimizer that steps the parameters themselves (master_weights=False), or strategy='mstopk_hier'."
                )

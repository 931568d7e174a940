"""One optimizer of a node: replicated on the node's devices, or each steps its slice of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.exchange import Exchange, HierCommunicator
from lightning_sparse.exchange.paths import Sparse
from lightning_sparse.sharding import parameters_of
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.difference import DifferenceState
from lightning_sparse.updates.division import division_of
from lightning_sparse.updates.pending import PendingState
from lightning_sparse.updates.slices import Slices
from lightning_sparse.updates.state import UpdateState


class NodeOptimizer:
    """Exchanges the updates of one optimizer.

    Args:
        optimizer: of this node; its parameters hold the shared weights.
        module: whose parameters it steps.
        names: of parameters by ``id()``.
        exchange: between nodes.
        inside: collectives of the node.
        config: of the updates.

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
    ) -> None:
        self.optimizer, self.steps = optimizer, 0
        self._hook = optimizer.register_step_pre_hook(lambda *_: self.follow_groups())
        self.division = division_of(optimizer, module, inside, names, config.shard_optimizer)
        self._exchange, self._config = exchange, config
        self.state = self._new_state()
        self._shown_S: Tensor | None = None
        self._own_S: Tensor | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """What is exchanged, in the order of the optimizer's groups."""
        return self.division.parameters

    def detach(self, reused: bool) -> None:
        """Leave the optimizer alone from now on. One used again gets all its state: a collective of the node."""
        self._hook.remove()
        if reused:
            self.division.release()

    @property
    def exchanges_next(self) -> bool:
        """Whether the next step ends with an exchange."""
        return (self.steps + 1) % self._config.sync_every == 0

    def step(self) -> None:
        """After the optimizer's."""
        self.follow_groups()
        exchanges = self.exchanges_next
        self.steps += 1
        if exchanges:
            self.state.advance()
        elif self.division.steps_all:
            return
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
        self._own_S = self.state.slices.read()
        self.state.slices.write(self.state.read_shared())
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

    def restart(self) -> None:
        """Go on from what the parameters hold, with nothing pending."""
        self.state.receive()
        self._own_S = self._shown_S = None
        self.state = self._new_state()

    # -- parameters ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def follow_groups(self) -> None:
        """Take up parameters of ``add_param_group()``; all ranks begin with those of rank 0."""
        known = self.parameters
        now = parameters_of(self.optimizer)
        if len(now) == len(known) and all(map(is_, now, known)):
            return
        ids = set(map(id, known))
        self.division.follow_groups()
        for parameter in now:
            if id(parameter) not in ids:
                self._exchange.communicator.begin_with_first(parameter)
        before = self.state
        self.state = self._new_state()
        self.state.take_over(before)
        self.gather()

    def _new_state(self) -> UpdateState:
        """Of what the parameters hold, with nothing pending."""
        kind = DifferenceState if self._config.path is Sparse else PendingState  # the lean one where the path allows it
        return kind(Slices(self.parameters, self.division.mine), self._exchange, self._config)


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

"""One optimizer of a node: how the node's devices divide its step, and the exchange of its updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sparse.exchange import Exchange, HierCommunicator
from lightning_sparse.optimizers import is_tested
from lightning_sparse.pto import ShardedStep
from lightning_sparse.pto.gather import FlatGather
from lightning_sparse.sharding import (
    Part,
    Parts,
    drop_gathered,
    local_of,
    parameters_of,
    part_of,
    partition_new,
    sparse_parameters,
    trainable_params,
)
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.probe import ENOUGH, KEEPS, OVERWRITES, Probe
from lightning_sparse.updates.slices import Slices
from lightning_sparse.updates.state import UpdateState


class LocalOptimizer:
    """Exchanges the updates of one optimizer, whose parameters hold the global weights at first."""

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        names: Mapping[int, str],
        exchange: Exchange,
        inside: HierCommunicator,
        config: UpdatesConfig,
        make_state: Callable[[Slices, Exchange, UpdatesConfig], UpdateState],
        before_change: Callable[[LocalOptimizer, UpdateState], None],
    ) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.has_unsent_step = False  # of this optimizer, or of an optimizer that it wraps
        nested = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
        self._hooks = [
            inner_optimizer.register_step_post_hook(self._note_step) for inner_optimizer in filter(_has_hooks, nested)
        ]
        if _has_hooks(optimizer):
            self._hooks += [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._note_step),
            ]
        self.division = partition_of(optimizer, module, inside, names, config.shard_optimizer)
        self._exchange, self._config, self._make_state = exchange, config, make_state
        self._before_change = before_change
        self.state = self._new_state()
        self._frozen: set[int] = set()  # ``id()`` of frozen parameters that are exchanged
        # Weights that the program loads before the first step are the first global weights.
        self.adopts_weights = True
        self._own: list[Tensor] | None = None  # this node's weights while the global weights are shown
        self._waits = True  # whether the shown weights include every message
        known = is_tested(optimizer) or type(optimizer).__module__.startswith("torch.optim")
        self.probe = None if known else Probe()
        self._probes_again = False  # begin the probe again after the swap

    @property
    def parameters(self) -> list[Tensor]:
        """Exchanged parameters, in the order of the optimizer's groups, without frozen parameters."""
        return self.division.parameters

    def stepped(self) -> list[tuple[Tensor, Part]]:
        if self.division.is_replicated:
            return [(parameter, Part(0, 0, parameter.numel())) for parameter in self.parameters]
        return self.state.slices.pieces

    def release(self, reused: bool) -> None:
        for hook in self._hooks:
            hook.remove()
        if reused:
            self.division.release()

    def step(self, step_id: int) -> None:
        """Exchange, or take a step without exchange, after a step of the optimizer.

        Raises:
            ValueError: if the optimizer overwrites the parameters with a copy of its own.
        """
        self.has_unsent_step = self.adopts_weights = False
        self.follow_groups()
        # Before the exchange, so that the probe's change does not count as an update.
        probed = self._end_probe()
        self._leave_frozen()
        self.steps += 1
        since = self.steps % self._config.sync_every
        if since == 0:
            self.state.exchange_step(step_id)
        else:
            self.state.step_without_exchange(since)
            if self.division.is_replicated and not self.state.may_change_without_exchange(since) and not probed:
                return  # all devices have equal parameters
        self.gather()

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Continue from weights that the program has loaded before the first step."""
        if self.adopts_weights and self._own is None:
            self.adopts_weights = False
            # On GPUs, a comparison would make the host wait.
            is_changed = not self.state.global_S.is_cuda and self.is_changed()
            if is_changed:
                self._exchange.log_once("the weights have changed before the first step: training starts from them")
            if is_changed or self.state.global_S.is_cuda:
                self.state.set_global(self.state.slices.read())

    def before_step(self) -> None:
        """Follow changes of the program since the last step."""
        self.adopt_weights()
        self.follow_groups()

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.before_step()
        if self.probe is None:
            return None
        self.probe.begin(self.state.slices)
        # Closures compute gradients, so they must not see the probe's change.
        lifted = self.probe.lifted
        optimizer, *others = args
        unprobed = [lifted()(argument) if callable(argument) else argument for argument in others]
        return (optimizer, *unprobed), {n: lifted()(value) if callable(value) else value for n, value in kwargs.items()}

    def _note_step(self, *_: Any) -> None:
        self.has_unsent_step = True

    def _end_probe(self) -> bool:
        if self.probe is None or not self.probe.under_way:
            return False
        self.probe.end()
        if self.probe.found >= ENOUGH:
            self._judge(self.probe.most, type(self.optimizer).__name__)
        return True

    def _judge(self, left: float, name: str) -> None:
        if left < OVERWRITES:
            raise ValueError(
                f"{name} undoes received updates: only {left:.0%} of a change of the weights was left after "
                f"its step, so it steps a copy of the weights, such as fp32 master weights. Let it step the parameters "
                f"themselves (master_weights=False), or use strategy='mstopk_hier'."
            )
        if left < KEEPS:
            self._exchange.log_once(
                f"{name} pulls the weights back toward its own copy of them in each step, as schedule-free "
                f"optimizers do. This undoes part of the received updates, so nodes learn less from each other. "
                f"Compare the loss with strategy='mstopk_hier'.",
                logging.WARNING,
            )

    @property
    def exchanges(self) -> int:
        return self.steps // self._config.sync_every

    def make_up_to(self, exchanges: int, step_id: int) -> None:
        self.adopts_weights = False
        while self.exchanges < exchanges:
            self.steps = (self.exchanges + 1) * self._config.sync_every
            self.state.exchange_step(step_id)
            self.gather()

    def flush(self) -> None:
        self.cancel_probe()
        self.state.flush()
        self.gather()

    def cancel_probe(self) -> None:
        if self.probe is not None:
            # An exception may have ended the step between the two hooks.
            self.probe.cancel()

    def gather(self) -> None:
        self.division.gather()

    # -- weights that the world sees -----------------------------------------------------------------------------------

    def swap_in_global_weights(self, wait: bool = True) -> None:
        """Write the global weights into the parameters; with ``wait=False``, without messages in flight."""
        self._probes_again = self.probe is not None and self.probe.cancel()  # true within a step
        self._own, self._waits = [piece.clone() for piece in self.state.slices.in_parameters()], wait
        self.state.slices.write(self._shown())
        self.gather()

    def restore_local_weights(self) -> None:
        # No hook has changed the global weights, so the copy is exact.
        self._put(self._own or ())
        self._end_swap()

    def swap_in_local_weights(self, adopt: bool) -> None:
        """Restore this node's weights, plus the changes that hooks made to the global weights.

        Args:
            adopt: all nodes made the same change, so it becomes part of the global weights.
        """
        state, changed_S = self.state, self.changed_weights() if adopt else None
        if changed_S is not None and self._waits:
            # Apply all messages first, so that the hook's values become global exactly.
            self._put(self._own or ())
            state.absorb_and_write()
            state.set_global(changed_S)
            state.write_model()
        else:
            # Without adoption, a change is an update of this node: the next exchange finds it in the parameters.
            self._put(self._now())
            if changed_S is not None:
                state.set_global(changed_S)
        self._end_swap()

    def _end_swap(self) -> None:
        self._own = None
        if self._probes_again and self.probe is not None:
            self.probe.begin(self.state.slices)
        self.gather()

    def changed_weights(self) -> Tensor:
        """Return the global weights with the changes of hooks, a new tensor [S]."""
        changed_S = self._shown().clone()
        for new, piece in zip(self.state.slices.of(changed_S), self.state.slices.in_parameters(), strict=True):
            # Unchanged entries keep their fp32 bits, which low-precision parameters would round.
            torch.where(piece == new.to(piece.dtype), new, piece.float(), out=new)
        return changed_S

    def is_changed(self) -> bool:
        """Return whether the parameters differ from the written global weights. Waits for the device."""
        shown = self.state.slices.of(self._shown())
        pairs = zip(self.state.slices.in_parameters(), shown, strict=True)
        return not all(torch.equal(piece, shown_piece.to(piece.dtype)) for piece, shown_piece in pairs)

    def average_changes(self) -> None:
        pieces = self.state.slices.in_parameters()
        # Devices at the same place own the same slice, so counterparts skip this collective together.
        if not pieces:
            return
        mean = torch.cat([piece.to(torch.promote_types(piece.dtype, torch.float32)) for piece in pieces])
        self._exchange.communicator.all_reduce(mean)
        self._put(torch.split(mean / self._exchange.topology.num_nodes, [piece.numel() for piece in pieces]))
        self.gather()

    def undo_changes(self) -> bool:
        """Write the global weights again. Return whether the parameters differed from them."""
        changed = self.is_changed()
        if changed:
            self.state.slices.write(self._shown())
        return changed

    def _shown(self) -> Tensor:
        return self.state.read_global() if self._waits else self.state.read_received()

    def _put(self, pieces: Iterable[Tensor]) -> None:
        for piece, now in zip(self.state.slices.in_parameters(), pieces, strict=True):
            piece.copy_(now)

    def _now(self) -> Iterator[Tensor]:
        slices = self.state.slices
        if self._own is None:
            yield from slices.in_parameters()
            return
        for piece, shown, own in zip(slices.in_parameters(), slices.of(self._shown()), self._own, strict=True):
            wide = torch.promote_types(piece.dtype, torch.float32)
            yield (piece.to(wide) - shown.to(piece.dtype).to(wide)).add_(own.to(wide))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of this device's slice, made on the CPU. Waits for messages in flight."""
        self.state.receive()
        # A device may have no room left for copies.
        now = [piece.cpu() for piece in self._now()]
        now_S = torch.cat([piece.float() for piece in now]) if now else torch.empty(0, dtype=torch.float32)
        wide = [piece for piece in now if piece.dtype == torch.float64]
        entries = {"wide": torch.cat(wide)} if wide else {}
        if self.probe is not None:
            entries |= {
                f"probe {n}": torch.tensor(value, dtype=torch.float64) for n, value in self.probe.state_dict().items()
            }
        return {**self.state.state_dict(now_S), **entries}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        probed = {name[6:]: float(value) for name, value in saved.items() if name.startswith("probe ")}
        if self.probe is not None and probed:
            self.probe.load_state_dict(probed)
        if (
            self.state.load_state_dict(saved) and "wide" in saved
        ):  # between two exchanges, fp64 parameters have more bits than fp32
            pieces = [piece for piece in self.state.slices.in_parameters() if piece.dtype == torch.float64]
            for piece, now in zip(pieces, torch.split(saved["wide"], list(map(len, pieces))), strict=True):
                piece.copy_(now)
        self.gather()

    def restart(self) -> None:
        self.state.receive()
        self._own, self.adopts_weights = None, True
        self.state = self._new_state()

    # -- parameters ----------------------------------------------------------------------------------------------------

    @property
    def must_follow(self) -> bool:
        """Whether the optimizer's parameters have changed."""
        parameters = self.parameters
        now = trainable_params(self.optimizer, set(map(id, parameters)))
        return len(now) != len(parameters) or not all(map(is_, now, parameters))

    @torch.no_grad()
    def follow_groups(self) -> None:
        """Exchange other parameters, if some were added, unfrozen or removed. A collective of the world."""
        if not self.must_follow:
            return
        ids = set(map(id, self.parameters))
        now = trainable_params(self.optimizer, ids)
        # All ranks make these collectives in this order. Removed parameters get the global weights.
        self._drop_pending(ids - set(map(id, now)))
        self.division.follow_groups()
        # New parameters begin with the values of rank 0, before `_new_state` copies them.
        self._exchange.communicator.broadcast_from_rank0(p for p in now if id(p) not in ids)
        before, after = self.state, self._new_state()
        self._before_change(self, after)
        self.state = after
        after.migrate_from(before)
        self.gather()

    def _leave_frozen(self) -> None:
        # Pending updates would still change frozen weights, so these get the global weights instead.
        frozen = {id(p) for p in self.parameters if not (p.requires_grad or _has_gradient(p))}
        new, self._frozen = frozen - self._frozen, frozen
        self._drop_pending(new)

    def _drop_pending(self, parameters: set[int]) -> None:
        if parameters:
            self.state.drop_pending(parameters)
            self.gather()

    def _new_state(self) -> UpdateState:
        return self._make_state(Slices(self.parameters, self.division.local_parts), self._exchange, self._config)


def _has_hooks(optimizer: Optimizer) -> bool:
    # A wrapper may not call ``Optimizer.__init__``.
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(local_of(parameter.grad).any())


def check_optimizer(optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS builds its search direction from earlier parameters, but the updates of other nodes change these "
            "parameters. Use a first-order optimizer, or strategy='ddp'."
        )
    if callable(getattr(optimizer, "consolidate_state_dict", None)):
        raise ValueError(
            f"{type(optimizer).__name__} is already sharded (by PTOCallback or ZeroRedundancyOptimizer). Remove the "
            f"callback or wrapper, because this strategy shards the optimizer step itself (shard_optimizer=True)."
        )


# -- the division of the step ------------------------------------------------------------------------------------------


class StepPartition:
    """How the devices of a node divide the step of one optimizer.

    Args:
        step: the sharded step. None: each device does the whole step.
    """

    def __init__(self, optimizer: Optimizer, inside: HierCommunicator, step: ShardedStep | None = None) -> None:
        self.optimizer, self._inside, self._step = optimizer, inside, step
        self.is_replicated = step is None  # all devices have equal parameters after the step
        self.parameters: list[Tensor] = []  # trained, in the order of the optimizer's groups
        self.local_parts: list[Part | None] = []  # the part of each parameter that this device exchanges
        self._parts: list[Parts] = []
        self.follow_groups()

    def follow_groups(self) -> None:
        place, size = self._inside.node.place, self._inside.node.size
        now = trainable_params(self.optimizer, set(map(id, self.parameters)))
        if self._step is not None:
            self._step.follow_groups()
            parts_by_id = {id(p): parts for p, parts in zip(self._step.parameters, self._step.parts, strict=True)}
            self._parts = [parts_by_id[id(p)] for p in now]
        else:
            parts_by_id = {id(p): parts for p, parts in zip(self.parameters, self._parts, strict=True)}
            self._parts = partition_new(now, parts_by_id, size, cost=Tensor.numel, cuttable=lambda _: True)
        self.parameters = now
        self.local_parts = [next((part for part in of if part.owner == place), None) for of in self._parts]
        self._gather = FlatGather(now, self._parts, place, size)

    def gather(self) -> None:
        self._gather(self._inside)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state; of a sharded step, only on the first device. A collective of the node."""
        node = self._inside.node
        if self._step is not None:
            # A collective of the node: every device calls it, and only the first gets the result.
            self._step.consolidate_state_dict(to=node.ranks[0])
            if node.place > 0:
                return {}
        return dict(self.optimizer.state_dict())

    def release(self) -> None:
        if self._step is not None:
            self._step.release()


class FSDPPartition(StepPartition):
    """FSDP2 has sharded the parameters: each device has only its part."""

    def __init__(self, optimizer: Optimizer, inside: HierCommunicator, module: nn.Module) -> None:
        self._module = module
        super().__init__(optimizer, inside)
        self.is_replicated = False

    def follow_groups(self) -> None:
        self.parameters = trainable_params(self.optimizer, set(map(id, self.parameters)))
        self.local_parts = [part_of(p) for p in self.parameters]

    def gather(self) -> None:
        # FSDP2 may have gathered parameters for an evaluation. Dropped, they are gathered again in the next forward
        # pass, with the new values.
        drop_gathered(self._module)


def partition_of(
    optimizer: Optimizer, module: nn.Module, inside: HierCommunicator, names: Mapping[int, str], share: bool
) -> StepPartition:
    """Return how the devices divide the step of an optimizer; with ``share``, each may step only its part."""
    parameters = parameters_of(optimizer)
    if any(isinstance(p, DTensor) for p in parameters):
        return FSDPPartition(optimizer, inside, module)
    # A sharded step gives another result with sparse gradients, or with a norm over all parameters.
    dense = sparse_parameters(module).isdisjoint(map(id, parameters))
    exact = is_tested(optimizer) and not any(group.get("max_grad_norm") for group in optimizer.param_groups)
    if share and inside.node.size > 1 and dense and exact:
        return StepPartition(optimizer, inside, ShardedStep(optimizer, inside, names, gather=False))
    return StepPartition(optimizer, inside)

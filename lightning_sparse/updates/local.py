"""Node-local optimizers that exchange their updates: the interface for a training loop."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sparse.agree import all_agree, differing, extremes, same_options
from lightning_sparse.checkpoint.state import State, for_folder
from lightning_sparse.engine import Engine
from lightning_sparse.exchange import Exchange, HierCommunicator
from lightning_sparse.messages import LogOnce, ensure_log_handler
from lightning_sparse.sharding import check_sharded, parameter_names, parameters_of, trainable_params
from lightning_sparse.topology import Topology, undisturbed
from lightning_sparse.updates import checkpoint, optimizer_state
from lightning_sparse.updates.buffers import Buffers
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.optimizer import LocalOptimizer, check_optimizer
from lightning_sparse.updates.slices import Slices
from lightning_sparse.updates.state import UpdateState, new_state


class LocalUpdates(Engine):
    """Exchanges the updates of this node's optimizers after each step.

    All ranks start with the parameters and buffers of rank 0. With one node, this does nothing. In a loop::

        topology = discover()
        ddp = DistributedDataParallel(model, process_group=topology.intra)
        updates = LocalUpdates(model, optimizer, UpdatesConfig(density=0.01), topology)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()
            updates.step()
        updates.finish()

    Args:
        module: the model, without a wrapper.
        optimizers: one or several optimizers without common parameters. Frozen parameters are exchanged once they
            train.
        topology: topology of the ranks, with groups, from ``topology.discover()``.

    Raises:
        ValueError: if nodes have different numbers of devices, an optimizer or parameter is unsupported, or ranks
            differ in options or in the parameters of their optimizers.
    """

    kind = "updates"
    reshard_message = (
        "the global weights and the mean of the pending updates are kept; optimizers continue with the state of node 0"
    )
    loss_message = "training continues from its weights, and unsent updates are lost"
    requires_all_ranks = has_local_weights = True

    def __init__(
        self,
        module: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        config: UpdatesConfig,
        topology: Topology,
    ) -> None:
        optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        ensure_log_handler()
        _check_topology(topology)
        for optimizer in optimizers:
            check_optimizer(optimizer)
        topology = undisturbed(topology)
        self.module, self.config, self.topology = module, config, topology
        self.active = self._has_others()
        self.log_once = LogOnce(topology.rank)
        self.optimizers: list[LocalOptimizer] = []
        self._names: dict[int, str] = {}
        self._shown = self._waits = False  # the module holds the global weights; with all messages
        self._all_sent = self._trusted = False  # ``_trusted``: changes of hooks have not been compared
        self._may_load_weights = True  # the weights that the program loads become the global weights
        if not self.active:
            self.log_once(f"{topology.shape}: one node, nothing to exchange")
            return
        _check_parameters(self.names, optimizers)
        same_options(options_to_compare(module, self.names, optimizers, config))
        parameters = [p for optimizer in optimizers for p in trainable_params(optimizer)]
        device = next((p.device for p in (*parameters, *module.parameters())), torch.device("cpu"))
        numel = sum(p.numel() for p in parameters)
        self.exchange = Exchange(config, topology, device, numel, self.log_once)
        self.buffers = Buffers(module, self.exchange.communicator, self._stepped)
        # Before the optimizers copy the parameters: these are the first global weights.
        self.exchange.communicator.broadcast_from_rank0([*module.parameters(), *module.buffers()])
        self._inside = inside = HierCommunicator(topology, world=self.exchange.communicator.node)
        self.optimizers = [
            LocalOptimizer(
                optimizer, module, self.names, self.exchange, inside, config, self._make_state, self._before_change
            )
            for optimizer in optimizers
        ]
        self._log_exchange()

    def _has_others(self) -> bool:
        return self.topology.kind == "hierarchical"

    def _log_exchange(self) -> None:
        volume = f"; {self.exchange.volume(self.config.density, self.config.sync_every)}" if self.optimizers else ""
        self.log_once(f"{self.topology.shape}: {self.config.describe(self.topology.num_nodes)}{volume}")

    def _make_state(self, slices: Slices, exchange: Exchange, config: UpdatesConfig) -> UpdateState:
        return new_state(slices, exchange, config)

    def _before_change(self, one: LocalOptimizer, after: UpdateState) -> None: ...

    def _stepped(self) -> set[int]:
        return {id(p) for local_optimizer in self.optimizers for p in local_optimizer.parameters}

    # -- training ------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Follow parameters that were added to an optimizer. The optimizer calls it before each step.

        Call it yourself if some nodes may skip a step.
        """
        for local_optimizer in self._of(optimizer):
            local_optimizer.before_step()

    @torch.no_grad()
    def step(self, optimizer: Optimizer | None = None) -> None:
        """Exchange the updates of one optimizer, or of all, after its step.

        Every rank calls it, even if it skipped the step.

        Raises:
            CommunicationError: if this exchange failed or, with a delay, an earlier exchange.
            ValueError: if the optimizer was not given to the constructor.
        """
        if not self.active:
            return
        self.exchange.refuse_capture()
        stepped = self._of(optimizer)
        if optimizer is not None and not stepped:
            raise ValueError(
                f"step() was given a {type(optimizer).__name__} that is none of the {len(self.optimizers)} "
                f"optimizer(s) whose updates are exchanged. Pass the optimizer itself, not a wrapper, or omit it to "
                f"step all."
            )
        self.steps += 1
        if self._may_load_weights:
            # Optimizers that step later, too: from here on, exchanges change the weights.
            for local_optimizer in self.optimizers:
                if local_optimizer not in stepped:
                    local_optimizer.adopt_weights()
            self._trusted = True
        self._all_sent = self._may_load_weights = False
        self._name_place(f"in step {self.steps}")
        for local_optimizer in stepped:
            local_optimizer.step(self._step_id(local_optimizer))
        self.exchange.stats.end_round()

    def keep_global_weights(self) -> None:
        self._may_load_weights = False
        for local_optimizer in self.optimizers:
            local_optimizer.adopts_weights = False

    def send_unsent(self) -> None:
        for local_optimizer in self.optimizers:
            if local_optimizer.has_unsent_step:
                self.step(local_optimizer.optimizer)

    def finish(self) -> None:
        """Send all pending updates. Afterwards all ranks have equal weights."""
        if not self.active:
            return
        self.swap_in_local_weights()
        self._name_place(f"at the end, after step {self.steps}")
        comm = self.exchange.communicator
        with comm.waiting():
            # All ranks decide alike, because the rest is collective.
            if all_agree(self._all_sent, comm.flat_all_reduce, self._device):
                return
            if self.steps == 0:
                self.warn_of_no_step()
            self._make_up()
            for local_optimizer in self.optimizers:  # all, before a flush uses their process group
                local_optimizer.state.receive()
            self.exchange.runner.synchronize()  # for other modules with this topology
            self._flush()
            self.buffers.average()
        self._all_sent = True

    def _flush(self) -> None:
        for local_optimizer in self.optimizers:
            local_optimizer.flush()

    def warn_of_no_step(self) -> None:
        self.log_once(
            "no optimizer step was made: nodes exchange nothing, and the global weights do not change. Call "
            "optimizer.step() of an optimizer that configure_optimizers() returned.",
            logging.WARNING,
        )

    def _make_up(self) -> None:
        # Nodes would otherwise wait forever in collectives that a node with fewer steps never makes.
        mine = [local_optimizer.exchanges for local_optimizer in self.optimizers]
        most, least = extremes(mine, self.exchange.communicator.flat_all_reduce, self._device)
        if most == least:
            return
        self.log_once(
            f"one node exchanged its updates {max(most)} times, another one {min(least)} times: nodes that made fewer "
            f"steps make the missing exchanges now. Call step() on every rank after each batch, even if a rank skips "
            f"its optimizer step.",
            logging.WARNING,
        )
        for local_optimizer, exchanges in zip(self.optimizers, most, strict=True):
            local_optimizer.make_up_to(exchanges, self._step_id(local_optimizer))

    def _step_id(self, one: LocalOptimizer) -> int:
        return (self.batches << 8) + self.optimizers.index(one)

    # -- weights that the world sees -----------------------------------------------------------------------------------

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        if self._shown and self._waits:
            yield
            return
        with super().global_weights():
            yield

    @torch.no_grad()
    def swap_in_global_weights(self, wait: bool = True) -> None:
        if not self.active or (self._shown and (self._waits or not wait)):
            return
        self.swap_in_local_weights()
        self._shown, self._waits = True, wait
        # Nodes do not wait for each other: the weights lack messages in flight, and buffers stay local.
        if not wait:
            for local_optimizer in self.optimizers:
                local_optimizer.swap_in_global_weights(wait=False)
            return
        self._name_place(f"showing the global weights, after step {self.steps}")
        with self.exchange.communicator.waiting():
            self._make_up()
            for local_optimizer in self.optimizers:
                local_optimizer.swap_in_global_weights()
            self._check_trusted()
            self.buffers.show_averaged()

    @torch.no_grad()
    def swap_in_local_weights(self) -> None:
        """Restore the local weights. Every rank calls it.

        A change since ``swap_in_global_weights()`` becomes part of the global weights: the mean of the nodes' changes.
        After ``swap_in_global_weights(wait=False)``, changes are not compared, so all nodes must make the same change.
        """
        if not self._shown:
            return
        changed, adopt = self._agree_on_changes() if self._waits else (self._may_be_changed(), True)
        self._trusted |= not self._waits
        self._all_sent &= adopt
        self._shown = False
        for local_optimizer in self.optimizers:
            if changed:
                local_optimizer.swap_in_local_weights(adopt)
            else:
                local_optimizer.restore_local_weights()
        if self._waits:
            self.buffers.swap_in_local_weights()

    @torch.no_grad()
    def adopt_changes(self) -> None:
        if self._shown and self._waits and self._agree_on_changes() == (True, True):
            self.swap_in_local_weights()
            self.swap_in_global_weights()

    @torch.no_grad()
    def average_changes(self) -> None:
        if self._shown and self._waits:
            self._agree_on_changes()

    def _may_be_changed(self) -> bool:
        # On GPUs, a comparison would make the host wait, so assume a change.
        return self._device.type != "cpu" or any(local_optimizer.is_changed() for local_optimizer in self.optimizers)

    def _agree_on_changes(self) -> tuple[bool, bool]:
        """Return whether any rank changed the shown global weights, and whether the global weights adopt the change."""
        changed = any(local_optimizer.is_changed() for local_optimizer in self.optimizers)
        # A collective of the world. If nodes made different changes, the mean is written into the parameters.
        if all_agree(not changed, self.exchange.communicator.flat_all_reduce, self._device):
            return False, True
        alike = self._same_on_all_nodes(
            [piece for local_optimizer in self.optimizers for piece in local_optimizer.state.slices.in_parameters()]
        )
        if not alike:
            self.log_once(
                "a hook changed the weights, but not in the same way on all nodes: all nodes now use the mean of "
                "the changes. If you did not intend this, make the same change on all nodes: seed it, or broadcast "
                "the weights.",
                logging.WARNING,
            )
            for local_optimizer in self.optimizers:
                local_optimizer.average_changes()
        return True, True

    def _check_trusted(self) -> None:
        # Hooks between batches run after a swap without waiting, so their changes are compared only here. All ranks
        # agree on ``_trusted``, because every rank swaps.
        if not self._trusted:
            return
        self._trusted = False
        if not self._same_on_all_nodes([local_optimizer.state.read_global() for local_optimizer in self.optimizers]):
            raise RuntimeError(
                "the global weights differ between nodes: on_train_batch_start or on_train_batch_end changed weights, "
                "or a loop loaded weights before its first step, but not in the same way on all nodes. Make the same "
                "change on all ranks, as DDP also requires, or change the weights in training_step. Resume from the "
                "last checkpoint."
            )

    def _same_on_all_nodes(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all nodes have equal values. A collective of the world."""
        comm = self.exchange.communicator
        differ = bool(tensors) and bool(differing(tensors, comm.all_reduce, self._device))
        return all_agree(not differ, comm.flat_all_reduce, self._device)

    @property
    def _device(self) -> torch.device:
        return self.optimizers[0].state.global_S.device if self.optimizers else torch.device("cpu")

    @property
    def names(self) -> dict[int, str]:
        """Names of the module's parameters by ``id()``."""
        # Old ids stay, for example of shards that FSDP2 replaces during an evaluation.
        self._names.update(parameter_names(self.module))
        return self._names

    @torch.no_grad()
    def restart(self) -> None:
        self._shown = self._all_sent = False
        self._may_load_weights = True
        for local_optimizer in self.optimizers:
            local_optimizer.restart()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def tracks_optimizer(self, optimizer: Optimizer) -> bool:
        return bool(self._of(optimizer))

    def state(self) -> State:
        return checkpoint.state_of(self.optimizers, self.names, self.buffers)

    def state_dict(self) -> dict[str, Any]:
        if not self.active:
            message = "with a single node, state_dict() has no optimizer state: save optimizer.state_dict(), too"
            self.log_once(message, logging.WARNING)
        return super().state_dict()

    def device_state(self) -> dict[str, Any]:
        return {
            **super().device_state(),
            "optimizers": for_folder(optimizer_state.state_of(self.optimizers, self.names)),
        }

    def stepped(self) -> optimizer_state.Stepped:
        return [(local_optimizer.optimizer, local_optimizer.stepped()) for local_optimizer in self.optimizers]

    def fits(self, metadata: Mapping[str, Any], state: State) -> bool:
        return self.active and checkpoint.fits(self.optimizers, self.names, self.buffers, state)

    def load(self, metadata: Mapping[str, Any], state: State | None) -> None:
        self._all_sent = False
        self.keep_global_weights()
        if state is not None:
            self.steps = metadata["steps"]
            checkpoint.load(self.optimizers, self.names, self.buffers, state)

    def load_from(self, metadata: Mapping[str, Any], nodes: Sequence[Sequence[State]]) -> None:
        self._all_sent = False
        self.keep_global_weights()
        if self.active:
            self.steps = metadata["steps"]
            checkpoint.load_from(self.optimizers, self.names, self.module, nodes)
        else:
            checkpoint.load_alone(self.module, nodes)

    def global_parts(self) -> list[Tensor]:
        return [local_optimizer.state.read_global() for local_optimizer in self.optimizers]

    def norms(self) -> dict[str, Tensor]:
        return {"pending_norm": self.pending_norm()}

    def gauges(self) -> dict[str, float]:
        return {"step_ahead": self.step_ahead}

    def close(self) -> None:
        if self.active:
            self.exchange.runner.shutdown()

    def release_optimizers(self, reused: Sequence[Optimizer] = ()) -> None:
        """Remove the hooks and end threads. Reused optimizers get all their state: a collective of the node."""
        self.close()
        for local_optimizer in self.optimizers:
            local_optimizer.release(any(local_optimizer.optimizer is optimizer for optimizer in reused))

    def _name_place(self, where: str) -> None:
        self.exchange.communicator.error_context = self._inside.error_context = where

    def _of(self, optimizer: Optimizer | None) -> list[LocalOptimizer]:
        return [
            local_optimizer
            for local_optimizer in self.optimizers
            if optimizer is None or local_optimizer.optimizer is optimizer
        ]

    @property
    def step_ahead(self) -> float:
        """The fraction of its pending updates in the weights of this device, averaged over optimizers."""
        fractions = [local_optimizer.state.local_fraction for local_optimizer in self.optimizers]
        return sum(fractions) / max(1, len(fractions))

    def pending_norm(self) -> Tensor:
        """Return the L2 norm of this device's pending updates, a 0-dim tensor, without a host wait."""
        norms = [torch.linalg.vector_norm(local_optimizer.state.pending_S) for local_optimizer in self.optimizers]
        return torch.stack(norms).norm() if norms else torch.zeros(())


def _check_topology(topology: Topology) -> None:
    if topology.kind == "unequal nodes":
        raise ValueError(
            f"nodes of {sorted({len(node) for node in topology.nodes})} devices cannot exchange slices: start the same "
            f"number of processes on each node, or name groups of equal size with LIGHTNING_SPARSE_NODE."
        )


def _check_parameters(names: Mapping[int, str], optimizers: Sequence[Optimizer]) -> None:
    stepped: set[int] = set()
    sharded = any(isinstance(p, DTensor) for optimizer in optimizers for p in parameters_of(optimizer))
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            name = names.get(id(parameter))
            if name is None:
                raise ValueError(
                    f"{type(optimizer).__name__} steps a parameter of shape {tuple(parameter.shape)} that the module "
                    f"does not hold: ranks would begin with different values. Make it a parameter of the module."
                )
            if parameter.is_complex():
                raise ValueError(
                    f"parameter {name} is of {parameter.dtype}, and updates are exchanged as real numbers: hold real "
                    f"and imaginary parts in a real parameter (torch.view_as_real), or use strategy='ddp'."
                )
            if sharded:
                check_sharded(name, parameter)
            if id(parameter) in stepped:
                raise ValueError(
                    f"parameter {name} is stepped twice, and each update is to be sent once: give it to one optimizer, "
                    f"in one group, or use strategy='ddp'."
                )
            stepped.add(id(parameter))


def options_to_compare(
    module: nn.Module, names: Mapping[int, str], optimizers: Sequence[Optimizer], config: UpdatesConfig
) -> dict[str, Any]:
    """Return the values that must be equal on all ranks, by name."""
    held = [*module.named_parameters(), *module.named_buffers()]
    stepped = [[names[id(p)] for p in trainable_params(optimizer)] for optimizer in optimizers]
    entries = repr((stepped, [(name, tuple(t.shape), t.stride(), t.dtype) for name, t in held]))
    digest = hashlib.sha256(entries.encode()).hexdigest()[:8]
    what = "names, order, shapes, strides, dtypes and optimizers"
    return {**config.to_dict(), "module": f"{len(held)} tensors, with digest {digest} of their {what}"}

"""The state of the hook between rounds.

A *round* is one reduction of all buckets:

    before_backward()            settles the last round: its residuals count, or are dropped with their gradients, or
                                 stay open while gradients accumulate before the step
    on_bucket(bucket)            once per bucket, during backward: cuts it into groups, each with its path
    end_round(used)              with the last bucket, on the runner's threads
    optimizer.step()             watch() notes the stepped parameters, whose residuals then count
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # re-exported, unannounced

from lightning_sparse.checkpoint.state import State
from lightning_sparse.engine import Engine
from lightning_sparse.exchange import Exchange, Path, TensorSpec
from lightning_sparse.exchange.paths import Dense, Flat
from lightning_sparse.exchange.rates import Rates
from lightning_sparse.gradients import checkpoint
from lightning_sparse.gradients.config import HierConfig, Warmup
from lightning_sparse.gradients.groups import (
    BY_SHARD,
    Bucket,
    BucketGroup,
    Layout,
    ParamGroup,
    excluded_names,
    group_of,
    in_bucket_order,
    refuse_python_reducer,
    refuse_sparse_gradients,
)
from lightning_sparse.gradients.momentum import MomentumCorrection
from lightning_sparse.gradients.residual import ResidualStore
from lightning_sparse.gradients.tracking import Parameters, StepTracker, UnusedParameters
from lightning_sparse.internals import scale_of
from lightning_sparse.messages import LogOnce, ensure_log_handler
from lightning_sparse.optimizers import sparse_gradient_objection, sparse_gradient_warning
from lightning_sparse.topology import Topology, undisturbed


class HierState(Engine):
    """State of ``hier_hook``.

    Args:
        module: the module inside the DDP wrapper.
        topology: topology of the ranks, from ``topology.discover()``.
        find_unused_parameters: as for DDP. Residuals of unused parameters then stay unchanged.

    Attributes:
        epoch: current epoch, for the density warm-up. Set it at the start of each epoch.
        round: number of finished rounds.
        momentum: momentum correction, if the hook has taken over the momentum of SGD.
        loss_scale: returns the scale of a loss scaler, a 0-dim tensor, or None; called in each round.
    """

    kind = "gradients"
    reshard_message = "the sum of residuals over nodes is kept, divided equally"
    loss_message = "their residuals are lost"

    def __init__(
        self, module: nn.Module, config: HierConfig, topology: Topology, *, find_unused_parameters: bool = False
    ) -> None:
        refuse_sparse_gradients(module)
        refuse_python_reducer()
        topology = undisturbed(topology)
        self.config, self.topology = config, topology
        ensure_log_handler()
        self.log_once = LogOnce(topology.rank)
        self.log_once(topology.describe())
        self.epoch: int | None = None
        self.round = 0
        self.warmup = Warmup(config.warmup_epochs, config.warmup_steps)
        self.parameters = Parameters(module)
        self.active = topology.kind == "hierarchical"
        devices = {parameter.device for parameter in module.parameters()}
        numel = sum(parameter.numel() for parameter in module.parameters())
        self.exchange = Exchange(config, topology, devices.pop() if len(devices) == 1 else None, numel, self.log_once)
        excluded = excluded_names(module, config.exclude)
        self.layout = Layout(excluded if self.active and config.exchange != "dense" else frozenset())
        self.store = ResidualStore(topology.device_index, topology.num_devices)
        self.momentum = self._momentum() if config.momentum_correction else None
        self.exchange.choice.reduces_shards = self.momentum is not None  # a velocity is kept with the node's sums
        self.loss_scale: Callable[[], Tensor | None] = lambda: None
        self.unused: UnusedParameters | None = None
        self._shares: dict[tuple[float, torch.device], Tensor] = {}  # cached, to save a kernel per bucket
        if find_unused_parameters:
            self.track_unused(module)
        self._steps = StepTracker(self.parameters, self.store.undecided_names)
        self._round_is_open = False  # waiting for buckets
        self._is_prepared = False  # ``before_backward`` was called for the next round
        self._is_reducing = False  # from the first bucket until the last bucket is reduced
        self._reason_for_dense = ""

    def _momentum(self) -> MomentumCorrection | None:
        if not self.active:
            self.log_once("momentum_correction: nothing is left out here, so the optimizer keeps its own momentum")
            return None
        self.log_once(
            "SGD's momentum is kept with the residuals, so callbacks see the velocity instead of the gradient"
        )
        return MomentumCorrection(self.parameters, self.topology, self.log_once)

    # -- the life of a round ------------------------------------------------------------------------------------------

    def before_backward(self, reason_for_dense: str = "") -> None:
        """Settle the last round, and prepare the next. Call it before each backward pass, on all ranks.

        It is optional without ``watch``: the next round then settles the last.

        Args:
            reason_for_dense: reason to reduce the next round as DDP does, without residuals; empty for none.
        """
        self.exchange.refuse_capture()
        self._is_prepared = True
        waiting = self.commit_round()
        if self.momentum is not None:
            self.momentum.begin_round(waiting)
        self._reason_for_dense = reason_for_dense
        if reason_for_dense:
            self.log_once(f"reducing as plain DDP does, without residuals: {reason_for_dense}")

    def on_bucket(self, bucket: GradBucket) -> Bucket:
        self.exchange.refuse_capture()
        flat_N, last = bucket.buffer(), bucket.is_last()
        if not self._round_is_open:
            self.commit_round()
            if self.momentum is not None and not self._is_prepared:
                raise ValueError(
                    "momentum_correction=True, but before_backward() was not called before this backward pass. Call "
                    "state.before_backward() before each backward pass, also within no_sync()."
                )
            self._is_prepared = False
            if self.exchange.choice.needs_probe:
                self.exchange.runner.synchronize()  # for another module with this topology
                self.exchange.choice.measure(flat_N.device, self.round)
            self._round_is_open = self._is_reducing = True
        group = group_of(bucket.parameters(), self.parameters.names)
        unused = frozenset[str]() if self.unused is None else self.unused.take(group)
        received = Bucket(group, flat_N, bucket.index(), last, frozenset() if self._reason_for_dense else unused)
        received.applies_by_name = not self.active and not self._reason_for_dense
        self.layout.record(group)
        received.groups = [
            self._part(received, subgroup) for subgroup in self.layout.groups_in(group) if subgroup.numel
        ]
        if last:
            self._round_is_open = False
        return received

    def _part(self, bucket: Bucket, group: ParamGroup) -> BucketGroup:
        if self._reason_for_dense:
            return BucketGroup(bucket, group, Flat(self._work(group)), has_residual=False)
        return BucketGroup(bucket, group, self.path(group), has_residual=self.is_sharded(group))

    def end_round(self, used: Tensor | None) -> None:
        if self.unused is not None and used is not None:
            self.unused.undo(used)
        if self.layout.end_round() and self.active:
            self._describe_layout()
        self.exchange.stats.end_round()
        self.round += 1
        self._is_reducing = False

    def commit_round(self) -> set[str]:
        """Commit the residuals of stepped parameters. Return the undecided parameters."""
        if self._is_reducing:
            self.exchange.runner.discard_errors()
            self._is_reducing = False
        # A round that an exception interrupted does not count.
        if self.layout.abandon_round() or self._round_is_open:
            for store in self.stores:
                store.drop_proposals()
            if self.unused is not None:
                self.unused.abandon()
            self.exchange.stats.abandon_round()
            self._round_is_open = False
        waiting: set[str] = set()
        if self.store.undecided_names():
            # A dropped gradient returns its residual to the last value. A gradient that may still be stepped keeps it
            # undecided.
            discarded, waiting = self._steps.not_stepped()
            for store in self.stores:
                store.commit(discarded, waiting)
        self._steps.clear()
        return waiting

    # -- around it -----------------------------------------------------------------------------------------------------

    def watch(self, optimizers: Iterable[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None = None) -> None:
        """Watch the steps of all optimizers from now on, so that only stepped gradients change residuals.

        If there is no optimizer, every round counts as used. If you call this, also call before_backward(), because
        gradients are incomplete inside a backward pass.

        Args:
            scaler: the loss scaler of the loop. Residuals are stored without its scale.

        Raises:
            ValueError: for an optimizer that cannot report its steps, or whose momentum cannot be corrected.
        """
        if scaler is not None:
            self.loss_scale = partial(scale_of, scaler)
        optimizers = list(optimizers)
        self._steps.watch(optimizers)
        if self.momentum is not None:
            self.momentum.watch(optimizers)
        objected = sparse_gradient_objection(optimizers) if self.active else ""
        self.exchange.choice.forbid_sparse = bool(objected)
        if objected and self.config.exchange == "auto":
            self.log_once(
                f"exchange='auto' sends all entries: {objected}. To send only the largest entries, use "
                f"exchange='sparse', or SGD"
            )
        elif objected and self.config.leaves_entries_out:
            alternative = "exchange='auto', which sends everything here"
            self.log_once(sparse_gradient_warning(self.config.exchange, objected, alternative), logging.WARNING)

    def close(self) -> None:
        # The last round stays open until the next one begins: only then is it known whether its gradient was stepped,
        # and after an exception, its buckets may still be in flight.
        self._steps.unwatch()
        self.exchange.runner.shutdown()
        if self.momentum is not None:
            self.momentum.unwatch()
        if self.unused is not None:
            self.unused.close()
            self.unused = None

    def track_unused(self, module: nn.Module) -> None:
        """Watch which parameters are used. Call it again after parameters are frozen or unfrozen."""
        if self.unused is not None:
            self.unused.close()
        self.unused = UnusedParameters(module) if self.active else None

    # -- paths and units -----------------------------------------------------------------------------------------------

    def is_sharded(self, group: ParamGroup) -> bool:
        return self.active and bool(group.numel) and self.parameters.dtypes[group.names[0]] in BY_SHARD

    def path(self, group: ParamGroup) -> Path:
        work, choice = self._work(group), self.exchange.choice
        if not self.is_sharded(group):
            return Flat(work)
        if not self.layout.is_settled(group):
            return Dense(work)
        if self.layout.is_excluded(group):
            return choice.path(work, 1.0, exact=True)
        return choice.path(work, self._density)

    def _work(self, group: ParamGroup) -> TensorSpec:
        return self.exchange.choice.work(group.numel, self.parameters.dtypes[group.names[0]])

    @property
    def _density(self) -> float:
        return self.warmup.density_now(self.config.density, self.epoch, self.round, self.log_once)

    def unscaled(self, share: float, device: torch.device) -> Tensor:
        factor = self._shares.get((share, device))
        if factor is None:
            factor = self._shares[share, device] = torch.full((), share, dtype=torch.float32, device=device)
        scale = self.loss_scale()
        return factor if scale is None else factor / scale

    def rescale(self, shard_S: Tensor) -> Tensor:
        scale = self.loss_scale()
        return shard_S if scale is None else shard_S.mul_(scale)

    # -- residuals -----------------------------------------------------------------------------------------------------

    def settled_stores(self) -> list[ResidualStore]:
        """Return copies of the stores for a checkpoint, as commit_round() would leave them."""
        # Gradients that wait for a step do not survive a restart, so their round does not count.
        pending = self.store.undecided_names() - self._steps.stepped()
        discarded = frozenset(pending) if self._steps.watching else frozenset()
        return [store.committed_copy(discarded) for store in self.stores]

    def residual_norm(self) -> Tensor:
        """Return the L2 norm of this device's residuals, a 0-dim tensor."""
        shards = [entry.latest for entry in self.store.entries.values() if entry.latest is not None]
        return torch.stack([torch.linalg.vector_norm(t) for t in shards]).norm() if shards else torch.zeros(())

    def norms(self) -> dict[str, Tensor]:
        residual = self.residual_norm()
        gradient = self.gradient_norm().to(residual.device)
        ratio = torch.where(gradient > 0, residual / gradient, 0.0)  # zero if the user has dropped the gradient
        return {"residual_norm": residual, "residual_to_gradient": ratio}

    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of the current gradients in the shards of ``residual_norm()``, a 0-dim tensor."""
        module = self.parameters.module
        named = () if module is None else module.named_parameters()
        grads = {name: p.grad.detach() for name, p in named if p.grad is not None and not p.grad.is_complex()}
        pieces = [
            in_bucket_order(grads[name])[param_slice]
            for group in self.layout.settled
            for name, _, param_slice in group.shard_slices(
                group.names, self.topology.device_index, self.topology.num_devices
            )
            if name in grads
        ]
        norms = [torch.linalg.vector_norm(piece).float() for piece in pieces]
        return torch.stack(norms).norm() if norms else torch.zeros(())

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        return self.round

    def owns_any(self, parameters: Collection[int]) -> bool:
        return not self.parameters.names.keys().isdisjoint(parameters)

    @property
    def stores(self) -> list[ResidualStore]:
        return [self.store] if self.momentum is None else [self.store, self.momentum.store]

    @property
    def saves(self) -> bool:
        return True

    def metadata(self) -> dict[str, Any]:
        rates = self.exchange.choice.rates
        groups_by_store = [sorted(store.entries, key=lambda group: group.names) for store in self.settled_stores()]
        return {
            "round": self.round,
            "rates": None if rates is None else rates.to_list(),
            "warmup": [self.warmup.epochs, self.warmup.rounds],
            "momentum": {} if self.momentum is None else self.momentum.momentum_equivalents(),
            "parameters": dict(self.parameters.numels),
            "settled": checkpoint.plain(self.layout.settled),
            "previous": checkpoint.plain(self.layout.previous),
            "stores": list(map(checkpoint.plain, groups_by_store)),
        }

    def state(self) -> State:
        return checkpoint.state_of(self.settled_stores(), self.parameters)

    def fits(self, metadata: Mapping[str, Any], state: State) -> bool:
        same = metadata["parameters"] == self.parameters.numels and len(metadata["stores"]) <= len(self.stores)
        # Residuals are flat in memory order, so another memory format does not fit.
        return same and state.layouts == checkpoint.layouts_of(self.parameters)

    def load(self, metadata: Mapping[str, Any], state: State | None) -> None:
        self._load_metadata(metadata)
        choice = self.exchange.choice
        if choice.rates is None and metadata["rates"] is not None:
            choice.rates = Rates.from_list(metadata["rates"])  # new measurements could change the choice of paths
        checkpoint.load(self.stores, metadata["stores"], state, self.parameters)

    def load_from(self, metadata: Mapping[str, Any], nodes: Sequence[Sequence[State]]) -> None:
        self._load_metadata(metadata)
        checkpoint.load_shares(self.stores, metadata, nodes, self.parameters, self.topology.num_nodes)

    def _load_metadata(self, metadata: Mapping[str, Any]) -> None:
        self.restart()
        self.round = metadata["round"]
        # Split again, because the run may now exclude other parameters. regroup() then moves the residuals.
        self.layout.fix(self.layout.split_excluded(checkpoint.groups_of(metadata["settled"])))
        self.layout.previous = self.layout.split_excluded(checkpoint.groups_of(metadata["previous"]))
        if self.config.warmup_epochs is None and self.config.warmup_steps is None:
            self.warmup = Warmup(*metadata["warmup"])  # estimated by the first run

    def restart(self) -> None:
        self.commit_round()
        for store in self.stores:
            store.clear()

    def _describe_layout(self) -> None:
        paths = [self.path(group).name for group in self.layout.settled]
        counted = ", ".join(f"{paths.count(path)} {path}" for path in dict.fromkeys(paths))
        later = "" if self._density == self.config.density else f"at density {self.config.density:g}, "
        self.log_once(
            f"round {self.round + 1}: {len(paths)} group(s) of parameters, {counted}, at density "
            f"{self._density:g} (exchange={self.config.exchange!r}); {later}{self.exchange.volume(self.config.density)}"
        )

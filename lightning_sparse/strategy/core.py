"""What the strategies for Trainer and Fabric do alike, as a mixin that imports no Lightning.

It keeps the states of the modules that were wrapped, finds out the topology, watches optimizers, and takes residuals
into checkpoints and back. The two strategies call it from the methods that their hosts offer.
"""

import gc
import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.gradients import HierConfig, HierState, hier_hook
from lightning_sparse.gradients.tracking import stepped_by
from lightning_sparse.messages import log, show_log_lines
from lightning_sparse.strategy import checkpoint as files
from lightning_sparse.strategy.barrier import StoreBarrier
from lightning_sparse.strategy.options import check_options, loss_scale_of, with_defaults
from lightning_sparse.topology import Topology, discover


class HierCore:
    """The core of both strategies.

    Attributes:
        hier_states: of the modules that are wrapped, in the order of set-up.
    """

    # The part of Lightning's strategies that is relied upon.
    root_device: torch.device
    node_rank: int
    local_rank: int
    global_rank: int
    world_size: int
    is_global_zero: bool
    _ddp_kwargs: dict[str, Any]
    _timeout: timedelta | None

    def _configure(self, config: HierConfig, node_name: str | None, ddp_options: dict[str, Any]) -> None:
        """Before the host's own constructor.

        Raises:
            ValueError: for an option that is unknown, or cannot be combined with this strategy.
        """
        check_options(type(self), ddp_options)
        self.config = config
        self.hier_states: list[HierState] = []
        self._node_name = node_name
        self._topology: Topology | None = None
        self._run_id = ""
        self._saved: list[files.Saved] = []
        self._watched: dict[HierState, list[Optimizer]] = {}
        self._seen_optimizers: list[weakref.ref[Optimizer]] = []  # those that Fabric has set up
        self._saves: Counter[str] = Counter()

    # -- modules -------------------------------------------------------------------------------------------------------

    def _attach(self, ddp: DistributedDataParallel, precision: Any, *, fresh: bool = False) -> HierState:
        """Reduce the module's gradients our way. One that is wrapped again goes on with its residuals, unless it is to
        begin ``fresh``. A collective of the world."""
        module = ddp.module
        self._drop_unused_states(module, fresh)
        state = next((each for each in self.hier_states if each.parameters.are_of(module)), None)
        if state is None:
            state = HierState(module, self.config, self._discover(), find_unused_parameters=self._find_unused)
            state.loss_scale = lambda: loss_scale_of(precision)
            state.log_once(state.topology.describe())
            self.hier_states.append(state)
        elif self._find_unused:
            state.track_unused(module)
        self._watched[state] = []  # new optimizers take the place of those before
        ddp.register_comm_hook(state, hier_hook)
        return state

    @property
    def _find_unused(self) -> bool:
        return bool(self._ddp_kwargs.get("find_unused_parameters", False))

    def _discover(self) -> Topology:
        if self._topology is None:
            self._topology = discover(
                node_rank=self.node_rank,
                local_rank=self.local_rank,
                node_name=self._node_name,
                config=self.config.to_dict() | {"find_unused_parameters": self._find_unused},
                timeout=self._timeout,
            )
            self._run_id = str(self.broadcast(files.new_run_id()))  # type: ignore[attr-defined]
        return self._topology

    def _drop_unused_states(self, module: nn.Module, fresh: bool) -> None:
        """Those of modules that are gone, and that of the module being wrapped if it has other parameters by now."""
        gc.collect()  # so that all ranks see the same modules gone
        for state in list(self.hier_states):
            replaced = state.parameters.are_of(module) and not state.parameters.are_in(module)
            if replaced and not fresh:
                state.log_once(
                    "parameters were replaced since the last set-up: their residuals are lost", logging.WARNING
                )
            if replaced or state.parameters.module is None or (fresh and state.parameters.are_of(module)):
                state.detach()
                self.hier_states.remove(state)
                stale = self._watched.pop(state)
                self._seen_optimizers = [each for each in self._seen_optimizers if each() not in stale]

    def _watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Note the steps of these besides those watched already, each for the modules whose parameters it steps. One
        that steps the same parameters as another takes its place."""
        optimizers = list(optimizers)
        for state in self.hier_states:
            own = [each for each in optimizers if state.parameters.are_stepped_by(each)]
            if own:
                self._watched[state] = _without_replaced(self._watched[state], own) + own
                state.watch(self._watched[state])

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _saving(self, path: Any, *, whole: bool) -> Iterator[list[dict[str, Any]] | None]:
        """Write this rank's residuals, then the caller writes the main file with what is yielded; afterwards those of
        earlier saves are removed. No collective: one rank alone may save, from a signal handler say.

        Args:
            path: of the main file.
            whole: False for weights alone, which have no residuals; None is yielded then.

        Raises:
            RuntimeError: when residuals of some ranks are missing and the main file would replace a whole checkpoint.
        """
        path = os.fspath(path)
        ids: list[str] = []
        manifests = None
        if whole and self.hier_states:
            manifests = [
                files.manifest_of(state, f"{self._run_id}-{index}") for index, state in enumerate(self.hier_states)
            ]
            ids = [manifest["save_id"] for manifest in manifests]
            for state, save_id in zip(self.hier_states, ids, strict=True):
                files.save_side_file(state, save_id, path)
            self._wait_for_residuals("/".join(ids), path)
        yield manifests
        if self.is_global_zero:
            files.remove_side_files(path, but=ids)

    def _wait_for_residuals(self, save_id: str, path: str) -> None:
        """On rank 0, wait for the side files of all ranks."""
        # Not by the path, which may differ between ranks (Ray gives each worker a folder of its own).
        self._saves[save_id] += 1
        barrier = StoreBarrier(f"lightning_sparse/{save_id}/{self._saves[save_id]}", self.world_size)
        barrier.arrive(self.global_rank, os.path.basename(path))
        missing = barrier.wait(self._timeout) if self.is_global_zero else []
        if len(set(barrier.names)) > 1:
            log.warning(
                "ranks save a checkpoint by different names (%s): a resume will not find all residuals. Log what is in "
                "the name with sync_dist=True",
                ", ".join(sorted(set(barrier.names))),
            )
        if not missing:
            return
        said = f"rank(s) {', '.join(map(str, missing))} did not write their residuals of {path} in time"
        if files.exists(path):
            raise RuntimeError(f"{said}: the checkpoint of that name stays as it was. Look for what stopped them.")
        log.warning("%s: it is saved without them, and they are lost on resume", said)

    def _load(self, checkpoint: Any, path: Any) -> None:
        """Read this rank's residuals, for modules that are wrapped now or later."""
        self._saved = files.load(checkpoint, os.fspath(path), self.global_rank)

    def _restore(self, state: HierState, *, any_parameters: bool = False) -> bool:
        """Give a state the first of the loaded residuals that fits its parameters. False when there is none."""
        found = next((each for each in self._saved if any_parameters or files.fits(each, state)), None)
        if found is not None:
            self._saved.remove(found)
            files.restore(found, state, self.root_device)
        return found is not None


def _without_replaced(watched: list[Optimizer], new: list[Optimizer]) -> list[Optimizer]:
    taken = {id(parameter) for each in new for parameter in stepped_by(each)}
    return [each for each in watched if taken.isdisjoint(map(id, stepped_by(each)))]


def prepare_ddp(strategy: HierCore) -> None:
    """Before the host wraps a module: options for DDP, and a logger in a process that did not make the strategy."""
    show_log_lines()
    strategy._ddp_kwargs = with_defaults(strategy._ddp_kwargs)

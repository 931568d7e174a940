"""What the strategies for Trainer and Fabric do alike, as a mixin that imports no Lightning.

It keeps the states of the modules that were wrapped, finds out the topology, watches optimizers, and takes residuals
into checkpoints and back. The two strategies call it from the methods that their hosts offer.
"""

import gc
import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.gradients import HierConfig, HierState, hier_hook
from lightning_sparse.gradients.tracking import stepped_by
from lightning_sparse.messages import show_log_lines
from lightning_sparse.strategy import checkpoint as files
from lightning_sparse.strategy.base import Core
from lightning_sparse.strategy.options import bucket_cap_mb, check_options, loss_scale_of, with_defaults
from lightning_sparse.topology import Topology


class HierCore(Core):
    """The core of both strategies.

    Attributes:
        hier_states: of the modules that are wrapped, in the order of set-up.
    """

    def _configure(self, config: HierConfig, node_name: str | None, ddp_options: dict[str, Any]) -> None:
        """Before the host's own constructor.

        Raises:
            ValueError: for an option that is unknown, or cannot be combined with this strategy.
        """
        check_options(type(self), ddp_options)
        self._begin(config, node_name)
        self.config: HierConfig = config
        self.hier_states: list[HierState] = []
        self._watched: dict[HierState, list[Optimizer]] = {}
        self._seen_optimizers: list[weakref.ref[Optimizer]] = []  # those that Fabric has set up

    # -- modules -------------------------------------------------------------------------------------------------------

    def _attach(self, ddp: DistributedDataParallel, precision: Any, *, fresh: bool = False) -> HierState:
        """Reduce the module's gradients our way. One that is wrapped again goes on with its residuals, unless it is to
        begin ``fresh``. A collective of the world."""
        module = ddp.module
        self._drop_unused_states(module, fresh)
        state = next((each for each in self.hier_states if each.parameters.are_of(module)), None)
        if state is None:
            topology = self._place
            state = HierState(module, self.config, topology, find_unused_parameters=self._find_unused)
            state.loss_scale = lambda: loss_scale_of(precision)
            state.log_once(state.topology.describe())
            self.hier_states.append(state)
        elif self._find_unused:
            state.track_unused(module)
        self._watched[state] = []  # new optimizers take the place of those before
        ddp.register_comm_hook(state, hier_hook)
        return state

    @property
    def _place(self) -> Topology:
        """The topology. A collective of the world, the first time."""
        return self._discover({"find_unused_parameters": self._find_unused})

    @contextmanager
    def _sized_buckets(self, module: nn.Module) -> Iterator[None]:
        """DistributedDataParallel is given a bucket size inside, unless the user gave one. A collective."""
        given = self._ddp_kwargs
        nbytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        size = bucket_cap_mb(nbytes, self._place, self.root_device)
        if size is not None and given.get("bucket_cap_mb") is None:
            self._ddp_kwargs = {**given, "bucket_cap_mb": size}
        try:
            yield
        finally:
            self._ddp_kwargs = given

    @property
    def _find_unused(self) -> bool:
        return bool(self._ddp_kwargs.get("find_unused_parameters", False))

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

    def _manifests(self) -> list[dict[str, Any]]:
        return [files.manifest_of(state, f"{self._run_id}-{index}") for index, state in enumerate(self.hier_states)]

    def _side_contents(self) -> list[dict[str, Any]]:
        return [files.side_content(state) for state in self.hier_states]

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


def prepare_ddp(strategy: Core) -> None:
    """Before the host wraps a module: options for DDP, and a logger in a process that did not make the strategy."""
    show_log_lines()
    strategy._ddp_kwargs = with_defaults(strategy._ddp_kwargs)

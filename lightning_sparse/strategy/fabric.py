"""The strategy for Lightning Fabric, as a mixin that imports no Lightning.

    fabric = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="mstopk_hier")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

Fabric knows no epochs, so a density warm-up is off unless asked for; who asks for one calls ``set_epoch``.
"""

import gc
import logging
import os
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.messages import log, show_log_lines
from lightning_sparse.strategy import checkpoint as saving
from lightning_sparse.strategy.config import HierConfig
from lightning_sparse.strategy.hook import hier_hook
from lightning_sparse.strategy.options import OWN, check_options, loss_scale_of, with_defaults
from lightning_sparse.strategy.state import HierState
from lightning_sparse.topology import Topology, discover

if TYPE_CHECKING:

    class _Host:
        """The part of Fabric's DDPStrategy that is relied upon."""

        root_device: torch.device
        node_rank: int
        local_rank: int
        global_rank: int
        is_global_zero: bool
        precision: Any
        _ddp_kwargs: dict[str, Any]
        _timeout: timedelta | None

        def __init__(self, **kwargs: Any) -> None: ...
        def setup_module(self, module: nn.Module) -> DistributedDataParallel: ...
        def setup_optimizer(self, optimizer: Any) -> Any: ...
        def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None: ...
        def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None: ...
        def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]: ...
        def broadcast(self, obj: Any, src: int = 0) -> Any: ...
        def barrier(self, *args: Any, **kwargs: Any) -> None: ...
else:
    _Host = object


class MSTopKHierFabricMixin(_Host):
    """DDP whose gradients travel hierarchically, and between nodes only the largest of them, for Fabric.

    Args:
        **kwargs: those of ``HierConfig`` (``density``, ``exchange``, ...; ``warmup_epochs`` is 0 unless given), of
            Fabric's DDPStrategy and of DistributedDataParallel. ``gradient_as_bucket_view`` is True unless given.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be joined with this strategy.
    """

    def __init__(self, **kwargs: Any) -> None:
        own = {name: kwargs.pop(name) for name in OWN if name in kwargs}
        self.config = HierConfig(**{"warmup_epochs": 0, **own})
        check_options(type(self), kwargs)
        super().__init__(**kwargs)
        self.hier_states: list[HierState] = []
        self._watched: dict[HierState, list[Optimizer]] = {}
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._epoch = 0
        self._topology: Topology | None = None
        self._run_id = ""
        self._saved: list[saving.Saved] = []

    def set_epoch(self, epoch: int) -> None:
        """Tell the density warm-up which epoch begins, counted from 0."""
        self._epoch = epoch
        for state in self.hier_states:
            state.epoch = epoch

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module, and let its gradients travel our way. A module that is set up again goes on with what waits
        in its residuals; those of modules that are gone are dropped. A collective of the world."""
        show_log_lines()  # here, since a spawned process did not make the strategy
        self._ddp_kwargs = with_defaults(self._ddp_kwargs)
        ddp = super().setup_module(module)
        if self._topology is None:
            self._topology = discover(node_rank=self.node_rank, local_rank=self.local_rank, timeout=self._timeout)
            self._run_id = str(self.broadcast(saving.new_run_id()))
        self._drop_states_without_use(ddp.module)
        state = next((each for each in self.hier_states if each.parameters.are_of(ddp.module)), None)
        if state is None:
            state = self._new_state(ddp.module, self._topology)
        else:
            self._watched[state] = []  # new optimizers take the place of those before; until then nothing changes
            if self._find_unused:
                state.track_unused(ddp.module)
        ddp.register_comm_hook(state, hier_hook)
        return ddp

    def _drop_states_without_use(self, module: nn.Module) -> None:
        """Those of modules that are gone, and that of the module being set up if it has other parameters by now."""
        gc.collect()  # so that all ranks see the same modules gone
        for state in list(self.hier_states):
            replaced = state.parameters.are_of(module) and not state.parameters.are_in(module)
            if replaced:
                state.say("parameters were replaced since the last set-up: what waited is lost", logging.WARNING)
            if replaced or state.parameters.module is None:
                state.detach()
                self.hier_states.remove(state)
                stale = self._watched.pop(state)
                self._optimizers = [each for each in self._optimizers if each() not in (None, *stale)]

    def _new_state(self, module: nn.Module, topology: Topology) -> HierState:
        state = HierState(module, self.config, topology, find_unused_parameters=self._find_unused)
        state.loss_scale = lambda: loss_scale_of(self.precision)
        state.epoch = self._epoch
        state.say(topology.describe())
        self._restore(state)
        self.hier_states.append(state)
        self._watched[state] = []
        self._watch(state, [each for reference in self._optimizers if (each := reference()) is not None])
        return state

    @property
    def _find_unused(self) -> bool:
        return bool(self._ddp_kwargs.get("find_unused_parameters", False))

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Watch whose parameters it steps: their residuals count. Its module may be set up before or after it; where
        both are set up a second time, the module comes first."""
        optimizer = super().setup_optimizer(optimizer)
        self._optimizers = [each for each in self._optimizers if each() is not None] + [weakref.ref(optimizer)]
        for state in self.hier_states:
            self._watch(state, [optimizer])
        return optimizer

    def _watch(self, state: HierState, optimizers: list[Optimizer]) -> None:
        """Watch those of them that step parameters of the state's module, besides the others of its set-up."""
        own = [each for each in optimizers if state.parameters.are_stepped_by(each)]
        if own:
            self._watched[state] += own
            state.watch(self._watched[state])

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Settle the last round, then go backward."""
        self._say_what_fits_no_module()
        for state in self.hier_states:
            state.before_backward()
        super().backward(tensor, module, *args, **kwargs)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        """The residuals of all ranks first, then the main file; then those of earlier saves go. A collective, as
        ``fabric.save`` is. A dict without an optimizer, or the state of one, is taken for weights alone."""
        path = os.fspath(path)
        ids: list[str] = []
        if isinstance(state, Mapping) and _has_optimizer(state):
            manifests = [
                saving.manifest_of(each, f"{self._run_id}-{index}") for index, each in enumerate(self.hier_states)
            ]
            ids = [manifest["save_id"] for manifest in manifests]
            for each, save_id in zip(self.hier_states, ids, strict=True):
                saving.save_side_file(each, save_id, path)
            state = {**state, saving.KEY: manifests}
            self.barrier()  # the main file says that they are there
        super().save_checkpoint(path, state, storage_options, filter)
        if self.is_global_zero:
            saving.remove_side_files(path, but=ids)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Modules that are set up get their residuals back now, others when they are, before the next backward pass:
        each the first that fit it, in the order of set-up. Weights loaded without an optimizer leave residuals
        alone."""
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        manifests = rest.pop(saving.KEY, []) if isinstance(rest, dict) else []
        if state and not _has_optimizer(state):  # what was loaded is in it by now
            return rest
        path = os.fspath(path)
        saved = [saving.load({saving.KEY: each}, path, self.global_rank) for each in manifests]
        self._saved = [each for each in saved if each is not None]
        for hier_state in self.hier_states:
            self._restore(hier_state)
        return rest

    def _restore(self, state: HierState) -> None:
        found = next((each for each in self._saved if saving.fits(each, state)), None)
        if found is not None:
            self._saved.remove(found)
            saving.restore(found, state, self.root_device)

    def _say_what_fits_no_module(self) -> None:
        """Modules that are to be restored are set up before the first backward pass."""
        left = [each for each in self._saved if any(each.manifest["stores"])]  # in the others nothing waited
        if left and self.is_global_zero:
            log.warning(
                "%d residual(s) of %s were saved for modules with other parameters than those set up: what waited in "
                "them is lost",
                len(left),
                left[0].path,
            )
        self._saved = []


def _has_optimizer(entry: Any) -> bool:
    """Whether there is an optimizer, or the state of one, in what is saved or loaded."""
    if isinstance(entry, Mapping):
        return "param_groups" in entry or any(map(_has_optimizer, entry.values()))
    return isinstance(entry, Optimizer) or (isinstance(entry, (list, tuple)) and any(map(_has_optimizer, entry)))

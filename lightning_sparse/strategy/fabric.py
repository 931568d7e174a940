"""The strategy for Lightning Fabric, as a mixin that imports no Lightning.

    fabric = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="mstopk_hier")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

Fabric knows no epochs, so a density warm-up is off unless asked for; who asks for one calls ``set_epoch``.
"""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.strategy import checkpoint as saving
from lightning_sparse.strategy.config import HierConfig
from lightning_sparse.strategy.hook import hier_hook
from lightning_sparse.strategy.options import OWN, check_options, loss_scale_of, show_log_lines, with_defaults
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
        show_log_lines()
        super().__init__(**kwargs)
        self.hier_states: list[HierState] = []
        self._watched: dict[int, list[torch.optim.Optimizer]] = {}
        self._topology: Topology | None = None
        self._run_id = ""
        self._saved: list[saving.Saved] = []

    def set_epoch(self, epoch: int) -> None:
        """Tell the density warm-up which epoch begins, counted from 0."""
        for state in self.hier_states:
            state.epoch = epoch

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module, and let its gradients travel our way. A collective of the world."""
        self._ddp_kwargs = with_defaults(self._ddp_kwargs)
        ddp = super().setup_module(module)
        if self._topology is None:
            self._topology = discover(node_rank=self.node_rank, local_rank=self.local_rank, timeout=self._timeout)
            self._run_id = str(self.broadcast(saving.new_run_id()))
        find_unused = bool(self._ddp_kwargs.get("find_unused_parameters", False))
        state = HierState(ddp.module, self.config, self._topology, find_unused_parameters=find_unused)
        state.loss_scale = lambda: loss_scale_of(self.precision)
        state.say(self._topology.describe())
        if self._saved:
            saving.restore(self._saved.pop(0), state, self.root_device)
        ddp.register_comm_hook(state, hier_hook)
        self.hier_states.append(state)
        return ddp

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Watch whose parameters it steps: their residuals count."""
        optimizer = super().setup_optimizer(optimizer)
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for index, state in enumerate(self.hier_states):
            if state.owns_any(stepped):
                watched = self._watched.setdefault(index, [])
                watched.append(optimizer)
                state.watch(watched)
        return optimizer

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Settle the last round, then go backward."""
        for state in self.hier_states:
            state.before_backward()
        super().backward(tensor, module, *args, **kwargs)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        """The residuals of all ranks first, then the main file; then those of earlier saves go. A collective, as
        ``fabric.save`` is. A dict without an optimizer, or the state of one, is taken for weights alone."""
        path = os.fspath(path)
        ids: list[str] = []
        if isinstance(state, Mapping) and any(map(_is_of_optimizer, state.values())):
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
        """Modules that are set up get their residuals back now, others when they are, in the order of set-up."""
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        manifests = rest.pop(saving.KEY, []) if isinstance(rest, dict) else []
        path = os.fspath(path)
        saved = [saving.load({saving.KEY: each}, path, self.global_rank) for each in manifests]
        self._saved = [each for each in saved if each is not None]
        for hier_state in self.hier_states:
            if self._saved:
                saving.restore(self._saved.pop(0), hier_state, self.root_device)
        return rest


def _is_of_optimizer(entry: Any) -> bool:
    return isinstance(entry, torch.optim.Optimizer) or (isinstance(entry, Mapping) and "param_groups" in entry)

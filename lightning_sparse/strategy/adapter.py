"""Common part of all strategies: the topology, the engines of modules, and DDP's options.

The adapters in `trainer` and `fabric` translate the methods of their host into methods of engines
(`lightning_sparse.engine`). Nothing here imports Lightning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sparse.agree import all_agree
from lightning_sparse.checkpoint.folder import atomic_directory, verify, verify_file
from lightning_sparse.checkpoint.restore import restore
from lightning_sparse.checkpoint.side_files import EngineCheckpoint, SideFiles, new_run_id
from lightning_sparse.engine import Engine
from lightning_sparse.exchange import HierCommunicator
from lightning_sparse.messages import LogOnce, class_repr, ensure_log_handler, log_if_nodes_missing, log_if_slow
from lightning_sparse.sharding import local_of
from lightning_sparse.strategy.late import LateGradients
from lightning_sparse.strategy.options import Kind, bucket_cap_mb, take_options
from lightning_sparse.topology import Topology, discover
from lightning_sparse.updates import LocalUpdates

Host: Any = object
"""A class of Lightning, to which `lightning_sparse.flavours` binds the mixins."""


class Adapter:
    """Connects Trainer or Fabric to engines.

    Attributes:
        engines: one engine per module, in the order of set-up.
    """

    engines: list[Any]

    # Private API of Lightning's strategies that this class uses.
    root_device: torch.device
    cluster_environment: Any
    num_nodes: int
    node_rank: int
    local_rank: int
    global_rank: int
    world_size: int
    is_global_zero: bool
    _ddp_kwargs: dict[str, Any]
    _ddp_comm_hook: Any
    _ddp_comm_state: Any
    _timeout: timedelta | None
    _save_distributed_checkpoint: bool = False
    _checkpoints_are_collective: bool = False  # all ranks read checkpoints at the same time
    _inside_the_node: ClassVar[bool] = False  # DDP averages only inside the node

    def _init_common(
        self, kind: Kind, node_name: str | None, given: dict[str, Any], exchanged: str, **more: Any
    ) -> None:
        """Set the fields before the host's own constructor, and remove the strategy's own options from `given`."""
        self.config: Any = take_options(kind, type(self), given, **more)
        if not isinstance(node_name, str | None):
            raise ValueError(f"node_name={node_name!r} must be a string, or None. Omit it to use the host's name.")
        self.engines = []
        self._node_name = node_name
        self._topology: Topology | None = None
        self._side_files = SideFiles(exchanged)

    def __repr__(self) -> str:
        default = type(self.config)().to_dict()
        options = {name: value for name, value in self.config.to_dict().items() if value != default[name]}
        return class_repr(type(self), {"density": self.config.density, **options})

    @property
    def topology(self) -> Topology:
        """The topology. All ranks must make the first access together, because it compares their options."""
        if self._topology is None:
            ensure_log_handler()  # again, because another process may have made the strategy
            self._topology = discover(
                node_rank=self.node_rank,
                local_rank=self.local_rank,
                node_name=self._node_name,
                config={**self.config.to_dict(), **self._shared_options(), "torch": torch.__version__},
                timeout=self._timeout,
            )
            # The run ID is part of the save ID of each side file, so it must be equal on all ranks.
            self._side_files.run_id = str(self.broadcast(new_run_id()))  # type: ignore[attr-defined]
        return self._topology

    def setup_environment(self) -> None:
        ensure_log_handler()
        with log_if_nodes_missing(self.num_nodes, self.cluster_environment):
            super().setup_environment()  # type: ignore[misc]

    def _shared_options(self) -> dict[str, Any]:
        return {}

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Return a context in which modules hold the global weights and averaged buffers. Every rank enters it."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.global_weights())
            yield

    def shared_weights(self) -> AbstractContextManager[None]:
        """Deprecated name of `global_weights`, until version 0.3."""
        return self.global_weights()

    # -- wrapped modules -----------------------------------------------------------------------------------------------

    def _prepare_ddp(self) -> None:
        """Set DDP's options. A collective of the world if DDP averages inside the node."""
        ensure_log_handler()
        kwargs, group = self._ddp_kwargs, {}
        if self._inside_the_node and self.topology.kind == "hierarchical":
            group = {"process_group": self.topology.intra}
        if self._inside_the_node and not self._averages_inside:
            kwargs = {name: value for name, value in kwargs.items() if name not in ABOUT_PARTS}
        # Gradients are views of the buckets, so DDP copies neither.
        self._ddp_kwargs = {"gradient_as_bucket_view": True, **kwargs, **group}

    @contextmanager
    def _sized_buckets(self, module: nn.Module) -> Iterator[None]:
        """Give DDP a bucket size, unless the user gave one. A collective."""
        kwargs = self._ddp_kwargs
        nbytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        size = bucket_cap_mb(nbytes, self.topology, self.root_device)
        if size is not None and kwargs.get("bucket_cap_mb") is None:
            self._ddp_kwargs = {**kwargs, "bucket_cap_mb": size}
        try:
            yield
        finally:
            self._ddp_kwargs = kwargs

    @property
    def _averages_inside(self) -> bool:
        return self.topology.kind != "hierarchical" or self.topology.num_devices > 1

    def _disable_ddp_sync(self, ddp: Any) -> None:
        if not self._averages_inside:
            # With nothing to average, DDP would only copy gradients into its buckets.
            ddp.require_backward_grad_sync = False

    def _new_late_gradients(self) -> LateGradients:
        communicator, level = HierCommunicator(self.topology), logging.WARNING
        if self._inside_the_node:
            communicator, level = HierCommunicator(self.topology, world=communicator.node), logging.INFO
        corrects = getattr(self.config, "momentum_correction", False) and self.topology.kind == "hierarchical"
        return LateGradients(communicator, LogOnce(self.topology.rank), level, MOMENTUM if corrects else "")

    def _new_updates(self, module: nn.Module, optimizers: list[Optimizer]) -> LocalUpdates:
        """Exchange the updates of these optimizers of a module. A collective of the world."""
        for submodule in module.modules():
            if isinstance(submodule, nn.SyncBatchNorm) and self.topology.kind == "hierarchical":
                # Statistics of its node, so that forward does not wait for other nodes.
                submodule.process_group = self.topology.intra
        return LocalUpdates(module, optimizers, self.config, self.topology)

    def _optimizer_state(self, optimizer: Any) -> dict[str, Any] | None:
        """Return the optimizer's state on the node's first device; None without an engine. A collective of the node."""
        exchanged = (
            candidate for engine in self.engines if isinstance(engine, LocalUpdates) for candidate in engine.optimizers
        )
        local_optimizer = next((candidate for candidate in exchanged if candidate.optimizer is optimizer), None)
        if local_optimizer is None:
            return None
        with log_if_slow(f"collecting the state of {type(optimizer).__name__} on the first device of the node"):
            return local_optimizer.division.optimizer_state()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _saved_engines(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.saves]

    def _rank_state(self, saved: Any) -> dict[str, Any]:
        """Return the state of this rank, or its node, in addition to the engines' state."""
        return {}

    def _load_rank_state(self, entries: dict[str, Any]) -> None:
        """Load the result of `_rank_state`."""

    def _main_path(self, path: Any) -> Any:
        """Return the path where all ranks look for a checkpoint and its side files."""
        return self.broadcast(path) if self._checkpoints_are_collective else path  # type: ignore[attr-defined]

    def _verify(self, path: Any) -> None:
        """Raise RuntimeError if a checkpoint is damaged; for a folder on all ranks, a collective of the world."""
        path = Path(self._main_path(path))
        folder = (path / ".metadata").is_file()
        if self._checkpoints_are_collective:
            folder = not all_agree(not folder, dist.all_reduce, self.root_device)  # some ranks may not see the folder
        if folder:
            verify(path, self.root_device)
        else:
            verify_file(path)

    @contextmanager
    def _checkpoint_target(self, path: Any) -> Iterator[Any]:
        """Yield the name under which to write a checkpoint. Every rank enters it."""
        if not self._save_distributed_checkpoint:
            yield path
            return
        main = os.fspath(self._main_path(path))
        if "://" in main:  # Path(main) would be a local folder
            raise ValueError(
                f"{main} is a URL, but a distributed checkpoint is a folder that all nodes share. Use the path at "
                f"which it is mounted, or save one file (save_distributed_checkpoint=False)."
            )
        with atomic_directory(Path(main), self.root_device) as partial:
            yield partial

    def _restore_engine(self, engine: Engine, saved: EngineCheckpoint) -> None:
        """Load an engine's part of a checkpoint. A collective of the world."""
        side = restore(engine, saved, self.root_device)
        if side is not None:
            self._load_rank_state(side.get("entries", {}))


ABOUT_PARTS = ("find_unused_parameters", "static_graph")
"""DDP's options for parameters outside a backward pass. They fail if DDP does not reduce."""


MOMENTUM = "momentum_correction=True keeps momentum only for the parameters that it reduces"


def with_tensors(state_dict: dict[str, Any], tensor_of: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    # A copy keeps the versions, which the loading of old formats needs. Extra state (``get_extra_state``) stays
    # unchanged.
    changed = copy(state_dict)
    changed.update({name: tensor_of(name, value) for name, value in state_dict.items() if isinstance(value, Tensor)})
    return changed


def clone_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Clone the tensors. Tensors that share memory share it in the copy, too."""
    copies: dict[Any, Tensor] = {}

    def copied(_: str, value: Tensor) -> Tensor:
        local = local_of(value)
        key = (local.data_ptr(), value.shape, value.stride()) if local.numel() else id(value)
        if key not in copies:
            whole = not isinstance(value, DTensor)  # whole copies of shards may not fit on the device
            copies[key] = value.detach().to("cpu", copy=True) if whole else value.detach().clone()
        return copies[key]

    return with_tensors(state_dict, copied)

"""What the strategies of updates for Trainer and Fabric do alike; imports no Lightning."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_sparse.messages import LogOnce
from lightning_sparse.sharding import local_of
from lightning_sparse.strategy import side_files
from lightning_sparse.strategy.base import Core
from lightning_sparse.topology import Topology
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from lightning_sparse.updates import checkpoint as files

_VERSION = 4


class LocalCore(Core):
    """The core of both strategies.

    Attributes:
        local_updates: one a module, in the order of set-up.
    """

    _kind = "updates"

    def _configure(self, config: UpdatesConfig, node_name: str | None) -> None:
        """Before the host's own constructor."""
        self._begin(config, node_name)
        self.config: UpdatesConfig = config
        self.local_updates: list[LocalUpdates] = []
        self._node_entries: dict[str, Any] = {}  # of the main file, that each node has of its own: optimizer states

    def _node_group(self) -> None:
        """Let DistributedDataParallel average inside the node alone. A collective of the world."""
        topology = self._discover({})
        if topology.kind == "hierarchical":
            self._ddp_kwargs = {**self._ddp_kwargs, "process_group": topology.intra}

    def _attach(self, module: nn.Module, optimizers: list[Optimizer]) -> LocalUpdates:
        """Exchange the updates of these optimizers of a module. A collective of the world."""
        topology = self._discover({})
        sync_inside_the_node(module, topology)
        updates = LocalUpdates(module, optimizers, self.config, topology)
        updates.log_once(f"{topology.shape}: {describe(self.config, topology)}")
        self.local_updates.append(updates)
        return updates

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Modules hold the shared weights inside, and buffers averaged over ranks, as in validation and checkpoints.
        Every rank enters it."""
        for updates in self.local_updates:
            updates.show_shared()
        try:
            yield
        finally:
            for updates in self.local_updates:
                updates.show_own()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _manifests(self) -> list[dict[str, Any]]:
        return [
            {
                "version": _VERSION,
                "kind": self._kind,
                "save_id": f"{self._run_id}-{index}-{updates.steps}",
                "config": self.config.to_dict(),
                "nodes": [list(node) for node in updates.topology.nodes],
            }
            for index, updates in enumerate(self.local_updates)
            if updates.active
        ]

    def _side_contents(self) -> list[dict[str, Any]]:
        contents = [files.side_content(updates) for updates in self.local_updates if updates.active]
        if self._discover({}).device_index == 0:
            # plain numbers: a schedule may leave NumPy's in an optimizer, which a safe load refuses
            contents[0]["entries"] = tree_map_only(np.generic, lambda number: number.item(), self._node_entries)
        return contents

    def _entries_of_node(self) -> dict[str, Any]:
        """What this node had of its own in the main file that was loaded; empty on another cluster."""
        if not self._saved:
            return {}
        saved, topology = self._saved[0], self._discover({})
        if not same_nodes(saved, topology):
            return {}
        first = topology.nodes[topology.node_index][0]
        content = side_files.read_side_file(saved.path, saved.manifest["save_id"], first)
        return {} if content is None else dict(content.get("entries", {}))

    def _restore_more(self, own: dict[str, Any]) -> None:
        """What a strategy added to this device's side content."""

    def _restore(self, updates: LocalUpdates) -> None:
        """Go on where the next of the loaded side files left off; without one, from the weights alone."""
        saved = self._saved.pop(0) if self._saved else None
        if saved is None:
            return
        side_files.check_version(saved, _VERSION)
        lost = "training goes on from its weights, and updates that nodes had not sent are lost"
        nodes = updates.topology if updates.active else None
        own, by_node = state_for(saved, nodes, lambda own: files.fits(updates, own), updates.log_once, lost)
        if own is not None:
            files.restore_own(updates, own)
            self._restore_more(own)
        if by_node is None:
            return
        if updates.active:
            files.restore_mean(updates, by_node)
        else:
            files.restore_alone(updates.module, by_node)
        updates.log_once(
            f"{len(by_node)} node(s) were saved and {updates.topology.num_nodes} resume: the shared weights and the "
            f"mean of the pending updates are kept; optimizers go on with the state of node 0"
        )


def state_for(
    saved: side_files.Saved,
    topology: Topology | None,
    fits: Callable[[dict[str, Any]], bool],
    log_once: LogOnce,
    lost: str,
) -> tuple[dict[str, Any] | None, list[list[dict[str, Any]]] | None]:
    """This rank's own content where every rank's fits, else that of all ranks by node, else neither, which is logged.
    A collective of the world.

    Args:
        topology: of the ranks that go on; None where these exchange nothing.
        fits: whether this rank can go on exactly where that content was saved.
        lost: what follows where files are missing, for the log.
    """
    own = saved.side if topology is not None and same_nodes(saved, topology) else None
    if all_agree(own is not None and fits(own)):  # all or none: collectives follow
        return own, None
    by_node = read_all(saved)
    if all_agree(by_node is not None):
        return None, by_node
    log_once(f"no readable files of all ranks beside {saved.path}: {lost}", logging.WARNING)
    return None, None


def all_agree(condition: bool) -> bool:
    """Whether it holds on every rank. A collective of the world."""
    stated = [condition] * dist.get_world_size()
    dist.all_gather_object(stated, condition)
    return all(stated)


def describe(config: UpdatesConfig, topology: Topology) -> str:
    """What is exchanged, for the log."""
    if topology.kind != "hierarchical":
        return "one node, nothing to exchange"
    share = f"{config.least_density:.2g}{' or more' if config.density == 'auto' else ''}"
    sent = f"{share} of each device's updates" if config.leaves_entries_out else f"{config.exchange} updates"
    every = "after each step" if config.sync_every == 1 else f"every {config.sync_every} steps"
    delay = ", received one exchange later" if config.delay else ""
    nodes = topology.num_nodes
    ahead = "measured" if config.measures_ahead(nodes) else f"{config.ahead(nodes):.2g}"
    return f"{sent} {every}{delay}; step_ahead {ahead}"


def leave_gradients(ddp: DistributedDataParallel, topology: Topology) -> None:
    """With one device a node there is nothing to average: spare DDP's copies into buckets."""
    if topology.kind == "hierarchical" and topology.num_devices == 1:
        ddp.require_backward_grad_sync = False


def sync_inside_the_node(module: nn.Module, topology: Topology) -> None:
    """Let SyncBatchNorm take the statistics of its node; between nodes each forward pass would wait."""
    for each in module.modules():
        if isinstance(each, nn.SyncBatchNorm) and topology.kind == "hierarchical":
            each.process_group = topology.intra


def detached(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy whose tensors are not the module's; tensors that share memory still do."""
    copies: dict[Any, Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        local = local_of(value)
        key = (local.data_ptr(), value.shape, value.stride()) if local.numel() else id(value)
        if key not in copies:
            copies[key] = value.detach().clone()
        return copies[key]

    return {name: copy(value) for name, value in state_dict.items()}


def same_nodes(saved: side_files.Saved, topology: Topology) -> bool:
    """Whether a checkpoint is of a cluster of the same ranks in the same nodes."""
    return tuple(map(tuple, saved.manifest["nodes"])) == topology.nodes


def read_all(saved: side_files.Saved) -> list[list[dict[str, Any]]] | None:
    """The side contents of all ranks by node; None if one cannot be read."""
    save_id = saved.manifest["save_id"]
    by_node = [
        [side_files.read_side_file(saved.path, save_id, rank) for rank in node] for node in saved.manifest["nodes"]
    ]
    if any(content is None for node in by_node for content in node):
        return None
    return [[content for content in node if content is not None] for node in by_node]

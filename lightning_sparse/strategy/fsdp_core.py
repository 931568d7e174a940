"""What the strategies of FSDP2 inside nodes do alike for Trainer and Fabric; imports no Lightning."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sparse.fsdp import ShardedGradients, mesh_of
from lightning_sparse.messages import show_log_lines
from lightning_sparse.sharding import local_of, parameters_of
from lightning_sparse.strategy import fsdp_gradients, side_files
from lightning_sparse.strategy.local_core import LocalCore, state_for

OPTIMIZERS = "local_optimizers"
_VERSION = 1  # of what is beside a checkpoint where gradients are sent


class FSDPCore(LocalCore):
    """FSDP2 on the mesh of the node; the shards' updates are exchanged.

    An optimizer's state differs between nodes. The main file has that of the first node, for other clusters and other
    strategies; what is beside it has each device's own.
    """

    _device_mesh: DeviceMesh | None
    gradients: ShardedGradients | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks have samples of their own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _set_mesh(self) -> DeviceMesh:
        """The axes "replicate" (nodes) and "shard" (devices of a node). A collective of the world."""
        show_log_lines()
        self._device_mesh = mesh_of(self._discover({}))
        return self._device_mesh

    @property
    def _saves_optimizers(self) -> bool:
        return self._discover({}).node_index == 0

    def _stepped_optimizers(self) -> Sequence[Optimizer]:
        return [node.optimizer for updates in self.local_updates for node in updates.nodes]

    def _manifests(self) -> list[dict[str, Any]]:
        if self.gradients is None:
            return super()._manifests()
        if not self.gradients.active:
            return []
        nodes = [list(node) for node in self.gradients.topology.nodes]
        return [
            {
                "version": _VERSION,
                "kind": self._kind,
                "save_id": f"{self._run_id}-gradients-{self.gradients.steps}",
                "config": self.config.to_dict(),
                "nodes": nodes,
            }
        ]

    def _side_contents(self) -> list[dict[str, Any]]:
        if self.gradients is not None:
            return [fsdp_gradients.side_content(self.gradients)]
        contents = super()._side_contents()
        contents[0][OPTIMIZERS] = [local_state(each) for each in self._stepped_optimizers()]
        return contents

    def _restore_gradients(self, gradients: ShardedGradients) -> None:
        """Go on with the residuals of the loaded side files, if there are any."""
        saved = self._saved.pop(0) if self._saved else None
        if saved is None:
            return
        side_files.check_version(saved, _VERSION)
        if not gradients.active:
            if saved.manifest["config"]["exchange"] == "dense":
                return  # which leaves nothing
            gradients.log_once(f"residuals beside {saved.path} are lost: one node has nothing to send", logging.WARNING)
            return
        lost = "residuals begin at zero, and what waited is lost"
        own, by_node = state_for(
            saved, gradients.topology, lambda own: fsdp_gradients.fits(gradients, own), gradients.log_once, lost
        )
        if own is not None:
            fsdp_gradients.restore_own(gradients, own)
        if by_node is not None:
            fsdp_gradients.restore_mean(gradients, by_node)
            gradients.log_once(
                f"{len(by_node)} node(s) were saved and {gradients.topology.num_nodes} resume: the mean of the "
                f"residuals over nodes is kept"
            )

    def _restore_more(self, own: dict[str, Any]) -> None:
        for optimizer, saved in zip(self._stepped_optimizers(), own.get(OPTIMIZERS, []), strict=False):
            load_local_state(optimizer, saved)


def local_state(optimizer: Optimizer) -> list[dict[str, Any]]:
    """This device's part of an optimizer's state, by parameter, on the CPU."""
    return [
        {
            name: local_of(value).detach().cpu() if isinstance(value, Tensor) else value
            for name, value in optimizer.state.get(parameter, {}).items()
        }
        for parameter in parameters_of(optimizer)
    ]


@torch.no_grad()
def load_local_state(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Put it back."""
    for parameter, values in zip(parameters_of(optimizer), saved, strict=True):
        state = optimizer.state[parameter]
        for name, value in values.items():
            current = state.get(name)
            if isinstance(value, Tensor) and isinstance(current, Tensor):
                local_of(current).copy_(value)
            elif (
                isinstance(value, Tensor)
                and isinstance(parameter, DTensor)
                and value.shape == local_of(parameter).shape
            ):
                state[name] = _sharded_as(parameter, value)
            else:
                state[name] = value


def _sharded_as(parameter: Tensor, value: Any) -> Any:
    """What has the shape of a parameter's shard is sharded, too."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    local, shape, stride = parameter.to_local(), parameter.shape, parameter.stride()
    if value.shape != local.shape:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value.to(local.device), mesh, placements, run_check=False, shape=shape, stride=stride)

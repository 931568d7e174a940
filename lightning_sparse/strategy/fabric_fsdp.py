"""The strategy of FSDP2 inside nodes and updates between them for Fabric, as a mixin that imports no Lightning.

fabric = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="mstopk_fsdp")
fabric.launch()
model = fabric.setup_module(model)                     # sharded inside the node
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
...
with fabric.strategy.shared_weights():                 # all ranks, for validation
    validate(model)
fabric.strategy.finish()                               # at the end: what is pending is sent
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_sparse.fsdp import shard
from lightning_sparse.strategy import side_files
from lightning_sparse.strategy.fabric_core import LocalFabricCore
from lightning_sparse.strategy.fsdp_core import FSDPCore
from lightning_sparse.strategy.options import OWN_OF_UPDATES, REFUSED_BY_FSDP, check_options
from lightning_sparse.updates import UpdatesConfig

Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]


class MSTopKFSDPFabricMixin(FSDPCore, LocalFabricCore):
    """FSDP2 inside each node, for models that one device cannot hold; between nodes travel the largest updates. For
    Fabric.

    Args:
        parallelize_fn: shards a module, given it and the mesh of axes "replicate" and "shard"; default: the blocks that
            repeat, then the whole.
        node_name: the node that this process belongs to, by name, on every rank (see lightning_sparse.topology).
        **kwargs: those of ``UpdatesConfig`` (``density``, ``step_ahead``, ...) and of Fabric's ModelParallelStrategy.

    Raises:
        ValueError: for a bad value, an unknown option, or one that this strategy sets itself.
    """

    def __init__(self, parallelize_fn: Parallelize = shard, node_name: str | None = None, **kwargs: Any) -> None:
        config = UpdatesConfig(**{name: kwargs.pop(name) for name in OWN_OF_UPDATES if name in kwargs})
        check_options(type(self), kwargs, OWN_OF_UPDATES, REFUSED_BY_FSDP, type(self))
        self._configure(config, node_name)
        super().__init__(parallelize_fn=parallelize_fn, **kwargs)
        self._modules = []

    def setup_environment(self) -> None:
        """The mesh, which ``parallelize_fn`` is given."""
        super().setup_environment()
        self._set_mesh()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module inside its node."""
        module = super().setup_module(module)
        self._remember(module)
        return module

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        """What each device alone knows first, then the main file or folder. All ranks call it, as ``fabric.save``. A
        dict without an optimizer is taken for weights alone."""
        optimizers = [name for name, each in state.items() if isinstance(each, Optimizer)]
        with self._saving(path, whole=bool(optimizers)) as manifests, self.shared_weights():
            if manifests is not None:
                state = {**state, side_files.KEY: manifests}
            if self._save_distributed_checkpoint and not self._saves_optimizers:
                state = {name: each for name, each in state.items() if name not in optimizers}
            super().save_checkpoint(path, state, storage_options, filter)
            dist.barrier()  # before files of earlier saves are removed

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Modules and optimizers that are set up go on where this device was saved; all of them are to be set up."""
        loaded = self._loaded_by(state)
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        manifests = rest.pop(side_files.KEY, []) if isinstance(rest, dict) else []
        self._load({side_files.KEY: manifests}, self.broadcast(path))
        self._go_on(loaded)
        return rest

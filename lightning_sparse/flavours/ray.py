"""The strategies for Ray Train, whose ``prepare_trainer`` takes none but subclasses of its own.

Ray uses ``lightning.pytorch`` where that is installed, else ``pytorch_lightning``; so must the program.
"""

import ray.train.torch
import torch
from ray.train.lightning import RayDDPStrategy

from lightning_sparse.strategy.fsdp import MSTopKFSDPMixin
from lightning_sparse.strategy.hier import MSTopKHierMixin
from lightning_sparse.strategy.local import MSTopKLocalMixin

try:
    from lightning.pytorch.strategies import ModelParallelStrategy
except ModuleNotFoundError:
    from pytorch_lightning.strategies import ModelParallelStrategy  # type: ignore[assignment]


class RayMSTopKHierStrategy(MSTopKHierMixin, RayDDPStrategy):
    pass


class RayMSTopKLocalStrategy(MSTopKLocalMixin, RayDDPStrategy):
    pass


class RayMSTopKFSDPStrategy(MSTopKFSDPMixin, ModelParallelStrategy):
    """Ray has no class for FSDP2 to derive from, so ``prepare_trainer`` does not know this one. It only checks: leave
    it out. Options are those of ``MSTopKFSDPStrategy``."""

    def setup_environment(self) -> None:
        """Lightning takes the world for the nodes and devices of its Trainer, which are one each under Ray."""
        assert self.cluster_environment is not None
        self._data_parallel_size, self._tensor_parallel_size = self.cluster_environment.world_size(), 1
        super().setup_environment()

    @property
    def root_device(self) -> torch.device:  # type: ignore[override]
        device: torch.device = ray.train.torch.get_device()
        return device

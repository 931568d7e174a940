"""The strategies for Ray Train, whose ``prepare_trainer`` accepts only subclasses of its own.

Ray uses ``lightning.pytorch`` if that is installed, else ``pytorch_lightning``. Use the same package in the program.
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
    __doc__ = MSTopKHierMixin.__doc__


class RayMSTopKLocalStrategy(MSTopKLocalMixin, RayDDPStrategy):
    __doc__ = MSTopKLocalMixin.__doc__


class RayMSTopKFSDPStrategy(MSTopKFSDPMixin, ModelParallelStrategy):
    """FSDP2 between nodes and inside a node, for Ray Train. It takes the options of ``MSTopKFSDPStrategy``.

    Ray has no FSDP2 class to derive from, so ``prepare_trainer`` does not accept this strategy. Omit
    ``prepare_trainer``, which only checks.
    """

    def setup_environment(self) -> None:
        """Set the world size, because under Ray each Trainer has one node and one device."""
        assert self.cluster_environment is not None
        self._data_parallel_size, self._tensor_parallel_size = self.cluster_environment.world_size(), 1
        super().setup_environment()

    @property
    def root_device(self) -> torch.device:  # type: ignore[override]
        device: torch.device = ray.train.torch.get_device()
        return device

"""The strategy for ``lightning_fabric``."""

from lightning_fabric.strategies.ddp import DDPStrategy

from lightning_sparse.strategy.fabric import MSTopKHierFabricMixin
from lightning_sparse.strategy.fabric_local import MSTopKLocalFabricMixin


class MSTopKHierStrategy(MSTopKHierFabricMixin, DDPStrategy):
    __doc__ = MSTopKHierFabricMixin.__doc__


class MSTopKLocalStrategy(MSTopKLocalFabricMixin, DDPStrategy):
    __doc__ = MSTopKLocalFabricMixin.__doc__

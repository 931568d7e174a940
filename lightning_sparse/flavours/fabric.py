"""The strategy for ``lightning.fabric``."""

from lightning.fabric.strategies.ddp import DDPStrategy

from lightning_sparse.strategy.fabric import MSTopKHierFabricMixin


class MSTopKHierStrategy(MSTopKHierFabricMixin, DDPStrategy):
    __doc__ = MSTopKHierFabricMixin.__doc__

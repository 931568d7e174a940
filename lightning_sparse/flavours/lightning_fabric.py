"""The strategies for ``lightning_fabric``."""

from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

from lightning_sparse.strategy.elastic import MSTopKElasticFabricMixin
from lightning_sparse.strategy.elastic_fsdp import MSTopKElasticFSDPFabricMixin
from lightning_sparse.strategy.fsdp import MSTopKFSDPFabricMixin
from lightning_sparse.strategy.hier import MSTopKHierFabricMixin
from lightning_sparse.strategy.local import MSTopKLocalFabricMixin


class MSTopKHierStrategy(MSTopKHierFabricMixin, DDPStrategy):
    __doc__ = MSTopKHierFabricMixin.__doc__


class MSTopKLocalStrategy(MSTopKLocalFabricMixin, DDPStrategy):
    __doc__ = MSTopKLocalFabricMixin.__doc__


class MSTopKElasticStrategy(MSTopKElasticFabricMixin, DDPStrategy):
    __doc__ = MSTopKElasticFabricMixin.__doc__


class MSTopKElasticFSDPStrategy(MSTopKElasticFSDPFabricMixin, ModelParallelStrategy):
    __doc__ = MSTopKElasticFSDPFabricMixin.__doc__


class MSTopKFSDPStrategy(MSTopKFSDPFabricMixin, ModelParallelStrategy):
    __doc__ = MSTopKFSDPFabricMixin.__doc__

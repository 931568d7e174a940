"""The strategies for ``lightning.fabric``."""

from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

from lightning_sparse.strategy.elastic import MSTopKElasticFabricMixin
from lightning_sparse.strategy.elastic_fsdp import MSTopKElasticFSDPFabricMixin
from lightning_sparse.strategy.fsdp import MSTopKFSDPFabricMixin
from lightning_sparse.strategy.hier import MSTopKHierFabricMixin
from lightning_sparse.strategy.local import MSTopKLocalFabricMixin


class MSTopKHierStrategy(MSTopKHierFabricMixin, DDPStrategy):
    pass


class MSTopKLocalStrategy(MSTopKLocalFabricMixin, DDPStrategy):
    pass


class MSTopKElasticStrategy(MSTopKElasticFabricMixin, DDPStrategy):
    pass


class MSTopKElasticFSDPStrategy(MSTopKElasticFSDPFabricMixin, ModelParallelStrategy):
    pass


class MSTopKFSDPStrategy(MSTopKFSDPFabricMixin, ModelParallelStrategy):
    pass

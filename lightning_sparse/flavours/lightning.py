"""The public classes for ``lightning.pytorch``."""

from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_sparse.data.datamodule import CachedDataModuleMixin, CachedImageDataModuleMixin
from lightning_sparse.data.tokens import TokenDataModuleMixin
from lightning_sparse.pto.callback import PTOMixin
from lightning_sparse.strategy.callback import CommStatsMixin
from lightning_sparse.strategy.elastic import MSTopKElasticMixin
from lightning_sparse.strategy.elastic_fsdp import MSTopKElasticFSDPMixin
from lightning_sparse.strategy.fsdp import MSTopKFSDPMixin
from lightning_sparse.strategy.hier import MSTopKHierMixin
from lightning_sparse.strategy.local import MSTopKLocalMixin


class MSTopKHierStrategy(MSTopKHierMixin, DDPStrategy):
    pass


class MSTopKLocalStrategy(MSTopKLocalMixin, DDPStrategy):
    pass


class MSTopKElasticStrategy(MSTopKElasticMixin, DDPStrategy):
    pass


class MSTopKElasticFSDPStrategy(MSTopKElasticFSDPMixin, ModelParallelStrategy):
    pass


class MSTopKFSDPStrategy(MSTopKFSDPMixin, ModelParallelStrategy):
    pass


class CommStatsCallback(CommStatsMixin, Callback):
    pass


class PTOCallback(PTOMixin, Callback):
    pass


class CachedDataModule(CachedDataModuleMixin, LightningDataModule):
    pass


class CachedImageDataModule(CachedImageDataModuleMixin, LightningDataModule):
    pass


class TokenDataModule(TokenDataModuleMixin, LightningDataModule):
    pass

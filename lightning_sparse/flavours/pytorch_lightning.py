"""The public classes for ``pytorch_lightning``."""

from pytorch_lightning import LightningDataModule
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

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
    __doc__ = MSTopKHierMixin.__doc__


class MSTopKLocalStrategy(MSTopKLocalMixin, DDPStrategy):
    __doc__ = MSTopKLocalMixin.__doc__


class MSTopKElasticStrategy(MSTopKElasticMixin, DDPStrategy):
    __doc__ = MSTopKElasticMixin.__doc__


class MSTopKElasticFSDPStrategy(MSTopKElasticFSDPMixin, ModelParallelStrategy):
    __doc__ = MSTopKElasticFSDPMixin.__doc__


class MSTopKFSDPStrategy(MSTopKFSDPMixin, ModelParallelStrategy):
    __doc__ = MSTopKFSDPMixin.__doc__


class CommStatsCallback(CommStatsMixin, Callback):
    __doc__ = CommStatsMixin.__doc__


class PTOCallback(PTOMixin, Callback):
    __doc__ = PTOMixin.__doc__


class CachedDataModule(CachedDataModuleMixin, LightningDataModule):
    __doc__ = CachedDataModuleMixin.__doc__


class CachedImageDataModule(CachedImageDataModuleMixin, LightningDataModule):
    __doc__ = CachedImageDataModuleMixin.__doc__


class TokenDataModule(TokenDataModuleMixin, LightningDataModule):
    __doc__ = TokenDataModuleMixin.__doc__

"""The strategies for Ray Train, whose ``prepare_trainer`` takes none but subclasses of its own.

Ray uses ``lightning.pytorch`` where that is installed, else ``pytorch_lightning``; so must the program.
"""

from ray.train.lightning import RayDDPStrategy

from lightning_sparse.strategy.mstopk_hier import MSTopKHierMixin
from lightning_sparse.strategy.mstopk_local import MSTopKLocalMixin


class RayMSTopKHierStrategy(MSTopKHierMixin, RayDDPStrategy):
    __doc__ = MSTopKHierMixin.__doc__


class RayMSTopKLocalStrategy(MSTopKLocalMixin, RayDDPStrategy):
    __doc__ = MSTopKLocalMixin.__doc__

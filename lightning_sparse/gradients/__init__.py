"""Exchange gradients with error feedback in a DDP communication hook (Shi et al., MLSys 2021)."""

from lightning_sparse.gradients.config import HierConfig
from lightning_sparse.gradients.hook import hier_hook
from lightning_sparse.gradients.state import HierState

__all__ = ["HierConfig", "HierState", "hier_hook"]

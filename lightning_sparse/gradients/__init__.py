"""The paper's front end: gradients are reduced before the optimizer, with error feedback, as a DDP hook."""

from lightning_sparse.gradients.config import HierConfig
from lightning_sparse.gradients.reduction import hier_hook
from lightning_sparse.gradients.state import HierState

__all__ = ["HierConfig", "HierState", "hier_hook"]

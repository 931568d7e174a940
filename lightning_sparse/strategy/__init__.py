"""What Lightning sees: strategies for Trainer and Fabric, checkpoints, a callback. Imports no Lightning."""

from lightning_sparse.exchange import CommStats, CommunicationError, HierCommunicator
from lightning_sparse.gradients import HierConfig, HierState, hier_hook

__all__ = ["CommStats", "CommunicationError", "HierCommunicator", "HierConfig", "HierState", "hier_hook"]

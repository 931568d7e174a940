"""Strategies for Trainer and Fabric, checkpoints, and a callback. Imports no Lightning."""

from lightning_sparse.exchange import CommunicationError, HierCommunicator
from lightning_sparse.gradients import HierConfig, HierState, hier_hook
from lightning_sparse.strategy.distributed import resume

__all__ = ["CommunicationError", "HierCommunicator", "HierConfig", "HierState", "hier_hook", "resume"]

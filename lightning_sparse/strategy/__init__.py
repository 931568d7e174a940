"""Gradients between ranks: hierarchical top-k communication with error feedback. Imports no Lightning."""

from lightning_sparse.strategy.communicator import CommunicationError, HierCommunicator
from lightning_sparse.strategy.config import HierConfig
from lightning_sparse.strategy.hook import hier_hook
from lightning_sparse.strategy.state import HierState
from lightning_sparse.strategy.stats import CommStats

__all__ = ["CommStats", "CommunicationError", "HierCommunicator", "HierConfig", "HierState", "hier_hook"]

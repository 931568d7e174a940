"""Gradients between ranks: hierarchical top-k communication with error feedback. Imports no Lightning."""

from .communicator import CommunicationError, HierCommunicator
from .config import HierConfig
from .hook import hier_hook
from .state import HierState
from .stats import CommStats

__all__ = ["CommStats", "CommunicationError", "HierCommunicator", "HierConfig", "HierState", "hier_hook"]

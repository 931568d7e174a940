"""The exchange of one shard between nodes. Imports no DDP, no optimizer and no Lightning."""

from lightning_sparse.exchange.communicator import CommunicationError, HierCommunicator
from lightning_sparse.exchange.config import ExchangeConfig
from lightning_sparse.exchange.engine import CommStats, Exchange, Transfer
from lightning_sparse.exchange.paths import Path, Shard, TensorSpec

__all__ = [
    "CommStats", "CommunicationError", "Exchange", "ExchangeConfig", "HierCommunicator", "Path", "Shard", "Transfer",
    "TensorSpec",
]  # fmt: skip

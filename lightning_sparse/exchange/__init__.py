"""The exchange of one shard between nodes: the engine of all front ends.

It imports no DDP, no optimizer and no Lightning. Paths are objects in `paths`; `choice` picks one for each shard by
`rates`; `communicator` holds the collectives; `lanes` runs them beside backward; `engine` puts these together.
"""

from lightning_sparse.exchange.communicator import CommunicationError, HierCommunicator
from lightning_sparse.exchange.config import ExchangeConfig
from lightning_sparse.exchange.engine import Exchange
from lightning_sparse.exchange.paths import Path, Shard, Work
from lightning_sparse.exchange.stats import CommStats

__all__ = [
    "CommStats", "CommunicationError", "Exchange", "ExchangeConfig", "HierCommunicator", "Path", "Shard", "Work"
]  # fmt: skip

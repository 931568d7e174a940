"""The exchange of one shard between nodes: the engine of all front ends.

It imports no DDP, no optimizer and no Lightning.

| file | contents |
|---|---|
| config.py | what a user chooses |
| engine.py | `Exchange`: a shard, a path, and what was communicated |
| lanes.py | the three stages of a job beside backward, on threads or streams |
| paths.py | ways of summing a shard over nodes: select, transfer, apply, and what they cost |
| communicator.py | the collectives |
| choice.py | which path each shard takes |
| rates.py, probe.py | what networks and kernels cost, and its measurement |
| host.py | what the host learns of a device without waiting: values, and times |
"""

from lightning_sparse.exchange.communicator import CommunicationError, HierCommunicator
from lightning_sparse.exchange.config import ExchangeConfig
from lightning_sparse.exchange.engine import CommStats, Exchange, Transfer
from lightning_sparse.exchange.paths import Path, Shard, Work

__all__ = [
    "CommStats", "CommunicationError", "Exchange", "ExchangeConfig", "HierCommunicator", "Path", "Shard", "Transfer",
    "Work",
]  # fmt: skip

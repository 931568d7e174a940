"""An emulated cluster on one machine: the nodes are network namespaces, joined by links with a limited rate.

Each node has a link of known rate to a common switch, and the kernel counts the bytes on it. torchrun starts the
training script in each node. Compute times differ from a cluster, because all nodes share one CPU, one memory, and the
GPUs. The lab imports only the standard library, so that the command starts fast.
"""

from lightning_sparse.lab.cluster import Cluster, LabConfig, RunResult
from lightning_sparse.lab.gpus import find_gpus
from lightning_sparse.lab.network import LabUnavailableError, NodeTraffic, unavailable_reason
from lightning_sparse.lab.processes import exit_on_signals

signals_as_exit = exit_on_signals  # deprecated name, until version 0.3

__all__ = [
    "Cluster",
    "LabConfig",
    "LabUnavailableError",
    "NodeTraffic",
    "RunResult",
    "exit_on_signals",
    "find_gpus",
    "signals_as_exit",
    "unavailable_reason",
]

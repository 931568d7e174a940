"""An emulated cluster on one machine: the nodes are network namespaces, joined by links with a limited rate.

On loopback, sending fewer bytes saves no time. In the lab each node has a link of known rate to a common switch, the
kernel counts the bytes on it, and torchrun starts the training script in each node. Use it for tests with a real
topology, for demos, and to measure network costs. Compute times are not those of a cluster: all nodes share this
machine's processors and memory.

::

    node 0: L ranks   node 1: L ranks        storage (optional)
        | eth0            | eth0                 | eth0         tbf on eth0 limits sending
        | node0           | node1                | storage      tbf on the port limits receiving
    +---+-----------------+----------------------+---+
    |                  bridge                        |          in its own namespace: the lab adds no interface,
    +------------------------------------------------+          address, route or firewall rule to the host

The lab imports only the standard library, so that the command starts fast.
"""

from lightning_sparse.lab.cluster import Cluster, RunResult
from lightning_sparse.lab.config import LabConfig, LabUnavailableError
from lightning_sparse.lab.network import NodeTraffic, unavailable_reason
from lightning_sparse.lab.processes import signals_as_exit

__all__ = [
    "Cluster",
    "LabConfig",
    "LabUnavailableError",
    "NodeTraffic",
    "RunResult",
    "signals_as_exit",
    "unavailable_reason",
]

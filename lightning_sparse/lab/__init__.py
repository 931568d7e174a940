"""A cluster on one machine: nodes are network namespaces, the network between them is slow on purpose.

Sending less between nodes shows nothing on loopback, where bytes are free. Here each node has a link of a known rate
to a common switch, every byte on it is counted by the kernel, and a training script runs in each node as a launcher
would run it. What it is good for: tests with a real topology, a demo, and measurements whose *network* part is honest.
What it is not: the nodes share this machine's processors and memory, so compute times are those of one machine cut in
pieces.

::

    node 0: L ranks   node 1: L ranks        storage (optional)
        | eth0            | eth0                 | eth0         tbf on eth0 = what the node sends
        | node0           | node1                | storage      tbf on the port = what the node receives
    +---+-----------------+----------------------+---+
    |                  bridge                        |          a namespace of its own: the host sees no interface,
    +------------------------------------------------+          address, route or firewall rule of the lab

=================  ==================================================================================
config.py          what is wanted: a frozen dataclass
network.py         namespaces, links, counters; removal of what a killed lab left behind
processes.py       every process of a run can be found again, and ends with it
output.py          what the nodes print, line by line and labelled; progress bars stay one line
launch.py          the launchers of one run, followed to their end
storage.py         a folder behind a slow link of its own, mounted over itself in each node
cluster.py         `Cluster`: puts these together and runs a command as a cluster would
=================  ==================================================================================

Only the standard library is imported, so the command starts at once; torch is imported by the launcher in the nodes.
"""

from lightning_sparse.lab.cluster import Cluster, RunResult
from lightning_sparse.lab.config import LabConfig, LabUnavailableError
from lightning_sparse.lab.network import NodeTraffic, why_not
from lightning_sparse.lab.processes import signals_as_exit

__all__ = ["Cluster", "LabConfig", "LabUnavailableError", "NodeTraffic", "RunResult", "signals_as_exit", "why_not"]

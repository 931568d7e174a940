"""Between nodes: each node serves the samples it keeps in memory, and reads those of other nodes.

============== =======================================================================
server.py      process that serves the samples of its node
client.py      reads samples from the servers of other nodes
protocol.py    messages and keys of both, address on which a node serves, limit of open files
collectives.py results that all ranks of a run share, over torch.distributed
============== =======================================================================
"""

"""FSDP2 inside each node, and what crosses between nodes: models that one device cannot hold, on slow networks.

| file | contents |
|---|---|
| mesh.py | the mesh of a cluster, and what to shard where nobody says |
| shards.py | where a device's shard lies in the whole, and its memory |
| gradients.py | gradients of shards, summed over nodes in FSDP2's hook |

Updates of shards are exchanged by `lightning_sparse.updates.LocalUpdates`, as those of whole parameters are.
"""

from lightning_sparse.fsdp.gradients import ShardedGradients
from lightning_sparse.fsdp.mesh import blocks, mesh_of, shard

__all__ = ["ShardedGradients", "blocks", "mesh_of", "shard"]

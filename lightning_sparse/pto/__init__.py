"""Share the optimizer step: each rank steps a part of the parameters, and the updated parameters are gathered.

After the gradient reduction, all ranks of a data-parallel run hold the same parameters and gradients. The W ranks of a
scope (a node, or the world) divide the step among them. `ShardedStep` adds hooks to the user's optimizer: before a
step, it runs the closure and sets the gradients of parameters that other ranks own to None; after it, it restores these
gradients and all-gathers the parameters in flat, padded buffers.

Each rank keeps optimizer state only for its own parameters. State is collected for a checkpoint, whose format is the
same as without sharing.

The first steps check three requirements: parameters and gradients are bit-identical on all ranks, the optimizer treats
parameters independently, and every step completes.

    step = ShardedStep(optimizer, communicator_of(topology.discover(), "node"))  # on all ranks, after creating DDP
"""

from lightning_sparse.pto.scope import Scope, communicator_of
from lightning_sparse.pto.sharded_step import ShardedStep

__all__ = ["Scope", "ShardedStep", "communicator_of"]

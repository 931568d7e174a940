"""Shard the optimizer step: each rank steps a part of the parameters, and the updated parameters are gathered.

After the gradient reduction, all ranks of a data-parallel run have equal parameters and gradients. So the W ranks in a
scope (one node, or the world) divide the step. Each rank keeps optimizer state only for its own parameters. A
checkpoint collects the state, in the usual format.

    step = ShardedStep(optimizer, communicator_of(topology.discover(), "node"))  # on all ranks, after creating DDP
"""

from lightning_sparse.pto.step import Scope, ShardedStep, communicator_of

__all__ = ["Scope", "ShardedStep", "communicator_of"]

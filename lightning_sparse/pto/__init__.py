"""Shard the optimizer step: each rank steps a part of the parameters, and the updated parameters are gathered.

After the gradient reduction, all ranks of a data-parallel run have equal parameters and gradients. The W ranks of a
scope (a node, or the world) divide the step. `ShardedStep` adds hooks to the user's optimizer. Before a step, a hook
runs the closure and sets the gradients of parameters that other ranks own to None. After the step, a hook restores
these gradients and all-gathers the parameters in flat, padded buffers. Each rank keeps optimizer state only for its own
parameters. A checkpoint collects the state, in the usual format.

There are three requirements. Parameters and gradients are bit-identical on all ranks, which the first step checks. The
optimizer treats parameters independently, which tests show for known optimizers and a user states for others. Every
step completes; otherwise the next step is refused.

    step = ShardedStep(optimizer, communicator_of(topology.discover(), "node"))  # on all ranks, after creating DDP
"""

from lightning_sparse.pto.step import Scope, ShardedStep, communicator_of

__all__ = ["Scope", "ShardedStep", "communicator_of"]

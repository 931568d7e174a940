"""Share the optimizer step: each rank steps a part of the parameters, and the updated parameters are gathered.

After the gradient reduction, all ranks of a data-parallel run hold the same parameters and gradients. The W ranks of a
scope (a node, or the world) partition the step among them. `ShardedStep` adds hooks to the user's optimizer: before a
step, it runs the closure and sets the gradients of parameters that other ranks own to None; after it, it restores these
gradients and all-gathers the parameters in flat, padded buffers.

Each rank keeps optimizer state only for its own parameters. State is collected for a checkpoint, whose format is the
same as without sharing.

It rests on three requirements: parameters and gradients are bit-identical on all ranks, which the first step checks;
the optimizer treats parameters independently, which tests show for the known ones and a user states of others; and
every step completes, without which the next one is refused.

    step = ShardedStep(optimizer, communicator_of(topology.discover(), "node"))  # on all ranks, after creating DDP
"""

from lightning_sparse.pto.step import Scope, ShardedStep, communicator_of

__all__ = ["Scope", "ShardedStep", "communicator_of"]

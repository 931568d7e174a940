"""Every rank runs its share of the optimizer step, and the updated parameters are gathered.

With data-parallel training all ranks hold the same parameters and, after the reduction, the same gradients; without
this part they all run the same optimizer step. Here the W ranks of a scope (a node, or the world) share it:

==================== =============== =================================================================================
step                 where           what
==================== =============== =================================================================================
1 closure            the rank        forward and backward; the reduction; clipping; whatever looks at gradients
2 hide               the rank        gradients of parameters that other ranks own become None
3 step               the rank        the optimizer itself, which skips parameters without a gradient
4 restore            the rank        the hidden gradients are back before anyone looks
5 gather             the scope       one flat, padded all-gather: each rank's new parameters -> all parameters
==================== =============== =================================================================================

There is no new optimizer object: hooks of the user's optimizer do it, so schedulers, scalers and loops keep the one
they know. Optimizer state exists only where its parameter is stepped, and is put together for a checkpoint, which is
therefore the same as without this part and resumes anywhere.

It rests on three assumptions, each checked at the first steps: gradients and parameters are bit-identical on all ranks,
the optimizer treats parameters independently, and no step is left half done.

    step = ShardedStep(optimizer, communicator_of(topology.discover(), "node"))     # on all ranks, after DDP is made
"""

from lightning_sparse.pto.scope import Scope, communicator_of
from lightning_sparse.pto.sharded_step import ShardedStep

__all__ = ["Scope", "ShardedStep", "communicator_of"]

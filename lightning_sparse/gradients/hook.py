"""The reduction of `lightning_sparse.gradients.reduction` as a DDP communication hook.

state = HierState(model, HierConfig(density=0.01), lightning_sparse.topology.discover())
ddp = DistributedDataParallel(model)
ddp.register_comm_hook(state, hier_hook)
state.watch([optimizer])  # residuals are committed only after optimizer.step()
for batch in loader:
    optimizer.zero_grad()
    state.before_backward()
    loss(ddp, batch).backward()
    optimizer.step()
state.end()
"""

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # re-exported, unannounced

from lightning_sparse.gradients.reduction import Reduction
from lightning_sparse.gradients.state import HierState


def hier_hook(state: HierState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce one bucket. Register it with ``ddp.register_comm_hook(state, hier_hook)``.

    In a loop of your own call ``state.watch([optimizer])`` once, ``state.before_backward()`` before each backward and
    ``state.end()`` at the end. A gradient that is never stepped then leaves its residual as it was.

    Raises:
        CommunicationError: when a collective failed, naming the step, the ranks, the round and the bucket. With overlap
            it is raised at the end of the backward pass.
    """
    received = state.receive(bucket)
    return state.exchange.runner.run(Reduction(state, received), received.flat_N)

"""The reduction of `lightning_sparse.gradients.reduction` as a DDP communication hook.

topology = lightning_sparse.topology.discover()
state = HierState(model, HierConfig(density=0.01), topology)
ddp = DistributedDataParallel(model)
ddp.register_comm_hook(state, hier_hook)
"""

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # re-exported, unannounced

from lightning_sparse.gradients.reduction import Reduction
from lightning_sparse.gradients.state import HierState


def hier_hook(state: HierState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce one bucket. Register it with ``ddp.register_comm_hook(state, hier_hook)``.

    Raises:
        CommunicationError: when a collective failed, naming the step, the ranks, the round and the bucket. With overlap
            it is raised at the end of the backward pass.
    """
    received = state.receive(bucket)
    return state.exchange.runner.run(Reduction(state, received), received.flat_N)

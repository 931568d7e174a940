"""The DDP communication hook."""

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # re-exported, but not in __all__

from lightning_sparse.gradients.reduction import Reduction
from lightning_sparse.gradients.state import HierState


def hier_hook(state: HierState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce one bucket. Register it with ``ddp.register_comm_hook(state, hier_hook)``.

    In a loop, call ``state.watch([optimizer])`` once, ``state.before_backward()`` before each backward pass, and
    ``state.close()`` at the end.

    Raises:
        CommunicationError: if a collective failed. With ``overlap``, it is raised at the end of the backward pass.
    """
    received = state.on_bucket(bucket)
    return state.exchange.runner.run(Reduction(state, received), received.flat_N)

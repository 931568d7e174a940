"""Check that all ranks hold the same parameters and gradients."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.exchange.communicator import HierCommunicator

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def differing(parameters: Sequence[Tensor], communicator: HierCommunicator) -> list[tuple[int, str]]:
    """Return the tensors that differ between ranks. A collective of the world.

    Returns:
        (index of the parameter, "parameter" or "gradient"), the same list on every rank.
    """
    device = parameters[0].device
    sums = torch.stack([fingerprint(tensor).to(device) for p in parameters for tensor in (p, p.grad)])
    extremes = torch.stack([sums, -sums])
    communicator.flat_all_reduce(extremes, op=dist.ReduceOp.MAX)
    where = (extremes[0] != -extremes[1]).nonzero().flatten().tolist()
    return [(place // 2, ("parameter", "gradient")[place % 2]) for place in where]


def all_agree(condition: bool, communicator: HierCommunicator, device: torch.device) -> bool:
    """Return whether `condition` holds on every rank. A collective of the world."""
    failures = torch.tensor([int(not condition)], device=device)
    communicator.flat_all_reduce(failures, op=dist.ReduceOp.MAX)
    return not int(failures)


def fingerprint(tensor: Tensor | None) -> Tensor:
    """Return the sum of the tensor's bits as integers, a 0-dim int64 tensor; a constant for None."""
    if tensor is None:
        return torch.full((), 0x5EED, dtype=torch.int64)
    values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    flat = values.contiguous().view(-1)
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int32)).sum(dtype=torch.int64)

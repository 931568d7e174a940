"""Whether all ranks hold the same parameters and gradients: what sharing a step rests on, looked at once."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.exchange.communicator import HierCommunicator

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def differing(parameters: Sequence[Tensor], communicator: HierCommunicator) -> list[tuple[int, str]]:
    """Where ranks differ. A collective of the world.

    Returns:
        (index of the parameter, "parameter" or "gradient"), the same list on every rank.
    """
    if not parameters:
        return []
    device = parameters[0].device
    sums = [fingerprint(tensor) for p in parameters for tensor in (p, p.grad)]
    here = torch.stack([each.to(device) for each in sums])
    extremes = torch.stack([here, -here])
    communicator.flat_all_reduce(extremes, op=dist.ReduceOp.MAX)
    where = (extremes[0] != -extremes[1]).nonzero().flatten().tolist()
    return [(place // 2, ("parameter", "gradient")[place % 2]) for place in where]


def all_say(yes: bool, communicator: HierCommunicator, device: torch.device) -> bool:
    """Whether every rank says yes. A collective of the world."""
    objections = torch.tensor([int(not yes)], device=device)
    communicator.flat_all_reduce(objections, op=dist.ReduceOp.MAX)
    return not int(objections)


def fingerprint(tensor: Tensor | None) -> Tensor:
    """Sum of the tensor's bits read as integers, a 0-dim int64 tensor. A missing tensor has one of its own."""
    if tensor is None:
        return torch.full((), 0x5EED, dtype=torch.int64)
    values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    flat = values.contiguous().view(-1)
    integers = _INTEGERS.get(flat.element_size(), torch.int32)
    return flat.view(integers).sum(dtype=torch.int64) if flat.numel() else torch.zeros((), dtype=torch.int64)

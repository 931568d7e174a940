"""Which rank holds which elements of each parameter: memory order, division of the step, shards of FSDP2.

All flat tensors of this package are in *memory order*, which can differ from the order of the dims (channels_last).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

ALIGNMENT = 64
"""Parts begin at multiples of this many elements, so that vectorized optimizers give bit-identical results."""
BALANCED = 1.1
"""No parameter is divided while the largest load is at most this multiple of the mean."""


class Part(NamedTuple):
    """Elements [begin, end) of one parameter, in memory order, and the rank that steps them."""

    owner: int
    begin: int
    end: int


Parts = tuple[Part, ...]


# -- memory order ------------------------------------------------------------------------------------------------------


def dim_order(tensor: Tensor) -> list[int]:
    """Return the dims in memory order, the outermost first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def flat_view(tensor: Tensor) -> Tensor:
    """Return a flat view of the tensor's memory. Raise ValueError if the elements do not fill it."""
    in_memory = tensor.detach().permute(dim_order(tensor))
    if not in_memory.is_contiguous():
        raise ValueError(
            f"a parameter of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps or overlaps in "
            f"its memory and cannot be gathered: make it contiguous()."
        )
    return in_memory.view(-1)


def flatten_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Flatten the tensor in the memory order of the parameter."""
    return tensor.detach().permute(dim_order(parameter)).reshape(-1)


def sparse_parameters(module: nn.Module) -> set[int]:
    """Return the ``id()`` of each embedding weight with sparse gradients, which cannot be divided."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    return {
        id(submodule.weight) for submodule in module.modules() if isinstance(submodule, embeddings) and submodule.sparse
    }


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Return the names by ``id()``; a shared parameter has its first name."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trainable_params(optimizer: Optimizer, known: Collection[int] = ()) -> list[Tensor]:
    """Return the parameters that a step can change. ``known`` has the ``id()`` of those trained before."""
    return [p for p in parameters_of(optimizer) if p.requires_grad or p.grad is not None or id(p) in known]


# -- the division of a step over ranks ---------------------------------------------------------------------------------


def partition(
    numels: Sequence[int], costs: Sequence[int], loads: Sequence[int], cuttable: Sequence[bool]
) -> list[Parts]:
    """Assign whole parameters if that balances the ranks; otherwise divide the costliest among all ranks.

    Parameters are divided one at a time, until loads are balanced. The parts of a parameter cover all its elements, in
    order.

    Args:
        costs: cost of each parameter's step, in any unit.
        loads: current cost of each rank, in the same unit; its length is the number of ranks.
        cuttable: whether a parameter's parts can be stepped separately.

    >>> partition([10, 6, 4], [10, 6, 4], loads=[0, 0], cuttable=[True] * 3)
    [(Part(owner=0, begin=0, end=10),), (Part(owner=1, begin=0, end=6),), (Part(owner=1, begin=0, end=4),)]
    >>> partition([900, 100], [900, 100], loads=[0, 0], cuttable=[True] * 2)[0]
    (Part(owner=0, begin=0, end=448), Part(owner=1, begin=448, end=900))
    """
    # All ranks compute the same result, without communication.
    cut: set[int] = set()
    while True:
        parts = _greedy_partition(numels, costs, loads, cut)
        totals = [a + b for a, b in zip(loads, loads_of(parts, costs, len(loads)), strict=True)]
        whole = [i for i, numel in enumerate(numels) if cuttable[i] and i not in cut and numel > ALIGNMENT]
        if not whole or max(totals) * len(loads) <= BALANCED * sum(totals):
            return parts
        cut.add(max(whole, key=lambda i: costs[i]))


def partition_new(
    parameters: Sequence[Tensor],
    known: Mapping[int, Parts],
    size: int,
    cost: Callable[[Tensor], int],
    cuttable: Callable[[Tensor], bool],
) -> list[Parts]:
    """Return the parts of all parameters on `size` ranks. Known parameters keep their parts."""
    old = [p for p in parameters if id(p) in known]
    new = [p for p in parameters if id(p) not in known]
    loads = loads_of([known[id(p)] for p in old], list(map(cost, old)), size)
    divided = partition([p.numel() for p in new], list(map(cost, new)), loads, list(map(cuttable, new)))
    parts = {**known, **dict(zip(map(id, new), divided, strict=True))}
    return [parts[id(p)] for p in parameters]


def assign_to_least_loaded(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the owner of each piece: the costliest first, each to the rank with the least load.

    >>> assign_to_least_loaded([3, 10, 4, 4], loads=[0, 0])
    [1, 0, 1, 1]
    >>> assign_to_least_loaded([5], loads=[7, 0, 0])
    [1]
    """
    totals = list(loads)
    owners = [0] * len(costs)
    # Ties go to the earlier piece and the lower rank, on all ranks. The largest load is at most the mean plus the
    # costliest piece.
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owner = min(range(len(totals)), key=totals.__getitem__)
        owners[index] = owner
        totals[owner] += max(1, costs[index])  # an empty parameter has a cost, too
    return owners


def loads_of(parts: Sequence[Parts], costs: Sequence[int], size: int) -> list[int]:
    """Return the load of each of `size` ranks.

    >>> loads_of([(Part(0, 0, 5), Part(1, 5, 10)), (Part(1, 0, 4),)], costs=[100, 7], size=2)
    [50, 57]
    """
    loads = [0] * size
    for of_parameter, cost in zip(parts, costs, strict=True):
        numel = of_parameter[-1].end
        for part in of_parameter:
            loads[part.owner] += max(1, cost * (part.end - part.begin) // max(1, numel))
    return loads


def _greedy_partition(numels: Sequence[int], costs: Sequence[int], loads: Sequence[int], cut: set[int]) -> list[Parts]:
    size, totals = len(loads), list(loads)
    in_parts = {i: tuple(Part(rank, *bounds) for rank, bounds in enumerate(_bounds(numels[i], size))) for i in cut}
    for index, parts in in_parts.items():
        totals = [a + b for a, b in zip(totals, loads_of([parts], [costs[index]], size), strict=True)]
    whole = [i for i in range(len(numels)) if i not in cut]
    owner_of = dict(zip(whole, assign_to_least_loaded([costs[i] for i in whole], totals), strict=True))
    return [in_parts.get(i) or (Part(owner_of[i], 0, numel),) for i, numel in enumerate(numels)]


def _bounds(numel: int, count: int) -> list[tuple[int, int]]:
    step = max(ALIGNMENT, round(numel / count / ALIGNMENT) * ALIGNMENT)
    begins = list(range(0, numel, step))[:count]
    return list(zip(begins, [*begins[1:], numel], strict=True))


# -- shards of FSDP2 ---------------------------------------------------------------------------------------------------


def local_of(tensor: Tensor) -> Tensor:
    """Return this device's shard of a tensor, or an unsharded tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(parameter: Tensor) -> Part:
    """Return the elements of a parameter on this device: rows of dim 0, cut as by ``torch.chunk``; all of a tensor."""
    if not isinstance(parameter, DTensor):
        return Part(0, 0, parameter.numel())
    index, size = parameter.device_mesh.get_local_rank(), parameter.device_mesh.size()
    rows, row = parameter.shape[0], prod(parameter.shape[1:])
    rows_per_device = -(-rows // size)
    begin, end = min(index * rows_per_device, rows), min((index + 1) * rows_per_device, rows)
    return Part(index, begin * row, end * row) if begin < end else Part(index, 0, 0)


def flat_view_of_part(parameter: Tensor, part: Part) -> Tensor:
    if isinstance(parameter, DTensor):
        return flat_view(parameter.to_local())
    return flat_view(parameter)[part.begin : part.end]


def drop_gathered(module: nn.Module) -> None:
    """Drop the parameters that FSDP2 gathered."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


def check_sharded(name: str, parameter: Tensor) -> None:
    if not isinstance(parameter, DTensor):
        reason = "is not sharded, and others are"
    elif parameter.device_mesh.ndim != 1:
        reason = f"is sharded over a mesh of {parameter.device_mesh.ndim} axes"
    elif parameter.placements != (Shard(0),):
        reason = f"is placed as {parameter.placements}"
    else:
        return
    raise ValueError(
        f"parameter {name} {reason}, but nodes exchange shards along dim 0 over a node's devices. Pass fully_shard() "
        f"the node's mesh, device_mesh['shard'], for the whole model."
    )

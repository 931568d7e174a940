"""Decisions of several ranks, from the values of all of them.

``reduce`` is an all-reduce in place, ``reduce(tensor, op=...)``, over the deciding ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Reduce = Callable[..., Any]
T = TypeVar("T")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COLUMNS, _ODD = 4096, 0x1E3779B97F4A7C15


def largest(number: float, reduce: Reduce, device: torch.device) -> float:
    """Return the largest of all ranks' numbers. A collective."""
    numbers = torch.tensor([number], dtype=torch.float64, device=device)
    reduce(numbers, op=dist.ReduceOp.MAX)
    return float(numbers)


def extremes(numbers: Sequence[int], reduce: Reduce, device: torch.device) -> tuple[list[int], list[int]]:
    """Return the elementwise largest and smallest of all ranks' numbers. A collective."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    both = torch.stack([mine, -mine])
    reduce(both, op=dist.ReduceOp.MAX)
    return both[0].tolist(), (-both[1]).tolist()


def all_agree(condition: bool, reduce: Reduce, device: torch.device) -> bool:
    """Return whether the condition holds on every rank. A collective."""
    return not largest(float(not condition), reduce, device)


def differing(tensors: Sequence[Tensor | None], reduce: Reduce, device: torch.device) -> list[int]:
    """Return the indices of the tensors whose bits differ between ranks, equal on all ranks. A collective."""
    sums = torch.stack([fingerprint(tensor).to(device) for tensor in tensors])
    extremes = torch.stack([sums, -sums])
    reduce(extremes, op=dist.ReduceOp.MAX)
    places: list[int] = (extremes[0] != -extremes[1]).nonzero().flatten().tolist()
    return places


def fingerprint(tensor: Tensor | None) -> Tensor:
    """Return a sum of the tensor's bits as integers, a 0-dim int64 tensor; a constant for None.

    Tensors with the same values in another order differ, too: the sums of rows and columns have different weights.
    """
    if tensor is None:
        return torch.full((), 0x5EED, dtype=torch.int64)
    values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
    flat_B = values.contiguous().view(-1).view(torch.uint8)
    if flat_B.storage_offset() % 8:  # of the first word
        flat_B = flat_B.clone()
    words = flat_B[: len(flat_B) // 8 * 8].view(torch.int64)
    columns = max(1, min(_COLUMNS, len(words)))
    rows = words[: len(words) // columns * columns].view(-1, columns)
    numbers = torch.cat([rows.sum(1), rows.sum(0), words[rows.numel() :], flat_B[8 * len(words) :].long()])
    weights = torch.arange(1, len(numbers) + 1, device=numbers.device) * _ODD
    return (numbers * ((weights ^ (weights >> 29)) | 1)).sum()


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two real tensors of one shape and dtype are equal, and NaN have equal bits."""
    integers = _INTEGERS[tensor.element_size()]
    return torch.equal(tensor.detach().view(integers), other.detach().view(integers))


def same_options(mine: Mapping[str, Any]) -> None:
    """Raise ValueError on all ranks unless all have equal options. A collective of the world."""
    compare(gather(dict(mine)))


def compare(options: Sequence[Mapping[str, Any]]) -> None:
    # A rank with other options would call other collectives, and hang.
    first = options[0]
    for rank, rank_options in enumerate(options):
        different = [name for name in {**first, **rank_options} if rank_options.get(name) != first.get(name)]
        if different:
            differences = ", ".join(
                f"{name}={rank_options.get(name)!r}, rank 0 has {first.get(name)!r}" for name in different
            )
            raise ValueError(f"ranks differ in their options: rank {rank} has {differences}. Give all ranks the same.")


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of the group, in their order. A collective of the group."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_first(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `make` on the first rank of the group. Return its result, or raise its error, on all its ranks.

    A collective of the group.
    """
    if not is_distributed():
        return make()
    answer = [_result_of(make) if dist.get_rank(group) == 0 else (None, None)]
    dist.broadcast_object_list(answer, group=group, group_src=0)
    value, error = answer[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None only if `make` returned None


def on_all(make: Callable[[], T]) -> list[T]:
    """Call `make` on each rank. Return all results in rank order, or raise on all ranks. A collective."""
    if not is_distributed():
        return [make()]
    own = _result_of(make)
    answers = gather(own)
    if own[1] is not None:
        raise own[1]  # this rank's own error, with its traceback
    for _, error in answers:
        if error is not None:
            raise error
    return [value for value, _ in answers]  # type: ignore[misc]  # None only if `make` returned None


def _result_of(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error

"""What all ranks of a run must know alike, over torch.distributed where there is a process group, alone where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from lightning_sparse.topology import Topology, locate

T = TypeVar("T")


def in_group() -> bool:
    """Whether there are ranks to agree with."""
    return dist.is_available() and dist.is_initialized()


def find_topology(node_rank: int | None = None, local_rank: int | None = None) -> Topology:
    """Which ranks share a node. A collective; without a process group this process is alone."""
    return locate(node_rank=node_rank, local_rank=local_rank) if in_group() else Topology(((0,),), 0)


def from_rank_zero(make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank. What it raises is raised everywhere, so that nobody waits. A collective."""
    if not in_group():
        return make()
    answer: list[tuple[T | None, Exception | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            answer = [(make(), None)]
        except Exception as error:
            answer = [(None, error)]
    dist.broadcast_object_list(answer)
    value, problem = answer[0]
    if problem is not None:
        raise problem
    return value  # type: ignore[return-value]  # None only where None was made


def from_all(make: Callable[[], T]) -> list[T]:
    """What each rank makes, in their order; what any of them raises is raised everywhere. A collective."""
    if not in_group():
        return [make()]
    own: tuple[T | None, Exception | None]
    try:
        own = (make(), None)
    except Exception as error:
        own = (None, error)
    answers = [own] * dist.get_world_size()
    dist.all_gather_object(answers, own)
    if own[1] is not None:
        raise own[1]  # a rank's own problem, with its traceback
    for _, problem in answers:
        if problem is not None:
            raise problem
    return [value for value, _ in answers]  # type: ignore[misc]  # None only where None was made

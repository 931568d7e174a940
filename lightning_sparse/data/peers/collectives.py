"""Results that all ranks share, over torch.distributed. Without a process group, this process is the only rank."""

import socket
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from lightning_sparse.topology import Topology, find_nodes

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def find_topology(node_rank: int | None = None, local_rank: int | None = None) -> Topology:
    """Find which ranks share a host, as disks and memory do, also where a node of the gradients has several hosts: a
    rack, for example. A collective."""
    if not is_distributed():
        return Topology(((0,),), 0)
    found = find_nodes(node_rank=node_rank, local_rank=local_rank)
    names, hosts = on_all_ranks(socket.gethostname), dict[tuple[int, str], list[int]]()
    for index, node in enumerate(found.nodes):
        for rank in node:
            hosts.setdefault((index, names[rank]), []).append(rank)
    return Topology(tuple(map(tuple, hosts.values())), found.rank)


def on_rank_zero(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result on all ranks. Raises on all ranks if it fails. A collective."""
    if not is_distributed():
        return make()
    answer = [_result_of(make) if dist.get_rank() == 0 else (None, None)]
    dist.broadcast_object_list(answer)
    value, error = answer[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None only if `make` returned None


def on_all_ranks(make: Callable[[], T]) -> list[T]:
    """Call `make` on each rank and return all results in rank order. Raises on all ranks if one fails. A collective."""
    if not is_distributed():
        return [make()]
    own = _result_of(make)
    answers = [own] * dist.get_world_size()
    dist.all_gather_object(answers, own)
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

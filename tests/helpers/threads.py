"""Ranks as threads of one process, so that several ranks can share one GPU, which NCCL refuses.

`ThreadCommunicator` implements the communicator's methods by passing tensors between threads. All ranks call the same
methods in the same order, so a barrier before and after reading is enough. Sums run in rank order.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.topology import Topology

T = TypeVar("T")


class Exchange:
    """Passes tensors between threads."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._slots: list[Tensor | None] = [None] * world_size

    def all_gather(self, rank: int, ranks: Sequence[int], tensor: Tensor) -> list[Tensor]:
        self._slots[rank] = tensor.clone()
        _finish(tensor)
        self._barrier.wait()
        gathered = [slot.clone() for slot in (self._slots[each] for each in ranks) if slot is not None]
        _finish(tensor)
        self._barrier.wait()
        return gathered


class ThreadCommunicator(HierCommunicator):
    """Implements the collectives between threads."""

    def __init__(self, topology: Topology, exchange: Exchange) -> None:
        super().__init__(topology)
        self._exchange = exchange

    def _gathered(self, ranks: Sequence[int], tensor: Tensor) -> list[Tensor]:
        return self._exchange.all_gather(self.topology.rank, ranks, tensor)

    def reduce_scatter(self, grad_N: Tensor) -> Tensor:
        devices, index = self.topology.num_devices, self.topology.device_index
        shard = -(-grad_N.numel() // devices)
        padded = torch.nn.functional.pad(grad_N, (0, shard * devices - grad_N.numel()))
        pieces = [each[index * shard : (index + 1) * shard] for each in self._gathered(self.node.ranks, padded)]
        return _sum(pieces)

    def exchange(self, message_B: Tensor) -> Tensor:
        return torch.stack(self._gathered(self.peers.ranks, message_B))

    def all_reduce(self, shard_S: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        shard_S.copy_(_sum(self._gathered(self.peers.ranks, shard_S)))

    def all_to_all(self, messages_MB: Tensor) -> Tensor:
        return torch.stack([each[self.topology.node_index] for each in self._gathered(self.peers.ranks, messages_MB)])

    def gather(self, shard_S: Tensor, *, last: bool = False, into: Tensor | None = None) -> Tensor:
        return torch.cat(self._gathered(self.node.ranks, shard_S))

    def flat_all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        everyone = self._gathered(range(self.topology.world_size), tensor)
        tensor.copy_(_sum(everyone) if op == dist.ReduceOp.SUM else torch.stack(everyone).amax(0))


def run_threads(fn: Callable[[Topology, Exchange], T], nodes: Sequence[Sequence[int]]) -> list[T]:
    """Call ``fn`` in one thread per rank. Return the results in rank order."""
    placed = tuple(tuple(node) for node in nodes)
    world_size = sum(map(len, placed))
    exchange = Exchange(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(fn, Topology(placed, rank), exchange) for rank in range(world_size)]
        return [future.result(timeout=120) for future in futures]


def _finish(tensor: Tensor) -> None:
    """Wait for the GPU, because each thread uses its own stream and the streams do not wait for each other."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for each in tensors[1:]:
        total += each
    return total

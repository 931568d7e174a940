"""One rank of a simulated cluster: the work of one device per step, without the other devices.

NCCL refuses several ranks on one GPU, and ranks as threads would share one interpreter and one GPU, so their times
would mean little. Here the other ranks are assumed to be copies of this rank. So collectives need no communication:
they compute the result on the device, with about as much work as real collectives. A link between nodes of a given rate
is a wait on the stream, or in the thread, of the exchange.
"""

from __future__ import annotations

import time
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_sparse.exchange import HierCommunicator
from lightning_sparse.topology import Topology

LINK = "between nodes"
"""What the wait is called in a trace of the CPU; on CUDA it is the kernel ``spin_kernel``."""


def topology_of(nodes: int, devices: int) -> Topology:
    """Return the topology of rank 0, without groups."""
    return Topology(tuple(tuple(range(node * devices, (node + 1) * devices)) for node in range(nodes)), 0)


class Alone(HierCommunicator):
    """Collectives of one rank among its copies.

    Args:
        topology: topology of the cluster.
        gbps: rate of the link that the devices of a node share, in Gbit/s; None takes no time.
    """

    def __init__(self, topology: Topology, gbps: float | None = None) -> None:
        super().__init__(topology)
        self.gbps = gbps

    def reduce_scatter(self, grad_N: Tensor) -> Tensor:
        devices = self.topology.num_devices
        if devices == 1:
            return grad_N
        shard = -(-grad_N.numel() // devices)
        return functional.pad(grad_N, (0, shard * devices - grad_N.numel()))[:shard] * devices

    def exchange(self, message_B: Tensor) -> Tensor:
        nodes = self.topology.num_nodes
        self._wait((nodes - 1) * message_B.nbytes, message_B.device)
        return message_B.expand(nodes, -1).contiguous()

    def all_reduce(self, shard_S: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        nodes = self.topology.num_nodes
        self._wait(2 * (nodes - 1) * shard_S.nbytes // nodes, shard_S.device)
        _among_copies(shard_S, op, nodes)

    def all_to_all(self, messages_MB: Tensor) -> Tensor:
        nodes = self.topology.num_nodes
        self._wait((nodes - 1) * messages_MB[0].nbytes, messages_MB.device)
        return messages_MB[self.topology.node_index].expand(nodes, -1).contiguous()

    def gather(self, shard_S: Tensor, *, last: bool = False, into: Tensor | None = None) -> Tensor:
        devices = self.topology.num_devices
        if devices == 1:
            return shard_S
        fits = into is not None and into.numel() == devices * shard_S.numel()
        grad_LS = into if into is not None and fits else shard_S.new_empty(devices * shard_S.numel())
        grad_LS.view(devices, -1).copy_(shard_S)
        return grad_LS

    def flat_all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        _among_copies(tensor, op, self.topology.world_size)

    def _wait(self, nbytes: int, device: torch.device) -> None:
        if self.gbps is None:
            return
        seconds = 8e-9 * nbytes * self.topology.num_devices / self.gbps
        if device.type == "cuda":
            torch.cuda._sleep(int(seconds * _cycles_per_second()))  # type: ignore[no-untyped-call]
            return
        with torch.profiler.record_function(LINK):
            time.sleep(seconds)


def _among_copies(tensor: Tensor, op: dist.ReduceOp.RedOpType, count: int) -> None:
    if op == dist.ReduceOp.SUM:
        tensor.mul_(count)


@cache
def _cycles_per_second() -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    cycles = 100_000_000
    for _ in range(2):  # the first call while clocks rise
        begin.record()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
    return cycles / (1e-3 * float(begin.elapsed_time(end)))

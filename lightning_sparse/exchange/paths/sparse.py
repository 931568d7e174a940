"""The K largest entries of each node's shard, by an all-gather between nodes (HiTopKComm, Shi et al., MLSys 2021).

================= ================================================= ======================
stretch           in -> out                                         received between nodes
================= ================================================= ======================
compress          acc_S = sum_S * factor + residual_S;              0
                  the K largest |acc_S| -> message;
                  residual_S = acc_S - what was sent
all-gather        message -> M messages                             (M-1) * message
accumulate        M messages, added in node order -> sum over       0
                  nodes, S elements, zero where none sent
================= ================================================= ======================

A non-finite entry anywhere makes the whole result NaN on every node: the message's header counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.density import num_selected
from lightning_sparse.exchange.paths.path import Path, Shard, Stretches, Work
from lightning_sparse.exchange.rates import Rates
from lightning_sparse.kernels import accumulate, compress, indices_of, message_bytes
from lightning_sparse.kernels.wire import decode


@dataclass(frozen=True)
class Sparse(Path):
    """``k`` pairs of each shard, values written as ``value_dtype``."""

    name = "sparse"
    leaves = "entries"

    k: int
    value_dtype: torch.dtype

    @classmethod
    def of(cls, work: Work, density: float, value_dtype: torch.dtype) -> Self | None:
        return cls(work, num_selected(density, work.shard_numel), value_dtype)

    @property
    def sent(self) -> int:
        return self.k

    @property
    def applied(self) -> float:
        return min(self.work.shard_numel, self.work.num_nodes * self.k)

    @property
    def steps(self) -> int:
        return self.work.num_nodes - 1

    def bytes(self) -> float:
        return float((self.work.num_nodes - 1) * message_bytes(self.work.shard_numel, self.k, self.value_dtype))

    def seconds_of_kernels(self, rates: Rates) -> float:
        pairs = self.work.num_nodes * self.k
        return self.work.shard_numel * (rates.select + rates.fill) + pairs * rates.scatter + rates.select_call

    def run(self, comm: HierCommunicator, shard: Shard) -> Stretches:
        numel = shard.sum_S.numel()
        message = compress(shard.sum_S, shard.residual_S, shard.next_S, self.k, self.value_dtype, shard.factor)
        if shard.on_sent is not None and self.k < numel:
            shard.on_sent(indices_of(message, numel, self.k, self.value_dtype))
        if shard.beside is not None:
            message = torch.cat([message, shard.beside])
        yield message, *shard.used_to_the_end
        messages = comm.exchange(message)
        yield messages, *shard.used_to_the_end
        if shard.on_received is not None:
            shard.on_received(messages)
            return shard.sum_S
        if shard.target_S is not None:
            self.add(messages, shard.target_S, shard.alpha)
            return shard.target_S
        shard_S = shard.result()
        accumulate(messages, shard_S, self.k, self.value_dtype)
        return shard_S

    def add(self, messages_MB: Tensor, target_S: Tensor, alpha: float) -> None:
        """target_S += alpha * each of the messages, in row order."""
        messages_MB = self.alone(messages_MB, target_S.numel())
        accumulate(messages_MB, target_S, self.k, self.value_dtype, alpha)

    def alone(self, messages_MB: Tensor, numel: int) -> Tensor:
        """Messages about shards of so many elements, without what went beside them."""
        return messages_MB[:, : message_bytes(numel, self.k, self.value_dtype)].contiguous()

    def wrote(self, messages_MB: Tensor, numel: int) -> bool:
        """Whether these are messages of this path, about shards of so many elements."""
        if messages_MB.shape[1] != message_bytes(numel, self.k, self.value_dtype):
            return False
        return bool(decode(messages_MB[0], numel, self.k, self.value_dtype)[2])

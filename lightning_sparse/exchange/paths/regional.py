"""An exchange whose volume does not grow with the number of nodes.

The shard is cut into M regions, as equal as whole numbers allow, and K into k = ceil(K / M) for each:

========================= ================================================= ==========================================
stretch                   in -> out                                         received between nodes, per device
========================= ================================================= ==========================================
1 select, by region       acc_S -> M messages of k pairs, one a region;     0
                          residual_S = acc_S - what was sent
2 all-to-all              message j goes to node j, which owns region j     (M-1) messages
3 the owner sums          M messages -> sum of its region; its k largest    0
                          -> one message; the rest joins its residual
4 all-gather              one message a node -> M messages, one a region    (M-1) messages
5 apply                   M messages -> shard_S                             0
========================= ================================================= ==========================================

About 2 K pairs are received for any M, where an all-gather takes (M-1) K. Sizes are known before the round, sums run
in node order, and nothing is lost: what a node does not send stays in its residual, and what an owner does not pass on
stays in the owner's. The price is that K coordinates are applied where the all-gather applies up to M K; a fair
comparison raises K until the bytes are equal.

A non-finite element is counted in the message of its region. The owner's sum of that region is then NaN, is counted in
the owner's message, and every node's shard has NaN there.

Worked example: S = 10, M = 3, K = 6: regions [0, 3), [3, 6), [6, 10), two pairs for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.paths.path import Shard, Stretches, Work
from lightning_sparse.exchange.paths.sparse import Sparse
from lightning_sparse.exchange.rates import Rates
from lightning_sparse.kernels import accumulate, compress, indices_of, message_bytes


@dataclass(frozen=True)
class Regional(Sparse):
    """K pairs of each shard are applied, ceil(K / M) of each region. For many nodes; needs M elements at least."""

    name = "regional"
    automatic = False  # it applies fewer entries than `Sparse`, so time alone does not compare the two

    @classmethod
    def of(cls, work: Work, density: float, value_dtype: torch.dtype) -> Self | None:
        return None if work.shard_numel < work.num_nodes else super().of(work, density, value_dtype)

    @property
    def applied(self) -> float:
        return self.k

    @property
    def steps(self) -> int:
        return 2 * (self.work.num_nodes - 1)

    @property
    def regions(self) -> Regions:
        """Which node owns what of the shard."""
        return Regions(self.work.shard_numel, self.work.num_nodes, self.k, self.value_dtype)

    def bytes(self) -> float:
        return 2.0 * (self.work.num_nodes - 1) * self.regions.row_nbytes

    def seconds_of_kernels(self, rates: Rates) -> float:
        nodes, shard = self.work.num_nodes, self.work.shard_numel
        region, pairs = -(-shard // nodes), 2 * nodes * -(-self.k // nodes)
        calls = (nodes + 1) * rates.select_call  # of the node's own regions one by one, and as an owner
        return (shard + region) * (rates.select + rates.fill) + pairs * rates.scatter + calls

    def run(self, comm: HierCommunicator, shard: Shard) -> Stretches:
        regions = self.regions
        rows = regions.select(shard.sum_S, shard.residual_S, shard.next_S, shard.factor)
        if shard.on_sent is not None and self.k < shard.sum_S.numel():
            shard.on_sent(regions.sent(rows))
        yield rows, *shard.used_to_the_end
        row = regions.merge(comm.all_to_all(rows), comm.topology.node_index, shard.next_S)
        rows = comm.exchange(row)
        yield rows, *shard.used_to_the_end
        shard_S = shard.result()
        regions.apply(rows, shard_S)
        return shard_S


@dataclass(frozen=True)
class Regions:
    """Who owns what of a shard, and the sizes that follow.

    Args:
        shard_numel: S, at least M.
        num_nodes: M.
        total: K, pairs of the whole shard.
        value_dtype: of the messages.
    """

    shard_numel: int
    num_nodes: int
    total: int
    value_dtype: torch.dtype

    def place(self, node: int) -> slice:
        """The region that a node owns."""
        return slice(node * self.shard_numel // self.num_nodes, (node + 1) * self.shard_numel // self.num_nodes)

    def size(self, node: int) -> int:
        """R, elements of that region."""
        place = self.place(node)
        return int(place.stop - place.start)

    def pairs(self, node: int) -> int:
        """k of a node's region: ceil(K / M), or all of a region that is smaller."""
        return min(-(-self.total // self.num_nodes), self.size(node))

    def nbytes(self, node: int) -> int:
        """Bytes of a message about a node's region."""
        return message_bytes(self.size(node), self.pairs(node), self.value_dtype)

    @property
    def row_nbytes(self) -> int:
        """B, the bytes of the longest message: each travels in a row of so many."""
        return max(map(self.nbytes, range(self.num_nodes)))

    def select(
        self, sum_S: Tensor, residual_S: Tensor | None, next_S: Tensor | None, scale: Tensor | None = None
    ) -> Tensor:
        """Step 1: the messages of all regions, [M, B]; ``next_S`` becomes what is not sent."""
        rows_MB = sum_S.new_zeros(self.num_nodes, self.row_nbytes, dtype=torch.uint8)
        for node in range(self.num_nodes):
            place = self.place(node)
            residual, left = (None if each is None else each[place] for each in (residual_S, next_S))
            message = compress(sum_S[place], residual, left, self.pairs(node), self.value_dtype, scale)
            rows_MB[node, : message.numel()] = message
        return rows_MB

    def sent(self, rows_MB: Tensor) -> Tensor:
        """Which elements of the shard the rows of ``select`` hold, int64."""
        sizes = [(self.nbytes(node), self.size(node), self.pairs(node)) for node in range(self.num_nodes)]
        return torch.cat(
            [
                indices_of(rows_MB[node, :nbytes], numel, k, self.value_dtype) + self.place(node).start
                for node, (nbytes, numel, k) in enumerate(sizes)
            ]
        )

    def merge(self, rows_MB: Tensor, node: int, next_S: Tensor | None) -> Tensor:
        """Step 3, at the owner: messages about its region in node order -> its message, B bytes."""
        place = self.place(node)
        sum_R = rows_MB.new_empty(self.size(node), dtype=torch.float32)
        accumulate(rows_MB[:, : self.nbytes(node)].contiguous(), sum_R, self.pairs(node), self.value_dtype)
        dropped_R = None if next_S is None else torch.empty_like(sum_R)
        message = compress(sum_R, None, dropped_R, self.pairs(node), self.value_dtype)
        if next_S is not None and dropped_R is not None:
            next_S[place].add_(dropped_R)
        row_B = rows_MB.new_zeros(self.row_nbytes)
        row_B[: message.numel()] = message
        return row_B

    def apply(self, rows_MB: Tensor, shard_S: Tensor) -> None:
        """Step 5: each region from its owner's message, in place."""
        for node in range(self.num_nodes):
            row = rows_MB[node : node + 1, : self.nbytes(node)]
            accumulate(row, shard_S[self.place(node)], self.pairs(node), self.value_dtype)

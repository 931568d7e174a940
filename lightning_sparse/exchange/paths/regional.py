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
from lightning_sparse.kernels import accumulate, accumulate_regions, compress, compress_regions
from lightning_sparse.kernels.wire import Regions, indices_of_regions


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
        nodes = self.work.num_nodes
        return Regions(self.work.shard_numel, nodes, -(-self.k // nodes), self.value_dtype)

    def bytes(self) -> float:
        return 2.0 * (self.work.num_nodes - 1) * self.regions.row_nbytes

    def seconds_of_kernels(self, rates: Rates) -> float:
        nodes, shard = self.work.num_nodes, self.work.shard_numel
        region, pairs = -(-shard // nodes), 2 * nodes * -(-self.k // nodes)
        calls = 2 * rates.select_call  # of the shard, and of the region that the node owns
        return (shard + region) * (rates.select + rates.fill) + pairs * rates.scatter + calls

    def run(self, comm: HierCommunicator, shard: Shard) -> Stretches:
        regions = self.regions
        rows = compress_regions(
            shard.sum_S,
            shard.residual_S,
            shard.next_S,
            regions.k,
            regions.num_regions,
            self.value_dtype,
            shard.factor,
        )
        if shard.on_sent is not None and self.k < shard.sum_S.numel():
            shard.on_sent(indices_of_regions(rows, regions))
        yield rows, *shard.used_to_the_end
        row = merge(comm.all_to_all(rows), regions, comm.topology.node_index, shard.next_S)
        rows = comm.exchange(row)
        yield rows, *shard.used_to_the_end
        shard_S = shard.result()
        accumulate_regions(rows, shard_S, regions.k, self.value_dtype)
        return shard_S


def merge(rows_MB: Tensor, regions: Regions, node: int, next_S: Tensor | None) -> Tensor:
    """Step 3, at the owner: messages about its region in node order -> its message, B bytes."""
    sum_R = rows_MB.new_empty(regions.size(node), dtype=torch.float32)
    accumulate(rows_MB[:, : regions.nbytes(node)].contiguous(), sum_R, regions.pairs(node), regions.value_dtype)
    dropped_R = None if next_S is None else torch.empty_like(sum_R)
    message = compress(sum_R, None, dropped_R, regions.pairs(node), regions.value_dtype)
    if next_S is not None and dropped_R is not None:
        next_S[regions.place(node)].add_(dropped_R)
    row_B = rows_MB.new_zeros(regions.row_nbytes)
    row_B[: message.numel()] = message
    return row_B

"""Dense at half the bytes: values of 16 bits between nodes, and what rounding took off stays in the residual.

An all-reduce of 16-bit values rounds at every addition, where no residual can see it. So it is taken apart, and sums
are made in fp32, in node order. The shard is cut into M regions of R = ceil(S / M) elements, the last ones shorter:

========================= ================================================= ==========================================
stretch                   in -> out                                         received between nodes, per device
========================= ================================================= ==========================================
1 round                   acc_S -> M rows of bfloat16, one a region;        0
                          residual_S = acc_S - what was sent
2 all-to-all              row j goes to node j, which owns region j         2 (M-1) R
3 the owner sums          M rows -> sum of its region, rounded -> one row;  0
                          what this takes off joins its residual
4 all-gather              one row a node -> shard_S                         2 (M-1) R
========================= ================================================= ==========================================

That is 4 (M-1)/M * S bytes where fp32 takes 8. Values are bfloat16 whatever messages hold: its range is that of fp32,
so nothing needs to be scaled. What is beyond its largest value (3.39e38) counts as infinite, as a sum of such would be.

A non-finite element travels as what it is, to every node, and leaves zero in the residuals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.paths.path import Path, Shard, Stretches
from lightning_sparse.exchange.rates import Rates
from lightning_sparse.kernels import round_rows, sum_rows

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Dense16(Path):
    """The shard whole, as bfloat16 between nodes; sums are fp32, and rounding errors stay in the residual."""

    name = "dense16"
    leaves = "rounding"

    def bytes(self) -> float:
        return 4.0 * (self.work.num_nodes - 1) * Rounded(self.work.shard_numel, self.work.num_nodes).row_numel

    def seconds_of_kernels(self, rates: Rates) -> float:
        return self.work.shard_numel * rates.cast + rates.cast_call

    def run(self, comm: HierCommunicator, shard: Shard) -> Stretches:
        rounded = Rounded(shard.sum_S.numel(), comm.topology.num_nodes)
        rows = rounded.split(shard.sum_S, shard.residual_S, shard.next_S, shard.factor)
        yield rows, *shard.used_to_the_end
        row = rounded.merge(comm.all_to_all(rows), comm.topology.node_index, shard.next_S)
        rows = comm.exchange(row)
        yield rows, *shard.used_to_the_end
        shard_S = shard.result()
        rounded.join(rows, shard_S)
        return shard_S


@dataclass(frozen=True)
class Rounded:
    """The sizes of a shard's rows, and what becomes of them.

    Args:
        shard_numel: S.
        num_nodes: M.
    """

    shard_numel: int
    num_nodes: int

    @property
    def row_numel(self) -> int:
        """R."""
        return -(-self.shard_numel // self.num_nodes)

    def split(self, sum_S: Tensor, residual_S: Tensor | None, next_S: Tensor | None, scale: Tensor | None) -> Tensor:
        """Stretch 1: the rows of all regions as bytes, [M, 2 R]; ``next_S`` becomes what rounding took off."""
        grad_S = sum_S.float() if sum_S.dtype == torch.float64 else sum_S
        return round_rows(grad_S, residual_S, next_S, self.num_nodes, scale).view(torch.uint8)

    def merge(self, rows_MB: Tensor, node: int, next_S: Tensor | None) -> Tensor:
        """Stretch 3, at the owner: rows of its region in node order -> its row, 2 R bytes."""
        own_S = None if next_S is None else next_S[node * self.row_numel :][: self.row_numel]  # shorter at the end
        return sum_rows(rows_MB.view(DTYPE), own_S if own_S is not None and own_S.numel() else None).view(torch.uint8)

    def join(self, rows_MB: Tensor, shard_S: Tensor) -> None:
        """After stretch 4: the sum over nodes, into ``shard_S``."""
        shard_S.copy_(rows_MB.view(-1).view(DTYPE)[: self.shard_numel])

"""The paths between nodes: ways of summing a shard over nodes. A new one is a class here, and a line in two tables.

With M nodes of L devices and a tensor of N elements on each rank, device l of each node holds shard l of S = N / L
elements: this node's sum. A path has three methods, ``select``, ``transfer`` and ``apply``, so that several shards
share the network (lightning_sparse.exchange.lanes), and two prices, ``bytes`` and ``seconds``.

Nothing else in the package knows how many paths there are. With P = M * L ranks, w = bytes of an element, K pairs of p
bytes in a message:

=========  ============================================  ==========================  ===================================
path       between nodes                                 bytes                       kernels, besides
=========  ============================================  ==========================  ===================================
flat       all-reduce over all P ranks                   2 (P-1)/P * N * w / L       add N
dense      all-reduce of the shard over M nodes          2 (M-1)/M * S * w           add S; twice N inside the node
dense16    all-to-all, then all-gather, of 16 bits       2 (M-1)/M * S * 2           cast S; twice N inside the node
sparse     all-gather of one message per node            (M-1) * K * p               select S, scatter M K, fill S;
                                                                                     twice N inside the node
regional   all-to-all, then all-gather of K / M pairs    2 (M-1)/M * K * p           select S + S/M, scatter 2 K,
                                                                                     fill S + S/M; twice N inside
=========  ============================================  ==========================  ===================================

(The ring of all ranks enters each node once, so its L devices share that traffic.) Sparse grows with M and dense does
not: with pairs of p bytes and 4-byte gradients, sparse receives less while density < 8 / (p M). Paths apply different
shares of a gradient, so time alone does not compare them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.rates import Rates
from lightning_sparse.kernels import (
    accumulate,
    accumulate_regions,
    compress,
    compress_regions,
    indices_of,
    message_bytes,
    round_rows,
    sum_rows,
)
from lightning_sparse.kernels.wire import Regions, decode, indices_of_regions

ResidualKind = Literal["nothing", "rounding", "entries"]


class TensorSpec(NamedTuple):
    """One tensor on one cluster: M nodes, L devices per node, N elements of ``itemsize`` bytes."""

    num_nodes: int
    num_devices: int
    numel: int
    itemsize: int = 4

    @property
    def shard_numel(self) -> int:
        """S."""
        return -(-self.numel // self.num_devices)


class Shard(NamedTuple):
    """The contribution of a device to one exchange.

    Args:
        sum_S: this node's sum; may be overwritten. If the path does not reduce shards: the whole tensor, N elements.
        residual_S: entries that earlier exchanges did not send, fp32; None for zero.
        next_S: memory for the next residual, fp32, uninitialized; None to drop it.
        factor: what ``sum_S`` is multiplied by before the residual is added, a 0-dim fp32 tensor; None for 1.
    """

    sum_S: Tensor
    residual_S: Tensor | None = None
    next_S: Tensor | None = None
    factor: Tensor | None = None

    @property
    def used_to_the_end(self) -> tuple[Tensor, ...]:
        """Tensors that every method of a path may use."""
        return (self.sum_S,) if self.next_S is None else (self.sum_S, self.next_S)

    def result(self) -> Tensor:
        """fp32 of S elements, uninitialised: the sums themselves if they allow it, for they are used up by then."""
        return self.sum_S if self.sum_S.dtype == torch.float32 else torch.empty_like(self.sum_S, dtype=torch.float32)


@dataclass(frozen=True)
class Path(ABC):
    """One way of summing a shard over nodes.

    Attributes:
        name: as in ``exchange="..."`` and in logs.
        residual_kind: kind of the residual of an exchange.
        in_place: it sums in the dtype and the units of ``sum_S``, and returns ``sum_S`` itself.
        reduces_shards: False for a path over all ranks at once, which takes whole tensors.
        in_auto: ``exchange="auto"`` considers it.
    """

    name: ClassVar[str]
    residual_kind: ClassVar[ResidualKind] = "nothing"
    in_place: ClassVar[bool] = False
    reduces_shards: ClassVar[bool] = True
    in_auto: ClassVar[bool] = True

    work: TensorSpec

    @classmethod
    def of(cls, work: TensorSpec, density: float, value_dtype: torch.dtype) -> Path | None:
        """The path for this work, or None where it cannot take it."""
        return cls(work)

    @property
    def sent(self) -> int:
        """Entries of its shard that a device sends."""
        return self.work.shard_numel

    @property
    def applied(self) -> float:
        """Entries of its shard that an exchange applies, at most: several nodes may send the same one."""
        return self.work.shard_numel

    @property
    def steps(self) -> int:
        """Number of steps that the collectives between nodes take."""
        return 2 * (self.work.num_nodes - 1)

    @abstractmethod
    def bytes(self) -> float:
        """Received per device from other nodes."""

    def seconds_between(self, rates: Rates) -> float:
        """Spent in collectives between nodes."""
        return rates.inter.seconds(self.steps, self.bytes())

    def seconds_of_kernels(self, rates: Rates) -> float:
        """Spent on the device, besides what collectives do there."""
        return 0.0

    def seconds(self, rates: Rates) -> float:
        """Time of the exchange, the reduce-scatter before it and the all-gather after it, without any overlap."""
        others = self.work.num_devices - 1
        nbytes = others * self.work.shard_numel * self.work.itemsize
        inside = 2 * rates.intra.seconds(others, nbytes) + nbytes * rates.add
        return inside + self.seconds_between(rates) + self.seconds_of_kernels(rates)

    @abstractmethod
    def select(self, comm: HierCommunicator, shard: Shard) -> Tensor:
        """Return what this device sends; what it does not send is written to ``shard.next_S``."""

    @abstractmethod
    def transfer(self, comm: HierCommunicator, sent: Tensor, shard: Shard) -> Tensor:
        """Return what arrives from all nodes."""

    def apply(self, arrived: Tensor, shard: Shard) -> Tensor:
        """Return the sum over nodes: fp32 of S elements, or for a path ``in_place`` ``shard.sum_S``, which this is."""
        return arrived

    def indices(self, sent: Tensor) -> Tensor | None:
        """Indices of the entries that ``select`` sent, int64; None where these are all."""
        return None


@dataclass(frozen=True)
class Flat(Path):
    """One all-reduce over all ranks: what DDP does, and the fastest where the network between nodes is not the slow
    one. It takes the whole tensor, in place. A device's residual joins at its shard's place, so that the sum over ranks
    has it once per node."""

    name = "flat"
    in_place = True
    reduces_shards = False

    @property
    def steps(self) -> int:
        return 2 * (self.work.num_nodes * self.work.num_devices - 1)

    @property
    def _added(self) -> float:
        """Bytes that a rank sums: all but its own part of the ring."""
        ranks = self.work.num_nodes * self.work.num_devices
        return (ranks - 1) / ranks * self.work.numel * self.work.itemsize

    def bytes(self) -> float:
        return 2 * self._added / self.work.num_devices if self.work.num_nodes > 1 else 0.0  # averaged over devices

    def seconds_between(self, rates: Rates) -> float:
        return super().seconds_between(rates) + self._added * rates.add

    def seconds(self, rates: Rates) -> float:
        return self.seconds_between(rates)

    def select(self, comm: HierCommunicator, shard: Shard) -> Tensor:
        sum_N = shard.sum_S
        if shard.residual_S is not None:
            own = sum_N[comm.topology.device_index * shard.residual_S.numel() :][: shard.residual_S.numel()]
            own.add_(shard.residual_S[: own.numel()])
        comm.flat_all_reduce(sum_N)  # in the first lane, which alone uses the group of all ranks
        return sum_N

    def transfer(self, comm: HierCommunicator, sent: Tensor, shard: Shard) -> Tensor:
        return sent


@dataclass(frozen=True)
class Dense(Path):
    """The shard whole, by an all-reduce between nodes: the 2-D form of DDP's all-reduce. Everything is sent, the
    residual included, so nothing is left."""

    name = "dense"
    in_place = True

    def bytes(self) -> float:
        nodes = self.work.num_nodes
        return 2 * (nodes - 1) / nodes * self.work.shard_numel * self.work.itemsize

    def seconds_between(self, rates: Rates) -> float:
        return super().seconds_between(rates) + self.bytes() / 2 * rates.add

    def select(self, comm: HierCommunicator, shard: Shard) -> Tensor:
        return shard.sum_S if shard.residual_S is None else shard.sum_S.add_(shard.residual_S)

    def transfer(self, comm: HierCommunicator, sent: Tensor, shard: Shard) -> Tensor:
        comm.all_reduce(sent)
        return sent


@dataclass(frozen=True)
class Dense16(Path):
    """Dense at half the bytes: values of 16 bits between nodes, and what rounding took off stays in the residual.

    An all-reduce of 16-bit values rounds at every addition, where no residual can see it. So it is taken apart, and
    sums are made in fp32, in node order. The shard is cut into M regions of R = ceil(S / M) elements, the last ones
    shorter:

    ======== ============== =============================================== ==========================================
    method   step           in -> out                                       received between nodes, per device
    ======== ============== =============================================== ==========================================
    select   round          acc_S -> M rows of bfloat16, one a region;      0
                            residual_S = acc_S - what was sent
    transfer all-to-all     row j goes to node j, which owns region j       2 (M-1) R
             the owner sums M rows -> sum of its region, rounded -> one     0
                            row; what this takes off joins its residual
             all-gather     one row a node -> M rows                        2 (M-1) R
    apply    join           M rows -> shard_S                               0
    ======== ============== =============================================== ==========================================

    That is 4 (M-1)/M * S bytes where fp32 takes 8. Values are bfloat16 whatever messages hold: its range is that of
    fp32, so nothing needs to be scaled. What is beyond its largest value (3.39e38) counts as infinite, as a sum of such
    would be. A non-finite element travels as what it is, to every node, and leaves zero in the residuals.
    """

    name = "dense16"
    residual_kind = "rounding"

    def bytes(self) -> float:
        return 4.0 * (self.work.num_nodes - 1) * self.row_numel

    def seconds_of_kernels(self, rates: Rates) -> float:
        return self.work.shard_numel * rates.cast + rates.cast_call

    @property
    def row_numel(self) -> int:
        """R."""
        return -(-self.work.shard_numel // self.work.num_nodes)

    def select(self, comm: HierCommunicator, shard: Shard) -> Tensor:
        return self.split(shard)

    def transfer(self, comm: HierCommunicator, sent: Tensor, shard: Shard) -> Tensor:
        return comm.exchange(self.merge(comm.all_to_all(sent), comm.topology.node_index, shard.next_S))

    def apply(self, arrived: Tensor, shard: Shard) -> Tensor:
        return shard.result().copy_(arrived.view(-1).view(torch.bfloat16)[: self.work.shard_numel])

    def split(self, shard: Shard) -> Tensor:
        """Return the rows of all regions as bytes, [M, 2 R]; ``next_S`` becomes what rounding took off."""
        grad_S = shard.sum_S.float() if shard.sum_S.dtype == torch.float64 else shard.sum_S
        return round_rows(grad_S, shard.residual_S, shard.next_S, self.work.num_nodes, shard.factor).view(torch.uint8)

    def merge(self, rows_MB: Tensor, node: int, next_S: Tensor | None) -> Tensor:
        """At the owner: rows of its region in node order -> its row, 2 R bytes."""
        own_S = None if next_S is None else next_S[node * self.row_numel :][: self.row_numel]  # shorter at the end
        own_S = own_S if own_S is not None and own_S.numel() else None
        return sum_rows(rows_MB.view(torch.bfloat16), own_S).view(torch.uint8)


@dataclass(frozen=True)
class Sparse(Path):
    """The K largest entries of each node's shard, by an all-gather between nodes (HiTopKComm, Shi et al., MLSys 2021):
    ``k`` pairs of each shard, values written as ``value_dtype``.

    ======== ================================================= ======================
    method   in -> out                                         received between nodes
    ======== ================================================= ======================
    select   acc_S = sum_S * factor + residual_S;              0
             the K largest |acc_S| -> message;
             residual_S = acc_S - what was sent
    transfer message -> M messages                             (M-1) * message
    apply    M messages, added in node order -> sum over       0
             nodes, S elements, zero where none sent
    ======== ================================================= ======================

    A non-finite entry anywhere makes the whole result NaN on every node: the message's header counts them.
    """

    name = "sparse"
    residual_kind = "entries"

    k: int
    value_dtype: torch.dtype

    @classmethod
    def of(cls, work: TensorSpec, density: float, value_dtype: torch.dtype) -> Self | None:
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

    @property
    def message_bytes(self) -> int:
        """Size of a message."""
        return message_bytes(self.work.shard_numel, self.k, self.value_dtype)

    def bytes(self) -> float:
        return float((self.work.num_nodes - 1) * self.message_bytes)

    def seconds_of_kernels(self, rates: Rates) -> float:
        pairs = self.work.num_nodes * self.k
        return self.work.shard_numel * (rates.select + rates.fill) + pairs * rates.scatter + rates.select_call

    def select(self, comm: HierCommunicator, shard: Shard) -> Tensor:
        return compress(shard.sum_S, shard.residual_S, shard.next_S, self.k, self.value_dtype, shard.factor)

    def transfer(self, comm: HierCommunicator, sent: Tensor, shard: Shard) -> Tensor:
        return comm.exchange(sent)

    def apply(self, arrived: Tensor, shard: Shard) -> Tensor:
        shard_S = shard.result()
        accumulate(arrived, shard_S, self.k, self.value_dtype)
        return shard_S

    def indices(self, sent: Tensor) -> Tensor | None:
        numel = self.work.shard_numel
        return indices_of(sent, numel, self.k, self.value_dtype) if self.k < numel else None

    def add(self, messages_MB: Tensor, target_S: Tensor, alpha: float) -> None:
        """target_S += alpha * each of the messages, in row order."""
        accumulate(messages_MB, target_S, self.k, self.value_dtype, alpha)

    def wrote(self, messages_MB: Tensor) -> bool:
        """Whether these are messages of this path."""
        if messages_MB.shape[1] != self.message_bytes:
            return False
        return bool(decode(messages_MB[0], self.work.shard_numel, self.k, self.value_dtype)[2])


@dataclass(frozen=True)
class Regional(Sparse):
    """An exchange whose volume does not grow with the number of nodes; for many of them. It needs M elements at least.

    The shard is cut into M regions, as equal as whole numbers allow, and K into k = ceil(K / M) for each:

    ======== ============== =============================================== ==========================================
    method   step           in -> out                                       received between nodes, per device
    ======== ============== =============================================== ==========================================
    select   by region      acc_S -> M messages of k pairs, one a region;   0
                            residual_S = acc_S - what was sent
    transfer all-to-all     message j goes to node j, which owns region j   (M-1) messages
             the owner sums M messages -> sum of its region; its k largest  0
                            -> one message; the rest joins its residual
             all-gather     one message a node -> M messages, one a region  (M-1) messages
    apply                   M messages -> shard_S                           0
    ======== ============== =============================================== ==========================================

    About 2 K pairs are received for any M, where an all-gather takes (M-1) K. Sizes are known before the round, sums
    run in node order, and nothing is lost: what a node does not send stays in its residual, and what an owner does not
    pass on stays in the owner's. The price is that K coordinates are applied where the all-gather applies up to M K; a
    fair comparison raises K until the bytes are equal.

    A non-finite element is counted in the message of its region. The owner's sum of that region is then NaN, is counted
    in the owner's message, and every node's shard has NaN there.

    Worked example: S = 10, M = 3, K = 6: regions [0, 3), [3, 6), [6, 10), two pairs for each.
    """

    name = "regional"
    in_auto = False  # it applies fewer entries than `Sparse`, so time alone does not compare the two

    @classmethod
    def of(cls, work: TensorSpec, density: float, value_dtype: torch.dtype) -> Self | None:
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

    def select(self, comm: HierCommunicator, shard: Shard) -> Tensor:
        k, regions = self.regions.k, self.regions.num_regions
        return compress_regions(shard.sum_S, shard.residual_S, shard.next_S, k, regions, self.value_dtype, shard.factor)

    def transfer(self, comm: HierCommunicator, sent: Tensor, shard: Shard) -> Tensor:
        return comm.exchange(merge(comm.all_to_all(sent), self.regions, comm.topology.node_index, shard.next_S))

    def apply(self, arrived: Tensor, shard: Shard) -> Tensor:
        shard_S = shard.result()
        accumulate_regions(arrived, shard_S, self.regions.k, self.value_dtype)
        return shard_S

    def indices(self, sent: Tensor) -> Tensor | None:
        return indices_of_regions(sent, self.regions) if self.k < self.work.shard_numel else None


def merge(rows_MB: Tensor, regions: Regions, node: int, next_S: Tensor | None) -> Tensor:
    """At the owner: messages about its region in node order -> its message, B bytes."""
    sum_R = rows_MB.new_empty(regions.size(node), dtype=torch.float32)
    accumulate(rows_MB[:, : regions.nbytes(node)].contiguous(), sum_R, regions.pairs(node), regions.value_dtype)
    dropped_R = None if next_S is None else torch.empty_like(sum_R)
    message = compress(sum_R, None, dropped_R, regions.pairs(node), regions.value_dtype)
    if next_S is not None and dropped_R is not None:
        next_S[regions.place(node)].add_(dropped_R)
    row_B = rows_MB.new_zeros(regions.row_nbytes)
    row_B[: message.numel()] = message
    return row_B


def num_selected(density: float, shard_numel: int) -> int:
    """K = ceil(density * S), at least 1 and at most S.

    >>> num_selected(0.01, 250), num_selected(0.01, 1), num_selected(1.0, 7)
    (3, 1, 7)
    """
    return min(shard_numel, max(1, math.ceil(density * shard_numel)))


Exchange = Literal["auto", "sparse", "regional", "dense", "dense16"]
"""What a user may ask for."""
PATHS: tuple[type[Path], ...] = (Dense, Flat, Dense16, Sparse, Regional)
"""All paths; what leaves less comes first."""

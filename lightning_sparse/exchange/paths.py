"""Paths: ways of summing a shard over nodes. To add a path, add a class, and a row to ``PATHS`` and ``ExchangeName``.

M nodes have L devices each. Device l of each node holds shard l of a tensor of N elements: S = N / L elements, summed
over the node. With P = M * L ranks, w bytes per element, and K pairs of p bytes in a message, a path costs:

=========  ============================================  ==========================  ===================================
path       collectives between nodes                     bytes received per device   work on the device
=========  ============================================  ==========================  ===================================
flat       all-reduce over all P ranks                   2 (P-1)/P * N * w / L       add N
dense      all-reduce of the shard                       2 (M-1)/M * S * w           add S
dense16    all-to-all, then all-gather, of 16 bits       2 (M-1)/M * S * 2           cast S
sparse     all-gather of one message per node            (M-1) * K * p               select S, scatter M K, fill S
regional   all-to-all, then all-gather of K / M pairs    2 (M-1)/M * K * p           select, fill S + S/M; scatter 2 K
=========  ============================================  ==========================  ===================================

All except flat also reduce and gather N elements inside the node.
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
        return -(-self.numel // self.num_devices)


class Shard(NamedTuple):
    """The contribution of a device to one exchange.

    Args:
        sum_S: sum over this node; may be overwritten. Paths that do not reduce shards take the whole tensor.
        residual_S: entries that earlier exchanges did not send, fp32; None for zero.
        next_S: memory for the next residual, fp32, uninitialized; None to drop it.
        factor: multiplied with ``sum_S`` before the residual is added, a 0-dim fp32 tensor; None for 1.
    """

    sum_S: Tensor
    residual_S: Tensor | None = None
    next_S: Tensor | None = None
    factor: Tensor | None = None

    @property
    def used_to_the_end(self) -> tuple[Tensor, ...]:
        return (self.sum_S,) if self.next_S is None else (self.sum_S, self.next_S)

    def result(self) -> Tensor:
        """Return memory for the result, fp32; ``sum_S`` itself if it is fp32."""
        return self.sum_S if self.sum_S.dtype == torch.float32 else torch.empty_like(self.sum_S, dtype=torch.float32)


@dataclass(frozen=True)
class Path(ABC):
    """One way of summing a shard over nodes.

    Attributes:
        in_place: it sums in the dtype and units of ``sum_S``, and returns ``sum_S`` itself.
        reduces_shards: False for a path over all ranks, which takes whole tensors.
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
        """Return the path, or None if it cannot sum the tensor."""
        return cls(work)

    @property
    def sent(self) -> int:
        """Number of entries of its shard that a device sends."""
        return self.work.shard_numel

    @property
    def applied(self) -> float:
        """Upper limit of the number of entries that an exchange applies."""
        return self.work.shard_numel

    @property
    def steps(self) -> int:
        return 2 * (self.work.num_nodes - 1)

    @abstractmethod
    def bytes(self) -> float:
        """Return the bytes that a device receives from other nodes."""

    def seconds_between(self, rates: Rates) -> float:
        return rates.inter.seconds(self.steps, self.bytes())

    def seconds_of_kernels(self, rates: Rates) -> float:
        return 0.0

    def seconds(self, rates: Rates) -> float:
        others = self.work.num_devices - 1
        nbytes = others * self.work.shard_numel * self.work.itemsize
        inside = 2 * rates.intra.seconds(others, nbytes) + nbytes * rates.add
        return inside + self.seconds_between(rates) + self.seconds_of_kernels(rates)

    @abstractmethod
    def select(self, comm: HierCommunicator, shard: Shard) -> Tensor:
        """Return the tensor to send, and write the unsent rest to ``shard.next_S``."""

    @abstractmethod
    def transfer(self, comm: HierCommunicator, sent: Tensor, shard: Shard) -> Tensor:
        """Return the tensor received from all nodes."""

    def apply(self, arrived: Tensor, shard: Shard) -> Tensor:
        """Return the sum over nodes: fp32 [S], or ``shard.sum_S`` if ``in_place``."""
        return arrived

    def indices(self, sent: Tensor) -> Tensor | None:
        """Return the indices of the sent entries, int64; None if all entries were sent."""
        return None


@dataclass(frozen=True)
class Flat(Path):
    """One all-reduce of the whole tensor over all ranks."""

    name = "flat"
    in_place = True
    reduces_shards = False

    @property
    def steps(self) -> int:
        return 2 * (self.work.num_nodes * self.work.num_devices - 1)

    @property
    def _added(self) -> float:
        # Bytes that a rank sums: everything except its own part of the ring.
        ranks = self.work.num_nodes * self.work.num_devices
        return (ranks - 1) / ranks * self.work.numel * self.work.itemsize

    def bytes(self) -> float:
        # The ring of all ranks enters each node once, so the L devices share its traffic.
        return 2 * self._added / self.work.num_devices if self.work.num_nodes > 1 else 0.0  # mean over devices

    def seconds_between(self, rates: Rates) -> float:
        return super().seconds_between(rates) + self._added * rates.add

    def seconds(self, rates: Rates) -> float:
        return self.seconds_between(rates)

    def select(self, comm: HierCommunicator, shard: Shard) -> Tensor:
        sum_N = shard.sum_S
        if shard.residual_S is not None:
            # Each device adds its residual to its shard, so the sum contains the residual once per node.
            own = sum_N[comm.topology.device_index * shard.residual_S.numel() :][: shard.residual_S.numel()]
            own.add_(shard.residual_S[: own.numel()])
        comm.flat_all_reduce(sum_N)  # here, because only the first lane uses the group of all ranks
        return sum_N

    def transfer(self, comm: HierCommunicator, sent: Tensor, shard: Shard) -> Tensor:
        return sent


@dataclass(frozen=True)
class Dense(Path):
    """An all-reduce of the shard between nodes. It sends everything, including the residual."""

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
    """Dense with half the bytes: bfloat16 values between nodes, and the rounding errors in the residual.

    The shard is cut into M regions of R = ceil(S / M) elements, and node j owns region j:

        select     acc_S -> M rows of bfloat16, one per region; residual_S = acc_S - sent
        transfer   all-to-all: row j goes to node j; it rounds the sum of M rows, with the error in its residual
                   all-gather: one row per node -> M rows
        apply      M rows -> shard_S

    Sums larger than 3.39e38 become infinite. A non-finite element reaches each node, and leaves zero in the residuals.
    """

    name = "dense16"
    residual_kind = "rounding"

    def bytes(self) -> float:
        return 4.0 * (self.work.num_nodes - 1) * self.row_numel

    def seconds_of_kernels(self, rates: Rates) -> float:
        return self.work.shard_numel * rates.cast + rates.cast_call

    @property
    def row_numel(self) -> int:
        return -(-self.work.shard_numel // self.work.num_nodes)

    def select(self, comm: HierCommunicator, shard: Shard) -> Tensor:
        return self.split(shard)

    def transfer(self, comm: HierCommunicator, sent: Tensor, shard: Shard) -> Tensor:
        return comm.exchange(self.merge(comm.all_to_all(sent), comm.topology.node_index, shard.next_S))

    def apply(self, arrived: Tensor, shard: Shard) -> Tensor:
        return shard.result().copy_(arrived.view(-1).view(torch.bfloat16)[: self.work.shard_numel])

    def split(self, shard: Shard) -> Tensor:
        """Return the rows of all regions as bytes, [M, 2 R]; ``next_S`` becomes the rounding error."""
        grad_S = shard.sum_S.float() if shard.sum_S.dtype == torch.float64 else shard.sum_S
        return round_rows(grad_S, shard.residual_S, shard.next_S, self.work.num_nodes, shard.factor).view(torch.uint8)

    def merge(self, rows_MB: Tensor, node: int, next_S: Tensor | None) -> Tensor:
        """Sum the rows of all nodes, in node order, to the row of the owner's region."""
        # the last region may be shorter
        own_S = None if next_S is None else next_S[node * self.row_numel :][: self.row_numel]
        own_S = own_S if own_S is not None and own_S.numel() else None
        # The sum is fp32, in node order. An all-reduce of 16-bit values would round at each addition, where no residual
        # sees it.
        return sum_rows(rows_MB.view(torch.bfloat16), own_S).view(torch.uint8)


@dataclass(frozen=True)
class Sparse(Path):
    """The K largest entries of each node's shard, by an all-gather between nodes (HiTopKComm, Shi et al., MLSys 2021).

        select     acc_S = sum_S * factor + residual_S; the K largest |acc_S| -> message; residual_S = acc_S - sent
        transfer   message -> M messages
        apply      M messages, added in node order -> sum over nodes [S], zero where no node sent

    The message header counts non-finite entries. With any such entry, the whole result is NaN on every node.
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
        """Add alpha times each message to ``target_S``, in row order."""
        accumulate(messages_MB, target_S, self.k, self.value_dtype, alpha)

    def wrote(self, messages_MB: Tensor) -> bool:
        if messages_MB.shape[1] != self.message_bytes:
            return False
        return bool(decode(messages_MB[0], self.work.shard_numel, self.k, self.value_dtype)[2])


@dataclass(frozen=True)
class Regional(Sparse):
    """An exchange whose bytes do not grow with the number of nodes. It needs at least M elements.

    The shard is cut into M regions of almost equal size, and K into k = ceil(K / M) pairs per region. Node j owns
    region j:

        select     acc_S -> M messages of k pairs, one per region; residual_S = acc_S - sent
        transfer   all-to-all: message j goes to node j; it sends the k largest of the sum, the rest joins its residual
                   all-gather: one message per node -> M messages
        apply      M messages -> shard_S

    Sums run in node order. An exchange applies K entries, and up to M K entries with `Sparse`. If a region has
    non-finite elements, its sum is NaN on every node.
    """

    name = "regional"
    in_auto = False  # it applies fewer entries than `Sparse`, so their times do not compare

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
        nodes = self.work.num_nodes
        return Regions(self.work.shard_numel, nodes, -(-self.k // nodes), self.value_dtype)

    def bytes(self) -> float:
        return 2.0 * (self.work.num_nodes - 1) * self.regions.row_nbytes

    def seconds_of_kernels(self, rates: Rates) -> float:
        nodes, shard = self.work.num_nodes, self.work.shard_numel
        region, pairs = -(-shard // nodes), 2 * nodes * -(-self.k // nodes)
        calls = 2 * rates.select_call  # one for the shard, one for the region that the node owns
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
    """Merge the messages of all nodes, in node order, to the message of the owner's region."""
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
    """Return K = ceil(density * S), at least 1 and at most S.

    >>> num_selected(0.01, 250), num_selected(0.01, 1), num_selected(1.0, 7)
    (3, 1, 7)
    """
    return min(shard_numel, max(1, math.ceil(density * shard_numel)))


ExchangeName = Literal["auto", "sparse", "regional", "dense", "dense16"]
"""Values of the option ``exchange``."""
PATHS: tuple[type[Path], ...] = (Dense, Flat, Dense16, Sparse, Regional)
"""All paths. ``exchange="auto"`` prefers earlier paths, which leave out less."""

"""What each path costs. Pure arithmetic: the same functions plan on paper, decide at run time and are held to account.

With M nodes of L devices, P = M * L, buckets of N and shards of S = N / L elements, K of them sent, w = bytes of a
gradient element, message = bytes of K pairs. Bytes are *received per device* from other nodes; the L devices of a node
do it at once and share its link.

=========  ============================================  ==========================  ===================================
path       between nodes                                 bytes                       on the host, besides
=========  ============================================  ==========================  ===================================
flat       ring all-reduce over all P ranks              2 (P-1)/P * N * w / L       add N
dense      ring all-reduce of the shard over M nodes     2 (M-1)/M * S * w           add S; twice N inside the node
dense16    all-to-all, then all-gather, of 16 bits       2 (M-1)/M * S * 2           cast S; twice N inside the node
sparse     all-gather of one message a node              (M-1) * message             select S, scatter M K, fill S;
                                                                                     twice N inside the node
regional   all-to-all, then all-gather of K / M pairs    2 (M-1) * message / M       select S + S/M, scatter 2 K,
                                                                                     fill S + S/M; twice N inside
=========  ============================================  ==========================  ===================================

(The ring of all ranks crosses into each node once, so its L devices share that traffic.) A collective of n steps that
receives b bytes takes ``n * latency + b * seconds_per_byte``; what it adds up and what is selected or scattered is paid
by the element. Overlap with backward is no part of it: the time of a round is the sum of its steps.

Sparse grows with M and dense does not: in bytes, with pairs of p bytes and 4-byte gradients, sparse wins while
density < 8 / (p M). Paths do not apply the same share of the gradient, so times alone compare little: the *effective
density* is 1 for the dense ones, at most M * K / S for sparse and K / S for regional.
"""

import math
from dataclasses import astuple, dataclass
from typing import NamedTuple

from torch import dtype as Dtype

from lightning_sparse.kernels import message_bytes
from lightning_sparse.strategy.rounded import Rounded

MARGIN = 0.9
"""Sparse rounds, and rounded ones, leave something for later, so they must be faster by more than noise."""


@dataclass(frozen=True)
class Link:
    """A network as one device meets it while all devices of its node talk.

    Args:
        latency: seconds that each step of a collective costs.
        seconds_per_byte: for each byte that the device receives.
    """

    latency: float
    seconds_per_byte: float


@dataclass(frozen=True)
class Rates:
    """What the machines can do; the slowest rank counts. Per-element costs are in seconds.

    Args:
        inter: the network between nodes.
        intra: the network inside a node.
        add: per byte that a reduction sums, beyond carrying it.
        select: per element of a shard that is looked through for the largest.
        scatter: per pair of a message that is added to a shard.
        fill: per element of a shard that is cleared before.
        cast: per element of a shard that is rounded to 16 bits, summed and read again.
    """

    inter: Link
    intra: Link
    add: float = 0.0
    select: float = 0.0
    scatter: float = 0.0
    fill: float = 0.0
    cast: float = 0.0

    @staticmethod
    def of_link(gbps: float, num_devices: int) -> "Rates":
        """A link of ``gbps`` Gbit/s a node, shared by its devices; everything else takes no time."""
        return Rates(Link(0.0, 8e-9 * num_devices / gbps), Link(0.0, 0.0))

    def describe(self, num_devices: int) -> str:
        """For the log."""
        between, inside = (8e-9 / max(link.seconds_per_byte, 1e-15) for link in (self.inter, self.intra))
        parts = [f"{between * num_devices:.3g} Gbit/s and {1e3 * self.inter.latency:.2g} ms between nodes"]
        if num_devices > 1:
            parts.append(f"{inside:.3g} Gbit/s and {1e3 * self.intra.latency:.2g} ms between devices of one")
        return f"{', '.join(parts)}, selection at {1e-9 / max(self.select, 1e-15):.2g} G elements/s"

    def to_list(self) -> list[float]:
        """Plain numbers, for a checkpoint and for agreement between ranks."""
        inter, intra, *rest = astuple(self)
        return [*inter, *intra, *rest]

    @staticmethod
    def from_list(numbers: list[float]) -> "Rates":
        """The inverse of to_list(). An older checkpoint lacks ``cast``: what was never measured is never chosen."""
        rest = [*numbers[4:], math.inf][:5]
        return Rates(Link(*numbers[0:2]), Link(*numbers[2:4]), *rest)


class Work(NamedTuple):
    """One group on one cluster: M nodes, L devices a node, N elements of ``itemsize`` bytes."""

    num_nodes: int
    num_devices: int
    numel: int
    itemsize: int = 4

    @property
    def shard_numel(self) -> int:
        """S."""
        return -(-self.numel // self.num_devices)


# -- bytes received per device between nodes ---------------------------------------------------------------------------


def dense_bytes(num_nodes: int, shard_numel: int, itemsize: int) -> float:
    """Of the all-reduce of a shard between nodes."""
    return 2 * (num_nodes - 1) / num_nodes * shard_numel * itemsize


def dense16_bytes(num_nodes: int, shard_numel: int) -> float:
    """Of the all-to-all and the all-gather of a shard's regions, in 16 bits."""
    return 4.0 * (num_nodes - 1) * Rounded(shard_numel, num_nodes).row_numel


def sparse_bytes(num_nodes: int, message_nbytes: int) -> float:
    """Of the all-gather of one message a node."""
    return float((num_nodes - 1) * message_nbytes)


def regional_bytes(num_nodes: int, message_nbytes: int) -> float:
    """Of the all-to-all and the all-gather of a message about a region."""
    return 2.0 * (num_nodes - 1) * message_nbytes


def flat_bytes(nodes: int, world_size: int, numel: int, itemsize: int) -> float:
    """Of an all-reduce over all ranks, averaged over devices."""
    if nodes == 1:
        return 0.0
    return 2 * (world_size - 1) / world_size * numel * itemsize * nodes / world_size


# -- seconds a round ---------------------------------------------------------------------------------------------------


def flat_seconds(work: Work, rates: Rates) -> float:
    """Of the all-reduce over all ranks."""
    ranks = work.num_nodes * work.num_devices
    nbytes = flat_bytes(work.num_nodes, ranks, work.numel, work.itemsize)
    added = (ranks - 1) / ranks * work.numel * work.itemsize
    return _collective(rates.inter, 2 * (ranks - 1), nbytes) + added * rates.add


def dense_seconds(work: Work, rates: Rates) -> float:
    """Of the 2-D dense round."""
    nodes, shard = work.num_nodes, work.shard_numel
    nbytes = dense_bytes(nodes, shard, work.itemsize)
    between = _collective(rates.inter, 2 * (nodes - 1), nbytes) + nbytes / 2 * rates.add
    return _inside(work, rates) + between


def dense16_seconds(work: Work, rates: Rates) -> float:
    """Of the 2-D dense round with 16-bit values."""
    nodes, shard = work.num_nodes, work.shard_numel
    between = _collective(rates.inter, 2 * (nodes - 1), dense16_bytes(nodes, shard))
    return _inside(work, rates) + between + shard * rates.cast


def sparse_seconds(work: Work, rates: Rates, k: int, value_dtype: Dtype) -> float:
    """Of a sparse round that sends k pairs."""
    nodes, shard = work.num_nodes, work.shard_numel
    nbytes = sparse_bytes(nodes, message_bytes(shard, k, value_dtype))
    host = shard * (rates.select + rates.fill) + nodes * k * rates.scatter
    return _inside(work, rates) + _collective(rates.inter, nodes - 1, nbytes) + host


def regional_seconds(work: Work, rates: Rates, k: int, value_dtype: Dtype) -> float:
    """Of a regional round that applies k pairs."""
    nodes, shard = work.num_nodes, work.shard_numel
    region, k = -(-shard // nodes), -(-k // nodes)
    nbytes = regional_bytes(nodes, message_bytes(region, k, value_dtype))
    host = (shard + region) * (rates.select + rates.fill) + 2 * nodes * k * rates.scatter
    return _inside(work, rates) + _collective(rates.inter, 2 * (nodes - 1), nbytes) + host


def effective_density(path: str, num_nodes: int, density: float) -> float:
    """The share of entries that a round applies, at most: nodes may select the same ones."""
    return {"sparse": min(1.0, num_nodes * density), "regional": density}.get(path, 1.0)


def _inside(work: Work, rates: Rates) -> float:
    """Reduce-scatter before and all-gather after, inside the node."""
    others = work.num_devices - 1
    nbytes = others * work.shard_numel * work.itemsize
    return 2 * _collective(rates.intra, others, nbytes) + nbytes * rates.add


def _collective(link: Link, steps: int, nbytes: float) -> float:
    return steps * link.latency + nbytes * link.seconds_per_byte

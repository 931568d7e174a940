"""Distributed sampler: the samples of a rank at a step, as a pure function of (seed, epoch, step).

An epoch consists of *shards*: lists of samples in shuffled order, each read by one or more nodes together.

=========== =============================== =====================================================================
shuffle     shards                          samples that a node reads from other nodes
=========== =============================== =====================================================================
"local"     one per node: the samples it    none; a node sees the same samples in every epoch
            owns
"global"    one, read by all nodes          the overflow: about 0.4 / sqrt(samples of a node in a global batch)
=========== =============================== =====================================================================

With "global", each global batch is a random draw from the whole data set. Each node gets the samples of the batch that
it owns, up to its share; nodes send each other only the overflow, not (M-1)/M of all samples.

All shards take as many steps as the longest one. A shard that ends early starts over; an epoch sees only these samples
twice. No sample is left out, and all batches are full.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_sparse.data.config import Shuffle, check_batch_size
from lightning_sparse.data.rng import shuffled

Indices = NDArray[np.int64]
_ORDER, _REST = 0, 3  # kinds of draws from (seed, epoch), which are independent
_DEVIATIONS = 4.5  # standard deviations below the capacity, where a node is almost never full
_PIECE = 2**15 - 1  # elements; torch starts threads for larger tensors


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """Options of the sampler. batch_size: per device and step. devices: number of each node, in node order."""

    batch_size: int
    devices: tuple[int, ...] = (1,)
    shuffle: Shuffle = "global"
    seed: int = 0

    def __post_init__(self) -> None:
        check_batch_size(self)

    @property
    def num_nodes(self) -> int:
        return len(self.devices)

    @property
    def global_batch(self) -> int:
        return self.batch_size * sum(self.devices)


@dataclass(frozen=True)
class EpochSegment:
    """Steps of an epoch that a run did with a config."""

    config: SamplerConfig
    steps: int

    def state_dict(self) -> dict[str, Any]:
        config = asdict(self.config)
        return {"layout": {**config, "devices": list(config["devices"])}, "steps": self.steps}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "EpochSegment":
        config = state["layout"]
        return cls(SamplerConfig(**{**config, "devices": tuple(config["devices"])}), int(state["steps"]))


@dataclass
class Shard:
    """Samples in shuffled order, read by some nodes together.

    Args:
        samples: the samples, in any order.
        key: key of the shuffle: seed, epoch, and the kind of draw.
        start: first position in the order; more than the number of samples if it has started over.
    """

    samples: Indices
    key: tuple[int, ...]
    nodes: tuple[int, ...]
    start: int = 0

    @cached_property
    def order(self) -> Indices:
        # on first use: a rank needs only the order of its own shard
        return shuffled(self.samples, *self.key)

    def width(self, config: SamplerConfig) -> int:
        return config.batch_size * sum(config.devices[node] for node in self.nodes)

    @property
    def left(self) -> int:
        return max(0, len(self.samples) - self.start)

    def steps(self, config: SamplerConfig) -> int:
        return -(-self.left // self.width(config))

    def at(self, step: int, config: SamplerConfig) -> Indices:
        """Return the samples of a step for all nodes of the shard. Wraps around at the end."""
        samples: Indices = self.slice(self.order, step, config)
        return samples

    def slice(self, values: NDArray[Any], step: int, config: SamplerConfig) -> NDArray[Any]:
        """Return the part of a step of `values`, which belong to `order`. A view, unless it wraps around."""
        width, count = self.width(config), len(values)
        first = (self.start + step * width) % count
        if first + width <= count:
            return values[first : first + width]
        return values[np.arange(first, first + width) % count]


@dataclass
class EpochPlan:
    config: SamplerConfig
    shards: list[Shard]
    owners: NDArray[Any]
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        # sorting numbers of 8 or 16 bits takes a tenth of the time; signed, because torch counts no others of 16 bits
        self.owners = self.owners.astype(np.min_scalar_type(-self.config.num_nodes))
        self.steps = max(shard.steps(self.config) for shard in self.shards)

    @property
    def num_repeated(self) -> int:
        """Samples that are seen twice, so that all ranks have the same number of full batches."""
        return self.steps * self.config.global_batch - sum(shard.left for shard in self.shards)

    def batch(self, step: int, node: int, device: int) -> Indices:
        """Return the samples of a rank at a step, int64 [batch_size]."""
        config = self.config
        shard = next(shard for shard in self.shards if node in shard.nodes)
        samples = shard.at(step, config)
        if len(shard.nodes) > 1:
            owners = shard.slice(self._owners_in_order, step, config)
            capacity = config.batch_size * np.array(config.devices)
            over, receivers = overflow(owners, capacity)
            own, foreign = np.flatnonzero(owners == node)[: capacity[node]], over[receivers == node]
            # Each device of the node reads an equal part of the foreign samples.
            mine: Indices = samples[np.concatenate([own, foreign])[device :: config.devices[node]]]
            return mine
        return samples[device * config.batch_size : (device + 1) * config.batch_size]

    @cached_property
    def _owners_in_order(self) -> NDArray[Any]:
        # of the only shard; once per epoch, because scattered memory accesses would dominate the time of a step
        return self.owners[self.shards[0].order]


class Sampler:
    """The samples of all ranks in each epoch.

    Args:
        samples: distinct indices into the manifest.
        owners_of: pure function from a number of nodes to the owner of each sample of the manifest.
    """

    def __init__(self, samples: Indices, owners_of: Callable[[int], NDArray[np.int64]], config: SamplerConfig) -> None:
        self.samples = samples
        self.config = config
        self._owners_of = owners_of
        if len(samples) < config.num_nodes:
            raise ValueError(
                f"{len(samples)} sample(s) are too few for {config.num_nodes} nodes: each node needs one. Use fewer "
                f"nodes, or more images."
            )

    def epoch(self, epoch: int, done: Sequence[EpochSegment] = ()) -> EpochPlan:
        """Return the plan of an epoch, or with `done`, of the rest after these steps with other configs."""
        plan = self._whole_epoch(epoch, done[0].config if done else self.config)
        for position, segment in enumerate(done, start=1):
            after = done[position].config if position < len(done) else self.config
            plan = self._remaining(plan, segment.steps, after, epoch)
        return plan

    @cached_property
    def steps(self) -> int:
        return self._whole_epoch(0, self.config).steps

    def _whole_epoch(self, epoch: int, config: SamplerConfig) -> EpochPlan:
        owners = self._owners_of(config.num_nodes)
        key = (config.seed, epoch, _ORDER)
        if config.shuffle == "global":
            nodes = tuple(range(config.num_nodes))
            return EpochPlan(config, [Shard(self.samples, key, nodes)], owners)
        home = owners[self.samples]
        shares = [self.samples[home == node] for node in range(config.num_nodes)]
        if not all(map(len, shares)):
            raise ValueError(
                f"a node owns none of the {len(self.samples)} samples: use fewer nodes, or shuffle='global'."
            )
        return EpochPlan(config, [Shard(share, (*key, node), (node,)) for node, share in enumerate(shares)], owners)

    def _remaining(self, plan: EpochPlan, steps: int, config: SamplerConfig, epoch: int) -> EpochPlan:
        shards = [replace(shard, start=shard.start + steps * shard.width(plan.config)) for shard in plan.shards]
        owners = self._owners_of(config.num_nodes)
        if config == plan.config:
            return EpochPlan(config, shards, owners)
        nodes = tuple(range(config.num_nodes))
        # a single global shard keeps its order; several shards are shuffled into one
        if len(shards) == 1:
            return EpochPlan(config, [replace(shards[0], nodes=nodes)], owners)
        left = np.concatenate([shard.order[shard.start :] for shard in shards])
        return EpochPlan(config, [Shard(left, (config.seed, epoch, _REST), nodes)], owners)


def assign(owners: NDArray[Any], capacity: NDArray[np.int64]) -> NDArray[Any]:
    """Assign each sample to its owner, up to the owner's capacity. The overflow goes to the other nodes, in order.

    The capacities of all nodes must add up to the number of samples. `owners` may have any integer type.

    >>> assign(np.array([0, 0, 0, 1]), np.array([2, 2]))
    array([0, 0, 1, 1])
    """
    over, receivers = overflow(owners, capacity)
    nodes = owners.copy()
    nodes[over] = receivers
    return nodes


def overflow(owners: NDArray[Any], capacity: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of the samples beyond the capacity of their owner, in order, and the nodes that take them.

    >>> overflow(np.array([0, 0, 0, 1]), np.array([2, 2]))
    (array([2]), array([1]))
    """
    begin, left = _skip_uncontested(owners, capacity)
    tail = owners[begin:]
    counts = _counts(tail, len(capacity))
    over = _positions_beyond(tail, counts, left)
    return begin + over, np.repeat(np.arange(len(capacity)), (left - counts).clip(0))


def _skip_uncontested(owners: NDArray[Any], capacity: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
    """Return a position before which no node exceeds its capacity, and the capacity that is left there."""
    # Owners are random, so nodes reach their capacity only near the end. Counting is much faster than sorting: with 512
    # nodes and 524,288 samples, 1.5 ms instead of 121 ms per step.
    begin = int(len(owners) * max(0.0, 1 - _DEVIATIONS / np.sqrt(capacity.min().clip(1))))
    left = capacity - _counts(owners[:begin], len(capacity))
    return (begin, left) if (left >= 0).all() else (0, capacity)


def _positions_beyond(
    owners: NDArray[Any], counts: NDArray[np.int64], capacity: NDArray[np.int64]
) -> NDArray[np.int64]:
    by_owner = np.argsort(owners, kind="stable")  # a radix sort, because the integers are small
    excess = (counts - capacity).clip(0)
    # The excess of a node is the last part of its range in `by_owner`, which ends at cumsum(counts).
    shift = np.repeat(np.cumsum(counts) - np.cumsum(excess), excess)
    return np.sort(by_owner[np.arange(excess.sum()) + shift])


def _counts(owners: NDArray[Any], nodes: int) -> NDArray[np.int64]:
    # torch takes half of the time of numpy, which widens the integers first
    pieces = torch.from_numpy(owners).chunk(len(owners) // _PIECE + 1)
    counts: NDArray[np.int64] = torch.stack([torch.bincount(piece, minlength=nodes) for piece in pieces]).sum(0).numpy()
    return counts


def evaluation_batches(
    samples: Indices, owners: NDArray[np.int64], config: SamplerConfig, node: int, device: int, *, pairs: bool
) -> list[Indices]:
    """Return the batches of a rank for an evaluation, without shuffling. All ranks have the same number of batches.

    All ranks together see each sample once, so means over samples equal a single device's means. With fewer samples
    than ranks, each rank sees all samples.

    With batch_size=1, `pairs` adds the last sample of a longer share to the batch before. Otherwise, ranks of shorter
    shares see their first sample twice.
    """
    shares = np.bincount(np.arange(len(samples)) % sum(config.devices), minlength=sum(config.devices))
    if shares.min() == 0:
        mine, most = samples, len(samples)
    else:
        capacity = np.add.reduceat(shares, np.cumsum([0, *config.devices[:-1]]))
        own = samples[assign(owners[samples], capacity) == node]
        mine, most = own[device :: config.devices[node]], int(shares.max())
    steps = -(-most // config.batch_size)
    if pairs and steps > len(samples) // sum(config.devices) > 0:
        steps -= 1
    elif steps > len(mine):
        mine = np.append(mine, mine[0])
    # Ranks differ by at most one sample. A rank that would have none for the last batch moves one there from the batch
    # before.
    cuts = np.arange(1, steps) * config.batch_size
    return np.split(mine, np.minimum(cuts, len(mine) - 1))


def repeated(count: int, config: SamplerConfig) -> int:
    """Return how many of `count` samples an evaluation without pairs sees twice."""
    ranks = sum(config.devices)
    return -count % ranks if config.batch_size == 1 and count > ranks else 0

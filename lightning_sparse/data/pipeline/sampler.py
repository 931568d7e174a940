"""Which samples a rank sees at a step: a pure function of (seed, epoch, step), the same on every rank.

An epoch is made of *streams*: a list of samples in shuffled order, and the nodes that serve it together.

=========== =============================== =====================================================================
shuffle     streams                         samples a node reads that another node owns
=========== =============================== =====================================================================
"local"     one a node: what it owns        none; a node sees the same samples in every epoch
"partial"   one a node: what it owns, a     fraction * (M-1)/M
            fraction of it dealt anew
            between the nodes each epoch
"global"    one, served by all nodes        what overflows: about 0.4 / sqrt(samples of a node in a global batch)
=========== =============================== =====================================================================

With "global" every global batch is a random draw from the whole data set, yet each node is given those samples of it
that it owns, as far as its share of the batch goes: which rank computes a gradient does not change the sum. Only the
overflow travels, where a split by position would fetch (M-1)/M of everything.

A stream of n samples gives ``width`` samples a step, batch size times devices. All streams take as many steps as the
longest needs; a stream that ends early starts over, and these repetitions (`Epoch.padding`) are the only samples that
an epoch sees twice. None is left out. All ranks have the same number of batches, all of them full.

Making the order of an epoch is one sort in numpy; from there every step costs the same, so a resumed run skips nothing
one by one. A run that goes on with other nodes, another batch size or another shuffle takes the samples of the epoch
that are left (`Segment`): one global stream keeps its order, several are shuffled into one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.data.pipeline.rng import shuffled

Indices = NDArray[np.int64]
Shuffle = Literal["local", "partial", "global"]
SHUFFLES = ("local", "partial", "global")
# What else than order is drawn from (seed, epoch): a purpose each, so that draws are independent.
_ORDER, _CHOICE, _DEAL, _REST = range(4)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How global batches are made.

    Args:
        batch_size: samples a device and step.
        devices: how many devices each node has, in node order.
        shuffle: see the top of this file.
        exchange_fraction: of "partial", in [0, 1].
        seed: of the order.

    Raises:
        ValueError: for a value out of its range.
    """

    batch_size: int
    devices: tuple[int, ...] = (1,)
    shuffle: Shuffle = "global"
    exchange_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size!r} must be at least 1: it counts samples a device and step.")
        if not self.devices or min(self.devices) < 1:
            raise ValueError(f"devices={self.devices} must name at least one node, and one device or more of each.")
        if self.shuffle not in SHUFFLES:
            raise ValueError(f"shuffle={self.shuffle!r} is not known: choose one of {', '.join(SHUFFLES)}.")
        if not 0 <= self.exchange_fraction <= 1:
            raise ValueError(
                f"exchange_fraction={self.exchange_fraction} must lie in [0, 1]: it is a share of samples."
            )

    @property
    def num_nodes(self) -> int:
        """M."""
        return len(self.devices)

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a step."""
        return self.batch_size * sum(self.devices)


@dataclass(frozen=True)
class Segment:
    """So many steps of an epoch were done under this layout."""

    layout: Layout
    steps: int

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        layout = asdict(self.layout)
        return {"layout": {**layout, "devices": list(layout["devices"])}, "steps": self.steps}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Segment":
        """The inverse of `state_dict`."""
        layout = state["layout"]
        return cls(Layout(**{**layout, "devices": tuple(layout["devices"])}), int(state["steps"]))


@dataclass
class Stream:
    """Samples in shuffled order, served by some nodes together.

    Args:
        samples: in any order.
        key: what the order is drawn from: seed, epoch, purpose.
        nodes: who serves it.
        start: places of the order that are already used up; more than there are where it has started over.
    """

    samples: Indices
    key: tuple[int, ...]
    nodes: tuple[int, ...]
    start: int = 0

    @cached_property
    def order(self) -> Indices:
        """All samples; made when first asked for: of the streams of other nodes a rank needs no order."""
        return shuffled(self.samples, *self.key)

    def width(self, layout: Layout) -> int:
        """Samples a step."""
        return layout.batch_size * sum(layout.devices[node] for node in self.nodes)

    @property
    def left(self) -> int:
        """Samples that are not seen yet."""
        return max(0, len(self.samples) - self.start)

    def steps(self, layout: Layout) -> int:
        """Until all are seen."""
        return -(-self.left // self.width(layout))

    def at(self, step: int, layout: Layout) -> Indices:
        """The samples of a step, of all the stream's nodes; the end wraps around."""
        width = self.width(layout)
        places = np.arange(self.start + step * width, self.start + (step + 1) * width) % len(self.order)
        return self.order[places]


@dataclass
class Epoch:
    """The order of one epoch, of all ranks."""

    layout: Layout
    streams: list[Stream]
    owners: NDArray[np.int64]
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.steps = max(stream.steps(self.layout) for stream in self.streams)

    @property
    def padding(self) -> int:
        """Samples that are seen a second time, so that all ranks have the same number of full batches."""
        return self.steps * self.layout.global_batch - sum(stream.left for stream in self.streams)

    def global_batch(self, step: int) -> list[list[Indices]]:
        """The samples of every rank at a step, by node and device."""
        return [
            [self.batch(step, node, device) for device in range(devices)]
            for node, devices in enumerate(self.layout.devices)
        ]

    def batch(self, step: int, node: int, device: int) -> Indices:
        """The samples of a rank at a step, int64 [batch_size].

        Raises:
            ValueError: for a step that the epoch does not have.
        """
        if not 0 <= step < self.steps:
            raise ValueError(f"step={step} is none of this epoch, which has steps 0 to {self.steps - 1}.")
        layout = self.layout
        stream = next(stream for stream in self.streams if node in stream.nodes)
        samples = stream.at(step, layout)
        if len(stream.nodes) > 1:
            capacity = layout.batch_size * np.array(layout.devices)
            samples = samples[assign(self.owners[samples], capacity) == node]
        return samples[device * layout.batch_size : (device + 1) * layout.batch_size]

    def rest(self, steps: int) -> list[Stream]:
        """What is left after so many steps, each stream on its own."""
        return [
            Stream(each.samples, each.key, each.nodes, each.start + steps * each.width(self.layout))
            for each in self.streams
        ]


class Order:
    """The order of every epoch.

    Args:
        samples: what there is to see, all different.
        owners_of: for a number of nodes, the node of each sample of the manifest; a pure function.
        layout: of this run.

    Raises:
        ValueError: when there are fewer samples than nodes.
    """

    def __init__(self, samples: Indices, owners_of: Callable[[int], NDArray[np.int64]], layout: Layout) -> None:
        self.samples = samples
        self.layout = layout
        self._owners_of = owners_of
        if len(samples) < layout.num_nodes:
            raise ValueError(
                f"{len(samples)} sample(s) cannot be shared by {layout.num_nodes} nodes: every node needs one. "
                f"Use fewer nodes, or more pictures."
            )

    def epoch(self, epoch: int, done: Sequence[Segment] = ()) -> Epoch:
        """The order of an epoch; with `done`, of what is left of it after these steps under other layouts."""
        plan = self._fresh(epoch, done[0].layout if done else self.layout)
        for place, each in enumerate(done, start=1):
            after = done[place].layout if place < len(done) else self.layout
            plan = self._go_on(plan, each.steps, after, epoch)
        return plan

    @cached_property
    def steps(self) -> int:
        """Of a whole epoch: all of them have as many."""
        return self._fresh(0, self.layout).steps

    def _fresh(self, epoch: int, layout: Layout) -> Epoch:
        owners = self._owners_of(layout.num_nodes)
        key = (layout.seed, epoch, _ORDER)
        if layout.shuffle == "global":
            nodes = tuple(range(layout.num_nodes))
            return Epoch(layout, [Stream(self.samples, key, nodes)], owners)
        home = owners[self.samples]
        shares = [self.samples[home == node] for node in range(layout.num_nodes)]
        if layout.shuffle == "partial":
            shares = _exchanged(shares, layout.exchange_fraction, layout.seed, epoch)
        if not all(map(len, shares)):
            raise ValueError(
                f"a node owns none of the {len(self.samples)} samples: use fewer nodes or shuffle='global'."
            )
        return Epoch(layout, [Stream(share, (*key, node), (node,)) for node, share in enumerate(shares)], owners)

    def _go_on(self, plan: Epoch, steps: int, layout: Layout, epoch: int) -> Epoch:
        """The same epoch under another layout (or the same), after some steps."""
        rest, owners = plan.rest(steps), self._owners_of(layout.num_nodes)
        if layout == plan.layout:
            return Epoch(layout, rest, owners)
        nodes = tuple(range(layout.num_nodes))
        if len(rest) == 1:
            return Epoch(layout, [Stream(rest[0].samples, rest[0].key, nodes, rest[0].start)], owners)
        left = np.concatenate([each.order[each.start :] for each in rest])
        return Epoch(layout, [Stream(left, (layout.seed, epoch, _REST), nodes)], owners)


def assign(owners: NDArray[np.int64], capacity: NDArray[np.int64]) -> NDArray[np.int64]:
    """Who takes which sample: its owner, until the owner has its share; what overflows fills the others up, in order.

    Args:
        owners: the owner of each of B samples.
        capacity: of each node; they sum to B.

    Returns:
        The node of each sample.

    >>> assign(np.array([0, 0, 0, 1]), np.array([2, 2]))
    array([0, 0, 1, 1])
    """
    by_owner = np.argsort(owners, kind="stable")
    counts = np.bincount(owners, minlength=len(capacity))
    place = np.empty_like(owners)
    place[by_owner] = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    nodes = owners.copy()
    overflow = place >= capacity[owners]
    nodes[overflow] = np.repeat(np.arange(len(capacity)), capacity - np.minimum(counts, capacity))
    return nodes


def evaluation_batches(
    samples: Indices, owners: NDArray[np.int64], layout: Layout, node: int, device: int
) -> list[Indices]:
    """A rank's batches of a pass in which nothing is shuffled, and every sample is seen once.

    Ranks differ by at most one sample, so the last batches may too. Only a rank that has none left when others do sees
    one a second time: at most P - 1 samples for P ranks, and only when they are needed.
    """
    ranks = sum(layout.devices)
    shares = np.bincount(np.arange(len(samples)) % ranks, minlength=ranks)
    first_rank = np.cumsum([0, *layout.devices])
    capacity = np.add.reduceat(shares, first_rank[:-1])
    own = samples[assign(owners[samples], capacity) == node]
    mine = own[device :: layout.devices[node]]
    steps = -(-int(shares.max()) // layout.batch_size)
    if len(mine) <= (steps - 1) * layout.batch_size:
        mine = np.append(mine, (own if len(own) else samples)[0])
    return [mine[step * layout.batch_size : (step + 1) * layout.batch_size] for step in range(steps)]


def _exchanged(shares: list[Indices], fraction: float, seed: int, epoch: int) -> list[Indices]:
    """A fraction of each node's samples goes into a pool, which is dealt out in equal numbers."""
    mixed = [shuffled(share, seed, epoch, _CHOICE) for share in shares]
    counts = [round(fraction * len(share)) for share in shares]
    pool = shuffled(
        np.concatenate([each[:count] for each, count in zip(mixed, counts, strict=True)]), seed, epoch, _DEAL
    )
    return [
        np.concatenate([each[count:], dealt])
        for each, count, dealt in zip(mixed, counts, _cut(pool, counts), strict=True)
    ]


def _cut(pool: Indices, counts: Sequence[int]) -> Iterator[Indices]:
    return iter(np.split(pool, np.cumsum(counts)[:-1]))

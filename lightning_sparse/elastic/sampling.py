"""Which node draws which samples, while nodes join and leave.

The samples of all epochs form one line, in an order by seed and epoch. An *assignment* gives the samples from one
position on to the present nodes in turn. With each request, a node reports a limit: before the next quorum, no node
that it knows of draws past it. When nodes join or leave, the next assignment begins at the highest limit. So no sample
is drawn twice, and an epoch lacks only the samples that a lost node had not drawn.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_sparse.messages import log

REMEMBERED = 64  # assignments


def name_of(*values: Any) -> str:
    """Return a name that is equal on all nodes if the values are, unlike ``hash()`` of a string."""
    return hashlib.sha1(repr(values).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SampleProgress:
    """The report of one node."""

    end: int = 0  # limit: as far as the node knows, no node draws at or after it before the next quorum
    assignment: str = ""  # name of the last assignment that it knows
    number: int = 0  # of that assignment
    reached: int = 0  # end of the drawn samples, as far as the node knows
    ahead: int = 0  # number of samples that it may draw before the next quorum
    size: int = 0  # samples per epoch; 0 if the loader draws no assigned samples
    epoch: int = 0  # last epoch that it has begun
    order: str = ""  # digest of the order of this epoch

    def check(self, theirs: SampleProgress) -> None:
        """Compare the data of this node with the data of another node.

        Raises:
            ValueError: if they differ.
        """
        if self.size and theirs.size and self.size != theirs.size:
            raise ValueError(
                f"this node has {self.size} samples per epoch, but the training nodes have {theirs.size}. The other "
                f"nodes continue without it. Give all nodes the same data."
            )
        if self.order and theirs.order and self.epoch == theirs.epoch and self.order != theirs.order:
            raise ValueError(
                f"this node has another order of samples in epoch {self.epoch} than the training nodes, so nodes would "
                f"draw some samples twice. The other nodes continue without it. Give all nodes the same data and seed."
            )


@dataclass(frozen=True)
class Assignment:
    """From position ``begin`` on, the samples go to these nodes in turn."""

    begin: int = 0
    names: tuple[str, ...] = ()
    number: int = 0

    @property
    def name(self) -> str:
        return name_of(self.begin, self.names, self.number)


class SampleAssigner:
    """The assignments that a node knows. At each position, the latest assignment counts."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._assignments: tuple[Assignment, ...] = ()  # replaced as a whole: threads read it
        self._size = 0  # samples per epoch
        self._order = 0, ""  # last epoch that the node has begun, and the digest of its order
        self._limit = 0  # limit of the last quorum: no node draws at or after it before the next quorum
        # ``ahead``: number of samples that the node may draw between two quorums. ``reached``: end of the samples drawn
        # before the last quorum.
        self._end = self.ahead = self.reached = 0
        self._reported, self._warned = 0, False  # the limit that this node reported

    def start_at(self, place: int) -> None:
        # Samples before the position of a checkpoint count as drawn.
        self._limit = self.reached = place

    def report(self) -> SampleProgress:
        epoch, order = self._order
        report = partial(SampleProgress, ahead=self.ahead, size=self._size, epoch=epoch, order=order)
        if not self._assignments:
            return report(self._limit, reached=self.reached)
        now = max(self._end, self._assignments[0].begin)
        newest = next(
            place for place, assignment in reversed(list(enumerate(self._assignments))) if assignment.begin <= now
        )
        strides = [len(assignment.names) for assignment in self._assignments[newest:]]
        # Two positions of the node are at most one stride apart; two strides if the second is in a later assignment.
        end = now + (self.ahead + len(strides) - 1) * max(strides)
        # includes samples of nodes that have left
        last, reached = self._assignments[-1], max(self._end, self.reached)
        self._reported = max(end, self._limit)
        return report(self._reported, last.name, last.number, reached)

    def update(self, names: Sequence[str], reports: Sequence[SampleProgress]) -> None:
        """Make a new assignment if nodes have joined or left."""
        # The result depends only on the reports of the quorum, so all of its nodes make the same assignment.
        last = self._assignments[-1] if self._assignments else Assignment()
        newest = max(reports, key=lambda each: (each.number, each.assignment))
        self._limit, self.reached = max(report.end for report in reports), max(report.reached for report in reports)
        if last.names == tuple(names) and {report.assignment for report in reports} == {last.name}:
            return
        # if names differ, assignments were made without this node
        before = self._assignments if newest.assignment == last.name else ()
        self._assignments = (*before, Assignment(self._limit, tuple(names), newest.number + 1))[-REMEMBERED:]
        # Nodes that were away draw from this assignment on, and could not report it.
        self._limit += len(names) * max(
            (report.ahead for report in reports if report.assignment != newest.assignment), default=0
        )
        self._reported = max(self._reported, self._limit, self._assignments[-1].begin + len(names) * self.ahead)

    def draw(self, place: int, end: int = sys.maxsize) -> int | None:
        """Return this node's first position in [place, end), and count all positions up to it as drawn; or None."""
        mine = self._find(place, end)
        if mine is not None:
            self._mark_drawn(mine)
        return mine

    def has_left(self, epoch: int, samples: int) -> bool:
        """Return whether this node has that many samples of an epoch left."""
        # True if the length of epochs is unknown.
        return not self._size or self._holds(epoch * self._size, (epoch + 1) * self._size, samples)

    def skip_to(self, epoch: int, samples: int) -> bool:
        """Begin an epoch. Return True if the other nodes must know before this node draws from it."""
        # With ``limit_train_batches``, a node leaves out the rest of an epoch. The next epoch may be beyond its limit,
        # so the other nodes must know before it draws from there.
        place = epoch * self._size
        skips = self._end < place and self._holds(self._end, place, samples)
        if skips:
            self._end = place
        return skips

    def _holds(self, place: int, end: int, samples: int) -> bool:
        for _ in range(samples):
            mine = self._find(place, end)
            if mine is None:
                return False
            place = mine + 1
        return True

    def _find(self, place: int, end: int) -> int | None:
        assignments = self._assignments
        while place < end:
            until = end
            for assignment in reversed(assignments):
                if assignment.begin > place:  # the last assignment that has begun counts, up to the next one
                    until = min(until, assignment.begin)
                    continue
                names = assignment.names
                if self._node in names:
                    mine = place + (names.index(self._node) + assignment.begin - place) % len(names)
                    if mine < until:
                        return mine
                break
            place = until
        return None

    def _mark_drawn(self, mine: int) -> None:
        self._end = max(self._end, mine + 1)
        if mine >= self._reported and not self._warned:
            self._warned = True
            log.warning(
                "this node has drawn more samples since the last round than it had reported. If nodes join or leave, "
                "some samples may be drawn twice. In a loop, pass the number of batches between two steps: "
                "shard_loader(loader, batches=...)"
            )

    def expect(self, size: int) -> None:
        self._size = self._size or size

    def share(self, order: Sequence[int], first: int, device: int, devices: int) -> Iterator[int]:
        """Yield the samples of an epoch for a device of this node. All devices get the same number.

        Args:
            order: all samples of the epoch.
            first: position of the first of them.

        Raises:
            ValueError: if epochs differ in size.
        """
        if self._size not in (0, len(order)):
            raise ValueError(
                f"epochs have {self._size} and {len(order)} samples: elastic nodes share one data set of constant "
                f"size. Use another sampler for other data sets."
            )
        self._size = len(order)
        self._order = first // len(order), hashlib.sha1(np.asarray(order).tobytes()).hexdigest()[:8]
        turn: list[int] = []  # the node's next samples, one for each device
        place, end = first, first + len(order)
        while (mine := self.draw(place, end)) is not None:
            turn.append(order[mine - first])
            # Only whole turns, so that no device makes a step that the others lack.
            if len(turn) == devices:
                yield turn[device]
                turn = []
            place = mine + 1
        if place == first and device == 0:
            log.warning(
                "no sample of epoch %d is left for this node, which continues with the next epoch: other nodes, or the "
                "job before the checkpoint, drew them",
                first // len(order),
            )


# -- the sampler -------------------------------------------------------------------------------------------------------

Share = Callable[[list[int], int], Iterator[int]]
"""Takes all samples of an epoch in order, and the position of the first; yields the samples of this device."""


class ElasticSource(Protocol):
    """A sampler or loader that draws the samples of one device."""

    prefetch_depth: int  # number of batches that it may draw in advance
    before_epoch: Callable[[int], None]  # set_epoch() calls it first, on every device of the node

    def set_share(self, share: Share) -> None: ...

    def set_epoch(self, epoch: int) -> None: ...


@runtime_checkable
class ElasticLoader(ElasticSource, Protocol):
    """A loader of a bundled DataModule."""

    batch_size: int


def sampler_of(loader: Any) -> ElasticSource | None:
    """Return the sampler of a loader, or the loader itself, if it can draw the samples of one device, or None."""
    if isinstance(loader, DataLoader):
        return loader.sampler if isinstance(loader.sampler, ElasticSampler) else None
    return loader if isinstance(loader, ElasticLoader) else None


def min_samples_per_round(loader: Any) -> int:
    """Return the size of the smallest batch of a loader."""
    whole = loader.drop_last if isinstance(loader, DataLoader) else True
    return int(loader.batch_size or 1) if whole else 1


class ElasticSampler(DistributedSampler[int]):
    """Draws each sample at most once per epoch, on one of the present nodes.

    Pass it to a DataLoader as ``sampler``, without ``shuffle``; ``strategy="mstopk_elastic"`` finds it there. It has no
    length, because that depends on the nodes that will be present. All devices of a node draw the same number of
    samples; a remainder is left out.

    Args:
        dataset: the data set to draw from.
        shuffle: draw in a new order in each epoch.
        seed: seed of the order, equal on all nodes.
    """

    def __init__(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self._size = len(dataset)
        self._share: Share | None = None
        self.prefetch_depth = 0
        self.before_epoch: Callable[[int], None] = lambda _: None

    def set_share(self, share: Share) -> None:
        self._share = share

    def set_epoch(self, epoch: int) -> None:
        """Draw from this epoch in the next iteration. Every device of the node calls it."""
        self.before_epoch(epoch)
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        if self._share is None:
            raise RuntimeError(
                "ElasticSampler is not attached to a run. Train with strategy='mstopk_elastic', and pass it as "
                "sampler= of the DataLoader. In a loop, call fabric.strategy.shard_loader(loader), or "
                "shard_loader(loader) of ElasticUpdates."
            )
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._size, generator=generator) if self.shuffle else torch.arange(self._size)
        yield from self._share(order.tolist(), self.epoch * self._size)

    def __len__(self) -> int:
        raise TypeError("ElasticSampler has no length: it depends on the nodes that will be present.")

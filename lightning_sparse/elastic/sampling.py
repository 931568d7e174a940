"""Which samples are whose, between nodes that come and go.

The samples of all epochs stand in one line: those of an epoch in an order that depends on seed and epoch, after those
of the epoch before. A *deal* gives out the line from a place on, to the nodes that are there, one by one. Each node
says up to where it, or another node that it heard of, may draw before the next quorum. When nodes come or go, all
conclude from that where the next deal begins: where nobody has drawn. Up to there the last deal holds. So no sample is
drawn twice, and what is left out of an epoch is the share that a node which is gone had not drawn, up to there.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_sparse.messages import log

REMEMBERED = 64  # deals


@dataclass(frozen=True)
class SampleProgress:
    """What a node says.

    Args:
        end: from this place on nobody draws before the next quorum, as far as the node knows.
        deal: the last one that it knows of, by name.
        number: of that deal.
        reached: up to here nodes have drawn so far, as far as it knows.
        ahead: samples that it may draw before the next quorum.
    """

    end: int = 0
    deal: str = ""
    number: int = 0
    reached: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class Assignment:
    """From place ``begin`` on, the samples go to these nodes in turn. Assignments are numbered."""

    begin: int = 0
    names: tuple[str, ...] = ()
    number: int = 0

    @property
    def name(self) -> str:
        """The same on all nodes."""
        return hashlib.sha1(repr((self.begin, self.names, self.number)).encode()).hexdigest()[:16]


class SampleAssigner:
    """Keeps the assignments that a node knows. The last assignments count.

    Args:
        node: its name.

    Attributes:
        ahead: samples that the node may draw between two quorums.
        reached: up to here nodes had drawn before the last quorum.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._deals: tuple[Assignment, ...] = ()  # replaced as a whole: threads read it
        self._size = 0  # of an epoch
        self._heard = 0  # from here on no node of the last quorum draws before the next one
        self._end = self.ahead = self.reached = 0
        self._told, self._warned = 0, False  # from here on the node draws nothing before the next quorum

    def begin(self, place: int) -> None:
        """Go on where a checkpoint was saved."""
        self._heard = self.reached = place

    def report(self) -> SampleProgress:
        """Return what this node says with its next request."""
        if not self._deals:
            return SampleProgress(self._heard, reached=self.reached, ahead=self.ahead)
        now = max(self._end, self._deals[0].begin)
        holds = next(place for place, each in reversed(list(enumerate(self._deals))) if each.begin <= now)
        strides = [len(each.names) for each in self._deals[holds:]]
        # From one of its places to the next it is at most a stride; one more where the next is in a later deal.
        end = now + (self.ahead + len(strides) - 1) * max(strides)
        # also what a node may have drawn that is gone now
        last, reached = self._deals[-1], max(self._end, self.reached)
        self._told = max(end, self._heard)
        return SampleProgress(self._told, last.name, last.number, reached, self.ahead)

    def update(self, names: Sequence[str], said: Sequence[SampleProgress]) -> None:
        """Make a new assignment if nodes have joined or left. All nodes of a quorum make the same one."""
        last = self._deals[-1] if self._deals else Assignment()
        newest = max(said, key=lambda each: (each.number, each.deal))
        self._heard, self.reached = max(each.end for each in said), max(each.reached for each in said)
        if last.names == tuple(names) and {each.deal for each in said} == {last.name}:
            return
        before = self._deals if newest.deal == last.name else ()  # what was dealt while it was away
        self._deals = (*before, Assignment(self._heard, tuple(names), newest.number + 1))[-REMEMBERED:]
        # who was away draws from this deal on, and could not say so
        self._heard += len(names) * max((each.ahead for each in said if each.deal != newest.deal), default=0)
        self._told = max(self._told, self._heard, self._deals[-1].begin + len(names) * self.ahead)

    def draw(self, place: int, end: int = sys.maxsize) -> int | None:
        """Return the first place from there on that is this node's, and before ``end``. Up to it, all counts as drawn.
        None without one."""
        mine = self._find(place, end)
        if mine is not None:
            self._mark_drawn(mine)
        return mine

    def leaves(self, epoch: int, samples: int) -> bool:
        """Whether `samples` of an epoch are left for this node, if the length of epochs is known."""
        place, end = epoch * self._size, (epoch + 1) * self._size
        for _ in range(samples if self._size else 0):
            mine = self._find(place, end)
            if mine is None:
                return False
            place = mine + 1
        return True

    def _find(self, place: int, end: int) -> int | None:
        deals = self._deals
        while place < end:
            until = end
            for deal in reversed(deals):
                if deal.begin > place:  # the last deal that has begun holds, up to where a later one begins
                    until = min(until, deal.begin)
                    continue
                if self._node in deal.names:
                    mine = place + (deal.names.index(self._node) + deal.begin - place) % len(deal.names)
                    if mine < until:
                        return mine
                break
            place = until
        return None

    def _mark_drawn(self, mine: int) -> None:
        self._end = max(self._end, mine + 1)
        if mine >= self._told and not self._warned:
            self._warned = True
            log.warning(
                "this node has drawn more samples since it last met the others than it had told them: where nodes come "
                "or go, some may be drawn twice. In a loop, give the batches between two steps: "
                "shard_loader(loader, batches=...)"
            )

    def share(self, order: Sequence[int], first: int, device: int, devices: int) -> Iterator[int]:
        """Yield the samples of an epoch that are dealt to a device of this node. Its devices step together, so each of
        them gets as many.

        Args:
            order: all samples of the epoch.
            first: place in the line of the first of them.

        Raises:
            ValueError: when epochs differ in size.
        """
        if self._size not in (0, len(order)):
            raise ValueError(
                f"epochs of {self._size} and {len(order)} samples: nodes that come and go are dealt the samples of one "
                f"data set, of one size. Draw others with a sampler of their own."
            )
        self._size = len(order)
        turn: list[int] = []  # the node's next samples, one for each device
        place, end = first, first + len(order)
        while (mine := self.draw(place, end)) is not None:
            turn.append(order[mine - first])
            if len(turn) == devices:
                yield turn[device]
                turn = []
            place = mine + 1
        if place == first and device == 0:
            log.warning(
                "no sample of epoch %d is left for this node: others, or the job before its checkpoint, drew them",
                first // len(order),
            )


# -- the sampler -------------------------------------------------------------------------------------------------------
#
# Samples of an epoch for nodes that come and go.

Share = Callable[[list[int], int], Iterator[int]]
"""Given all samples of an epoch in order, and how many samples the epochs before have: yields those of this device."""


class Dealt(Protocol):
    """A source of samples that draws the share of one device.

    Attributes:
        prefetch_depth: batches that it may have drawn and not given out.
    """

    prefetch_depth: int

    def deal(self, share: Share) -> None:
        """Draw in each epoch what ``share`` yields."""

    def set_epoch(self, epoch: int) -> None:
        """Draw from that epoch when iterated next."""


@runtime_checkable
class DealtLoader(Dealt, Protocol):
    """A loader that does, of a bundled DataModule."""

    batch_size: int


def sampler_of(loader: Any) -> Dealt | None:
    """Return the object that draws a loader's samples: its sampler, or the loader itself; None if it cannot draw a
    share."""
    if isinstance(loader, DataLoader):
        return loader.sampler if isinstance(loader.sampler, ElasticSampler) else None
    return loader if isinstance(loader, DealtLoader) else None


def min_samples_per_round(loader: Any) -> int:
    """Return the size of the smallest batch that the loader yields on one device."""
    whole = loader.drop_last if isinstance(loader, DataLoader) else True
    return int(loader.batch_size or 1) if whole else 1


class ElasticSampler(DistributedSampler[int]):
    """Draws each sample at most once an epoch, on one of the nodes that are there, as described at the top of
    this file.

    Give it to a DataLoader, in the place of ``shuffle``; ``strategy="mstopk_elastic"`` finds it there. It has no
    length, which depends on the nodes that will be there: an epoch ends when it has given out the last sample. The
    devices of a node draw as many each; of its share, those at the end that are fewer than its devices are left out.

    Args:
        dataset: of which it draws.
        shuffle: draw in an order of its own each epoch.
        seed: of the order, the same on all nodes.
    """

    def __init__(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self._size = len(dataset)
        self._share: Share | None = None
        self.prefetch_depth = 0

    def deal(self, share: Share) -> None:
        """Draw the share of this device."""
        self._share = share

    def __iter__(self) -> Iterator[int]:
        if self._share is None:
            raise RuntimeError(
                "ElasticSampler is not attached to any nodes: train with "
                "strategy='mstopk_elastic', and in a loop call fabric.strategy.shard_loader(loader), or "
                "shard_loader(loader) of ElasticUpdates, with the sampler as the DataLoader's sampler=."
            )
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._size, generator=generator) if self.shuffle else torch.arange(self._size)
        yield from self._share(order.tolist(), self.epoch * self._size)

    def __len__(self) -> int:
        raise TypeError("ElasticSampler has no length: it depends on the nodes that will be there.")

"""Samples of an epoch for nodes that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, DistributedSampler

Share = Callable[[list[int], int], Iterator[int]]
"""Given all samples of an epoch in order, and how many samples the epochs before have: yields those of this device."""


class Dealt(Protocol):
    """What draws the samples that it is dealt.

    Attributes:
        ahead: batches that it may have drawn and not given out.
    """

    ahead: int

    def deal(self, share: Share) -> None:
        """Draw in each epoch what ``share`` yields."""

    def set_epoch(self, epoch: int) -> None:
        """Draw from that epoch when iterated next."""


@runtime_checkable
class DealtLoader(Dealt, Protocol):
    """A loader that does, of a bundled DataModule."""

    batch_size: int


def dealt_by(loader: Any) -> Dealt | None:
    """Return what a loader deals with: the sampler of torch's, one of a bundled DataModule itself; None for others."""
    if isinstance(loader, DataLoader):
        return loader.sampler if isinstance(loader.sampler, ElasticSampler) else None
    return loader if isinstance(loader, DealtLoader) else None


def least_samples(loader: Any) -> int:
    """Return the size of the smallest batch that the loader yields on one device."""
    whole = loader.drop_last if isinstance(loader, DataLoader) else True
    return int(loader.batch_size or 1) if whole else 1


class ElasticSampler(DistributedSampler[int]):
    """Draws each sample at most once an epoch, on one of the nodes that are there, as `lightning_sparse.exchange.deals`
    says.

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
        self.ahead = 0

    def deal(self, share: Share) -> None:
        """Draw what is dealt to this device of its node."""
        self._share = share

    def __iter__(self) -> Iterator[int]:
        if self._share is None:
            raise RuntimeError(
                "ElasticSampler draws what nodes agree on, and is attached to none: train with "
                "strategy='mstopk_elastic', and in a loop call fabric.strategy.deal(loader), or deal(loader) of "
                "ElasticUpdates, with the sampler as the DataLoader's sampler=."
            )
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._size, generator=generator) if self.shuffle else torch.arange(self._size)
        yield from self._share(order.tolist(), self.epoch * self._size)

    def __len__(self) -> int:
        raise TypeError("ElasticSampler has no length: it depends on the nodes that will be there.")

"""Samples of an epoch for nodes that come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import DistributedSampler

from lightning_sparse.exchange.deals import Deals


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
        self._deals: Deals | None = None

    def attach(self, deals: Deals, device: int, devices: int) -> None:
        """Draw what is dealt to this device of its node."""
        self._deals, self._device, self._devices = deals, device, devices

    def __iter__(self) -> Iterator[int]:
        if self._deals is None:
            raise RuntimeError(
                "ElasticSampler draws what nodes agree on, and is attached to none: train with "
                "strategy='mstopk_elastic', or call deal(loader) of ElasticUpdates."
            )
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self._size, generator=generator) if self.shuffle else torch.arange(self._size)
        turn: list[int] = []  # the node's next samples, one for each device, which step together
        for place, index in enumerate(order.tolist(), self.epoch * self._size):
            if self._deals.takes(place):
                turn.append(index)
            if len(turn) == self._devices:
                yield turn[self._device]
                turn = []

    def __len__(self) -> int:
        raise TypeError("ElasticSampler has no length: it depends on the nodes that will be there.")

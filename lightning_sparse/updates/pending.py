"""Pending updates as a tensor of their own: for paths that send everything, or leave it to others what is sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sparse.exchange import Exchange, Shard
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.slices import Slices
from lightning_sparse.updates.state import Delivery, UpdateState


class PendingState(UpdateState):
    """For every path.

    Attributes:
        start_S: what the parameters held after the last exchange.
    """

    def __init__(self, slices: Slices, exchange: Exchange, config: UpdatesConfig) -> None:
        super().__init__(slices, exchange, config)
        self._pending_S = torch.zeros_like(self.shared_S)
        self.start_S = self.shared_S.clone()
        self._spare_S = torch.empty_like(self.shared_S)

    @property
    def pending_S(self) -> Tensor:
        self.receive()
        return self._pending_S

    def advance(self) -> None:
        if not self.slices.numel:
            return
        self.receive()  # first: some paths add to what is pending to the end
        acc_S = self._accumulate()
        path = self._path(whole=False)
        if path.leaves == "nothing":
            self._pending_S.zero_()
        transfer = self._exchange.begin(path, Shard(acc_S, next_S=self._pending_S))
        delivery = Delivery(self._exchange, transfer, self.shared_S, self._mean)
        if self._config.delay:
            self._set_model(acc_S)
            self._start(delivery)
            return
        self._start(delivery)
        self._set_model(None)

    def flush(self) -> None:
        if not self.slices.numel:
            return
        self.receive()
        self.shared_S.add_(self._exchange.sum(self._path(whole=True), Shard(self._accumulate())), alpha=self._mean)
        self._pending_S.zero_()
        self._set_model(None)

    def begin(self) -> None:
        self._set_model(None)

    def set_pending(self, pending_S: Tensor) -> None:
        self._pending_S.copy_(pending_S)

    def take_over(self, before: UpdateState) -> None:
        assert isinstance(before, PendingState)
        before.receive()
        for name in ("shared_S", "_pending_S", "start_S"):
            self._take_pieces(getattr(self, name), before, getattr(before, name))

    def state_dict(self, now_S: Tensor) -> dict[str, Tensor]:
        unsent_S = self._pending_S + (self.start_S - now_S)
        return {
            "shared": self.shared_S,
            "unsent": unsent_S,
            "pending": self._pending_S,
            "start": self.start_S,
            "now": now_S,
        }

    def _load_own(self, saved: Mapping[str, Tensor]) -> bool:
        if not {"pending", "start"} <= saved.keys():
            return False
        self._pending_S.copy_(saved["pending"])
        self.start_S.copy_(saved["start"])
        return True

    def _accumulate(self) -> Tensor:
        """acc_S = pending_S + (what the parameters held after the last exchange - what they hold now)."""
        acc_S = self.start_S
        self.slices.add_progress(acc_S, self._pending_S)
        self.start_S, self._spare_S = self._spare_S, acc_S
        return acc_S

    def _set_model(self, acc_S: Tensor | None) -> None:
        """x = shared_S - step_ahead * pending_S - in flight. In flight is acc_S - pending_S, or nothing."""
        start_S = self.start_S
        if acc_S is None:
            torch.add(self.shared_S, self._pending_S, alpha=-self.ahead, out=start_S)
        else:
            torch.sub(self.shared_S, acc_S, out=start_S)
            if self.ahead != 1.0:
                start_S.add_(self._pending_S, alpha=1.0 - self.ahead)
        self.slices.write(start_S)
        if self.slices.rounds:
            self.slices.copy_to(start_S)

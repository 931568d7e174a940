"""What a device knows of one optimizer's parameters: the shared weights, and its node's updates that they lack."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from lightning_sparse.exchange import Exchange, Shard
from lightning_sparse.exchange.lanes import TensorFuture
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.slices import Slices


class UpdateState:
    """Of one device's slice S, all fp32.

    Args:
        slices: the slice; its parameters hold the shared weights.
        exchange: between nodes.
        config: of the updates.

    Attributes:
        shared_S: the shared weights, bit-identical on all nodes but for messages under way.
        pending_S: this node's updates that it has not sent.
        start_S: what the parameters held after the last exchange.
    """

    def __init__(self, slices: Slices, exchange: Exchange, config: UpdatesConfig) -> None:
        self.slices, self._exchange, self._config = slices, exchange, config
        self._ahead = config.ahead(exchange.topology.num_nodes)
        self.shared_S = slices.read()
        self.pending_S = torch.zeros_like(self.shared_S)
        self.start_S = self.shared_S.clone()
        self._spare_S = torch.empty_like(self.shared_S)
        self._future: TensorFuture | None = None

    def advance(self) -> None:
        """Exchange what the parameters have changed by since the last time, and set them to this node's model."""
        if not self.slices.numel:
            return
        self.receive()  # first: some paths add to what is pending to the end
        acc_S = self._accumulate()
        job = self._send(acc_S)
        next(job, None)  # selects
        if self._config.delay:
            self._set_model(acc_S)
            self._future = self._exchange.runner.start(job, acc_S)
            return
        for _ in job:
            pass
        self._set_model(None)

    def receive(self) -> None:
        """Wait until the messages under way are in the shared weights. May come at any time before the next exchange:
        the result is the same."""
        if self._future is not None:
            self._exchange.runner.finish(self._future)
            self._future = None

    def flush(self) -> None:
        """Send everything that is pending: afterwards the parameters hold the shared weights, on all nodes."""
        if not self.slices.numel:
            return
        self.receive()
        for _ in self._send(self._accumulate(), whole=True):
            pass
        self._set_model(None)

    def take_over(self, before: UpdateState) -> None:
        """Go on with the pieces that another division of the same parameters had."""
        for name in ("shared_S", "pending_S", "start_S"):
            old = before.slices.by_piece(getattr(before, name))
            for piece, view in self.slices.by_piece(getattr(self, name)).items():
                if piece in old:
                    view.copy_(old[piece])

    def set_model(self) -> None:
        """Put this node's model into the parameters; nothing is under way."""
        self._set_model(None)

    def _accumulate(self) -> Tensor:
        """acc_S = pending_S + (what the parameters held after the last exchange - what they hold now)."""
        acc_S = self.start_S
        self.slices.add_change(acc_S, self.pending_S)
        self.start_S, self._spare_S = self._spare_S, acc_S
        return acc_S

    def _send(self, acc_S: Tensor, *, whole: bool = False) -> Generator[None, None, None]:
        """The job of exchanging ``acc_S``, which leaves in ``pending_S`` what it does not send."""
        exchange = self._exchange
        choice = exchange.choice
        work = choice.work(acc_S.numel() * exchange.topology.num_devices, torch.float32)
        path = choice.dense(work) if whole else choice.path(work, choice.density)
        if path.leaves == "nothing":
            self.pending_S.zero_()
        shard = Shard(acc_S, next_S=self.pending_S, target_S=self.shared_S, alpha=-1.0 / exchange.topology.num_nodes)
        where = exchange.communicator.where
        for _ in exchange.run(path, shard):
            yield
            exchange.communicator.where = where  # of the thread that goes on

    def _set_model(self, acc_S: Tensor | None) -> None:
        """x = shared_S - step_ahead * pending_S - in flight. In flight is acc_S - pending_S, or nothing."""
        start_S = self.start_S
        if acc_S is None:
            torch.add(self.shared_S, self.pending_S, alpha=-self._ahead, out=start_S)
        else:
            torch.sub(self.shared_S, acc_S, out=start_S)
            if self._ahead != 1.0:
                start_S.add_(self.pending_S, alpha=1.0 - self._ahead)
        self.slices.write(start_S)
        if self.slices.rounds:
            self.slices.copy_to(start_S)

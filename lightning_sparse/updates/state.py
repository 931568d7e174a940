"""What a device knows of one optimizer's parameters: the shared weights, and its node's updates that they lack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparse.exchange import Exchange, Path, Transfer
from lightning_sparse.exchange.host import HostCopy
from lightning_sparse.exchange.lanes import TensorFuture
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.slices import Slices


class Delivery:
    """The job of carrying what was selected of an update to the shared weights.

    Args:
        exchange: between nodes.
        transfer: that has selected.
        target_S: the sum over nodes is added to it, times ``alpha``; None keeps the messages.
        sample_B: bytes that ride along with the message, of a path whose messages are kept.

    Attributes:
        messages: of all nodes, uint8 [M, B], if they are kept.
        samples: of all nodes, uint8 [M, bytes].
    """

    def __init__(
        self,
        exchange: Exchange,
        transfer: Transfer,
        target_S: Tensor | None = None,
        alpha: float = 1.0,
        sample_B: Tensor | None = None,
    ) -> None:
        self._communicator, self._where = exchange.communicator, exchange.communicator.where
        self._transfer, self._target_S, self._alpha = transfer, target_S, alpha
        self._sample_bytes = 0
        self.messages: Tensor | None = None
        self.samples: HostCopy | None = None
        if sample_B is not None:
            self._sample_bytes = sample_B.numel()
            transfer.carried = torch.cat([transfer.carried, sample_B])
            exchange.stats.count_bytes((exchange.topology.num_nodes - 1) * sample_B.nbytes)

    def select(self) -> Sequence[Tensor]:
        """It is done."""
        return self._transfer.tensors

    def transfer(self) -> Sequence[Tensor]:
        """Communicate between nodes."""
        self._communicator.where = self._where  # of this thread
        self._transfer.transfer()
        return self._transfer.tensors

    def apply(self) -> Sequence[Tensor]:
        """Add the sum over nodes, or keep the messages."""
        if self._target_S is not None:
            self._target_S.add_(self._transfer.apply(), alpha=self._alpha)
            return ()
        self.messages, beside = self._transfer.carried, self._sample_bytes
        if beside:
            self.samples = HostCopy(self.messages[:, -beside:].contiguous())
            self.messages = self.messages[:, :-beside].contiguous()
        return ()


class UpdateState(ABC):
    """Of one device's slice S, all fp32.

    Args:
        slices: the slice; its parameters hold the shared weights.
        exchange: between nodes.
        config: of the updates.

    Attributes:
        shared_S: the shared weights, bit-identical on all nodes but for messages that have not been added yet.
        ahead: share of what is pending that this node's model keeps.
    """

    def __init__(self, slices: Slices, exchange: Exchange, config: UpdatesConfig) -> None:
        self.slices, self._exchange, self._config = slices, exchange, config
        self.ahead = config.ahead(exchange.topology.num_nodes)
        self.shared_S = slices.read()
        self._under_way: tuple[TensorFuture, Delivery] | None = None

    @property
    @abstractmethod
    def pending_S(self) -> Tensor:
        """This node's updates up to the last exchange that it has not sent."""

    @abstractmethod
    def advance(self) -> None:
        """Exchange what the parameters have changed by since the last time, and set them to this node's model."""

    @abstractmethod
    def flush(self) -> None:
        """Send everything that is pending: afterwards the parameters hold the shared weights, on all nodes."""

    @abstractmethod
    def begin(self) -> None:
        """Put this node's model into the parameters, after ``shared_S`` and ``set_pending`` have been given."""

    @abstractmethod
    def set_pending(self, pending_S: Tensor) -> None:
        """What this node has not sent, in a state without a past."""

    @abstractmethod
    def take_over(self, before: UpdateState) -> None:
        """Go on with the pieces that another division of the same parameters had."""

    @abstractmethod
    def state_dict(self, now_S: Tensor) -> dict[str, Tensor]:
        """What a resumed run needs: ``shared`` and ``unsent`` (all that the shared weights lack) on any cluster, the
        rest on the same one. Nothing is under way.

        Args:
            now_S: what the parameters hold.
        """

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Go on where it was saved; the parameters are set, too. Under other options than it was saved with, with all
        that is unsent as pending."""
        self.receive()  # what is under way would be added to what was saved
        self.shared_S.copy_(saved["shared"])
        if self._load_own(saved):
            self.slices.write(saved["now"].to(self.shared_S.device))
            return
        self.set_pending(saved["unsent"].to(self.shared_S.device))
        self.begin()

    @abstractmethod
    def _load_own(self, saved: Mapping[str, Tensor]) -> bool:
        """The rest of the state, if it is what this one would have saved."""

    def _take_pieces(self, mine_S: Tensor, before: UpdateState, theirs_S: Tensor) -> None:
        """Copy the pieces that both divisions have."""
        old = before.slices.by_piece(theirs_S)
        for piece, view in self.slices.by_piece(mine_S).items():
            if piece in old:
                view.copy_(old[piece])

    def read_shared(self) -> Tensor:
        """The shared weights with every message; not to be written to."""
        self.receive()
        return self.shared_S

    def receive(self) -> None:
        """Wait for the messages under way. May come at any time before the next exchange: the result is the same."""
        if self._under_way is not None:
            future, delivery = self._under_way
            self._exchange.runner.finish(future)
            self._under_way = None
            self._keep(delivery)

    def _path(self, *, whole: bool) -> Path:
        choice = self._exchange.choice
        work = choice.work(self.shared_S.numel() * self._exchange.topology.num_devices, torch.float32)
        return choice.dense(work) if whole else choice.path(work, choice.density)

    @property
    def _mean(self) -> float:
        """What makes a sum over nodes the mean that is taken off weights."""
        return -1.0 / self._exchange.topology.num_nodes

    def _start(self, delivery: Delivery) -> None:
        """Run a job that has selected: beside the next step, or with ``delay=0`` now."""
        if self._config.delay:
            selected = delivery.select()
            self._under_way = self._exchange.runner.start(delivery, self.shared_S, selected), delivery
            return
        delivery.transfer()
        delivery.apply()
        self._keep(delivery)

    def _keep(self, delivery: Delivery) -> None:
        """Take what a delivery that is done has not added to the shared weights."""
        return  # nothing, unless messages are kept

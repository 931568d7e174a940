"""Pending updates as the difference of two models: for messages of the largest entries.

A node's own model lacks nothing that the node did, and the shared one lacks what it has not sent:

    pending_S = shared_S - own_S                                 once this node's last message is added to own_S
    x         = shared_S - a * (shared_S - own_S)                what the parameters hold; a = ``step_ahead``

So neither what is pending nor what the parameters held before the step is stored: two tensors, whatever a is, and a may
change (see `agreement`). Entries change by messages alone: in shared_S by the mean of all nodes', in own_S by that mean
less the node's own, which it had already. A model that took the share a of each update would round it away where it is
small beside the weight.

What is pending does not depend on what other nodes have sent, so the next message is selected while theirs arrive:

    link       messages t                 messages t+1
    device     step t+1, select t+1       add t, step t+2, select t+2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_sparse.exchange import Exchange, Shard
from lightning_sparse.exchange.host import HostCopy
from lightning_sparse.exchange.paths import Sparse
from lightning_sparse.updates.agreement import Agreement
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.slices import Slices
from lightning_sparse.updates.state import Delivery, UpdateState


class DifferenceState(UpdateState):
    """For ``exchange="sparse"``.

    Attributes:
        own_S: this node's model. It and ``shared_S`` lack the messages of the last exchange until the next one: how
            sums round must not depend on who asks for weights in between.
    """

    def __init__(self, slices: Slices, exchange: Exchange, config: UpdatesConfig) -> None:
        super().__init__(slices, exchange, config)
        self.own_S = self.shared_S.clone()
        self._agreement: Agreement | None = None
        nodes = exchange.topology.num_nodes
        if config.measures_ahead(nodes):
            self._agreement, self.ahead = Agreement(slices.numel, nodes), 1.0
        self._exchanges = 0
        self._samples: HostCopy | None = None  # of what nodes had pending at the last exchange
        self._messages: Tensor | None = None  # those, uint8 [M, B], once they are received
        self._sent: Tensor | None = None  # this node's among them, uint8 [1, B]
        self._wrote: Sparse | None = None  # their path; the density may have changed since
        self._minus_one = torch.tensor(-1.0, device=self.own_S.device)

    @property
    def pending_S(self) -> Tensor:
        own_S = self.own_S.clone()
        self._add_sent(own_S)
        return self.shared_S - own_S

    def read_shared(self) -> Tensor:
        self.receive()
        if self._messages is None:
            return self.shared_S
        shared_S = self.shared_S.clone()
        self._add_mean(self._messages, shared_S)
        return shared_S

    def advance(self) -> None:
        if not self.slices.numel:
            return
        self._add_own()
        self._follow_agreement()
        path, sample = self._sparse, self._sample()
        transfer = self._exchange.begin(path, Shard(self.own_S, self.shared_S, factor=self._minus_one))
        sent = transfer.carried.view(1, -1)
        delivery = Delivery(self._exchange, transfer, sample_B=sample)
        self._take_messages(lambda: self._start(delivery))
        self._wrote, self._sent = path, sent
        if not self._config.delay:
            path.add(self._sent, self.own_S, 1.0)
            self._sent = None
            self._take_messages()
        elif self.ahead != 1.0:
            path.add(self._sent, self.own_S, 1.0 - 1.0 / self.ahead)  # what is under way is seen in full
        self._set_model()

    def flush(self) -> None:
        if not self.slices.numel:
            return
        self._add_own()
        self._take_messages()
        pending_S = self.shared_S - self.own_S
        self.shared_S.add_(self._exchange.sum(self._path(whole=True), Shard(pending_S)), alpha=self._mean)
        self.own_S.copy_(self.shared_S)
        self._set_model()

    def begin(self) -> None:
        self._set_model()

    def set_pending(self, pending_S: Tensor) -> None:
        self._messages = self._sent = None
        torch.sub(self.shared_S, pending_S, out=self.own_S)

    def take_over(self, before: UpdateState) -> None:
        assert isinstance(before, DifferenceState)
        before._add_own()  # messages hold places in the slice as it was
        before._take_messages()
        before.begin()
        self.ahead, self._exchanges = before.ahead, before._exchanges
        self._take_pieces(self.shared_S, before, before.shared_S)
        self._take_pieces(self.own_S, before, before.own_S)

    def state_dict(self, now_S: Tensor) -> dict[str, Tensor]:
        shared_S, own_S = self.read_shared(), self.own_S.clone()
        self.slices.add_change(own_S, self.shared_S, self.ahead, now_S)
        self._add_sent(own_S)
        saved = {"shared": shared_S, "unsent": self.shared_S - own_S, "own": self.own_S, "now": now_S}
        saved["ahead"] = torch.tensor(self.ahead, dtype=torch.float64)
        saved["exchanges"] = torch.tensor(self._exchanges)
        if self._samples is not None:
            saved["samples"] = self._samples.read()
        if self._messages is not None and self._wrote is not None:
            saved["before"] = self.shared_S
            saved["messages"] = self._messages
            saved["sent"] = torch.tensor(self._wrote.k)
        return saved

    def _load_own(self, saved: Mapping[str, Tensor]) -> bool:
        if "own" not in saved or (self._agreement is None and saved["ahead"] != self.ahead):
            return False
        self._messages = self._sent = self._samples = None
        self.ahead = float(saved["ahead"])
        self._exchanges = int(saved["exchanges"])
        if "samples" in saved and self._agreement is not None:
            self._samples = HostCopy(saved["samples"])
        if "messages" in saved and not self._load_messages(saved):
            return False
        self.own_S.copy_(saved["own"])
        return True

    def _load_messages(self, saved: Mapping[str, Tensor]) -> bool:
        messages = saved["messages"].to(self.own_S.device)
        wrote = replace(self._sparse, k=int(saved["sent"]))
        if not wrote.wrote(messages):
            return False
        mine = self._exchange.topology.node_index
        self._messages, self._sent, self._wrote = messages, messages[mine : mine + 1], wrote
        self.shared_S.copy_(saved["before"])
        return True

    @property
    def _sparse(self) -> Sparse:
        path = self._path(whole=False)
        assert isinstance(path, Sparse)
        return path

    def _sample(self) -> Tensor | None:
        self._exchanges += 1
        if self._agreement is None or not self._agreement.due(self._exchanges):
            return None
        return self._agreement.sample(self._exchanges, self.own_S, self.shared_S)

    def _follow_agreement(self) -> None:
        """Change ``ahead`` to what the samples of the last exchange say, if it had any."""
        if self._agreement is None or not self._agreement.due(self._exchanges):
            return
        self.receive()
        measured = None if self._samples is None else self._agreement.measure(self._samples)
        self._samples = None
        if measured is not None:
            self.ahead = measured

    def _keep(self, delivery: Delivery) -> None:
        self._messages, self._samples = delivery.messages, delivery.samples

    def _add_own(self) -> None:
        """Add to this node's model what the parameters have changed by, and what it has sent: the rest is pending."""
        self.slices.add_change(self.own_S, self.shared_S, self.ahead)
        self._add_sent(self.own_S)
        self._sent = None

    def _add_sent(self, own_S: Tensor) -> None:
        if self._sent is not None and self._wrote is not None:
            self._wrote.add(self._sent, own_S, 1.0 / self.ahead)

    def _take_messages(self, start_next: Callable[[], None] = lambda: None) -> None:
        """Wait for the messages under way, start the next ones, and add the mean to both models."""
        self.receive()
        messages, self._messages = self._messages, None
        start_next()
        if messages is not None:
            self._add_mean(messages, self.shared_S)
            self._add_mean(messages, self.own_S)

    def _add_mean(self, messages: Tensor, model_S: Tensor) -> None:
        assert self._wrote is not None
        self._wrote.add(messages, model_S, self._mean)

    def _set_model(self) -> None:
        """x = shared_S - step_ahead * pending_S - in flight, which own_S holds for that."""
        self.slices.write_between(self.own_S, self.shared_S, self.ahead)

"""Pending updates as the difference of two models: for messages of the largest entries.

A node's own model lacks nothing that the node did, and the shared one lacks what it has not sent:

    pending_S = shared_S - own_S                                 once every message is in both

So neither what is pending nor what the parameters held before the step is stored. Entries change by messages alone:
in shared_S by the mean of all nodes', in own_S by that mean less the node's own, which it had already. Two tensors; a
third, ``kept_S``, where the model that is trained is not own_S (``step_ahead`` below 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_sparse.exchange import Exchange, Shard
from lightning_sparse.exchange.paths import Sparse
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.slices import Slices
from lightning_sparse.updates.state import UpdateState


class DifferenceState(UpdateState):
    """For ``exchange="sparse"``.

    Attributes:
        own_S: this node's model, which lacks ``_messages``: those of the last exchange, uint8 [M, B], which are in
            ``shared_S`` once they are received.
    """

    def __init__(self, slices: Slices, exchange: Exchange, config: UpdatesConfig) -> None:
        super().__init__(slices, exchange, config)
        self.own_S = self.shared_S.clone()
        self._kept_S = torch.zeros_like(self.own_S) if self._ahead != 1.0 else None
        self._messages: Tensor | None = None
        self._wrote: Sparse | None = None  # the path of those messages; the density may have changed since
        self._minus_one = torch.tensor(-1.0, device=self.own_S.device)

    @property
    def pending_S(self) -> Tensor:
        self.receive()
        own_S = self.own_S.clone()
        self._add_messages(own_S)
        return self.shared_S - own_S

    def advance(self) -> None:
        if not self.slices.numel:
            return
        self._catch_up()
        self._wrote = path = self._sparse
        shard = Shard(self.own_S, self.shared_S, self._kept_S, self._minus_one, on_received=self._keep)
        job = self._run(path, shard)
        handed = next(job)  # selects
        if self._config.delay:
            self._set_model()
            self._start(job, handed)
            return
        self._start(job, handed)
        self._correct()
        self._set_model()

    def flush(self) -> None:
        if not self.slices.numel:
            return
        self._catch_up()
        for _ in self._run(self._path(whole=True), Shard(self.shared_S - self.own_S)):
            pass
        self.own_S.copy_(self.shared_S)
        if self._kept_S is not None:
            self._kept_S.zero_()
        self._set_model()

    def begin(self) -> None:
        self._set_model()

    def set_pending(self, pending_S: Tensor) -> None:
        self._messages = None
        torch.sub(self.shared_S, pending_S, out=self.own_S)
        if self._kept_S is not None:
            self._kept_S.copy_(pending_S)

    def take_over(self, before: UpdateState) -> None:
        assert isinstance(before, DifferenceState)
        before._catch_up()  # messages hold places in the slice as it was
        before._set_model()
        self._take_pieces(self.shared_S, before, before.shared_S)
        self._take_pieces(self.own_S, before, before.own_S)
        if self._kept_S is not None and before._kept_S is not None:
            self._take_pieces(self._kept_S, before, before._kept_S)

    def state_dict(self, now_S: Tensor) -> dict[str, Tensor]:
        own_S = self.own_S.clone()
        self.slices.add_change(own_S, self._kept_S, 1.0 - self._ahead, now_S)
        self._add_messages(own_S)
        saved = {"shared": self.shared_S, "unsent": self.shared_S - own_S, "own": self.own_S, "now": now_S}
        if self._kept_S is not None:
            saved["kept"] = self._kept_S
        if self._messages is not None and self._wrote is not None:
            saved["messages"], saved["sent"] = self._messages, torch.tensor(self._wrote.k)
        return saved

    def _load_own(self, saved: Mapping[str, Tensor]) -> bool:
        messages = saved.get("messages")
        if "own" not in saved or ("kept" in saved) != (self._kept_S is not None):
            return False
        wrote = self._sparse
        if "sent" in saved:
            wrote = replace(wrote, k=int(saved["sent"]))
        if messages is not None and not wrote.wrote(messages, self.own_S.numel()):
            return False
        self.own_S.copy_(saved["own"])
        if self._kept_S is not None:
            self._kept_S.copy_(saved["kept"])
        self._messages = None if messages is None else messages.to(self.own_S.device)
        self._wrote = None if messages is None else wrote
        return True

    @property
    def _sparse(self) -> Sparse:
        path = self._path(whole=False)
        assert isinstance(path, Sparse)
        return path

    def _keep(self, messages: Tensor) -> None:
        self._messages = messages

    def _catch_up(self) -> None:
        """Add to this node's model what the parameters have changed by, and what the other nodes sent."""
        self.receive()
        self.slices.add_change(self.own_S, self._kept_S, 1.0 - self._ahead)
        self._correct()

    def _correct(self) -> None:
        self._add_messages(self.own_S)
        self._messages = None

    def _add_messages(self, own_S: Tensor) -> None:
        """own_S += this node's message - the mean of all."""
        if self._messages is None:
            return
        assert self._wrote is not None
        topology = self._exchange.topology
        mine = topology.node_index
        self._wrote.add(self._messages, own_S, -1.0 / topology.num_nodes)
        self._wrote.add(self._messages[mine : mine + 1], own_S, 1.0)

    def _set_model(self) -> None:
        """x = shared_S - step_ahead * pending_S - in flight = own_S + (1 - step_ahead) * kept_S."""
        self.slices.write_model(self.own_S, self._kept_S, 1.0 - self._ahead)

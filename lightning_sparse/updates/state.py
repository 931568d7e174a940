"""The update state of one optimizer on one device: the global weights, and the updates of its node that they lack.

All tensors are slices S in fp32. The parameters are this node's model x. *Pending* updates are not sent yet. Updates
*in flight* are sent, but other nodes have not received them yet. With a = ``step_ahead``:

    x = global_S - a * pending - in flight

`UpdateState` stores the pending updates, and the parameters after the last exchange. It serves paths that send
everything, or that select the sent entries only during the exchange.

`SparseUpdateState`, for messages of the largest entries, stores a second model with all updates of the node instead:

    pending_S = global_S - local_S                                 once this node's last message is added to local_S

So it needs two tensors for any a, and a may change (see `agreement`). It stores neither the pending updates nor the
parameters before the step. Only messages change entries: global_S by ``outer_lr`` times the mean message of all nodes,
local_S by this less the node's own message, which it already contains. A model with the share a of each update would
lose updates that are small compared with the weight to rounding. Also between two exchanges, the parameters keep the
share a of each update; otherwise, the models of nodes drift apart (``settle``). Pending updates do not depend on the
messages of other nodes, so a device selects the next message while these arrive:

    link       messages t                 messages t+1
    device     step t+1, select t+1       add t, step t+2, select t+2
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_sparse.exchange import Exchange, Shard, Transfer
from lightning_sparse.exchange.lanes import AsyncHostTensor, TensorFuture
from lightning_sparse.exchange.paths import Dense, Sparse
from lightning_sparse.kernels.wire import read_step_ids, write_step_id
from lightning_sparse.updates.agreement import UpdateCorrelation
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.slices import Slices


class UpdateState:
    """The state of one slice, for any path.

    Args:
        slices: the slice; its parameters hold the global weights.

    Attributes:
        global_S: the global weights, bit-identical on all nodes but for messages that have not been added yet.
        local_fraction: share of its pending updates in this node's model.
    """

    _MODELS: ClassVar[Sequence[str]] = ("global_S", "_pending_S", "_start_S")
    """Names of the tensors of S elements that another division of the parameters goes on with."""

    def __init__(self, slices: Slices, exchange: Exchange, config: UpdatesConfig) -> None:
        self.slices, self._exchange, self._config = slices, exchange, config
        self.global_S = slices.read()
        self._mean = -config.outer_lr / exchange.topology.num_nodes  # makes a sum over nodes what weights lose
        self._under_way: tuple[TensorFuture, Delivery] | None = None
        work = exchange.choice.work(slices.numel * exchange.topology.num_devices, torch.float32)
        self._path = exchange.choice.path(work, config.density)
        self.local_fraction = config.ahead(exchange.topology.num_nodes)
        self._make_models()

    def _make_models(self) -> None:
        self._pending_S = torch.zeros_like(self.global_S)
        self._start_S = self.global_S.clone()  # the parameters after the last exchange
        self._spare_S = torch.empty_like(self.global_S)

    @property
    def pending_S(self) -> Tensor:
        """This node's updates up to the last exchange that it has not sent."""
        self.receive()
        return self._pending_S

    def exchange_step(self, step_id: int = 0) -> None:
        """Exchange the change of the parameters since the last exchange, and write this node's model into them.

        Args:
            step_id: number of the step, equal on all nodes. Paths that send messages compare it, two exchanges later.

        Raises:
            RuntimeError: if nodes exchanged in different steps.
        """
        if not self.slices.numel:
            return
        acc_S = self._collect()
        if self._path.residual_kind == "nothing":
            self._pending_S.zero_()
        transfer = self._exchange.begin(self._path, Shard(acc_S, next_S=self._pending_S))
        if self._config.delay:  # acc_S - pending_S is in flight
            torch.sub(self.global_S, acc_S, out=self._start_S)
            if self.local_fraction != 1.0:
                self._start_S.add_(self._pending_S, alpha=1.0 - self.local_fraction)
            self._write_start()
        self._start(Delivery(self._exchange, transfer, self.global_S, self._mean))
        if not self._config.delay:
            self.begin()

    def settle(self, since: int) -> None:
        """Finish a step without an exchange: apply received messages when they are due, and keep the share
        ``local_fraction`` of the change of the parameters.

        Args:
            since: steps since the last exchange, or since the start.
        """
        arrives = since == self._config.delay
        self._exchange.count_step_without(self._path)
        if self.slices.numel and (arrives or self.local_fraction != 1.0):
            self._settle(arrives, since)

    def _settle(self, arrives: bool, since: int) -> None:
        if since < self._config.delay:
            return  # the path adds to what is pending until its messages are there
        self._pending_S.copy_(self._collect())
        self.begin()

    def may_settle(self, since: int) -> bool:
        """Whether ``settle`` may change the parameters on some device of the node: the same answer on all."""
        return self._config.settles(since, self._exchange.topology.num_nodes)

    def begin(self) -> None:
        """Put this node's model into the parameters; nothing is in flight."""
        torch.add(self.global_S, self._pending_S, alpha=-self.local_fraction, out=self._start_S)
        self._write_start()

    def _write_start(self) -> None:
        self.slices.write(self._start_S)
        if self.slices.rounds:
            self.slices.copy_to(self._start_S)

    def _start(self, delivery: Delivery) -> None:
        """Run a job that has selected: beside the next step, or with ``delay=0`` now."""
        if self._config.delay:
            selected = delivery.select()
            self._under_way = self._exchange.runner.start(delivery, self.global_S, selected), delivery
            return
        with self._exchange.communicator.waiting():
            delivery.transfer()
        delivery.apply()
        self._store_received(delivery)

    def receive(self) -> None:
        """Wait for the messages under way. May come at any time before the next exchange: the result is the same."""
        if self._under_way is not None:
            future, delivery = self._under_way
            with nullcontext() if future.done() else self._exchange.communicator.waiting():
                self._exchange.runner.finish(future)
            self._under_way = None
            self._store_received(delivery)

    def _store_received(self, delivery: Delivery) -> None:
        """Take what a delivery that is done has not added to the global weights."""
        return  # nothing, unless messages are kept

    def read_global(self) -> Tensor:
        """Return the global weights with every message; not to be written to."""
        self.receive()
        return self.global_S

    def read_received(self) -> Tensor:
        """Return the global weights without waiting. They may lack messages in flight, the same messages on all nodes.
        Do not write to them."""
        return self.read_global()

    def settle_now(self) -> None:
        """Apply all messages, and write this node's model into the parameters, so that nothing is in flight."""
        self._pending_S.copy_(self._collect())
        self.begin()

    def set_global(self, global_S: Tensor) -> None:
        """Set the global weights, and move this node's model by the same difference: pending updates stay pending."""
        self.receive()
        _move(self._start_S, self.global_S, global_S)
        self.global_S.copy_(global_S)

    def flush(self) -> None:
        """Send everything that is pending, which counts once: afterwards the parameters hold the global weights, on all
        nodes."""
        if not self.slices.numel:
            return
        unsent_S, mean = self._collect(), -1.0 / self._exchange.topology.num_nodes
        total_S = self._exchange.sum(Dense(self._path.work), Shard(unsent_S), of_a_step=False)
        self.global_S.add_(total_S, alpha=mean)
        self.set_pending(torch.zeros_like(unsent_S))
        self.begin()

    def _collect(self) -> Tensor:
        """Return all that this node has not sent, with nothing in flight; ``begin`` is to follow."""
        self.receive()  # first: some paths add to what is pending to the end
        acc_S = self._start_S
        self.slices.add_progress(acc_S, self._pending_S)
        self._start_S, self._spare_S = self._spare_S, acc_S
        return acc_S

    def set_pending(self, pending_S: Tensor) -> None:
        """Set what this node has not sent, and forget what is in flight."""
        self._pending_S.copy_(pending_S)

    def drop_pending(self, parameters: Collection[int]) -> None:
        """Drop the pending updates of parameters, given by ``id()``: they hold the global weights from now on."""
        pending_S = self._collect()
        for piece, view in self.slices.by_piece(pending_S).items():
            if piece[0] in parameters:
                view.zero_()
        self.set_pending(pending_S)
        self.begin()

    def migrate_from(self, before: Self) -> None:
        """Go on with the pieces that another division of the same parameters had."""
        before.receive()
        self.local_fraction = before.local_fraction
        for name in self._MODELS:
            old = before.slices.by_piece(getattr(before, name))
            for piece, view in self.slices.by_piece(getattr(self, name)).items():
                if piece in old:
                    view.copy_(old[piece])

    def state_dict(self, now_S: Tensor) -> dict[str, Tensor]:
        """Return what a resumed run needs: ``shared``, and what `unsent_of` takes, on any cluster; the rest on the same
        one, as patches, which are small but for a save between two exchanges. Nothing is under way.

        Args:
            now_S: what the parameters hold, on the CPU, where all of this is made: a device may have no room left.
        """
        models = {"shared": self.global_S.cpu(), "pending": self._pending_S.cpu(), "start": self._start_S.cpu()}
        return {**models, "now": sparse_diff(models["start"], now_S)}

    def _written(self) -> Tensor:
        """Return what the parameters held after the last exchange."""
        return self._start_S

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> bool:
        """Go on where it was saved; the parameters are set, too. Return whether it goes on exactly; under other options
        than it was saved with, all that is unsent is pending."""
        self.receive()  # what is under way would be added to what was saved
        self.global_S.copy_(saved["shared"])
        if self._load_own(saved):
            self.slices.write(apply_diff(self._written(), saved["now"]))
            return True
        self.set_pending(unsent_of(saved).to(self.global_S.device))
        self.begin()
        return False

    def _load_own(self, saved: Mapping[str, Tensor]) -> bool:
        """Load the rest of the state, if it is what this one would have saved."""
        if not {"pending", "start"} <= saved.keys():
            return False
        self._pending_S.copy_(saved["pending"])
        self._start_S.copy_(saved["start"])
        return True


class SparseUpdateState(UpdateState):
    """For ``exchange="sparse"``.

    Attributes:
        local_S: this node's model. It and ``global_S`` lack the messages of the last exchange until the next one: how
            sums round must not depend on who asks for weights in between.
    """

    _MODELS = ("global_S", "local_S")
    _path: Sparse

    def _make_models(self) -> None:
        self.local_S = self.global_S.clone()
        self._correlation: UpdateCorrelation | None = None
        nodes = self._exchange.topology.num_nodes
        if self._config.measures_ahead(nodes):
            self._correlation, self.local_fraction = UpdateCorrelation(self.slices.numel), 1.0
        self._exchanges = 0
        self._samples: AsyncHostTensor | None = None  # of the nodes' pending updates at the last exchange
        self._messages: Tensor | None = None  # received messages of all nodes, uint8 [M, B]
        self._sent: Tensor | None = None  # this node's own message, uint8 [1, B]
        self._marks: AsyncHostTensor | None = None  # step ids of the last received messages, int64 [M]
        self._minus_one = torch.tensor(-1.0, device=self.local_S.device)

    @property
    def pending_S(self) -> Tensor:
        local_S = self.local_S.clone()
        self._add_sent(local_S)
        return self.global_S - local_S

    def read_global(self) -> Tensor:
        self.receive()
        if self._messages is None:
            return self.global_S
        global_S = self.global_S.clone()
        self._add_messages(self._messages, global_S)
        return global_S

    def read_received(self) -> Tensor:
        return self.global_S

    def settle_now(self) -> None:
        self._collect()
        self.begin()

    def set_global(self, global_S: Tensor) -> None:
        _move(self.local_S, self.global_S, global_S)
        self.global_S.copy_(global_S)

    def exchange_step(self, step_id: int = 0) -> None:
        if not self.slices.numel:
            return
        self._check_step_ids()
        self._add_own()
        self._update_local_fraction()
        sample = self._sample()
        transfer = self._exchange.begin(self._path, Shard(self.local_S, self.global_S, factor=self._minus_one))
        write_step_id(transfer.payload, step_id)
        sent, delivery = transfer.payload.view(1, -1), self._delivery(transfer, sample)
        self.receive()
        messages, self._messages = self._messages, None
        self._start(delivery)
        self._add_mean(messages)
        self._sent = sent
        if not self._config.delay:
            self._path.add(sent, self.local_S, 1.0)
            self._sent = None
            self._apply_received()
        elif self.local_fraction != 1.0:
            self._path.add(sent, self.local_S, 1.0 - 1.0 / self.local_fraction)  # updates in flight count in full
        self.begin()

    def _delivery(self, transfer: Transfer, sample_B: Tensor | None) -> Delivery:
        return Delivery(self._exchange, transfer, sample_B=sample_B)

    def _settle(self, arrives: bool, since: int) -> None:
        if arrives:
            self._add_own()
            self._apply_received()
        else:
            self.slices.accumulate_delta(self.local_S, self.global_S, self.local_fraction)
        self.begin()

    def begin(self) -> None:
        self.slices.lerp_into(self.local_S, self.global_S, self.local_fraction)

    def set_pending(self, pending_S: Tensor) -> None:
        self._messages = self._sent = None
        torch.sub(self.global_S, pending_S, out=self.local_S)

    def drop_pending(self, parameters: Collection[int]) -> None:
        self._collect()
        shared = self.slices.by_piece(self.global_S)
        for piece, view in self.slices.by_piece(self.local_S).items():
            if piece[0] in parameters:
                view.copy_(shared[piece])
        self.begin()

    def migrate_from(self, before: Self) -> None:
        before._collect()  # messages hold places in the slice as it was
        before.begin()
        super().migrate_from(before)
        self._exchanges = before._exchanges

    def state_dict(self, now_S: Tensor) -> dict[str, Tensor]:
        before_S, kept_S = self.global_S.cpu(), self.local_S.cpu()
        global_S, local_S = before_S, kept_S.clone()
        if self._messages is not None:
            global_S = before_S.clone()
            self._path.add(self._messages.cpu(), global_S, self._mean)
        self.slices.accumulate_delta(local_S, before_S, self.local_fraction, now_S)
        if self._sent is not None:
            self._path.add(self._sent.cpu(), local_S, 1.0 / self.local_fraction)
        written_S = self.slices.between(kept_S, before_S, self.local_fraction)
        saved = {"shared": global_S, "own": local_S, "now": sparse_diff(written_S, now_S)}
        saved |= {"before": sparse_diff(global_S, before_S), "kept": sparse_diff(local_S, kept_S)}
        saved["ahead"] = torch.tensor(self.local_fraction, dtype=torch.float64)
        saved["outer_lr"] = torch.tensor(self._config.outer_lr, dtype=torch.float64)
        saved["exchanges"] = torch.tensor(self._exchanges)
        if self._samples is not None:
            saved["samples"] = self._samples.read()
        if self._messages is not None:
            saved["messages"] = self._messages.cpu()
        return saved

    def _written(self) -> Tensor:
        return self.slices.between(self.local_S, self.global_S, self.local_fraction)

    def _load_own(self, saved: Mapping[str, Tensor]) -> bool:
        if "own" not in saved or (self._correlation is None and saved["ahead"] != self.local_fraction):
            return False
        self._messages = self._sent = self._samples = None
        self.local_fraction = float(saved["ahead"])
        self._exchanges = int(saved["exchanges"])
        if "samples" in saved and self._correlation is not None:
            self._samples = AsyncHostTensor(saved["samples"])
        if "messages" in saved:
            messages, mine = saved["messages"].to(self.local_S.device), self._exchange.topology.node_index
            counted = float(saved["outer_lr"])  # in the global weights that were saved
            if counted != self._config.outer_lr or not self._path.wrote(messages):
                return False
            self._messages, self._sent = messages, messages[mine : mine + 1]
        self.global_S.copy_(apply_diff(saved["shared"], saved["before"]))
        self.local_S.copy_(apply_diff(saved["own"], saved["kept"]))
        return True

    def _sample(self) -> Tensor | None:
        self._exchanges += 1
        if self._correlation is None or not self._correlation.should_sample(self._exchanges):
            return None
        return self._correlation.sample(self._exchanges, self.local_S, self.global_S)

    def _update_local_fraction(self) -> None:
        """Set ``local_fraction`` from the samples of the last exchange, if it had any."""
        if self._correlation is None or not self._correlation.should_sample(self._exchanges):
            return
        self.receive()
        measured = None if self._samples is None else self._correlation.measure(self._samples)
        self._samples = None
        if measured is not None:
            self.local_fraction = measured

    def _store_received(self, delivery: Delivery) -> None:
        self._messages, self._samples = delivery.messages, delivery.samples
        self._marks = None if delivery.messages is None else AsyncHostTensor(read_step_ids(delivery.messages))

    def _check_step_ids(self) -> None:
        """Of messages that were received before: the host need not wait for those under way."""
        marks = [] if self._marks is None else self._marks.read().tolist()
        self._marks = None
        if len(set(marks)) > 1:
            said = ", ".join(
                f"node {node} in batch {each >> 8} with optimizer {each & 255}" for node, each in enumerate(marks)
            )
            raise RuntimeError(
                f"nodes have exchanged updates of different steps ({said}): one skipped a step that others made, and "
                f"what they sent since belongs to other weights. In manual optimization step on all nodes or on none: "
                f"a node without a gradient steps with one of zeros. Resume from the last checkpoint."
            )

    def _collect(self) -> Tensor:
        self.receive()
        self._check_step_ids()
        self._add_own()
        self._apply_received()
        return self.global_S - self.local_S

    def _add_own(self) -> None:
        """Add to this node's model what the parameters have changed by, and what it has sent: the rest is pending."""
        self.slices.accumulate_delta(self.local_S, self.global_S, self.local_fraction)
        self._add_sent(self.local_S)
        self._sent = None

    def _apply_received(self) -> None:
        self.receive()
        self._add_mean(self._messages)
        self._messages = None

    def _add_sent(self, local_S: Tensor) -> None:
        if self._sent is not None:
            self._path.add(self._sent, local_S, 1.0 / self.local_fraction)

    def _add_mean(self, messages: Tensor | None) -> None:
        """Add the messages of all nodes to both models."""
        if messages is not None:
            self._add_messages(messages, self.global_S)
            self._add_messages(messages, self.local_S)

    def _add_messages(self, messages: Tensor, target_S: Tensor) -> None:
        self._path.add(messages, target_S, self._mean)


def _move(model_S: Tensor, before_S: Tensor, now_S: Tensor) -> None:
    """Move a model with the global weights: exactly to them where it was equal, not at all where they stay."""
    torch.where(now_S == before_S, model_S, now_S - (before_S - model_S), out=model_S)


def state_of(slices: Slices, exchange: Exchange, config: UpdatesConfig) -> UpdateState:
    """Return the state of what the parameters hold, with nothing pending: the lean one where the path allows it."""
    kind = SparseUpdateState if config.path is Sparse else UpdateState
    return kind(slices, exchange, config)


def unsent_of(saved: Mapping[str, Tensor]) -> Tensor:
    """Return all that the global weights lack of a node's updates, from what a state saved."""
    if "own" in saved:
        return apply_diff(saved["shared"], saved["before"]) - saved["own"]
    return saved["pending"] + (saved["start"] - apply_diff(saved["start"], saved["now"]))


def sparse_diff(new_S: Tensor, old_S: Tensor) -> Tensor:
    """Return the places and the bits, int32 or int64 [2, n], in which one tensor of fp32 differs from another; or all
    bits, int32 [S], where that is smaller."""
    bits = old_S.view(torch.int32)
    (places,) = (new_S.view(torch.int32) != bits).nonzero(as_tuple=True)
    if 2 * len(places) >= len(bits):
        return bits
    return torch.stack([places, bits[places].long()]).to(torch.int32 if len(bits) < 2**31 else torch.int64)


def slice_diff(saved: Mapping[str, Any], begin: int, end: int) -> dict[str, Tensor]:
    """Return those of elements [begin, end) of the patches that a state saved."""
    patches = {}
    for name in saved.keys() & {"now", "before", "kept"}:
        patch = saved[name]
        if patch.dim() == 1:
            patches[name] = patch[begin:end]
            continue
        first, last = torch.searchsorted(patch[0], torch.tensor([begin, end], dtype=patch.dtype)).tolist()
        patches[name] = patch[:, first:last] - torch.tensor([[begin], [0]], dtype=patch.dtype)
    return patches


def apply_diff(new_S: Tensor, patch: Tensor) -> Tensor:
    """Return the other tensor, from the first and its patch."""
    if patch.dim() == 1:
        return patch.view(torch.float32).to(new_S.device, copy=True)
    old_S, (places, bits) = new_S.clone(), patch.to(new_S.device)
    old_S.view(torch.int32)[places.long()] = bits.int()
    return old_S


class Delivery:
    """The job of adding selected updates to the global weights.

    Args:
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
        self._transfer, self._target_S, self._alpha = transfer, target_S, alpha
        self._sample_bytes = 0
        self.messages: Tensor | None = None
        self.samples: AsyncHostTensor | None = None
        if sample_B is not None:
            self._sample_bytes = sample_B.numel()
            transfer.payload = torch.cat([transfer.payload, sample_B])
            exchange.stats.count_bytes((exchange.topology.num_nodes - 1) * sample_B.nbytes)

    def select(self) -> Sequence[Tensor]:
        """It is done."""
        return self._transfer.tensors

    def transfer(self) -> Sequence[Tensor]:
        """Communicate between nodes."""
        self._transfer.transfer()
        return self._transfer.tensors

    def apply(self) -> Sequence[Tensor]:
        """Add the sum over nodes, or keep the messages."""
        if self._target_S is not None:
            self._target_S.add_(self._transfer.apply(), alpha=self._alpha)
            return ()
        self.messages, beside = self._transfer.payload, self._sample_bytes
        if beside:
            self.samples = AsyncHostTensor(self.messages[:, -beside:].contiguous())
            self.messages = self.messages[:, :-beside].contiguous()
        return ()

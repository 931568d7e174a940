"""The update state of one optimizer on one device: the global weights, and this node's updates that they lack.

All tensors hold the device's slice S in fp32. The parameters hold this node's model x. *Pending* updates are not sent
yet. Updates *in flight* are sent, but not yet part of the global weights. With a = ``local_fraction``:

    x = global_S - a * pending - in flight                                                                       (1)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_sparse.exchange import Exchange, Shard, Transfer
from lightning_sparse.exchange.lanes import AsyncHostTensor, Job, TensorFuture
from lightning_sparse.exchange.paths import Dense, Sparse
from lightning_sparse.kernels.wire import read_step_ids, write_step_id
from lightning_sparse.updates.agreement import UpdateCorrelation
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.slices import Slices

JobKind = TypeVar("JobKind", bound=Job)


class InFlight(Generic[JobKind]):
    """The exchange that runs during the next step, or at once if ``delay`` is 0."""

    def __init__(self, delay: int) -> None:
        self._delay = delay
        self._running: tuple[TensorFuture, JobKind] | None = None

    def start(self, exchange: Exchange, job: JobKind, result: Tensor) -> JobKind | None:
        """Start a job that has selected. Return it if it has finished."""
        if self._delay:
            # The runner owns the job until `wait`.
            self._running = exchange.runner.submit_selected(job, result, job.select()), job
            return None
        with exchange.communicator.waiting():
            job.transfer()
        job.apply()
        return job

    def wait(self, exchange: Exchange) -> JobKind | None:
        if self._running is None:
            return None
        future, job = self._running
        with nullcontext() if future.done() else exchange.communicator.waiting():
            exchange.runner.finish(future)
        self._running = None
        return job


class UpdateState(ABC):
    """The state of one slice, whose parameters hold the global weights at first.

    Attributes:
        global_S: bit-identical on all nodes except for messages that are not added yet.
        local_fraction: a in equation (1).
    """

    _MODELS: ClassVar[Sequence[str]]
    """Names of the tensors [S] that ``migrate_from`` copies."""

    def __init__(self, slices: Slices, exchange: Exchange, config: UpdatesConfig) -> None:
        self.slices, self._exchange, self._config = slices, exchange, config
        self.global_S = slices.read()
        spec = exchange.choice.work(slices.numel * exchange.topology.num_devices, torch.float32)
        self._path = exchange.choice.path(spec, config.density)
        self.local_fraction = config.ahead(exchange.topology.num_nodes)
        self._flight: InFlight[Any] = InFlight(config.delay)

    @property
    @abstractmethod
    def pending_S(self) -> Tensor:
        """This node's updates up to the last exchange that it has not sent."""

    @abstractmethod
    def exchange_step(self, step_id: int = 0) -> None:
        """Exchange the change of the parameters since the last exchange, and write this node's model into them.

        Args:
            step_id: number of the step, equal on all nodes.

        Raises:
            RuntimeError: if nodes exchanged in different steps, two exchanges later.
        """

    def step_without_exchange(self, since: int) -> None:
        """Finish a step without an exchange, ``since`` steps after the last."""
        # Received messages count at a fixed step, so that the result does not depend on their arrival.
        due = since == self._config.delay
        self._exchange.count_step_without(self._path)
        # Between exchanges, the parameters keep only the fraction a of each update. Otherwise the models of nodes drift
        # apart.
        if self.slices.numel and (due or self.local_fraction != 1.0):
            self._step_without_exchange(due, since)

    @abstractmethod
    def _step_without_exchange(self, due: bool, since: int) -> None: ...

    def may_change_without_exchange(self, since: int) -> bool:
        """Return whether ``step_without_exchange`` may change parameters. All devices of the node return the same."""
        return self._config.changes_without_exchange(since, self._exchange.topology.num_nodes)

    @abstractmethod
    def write_model(self) -> None:
        """Write this node's model (1) into the parameters. Nothing is in flight."""

    @abstractmethod
    def absorb(self) -> None:
        """Wait until nothing is in flight, and make the change of the parameters pending. Then call ``write_model``."""

    @abstractmethod
    def set_pending(self, pending_S: Tensor) -> None:
        """Replace the pending updates, and drop received messages that are not added yet."""

    @abstractmethod
    def drop_pending(self, parameters: Collection[int]) -> None:
        """Drop the pending updates of parameters, given by ``id()``, so that they hold the global weights."""

    def _start(self, job: Job) -> None:
        self._store(self._flight.start(self._exchange, job, self.global_S))

    def receive(self) -> None:
        """Wait for the messages in flight. The result does not depend on when this is called."""
        self._store(self._flight.wait(self._exchange))

    def _store(self, finished: Any) -> None:
        if finished is not None:
            self._store_received(finished)

    @abstractmethod
    def _store_received(self, job: Any) -> None: ...

    def read_global(self) -> Tensor:
        """Return the global weights with every message. Do not write to them."""
        self.receive()
        return self.global_S

    def read_received(self) -> Tensor:
        """Return the global weights without waiting, if nodes then still agree. Do not write to them."""
        return self.read_global()

    def absorb_and_write(self) -> None:
        self.absorb()
        self.write_model()

    @abstractmethod
    def set_global(self, global_S: Tensor) -> None:
        """Set the global weights, and move this node's model by the same difference."""

    def flush(self) -> None:
        """Send all pending updates. Afterwards the parameters of all nodes hold the global weights."""
        if not self.slices.numel:
            return
        self.absorb()
        # Each update counts once here, without ``outer_lr``.
        total_S = self._exchange.sum(Dense(self._path.work), Shard(self.pending_S), of_a_step=False)
        self.global_S.add_(total_S, alpha=-1.0 / self._exchange.topology.num_nodes)
        self.set_pending(torch.zeros_like(total_S))
        self.write_model()

    def migrate_from(self, before: Self) -> None:
        """Copy the state of ``before``, which divides the same parameters into other slices."""
        before.receive()
        self.local_fraction = before.local_fraction
        for name in self._MODELS:
            old = before.slices.by_piece(getattr(before, name))
            for piece, view in self.slices.by_piece(getattr(self, name)).items():
                if piece in old:
                    view.copy_(old[piece])

    @abstractmethod
    def state_dict(self, now_S: Tensor) -> dict[str, Tensor]:
        """Return the state for a resumed run, on the CPU, like ``now_S``, the parameters. Nothing may be in flight."""

    @abstractmethod
    def _written(self) -> Tensor:
        """Return the model that the last exchange wrote into the parameters."""

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> bool:
        """Load a saved state, and write the parameters. Return whether the run continues exactly."""
        # ``shared`` and `unsent_of` serve any cluster. The other tensors make a resume on the same cluster exact. They
        # are patches (`sparse_diff`), which are large only for a save between two exchanges.
        self.receive()  # a message in flight would be added to the loaded weights
        self.global_S.copy_(saved["shared"])
        # Only if this state would have saved the rest in the same form.
        if self._load_own(saved):
            self.slices.write(apply_diff(self._written(), saved["now"]))
            return True
        # The saved run had other options: all unsent updates become pending.
        self.set_pending(unsent_of(saved).to(self.global_S.device))
        self.write_model()
        return False

    @abstractmethod
    def _load_own(self, saved: Mapping[str, Tensor]) -> bool: ...


class PendingUpdateState(UpdateState):
    """For ``exchange="dense"``, ``"dense16"`` and ``"regional"``. It stores the pending updates."""

    _MODELS = ("global_S", "_pending_S", "_start_S")

    def __init__(self, slices: Slices, exchange: Exchange, config: UpdatesConfig) -> None:
        super().__init__(slices, exchange, config)
        self._pending_S = torch.zeros_like(self.global_S)
        self._start_S = self.global_S.clone()  # the parameters after the last exchange
        self._spare_S = torch.empty_like(self.global_S)

    @property
    def pending_S(self) -> Tensor:
        self.receive()
        # Only after ``receive``: while a regional exchange runs, its path adds to the pending updates.
        return self._pending_S

    def exchange_step(self, step_id: int = 0) -> None:
        if not self.slices.numel:
            return
        acc_S = self._accumulate()
        if self._path.residual_kind == "nothing":
            self._pending_S.zero_()
        transfer = self._exchange.begin(self._path, Shard(acc_S, next_S=self._pending_S))
        if self._config.delay:  # equation (1), where acc_S - pending_S is in flight
            torch.sub(self.global_S, acc_S, out=self._start_S)
            if self.local_fraction != 1.0:
                self._start_S.add_(self._pending_S, alpha=1.0 - self.local_fraction)
            self._write_start()
        transfer.add_to(self.global_S, -self._config.outer_lr / self._exchange.topology.num_nodes)
        self._start(transfer)
        if not self._config.delay:
            self.write_model()

    def _store_received(self, job: Any) -> None:
        pass  # the job added everything

    def _step_without_exchange(self, due: bool, since: int) -> None:
        if since >= self._config.delay:  # before, the path still adds to the pending updates
            self.absorb_and_write()

    def write_model(self) -> None:
        torch.add(self.global_S, self._pending_S, alpha=-self.local_fraction, out=self._start_S)
        self._write_start()

    def _write_start(self) -> None:
        self.slices.write(self._start_S)
        # The next difference is to the values that the parameters really have.
        if self.slices.is_rounded:
            self.slices.copy_to(self._start_S)

    def absorb(self) -> None:
        self._pending_S.copy_(self._accumulate())

    def _accumulate(self) -> Tensor:
        self.receive()
        acc_S = self._start_S
        self.slices.add_progress(acc_S, self._pending_S)
        # The exchange may read acc_S during the next step, so the two buffers alternate.
        self._start_S, self._spare_S = self._spare_S, acc_S
        return acc_S

    def set_pending(self, pending_S: Tensor) -> None:
        self._pending_S.copy_(pending_S)

    def drop_pending(self, parameters: Collection[int]) -> None:
        self.absorb()
        for piece, view in self.slices.by_piece(self._pending_S).items():
            if piece[0] in parameters:
                view.zero_()
        self.write_model()

    def set_global(self, global_S: Tensor) -> None:
        self.receive()
        _move(self._start_S, self.global_S, global_S)
        self.global_S.copy_(global_S)

    def state_dict(self, now_S: Tensor) -> dict[str, Tensor]:
        models = {"shared": self.global_S.cpu(), "pending": self._pending_S.cpu(), "start": self._start_S.cpu()}
        return {**models, "now": sparse_diff(models["start"], now_S)}

    def _written(self) -> Tensor:
        return self._start_S

    def _load_own(self, saved: Mapping[str, Tensor]) -> bool:
        if not {"pending", "start"} <= saved.keys():
            return False
        self._pending_S.copy_(saved["pending"])
        self._start_S.copy_(saved["start"])
        return True


class RoundUpdates(Protocol):
    @property
    def num_nodes(self) -> int: ...  # M, which divides the sum of the updates
    @property
    def messages_MB(self) -> Tensor: ...  # uint8 [up to M, B or more]; a sample may follow each message
    @property
    def dense(self) -> Sequence[Tensor]: ...  # of nodes that sent all entries, fp32 [S]


class Messages(NamedTuple):
    num_nodes: int
    messages_MB: Tensor
    dense: Sequence[Tensor] = ()


class SparseUpdateState(UpdateState):
    """For ``exchange="sparse"``. It stores a model with all updates of this node instead of the pending updates:

        pending = global_S - local_S

    After an exchange, and until the next one,

        local_S = global_S - pending - sent / a

    so that the model of equation (1) is global_S - a * (global_S - local_S), as `Slices.lerp_into` writes it. A device
    selects while messages arrive, because pending updates do not depend on them:

        link       messages t                 messages t+1
        device     step t+1, select t+1       add t, step t+2, select t+2
    """

    _MODELS = ("global_S", "local_S")
    _path: Sparse

    def __init__(self, slices: Slices, exchange: Exchange, config: UpdatesConfig) -> None:
        super().__init__(slices, exchange, config)
        # A model with the fraction a of each update would lose updates that are small compared with the weight to
        # rounding, and could not follow a change of a.
        self.local_S = self.global_S.clone()
        self._correlation: UpdateCorrelation | None = None
        if config.measures_ahead(exchange.topology.num_nodes):
            self._correlation, self.local_fraction = UpdateCorrelation(slices.numel), 1.0
        self._exchanges = 0
        self._sent: Tensor | None = None  # this node's own message, uint8 [1, B]; local_S contains it 1 / a times
        self._received: list[RoundUpdates] = []  # not added to the models yet
        self._samples: AsyncHostTensor | None = None  # of the nodes' pending updates at the last exchange
        self._step_ids: AsyncHostTensor | None = None  # of the last received messages, int64 [M]
        self._minus_one = torch.tensor(-1.0, dtype=torch.float32, device=self.local_S.device)

    @property
    def pending_S(self) -> Tensor:
        if self._sent is None:
            return self.global_S - self.local_S
        local_S = self.local_S.clone()
        self._add_sent(local_S)
        return self.global_S - local_S

    def read_global(self) -> Tensor:
        self.receive()
        # The models lack the messages of the last exchange until the next one: the rounding of sums must not depend on
        # who asks for weights in between. So this adds them to a copy.
        if not self._received:
            return self.global_S
        global_S = self.global_S.clone()
        self._add_received(global_S)
        return global_S

    def read_received(self) -> Tensor:
        return self.global_S

    def set_global(self, global_S: Tensor) -> None:
        _move(self.local_S, self.global_S, global_S)
        self.global_S.copy_(global_S)

    def exchange_step(self, step_id: int = 0) -> None:
        if not self.slices.numel:
            return
        self._check_step_ids()
        # The order is an invariant: select, wait for messages t, start messages t+1, and add messages t during their
        # transfer.
        transfer, sent = self.begin_exchange(step_id)
        self.receive()
        self._start(transfer)
        self.end_exchange(sent)

    def begin_exchange(self, step_id: int = 0) -> tuple[Transfer, Tensor]:
        """Select the updates to send. Return their transfer, and the message, uint8 [1, B]."""
        self._take_local_change()
        # Only here may a change: no message is contained in part.
        self._update_local_fraction()
        transfer = self._select(step_id)
        sent = transfer.payload.view(1, -1)
        self._append_sample(transfer)
        return transfer, sent

    def end_exchange(self, sent: Tensor) -> None:
        if self._config.delay:
            self._apply_received()
            # Until the message arrives, local_S contains sent / a, so that the model (1) contains all of it.
            self._sent = sent
            if self.local_fraction != 1.0:
                self._path.add(sent, self.local_S, 1.0 - 1.0 / self.local_fraction)
        else:
            self._path.add(sent, self.local_S, 1.0)
            self._apply_received()
        self.write_model()

    def _select(self, step_id: int) -> Transfer:
        self._exchanges += 1
        # The sent entries stay in local_S until `end_exchange`.
        pending = Shard(self.local_S, self.global_S, factor=self._minus_one)
        transfer = self._exchange.begin(self._path, pending)
        write_step_id(transfer.payload, step_id)
        return transfer

    def _append_sample(self, transfer: Transfer) -> None:
        # The sample includes the updates of this message, which are still in local_S.
        if self._correlation is not None and self._correlation.should_sample(self._exchanges):
            sample_B = self._correlation.sample(self._exchanges, self.local_S, self.global_S)
            transfer.payload = torch.cat([transfer.payload, sample_B])
            self._exchange.stats.count_bytes((self._exchange.topology.num_nodes - 1) * sample_B.nbytes)

    def _step_without_exchange(self, due: bool, since: int) -> None:
        if due:
            self._take_local_change()
            self.receive()
            self._apply_received()
        else:
            self.slices.accumulate_delta(self.local_S, self.global_S, self.local_fraction)
        self.write_model()

    def write_model(self) -> None:
        self.slices.lerp_into(self.local_S, self.global_S, self.local_fraction)

    def absorb(self) -> None:
        self.receive()
        self._check_step_ids()
        self._take_local_change()
        self._apply_received()

    def _take_local_change(self) -> None:
        self.slices.accumulate_delta(self.local_S, self.global_S, self.local_fraction)
        # Afterwards, global_S - local_S is pending.
        self._add_sent(self.local_S)
        self._sent = None

    def _add_sent(self, local_S: Tensor) -> None:
        if self._sent is not None:
            self._path.add(self._sent, local_S, 1.0 / self.local_fraction)

    def _apply_received(self) -> None:
        self._add_received(self.global_S)
        # Only messages change entries of both models: global_S by ``outer_lr`` times the mean message of all nodes,
        # local_S by this less the own message, which it already contains.
        self._add_received(self.local_S)
        self._received = []

    def _add_received(self, target_S: Tensor) -> None:
        for updates in self._received:
            self._add_round(updates, target_S)

    def _add_round(self, updates: RoundUpdates, target_S: Tensor) -> None:
        # Updates of messages count ``outer_lr`` times, and dense updates once. All nodes add in the order of the nodes,
        # so their sums have equal bits.
        if len(updates.messages_MB):
            messages_MB = updates.messages_MB[:, : self._path.message_bytes].contiguous()
            self._path.add(messages_MB.to(target_S.device), target_S, -self._config.outer_lr / updates.num_nodes)
        for update in updates.dense:
            target_S.add_(update.to(target_S.device), alpha=-1.0 / updates.num_nodes)

    def set_pending(self, pending_S: Tensor) -> None:
        self._received, self._sent = [], None
        torch.sub(self.global_S, pending_S, out=self.local_S)

    def drop_pending(self, parameters: Collection[int]) -> None:
        self.absorb()
        global_pieces = self.slices.by_piece(self.global_S)
        for piece, view in self.slices.by_piece(self.local_S).items():
            if piece[0] in parameters:
                view.copy_(global_pieces[piece])
        self.write_model()

    def migrate_from(self, before: Self) -> None:
        before.absorb_and_write()  # indices in messages refer to the slices of ``before``
        super().migrate_from(before)
        self._exchanges = before._exchanges

    def state_dict(self, now_S: Tensor) -> dict[str, Tensor]:
        before_S, kept_S = self.global_S.cpu(), self.local_S.cpu()
        global_S, local_S = before_S, kept_S.clone()
        if self._received:
            global_S = before_S.clone()
            for updates in self._received:
                self._add_round(updates, global_S)
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
        if self._received:
            saved["messages"] = self._received[0].messages_MB[:, : self._path.message_bytes].cpu().contiguous()
        return saved

    def _written(self) -> Tensor:
        return self.slices.between(self.local_S, self.global_S, self.local_fraction)

    def _load_own(self, saved: Mapping[str, Tensor]) -> bool:
        if "own" not in saved or (self._correlation is None and saved["ahead"] != self.local_fraction):
            return False
        self._received, self._sent, self._samples = [], None, None
        self.local_fraction = float(saved["ahead"])
        self._exchanges = int(saved["exchanges"])
        if "samples" in saved and self._correlation is not None:
            self._samples = AsyncHostTensor(saved["samples"])
        if "messages" in saved:
            messages_MB, topology = saved["messages"].to(self.local_S.device), self._exchange.topology
            # The saved global weights count the messages with the ``outer_lr`` of the saved run.
            if float(saved["outer_lr"]) != self._config.outer_lr or not self._path.wrote(messages_MB):
                return False
            self._received = [Messages(topology.num_nodes, messages_MB)]
            self._sent = messages_MB[topology.node_index : topology.node_index + 1]
        self.global_S.copy_(apply_diff(saved["shared"], saved["before"]))
        self.local_S.copy_(apply_diff(saved["own"], saved["kept"]))
        return True

    def _update_local_fraction(self) -> None:
        if self._correlation is None or not self._correlation.should_sample(self._exchanges):
            return
        self.receive()
        # All nodes measure the same samples, at the same exchange.
        measured = None if self._samples is None else self._correlation.measure(self._samples)
        self._samples = None
        if measured is not None:
            self.local_fraction = measured

    def _store_received(self, job: Transfer) -> None:
        self._store_round(Messages(self._exchange.topology.num_nodes, job.payload))
        self._step_ids = AsyncHostTensor(read_step_ids(job.payload))

    def _store_round(self, updates: RoundUpdates) -> None:
        self._received.append(updates)
        samples_MB = updates.messages_MB[:, self._path.message_bytes :]
        if samples_MB.numel() and len(samples_MB) == updates.num_nodes:
            self._samples = AsyncHostTensor(samples_MB.contiguous())

    def _check_step_ids(self) -> None:
        # These messages were received before: the host need not wait for those in flight.
        step_ids = [] if self._step_ids is None else self._step_ids.read().tolist()
        self._step_ids = None
        if len(set(step_ids)) > 1:
            steps = ", ".join(
                f"node {node} in batch {step_id >> 8} with optimizer {step_id & 255}"
                for node, step_id in enumerate(step_ids)
            )
            raise RuntimeError(
                f"nodes have exchanged updates of different steps ({steps}): one node skipped a step, and its later "
                f"updates belong to other weights. In manual optimization, step on all nodes or on none: a node "
                f"without a gradient steps with zero gradients. Resume from the last checkpoint."
            )


def _move(model_S: Tensor, before_S: Tensor, now_S: Tensor) -> None:
    # Entries that were equal stay exactly equal, and where the global weights stay, the model stays.
    torch.where(now_S == before_S, model_S, now_S - (before_S - model_S), out=model_S)


def new_state(slices: Slices, exchange: Exchange, config: UpdatesConfig) -> UpdateState:
    kind = SparseUpdateState if config.path is Sparse else PendingUpdateState
    return kind(slices, exchange, config)


def unsent_of(saved: Mapping[str, Tensor]) -> Tensor:
    """Return the updates of a node that its saved global weights lack, from ``UpdateState.state_dict``."""
    if "own" in saved:
        return apply_diff(saved["shared"], saved["before"]) - saved["own"]
    return saved["pending"] + (saved["start"] - apply_diff(saved["start"], saved["now"]))


def sparse_diff(new_S: Tensor, old_S: Tensor) -> Tensor:
    """Return indices and bits, int32 or int64 [2, n], where ``old_S`` differs; or all bits, int32 [S], if smaller."""
    bits = old_S.view(torch.int32)
    (indices,) = (new_S.view(torch.int32) != bits).nonzero(as_tuple=True)
    if 2 * len(indices) >= len(bits):
        return bits
    return torch.stack([indices, bits[indices].long()]).to(torch.int32 if len(bits) < 2**31 else torch.int64)


def slice_diff(saved: Mapping[str, Any], begin: int, end: int) -> dict[str, Tensor]:
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
    """Return ``old_S`` of `sparse_diff`, a new tensor."""
    if patch.dim() == 1:
        return patch.view(torch.float32).to(new_S.device, copy=True)
    old_S, (indices, bits) = new_S.clone(), patch.to(new_S.device)
    old_S.view(torch.int32)[indices.long()] = bits.int()
    return old_S

"""Updates between elastic nodes: `LocalUpdates` with the rounds of `lightning_sparse.elastic.rounds`.

The algorithm is that of fixed nodes, with the number of nodes M of each round. If a round does not count, its sent
updates become pending again. A node that is alone in a round sends everything. Each node has its own process group.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_sparse import options
from lightning_sparse._version import __version__
from lightning_sparse.elastic.device_state import DeviceReceiver, snapshot_of
from lightning_sparse.elastic.lighthouse import Lighthouse
from lightning_sparse.elastic.rounds import Outcome, Payload, Round, RoundProtocol, from_first
from lightning_sparse.elastic.sampling import min_samples_per_round, sampler_of
from lightning_sparse.elastic.snapshots import Download, SnapshotServer
from lightning_sparse.exchange import Exchange, Transfer
from lightning_sparse.exchange.communicator import Group
from lightning_sparse.exchange.lanes import FifoLanes
from lightning_sparse.kernels.wire import nonfinite_of
from lightning_sparse.messages import SLOW_AFTER, log
from lightning_sparse.sharding import trainable_params
from lightning_sparse.topology import Topology
from lightning_sparse.updates.agreement import UpdateCorrelation
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.local import LocalUpdates, options_to_compare
from lightning_sparse.updates.optimizer_state import to_python
from lightning_sparse.updates.slices import Slices
from lightning_sparse.updates.state import SparseUpdateState

TRIES_TO_FLUSH = 3
WATCH_SECONDS = 0.05
UNREACHED_TIMEOUTS, LONGEST_WAIT_SECONDS = 4, 1800.0  # limits for a joining node
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Supported dtypes of parameters."""
WATCHED_BYTES = 1 << 30
"""Limit of the messages that an observing node stores. Beyond it, the node has missed rounds."""


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(UpdatesConfig):
    """Options of ``ElasticUpdates``, in addition to the options of `UpdatesConfig` for ``exchange="sparse"``.

    Args:
        lighthouse: Address of torchft's lighthouse, such as ``"http://host:29510"``. Default: the environment variable
            TORCHFT_LIGHTHOUSE.
        min_nodes: Smallest number of nodes that train, equal on all nodes. With fewer nodes, an exchange first waits up
            to ``timeout`` for others.
        timeout: Seconds after which a round fails because a node did not answer. The lighthouse's own
            ``--join_timeout_ms`` must be shorter.
        flush_every: Number of exchanges after which the nodes send all pending updates and wait for the result. A node
            that dies later then loses less. It costs 4 bytes per parameter and must take less than the timeout.
            Default: only a node that leaves sends everything.
    """

    lighthouse: str | None = None
    min_nodes: int = 1
    timeout: float = 30.0
    flush_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange != "sparse":
            raise ValueError(
                f"exchange={self.exchange!r} needs a fixed set of nodes. For elastic nodes, use exchange='sparse'; for "
                f"this exchange, use strategy='mstopk_local'."
            )
        options.whole(self, "min_nodes", low=1)
        options.number(self, "timeout", above=0, hint="in seconds")
        options.whole(self, "flush_every", low=1, optional=True, hint="in exchanges")


class Version(NamedTuple):
    """The version of the global weights, as a checkpoint stores it.

    Args:
        token, number: name of the weights, and the number of rounds that led to them.
        place: position up to which nodes had drawn samples, over all epochs.
        run: name of the run; empty in old checkpoints, where the token replaces it.
    """

    token: str
    number: int
    place: int = 0
    run: str = ""


class ElasticUpdates(LocalUpdates):
    """Exchanges this node's updates with the present nodes.

    The constructor of a joining node loads the parameters, buffers and optimizer state of another node. In a loop::

        updates = ElasticUpdates(model, optimizer, ElasticConfig(lighthouse=...), topology)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()
            updates.step()
            updates.serve()
        updates.finish()
        updates.end()

    Args:
        topology: topology of this node alone.
        name: name of this node in the log; default: its host name.
        version: version of the weights in the module, from a checkpoint; default: new weights.

    Attributes:
        progress: the value of ``extra`` that a peer passed to ``serve``; None if the node did not join other nodes.

    Raises:
        ValueError: if no lighthouse is given, the model or optimizer is unsupported, or this node differs from others.
    """

    kind = "elastic"
    in_step = False
    _joined = False  # this node has joined training nodes
    _begins: bool  # this node begins a run

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: ElasticConfig,
        topology: Topology,
        *,
        name: str = "",
        version: Version | None = None,
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        _check(optimizers, topology)
        self._devices, self._main = _own_group(topology), _own_group(topology)
        lighthouse = _connect(self._devices, config, name)
        host = str(from_first(self._devices, lambda: lighthouse.host if lighthouse is not None else ""))
        self._server = SnapshotServer(host)
        self.peers = RoundProtocol(
            lighthouse,
            self._devices,
            _facts(module, optimizers, config, topology),
            min_nodes=config.min_nodes,
            timeout=config.timeout,
            servers=_gather(self._devices, self._server.address),
            host=host,
        )
        self._watch = RoundObserver(self.peers)
        self._least = 0  # number of samples that the node needs for a batch
        self.progress: Any = None
        self.optimizers, self._begins = [], version is None
        try:
            super().__init__(module, optimizers, config, topology)
            # slices of devices differ in size
            self.peers.facts["sizes"] = self._from_first(lambda: list(self.peers.sizes))
            self.exchange.runner = FifoLanes()  # threads on GPUs, too, because rounds make the host wait
            if version is not None:
                self.peers.token, self.peers.number, place, run = version
                self.peers.run = run or version.token
                self.peers.assigner.start_at(place)
            self._join()
        except BaseException:
            self.end()
            raise

    def _has_others(self) -> bool:
        return True

    def _make_up(self) -> None:
        """Do nothing: a node that makes fewer steps misses rounds, and downloads the weights of other nodes."""

    def _make_state(self, slices: Slices, exchange: Exchange, config: UpdatesConfig) -> ElasticUpdateState:
        assert isinstance(config, ElasticConfig)
        return ElasticUpdateState(slices, exchange, config, self.peers)

    @property
    def _state(self) -> ElasticUpdateState:
        state = self.optimizers[0].state
        assert isinstance(state, ElasticUpdateState)
        return state

    @property
    def version(self) -> Version:
        """Version of the global weights for a checkpoint; while the module holds them, the version of these weights."""
        if self._shown:
            return self._shows
        self._stop_watching()
        self._state.receive()
        return Version(self.peers.token, self.peers.number, self.peers.assigner.reached, self.peers.run)

    # -- training ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, optimizer: Optimizer | None = None) -> None:
        """Exchange updates after a step of the optimizer.

        Raises:
            ValueError: if the other nodes refuse this node.
        """
        self._stop_watching()
        super().step(optimizer)
        if self._state.left_out:
            self._leave_out()
        if self._state.behind:
            self._catch_up()

    @torch.no_grad()
    def swap_in_global_weights(self, wait: bool = True) -> None:
        if not self._shown:
            self._shows = self.version
        super().swap_in_global_weights()

    @torch.no_grad()
    def swap_in_local_weights(self) -> None:
        """Restore this node's weights. A node that joined others drops changes from before its first step."""
        if self._shown and self.steps == 0 and self._joined:
            changed = [one.undo_changes() for one in self.optimizers]
            if any(changed):
                log.warning(
                    "a hook changed the weights before the first step of this node. The change is dropped, because the "
                    "node has joined training nodes. Set weights before fit, or on the nodes that begin a run."
                )
        super().swap_in_local_weights()

    def _settle_changes(self) -> tuple[bool, bool]:
        """Other nodes do not take part: a change is an update of this node, except before a new run begins."""
        changed = any(one.is_changed() for one in self.optimizers)
        return changed, not changed or (self.steps == 0 and self._begins)

    def shard_loader(self, loader: Any, batches: int = 1) -> None:
        """Let a loader draw the samples that are assigned to this device. Every device of the node calls it.

        It works for a DataLoader of torch with an `ElasticSampler`, and for the loaders of the bundled DataModules.
        Other loaders stay unchanged. It waits until the other nodes know how far the loader may draw.

        Args:
            batches: number of batches between two steps.

        Raises:
            ValueError: if ``batches`` is not a whole number of at least 1.
        """
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
            raise ValueError(
                f"batches={batches!r} must be the number of batches between two steps, a whole number of at least 1: "
                f"it limits the samples that this node may draw."
            )
        source = sampler_of(loader)
        if source is None:
            return
        if isinstance(loader, DataLoader):
            source.prefetch_depth = loader.num_workers * (loader.prefetch_factor or 0)
        batch_size = loader.batch_size or 1
        assigner, devices = self.peers.assigner, self._devices
        self._least = max(self._least, min_samples_per_round(loader) * devices.size)
        ahead = (1 + 2 * batches * self.config.sync_every + source.prefetch_depth) * batch_size * devices.size
        if ahead > assigner.ahead:
            assigner.ahead = ahead
            self.watch()
            self._from_first(self._watch.wait_for_a_round)
        source.set_share(partial(assigner.share, device=devices.place, devices=devices.size))

    def deal(self, loader: Any, batches: int = 1) -> None:
        """Deprecated name of `shard_loader`, until version 0.3."""
        self.shard_loader(loader, batches)

    def has_batch(self, epoch: int) -> bool:
        """Return whether the loaders passed to `shard_loader` have a batch of this epoch left for this node. Every
        device of the node calls it."""
        return bool(self._from_first(lambda: self.peers.assigner.has_left(epoch, self._least)))

    def any_device(self, *conditions: bool) -> list[bool]:
        """Return for each condition whether it holds on any device of the node. Every device of the node calls it."""
        if self._main.size == 1:
            return list(conditions)
        flags = torch.tensor(conditions, dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._main.handle)
        return [bool(each) for each in flags.tolist()]

    def watch(self) -> None:
        """Observe rounds until the next step, so that other nodes do not wait for this node, for example during a
        validation. Every device of the node calls it."""
        self._state.receive()
        self._watch.start()

    def serve(self, extra: Callable[[], Any] | None = None) -> None:
        """Offer the snapshots that joining nodes request from this node. Call it between two steps, on all devices.

        Args:
            extra: returns additional state for them, on the first device; called on all devices if a node asks.
        """
        state = self._state
        names, state.requests_for_me = [each for each in state.requests_for_me if each not in state.answered], []
        if state.open_requests is not None:
            state.answered = [each for each in state.answered if each in state.open_requests]
            self._server.keep(state.open_requests)
        if not names:
            return
        state.answered += names
        progress = None if extra is None else to_python(extra())
        head = {
            "extra": progress if self._devices.place == 0 else None,
            "version": tuple(self.version[:2]),  # the next quorum gives the place
            "run": self.peers.run,
            "history": list(self.peers.history),
        }
        with self.global_weights():
            snapshot = snapshot_of(self.optimizers[0], self.module, self.names, head)
        self._server.offer(names, snapshot)

    def finish(self) -> None:
        """Send all pending updates. Every device of the node calls it."""
        self.swap_in_local_weights()
        self._stop_watching()
        self._all_sent = False  # rounds may have failed
        super().finish()

    def end(self) -> None:
        """Leave the other nodes."""
        self._watch.stop()
        if self.optimizers:
            self.exchange.runner.drain()
            super().end()
        self.peers.leave()
        self._server.close()

    @property
    def saves(self) -> bool:
        return False

    def gauges(self) -> dict[str, float]:
        """Return the `RoundStats` so far."""
        stats = self.peers.stats
        counts = {"nodes": stats.nodes, "rounds_lost": stats.lost, "rounds_left_out": stats.left_out}
        return {**super().gauges(), **counts, "waited_s": stats.waited_s, "healing_s": stats.healing_s}

    # -- joining -------------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Load the weights of the present nodes, if there are any."""
        began = self.peers.token
        self.peers.ask()
        self._watch.start()
        if not self._load_snapshot(pending_S=None):
            log.info("this node starts from %s", "its checkpoint" if began else "its own weights: it is the first node")

    def _catch_up(self) -> None:
        """Load the global weights after rounds that this node has missed. Its unsent updates stay pending."""
        log.info("this node has missed rounds after round %d: it loads the weights of a peer", self.peers.number)
        self._state.absorb()
        pending_S = self._state.pending_S
        self.peers.ask()
        self._watch.start()
        if not self._load_snapshot(pending_S):  # the other nodes have left: continue with these weights
            self._state.go_on(pending_S, *self.peers.reconcile())
            self.optimizers[0].gather()
        self._stop_watching()

    def _leave_out(self) -> None:
        """Continue from the global weights, without updates that are not finite."""
        self.log_once(
            "updates of this node are not finite (NaN or infinity). The other nodes continue without them. This node "
            "continues from the global weights, and resets optimizer state that is not finite. "
            "If comm/rounds_left_out grows, lower the learning rate, or check for faulty memory.",
            logging.WARNING,
        )
        self._state.drop()
        for state in self.optimizers[0].optimizer.state.values():
            tensors = [each for each in state.values() if isinstance(each, Tensor)]
            if not all(bool(each.isfinite().all()) for each in tensors):
                for each in tensors:
                    each.zero_()
        self.optimizers[0].gather()

    def _load_snapshot(self, pending_S: Tensor | None) -> bool:
        """Load a peer's snapshot and apply the rounds since. Return False if the next round changes this node's own
        weights."""
        while True:
            began = time.monotonic()
            received = self._download(joins=pending_S is None)
            self.peers.stats.healing_s += time.monotonic() - began
            if received is None:
                self.peers.wants = ""
                return False
            self._watch.stop()
            rounds = self.peers.since(received.head["version"][0])
            if rounds is not None:
                self._install(received, rounds, pending_S)
                self._watch.start()
                return True
            self.peers.ask()
            self._watch.start()

    def _download(self, *, joins: bool) -> DeviceReceiver | None:
        """Download the requested snapshot. Return None once this node needs none. Each device downloads from its
        counterpart.

        Args:
            joins: if True, download all tensors; otherwise only the weights.

        Raises:
            RuntimeError: if no node provides it in time.
        """
        new = partial(DeviceReceiver, self.optimizers[0], self.module, self.names, joins=joins)
        wait = Wait()
        download: Download[DeviceReceiver] | None = None
        while True:
            needs_none, source, name = self._from_first(self._find_source)
            if needs_none:
                return None
            address = source[self._devices.place] if source else ""
            if address and (download is None or (download.address, download.name) != (address, name)):
                download = Download(address, name, new)
            reports = _gather(self._main, self._advance(wait, download))
            failed = next((each.error for each in reports if each.error), "")
            if failed:
                raise RuntimeError(failed)
            if download is not None and all(each.version == reports[0].version is not None for each in reports):
                return download.receiver
            time.sleep(WATCH_SECONDS)

    def _find_source(self) -> tuple[bool, tuple[str, ...], str]:
        """Return whether the next round changes this node's own weights, the addresses of the snapshots, and their
        name."""
        self._watch.check()
        return self.peers.in_step, self.peers.sources, self.peers.wants

    def _advance(self, wait: Wait, download: Download[DeviceReceiver] | None) -> DownloadReport:
        try:
            if download is not None and download.advance(1.0, self.config.timeout):
                return DownloadReport(version=tuple(download.receiver.head["version"]))
            wait.check(download, self.config.timeout)
        except RuntimeError as error:
            return DownloadReport(error=str(error))
        return DownloadReport()

    @torch.no_grad()
    def _install(self, received: DeviceReceiver, rounds: list[Round], pending_S: Tensor | None) -> None:
        one, state, head = self.optimizers[0], self._state, received.head
        if pending_S is None:
            received.install()
            self.progress = self._from_first(lambda: head["extra"])
            self._joined, self._begins = True, False
        token, number = (rounds[-1].token, rounds[-1].number) if rounds else head["version"]
        self.peers.run = head["run"]
        history = [*head["history"], *(each.token for each in rounds)]
        returned, counted = self.peers.set_version(token, number, history)
        state.start_from(received.weights_S, rounds, pending_S, returned, counted)
        one.gather()

    def _stop_watching(self) -> None:
        """Let the next exchange add the rounds that this node has only observed."""
        if self._watch.running:
            self._watch.stop()
            self._watch.check()
            self._state.arrive(self._watch.drain())

    def _from_first(self, ask: Callable[[], Any]) -> Any:
        return from_first(self._main, ask)


class DownloadReport(NamedTuple):
    """The state of a device's download.

    Args:
        version: version of a complete snapshot.
        error: error message of a failed download; empty otherwise.
    """

    version: tuple[Any, ...] | None = None
    error: str = ""


class Wait:
    """Limits and logs the wait of a joining node."""

    def __init__(self) -> None:
        self._began = self._said = time.monotonic()

    def check(self, download: Download[Any] | None, timeout: float) -> None:
        """Log the wait every 10 s.

        Args:
            download: None while no node offers weights.

        Raises:
            RuntimeError: if the wait has taken too long.
        """
        now = time.monotonic()
        cause = "no node offers its weights"
        if download is not None:
            cause = f"no weights from the node at {download.address}: {download.problem}"
        unreached = download is not None and now - download.heard > UNREACHED_TIMEOUTS * max(timeout, 10.0)
        since = max(self._began, 0.0 if download is None else download.advanced)
        if unreached or now - since > LONGEST_WAIT_SECONDS:
            raise RuntimeError(
                f"this node could not join the others within {now - self._began:.0f} s: {cause}. Make sure that nodes "
                f"reach each other on all ports, then start this node again."
            )
        if now - self._said > SLOW_AFTER.total_seconds():
            self._said = now
            log.warning("this node has waited %.0f s to join the other nodes: %s", now - self._began, cause)


class RoundObserver:
    """Observes rounds in a thread, so that other nodes do not wait for this node."""

    def __init__(self, rounds: RoundProtocol) -> None:
        self._peers = rounds
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._seen = Outcome()
        self._begun = self._ended = 0  # number of rounds

    @property
    def running(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="lightning_sparse", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def wait_for_a_round(self) -> None:
        """Wait for the end of a round that begins from now on, unless the thread ends."""
        last = self._begun
        while self._ended <= last and self._thread is not None and self._thread.is_alive():
            time.sleep(WATCH_SECONDS)

    def check(self) -> None:
        """Raise the error that ended the thread, if any."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def drain(self) -> Outcome:
        seen, self._seen = self._seen, Outcome()
        return seen

    def _run(self) -> None:
        kept = 0
        try:
            while self._peers.first_device_wants(not self._stopped.is_set() and kept < WATCHED_BYTES):
                self._begun += 1
                with torch.no_grad():
                    outcome = self._peers.round()
                self._ended += 1
                kept += sum(each.nbytes for round_ in outcome.rounds for each in (round_.messages_MB, *round_.dense))
                self._seen.rounds += outcome.rounds
                self._seen.returned += outcome.returned
                self._seen.requests_for_me += outcome.requests_for_me
        except BaseException as error:
            self._error = error


class ElasticUpdateState(SparseUpdateState):
    """The state of one device of an elastic node.

    Attributes:
        alone: no other node took part in the last round.
        behind: the global weights have moved on without this node.
        left_out: updates of this node were not finite, and so not sent.
        open_requests: names of the snapshots that nodes request.
        requests_for_me: names of snapshots that other nodes request from this node.
        answered: names of requested snapshots that this node has served.
    """

    def __init__(self, slices: Slices, exchange: Exchange, config: ElasticConfig, peers: RoundProtocol) -> None:
        super().__init__(slices, exchange, config)
        if slices.numel == 0:
            raise ValueError(
                "this device has no parameters to exchange, because the model is too small. Use fewer devices per node."
            )
        self._peers, self._flush_every = peers, config.flush_every
        self.alone = self.behind = self.left_out = False
        self.open_requests: list[str] | None = None
        self.requests_for_me: list[str] = []
        self.answered: list[str] = []
        self._returned: list[Tensor] = []  # messages or updates of this node that no node counted
        self._num_nodes, self._changed = 0, False  # M of the last round, and whether it differed from the one before
        self._number = self._seen = 0  # of the last round, and of the last round before the last exchange
        sample_bytes = 0
        if config.measures_ahead(3):
            self._correlation, self.local_fraction = UpdateCorrelation(slices.numel), 1.0
            sample_bytes = self._correlation.sample_bytes
        peers.fit(self._path.message_bytes, sample_bytes, slices.numel)

    def exchange_step(self, step_id: int = 0) -> None:
        every, before, self._seen = self._flush_every, self._seen, self._number
        # By the number of rounds, so that all nodes flush in the same round.
        due = every is not None and self._number // every > before // every
        if due or (self.alone and not (self._received or self._returned)):
            self._flush()
        else:
            super().exchange_step(step_id)

    def may_settle(self, since: int) -> bool:
        return True

    def flush(self) -> None:
        """Send all pending updates to the present nodes. If rounds fail, some updates stay pending."""
        for _ in range(TRIES_TO_FLUSH):
            self._peers.try_again()
            if self._flush(leaves=True):
                return
            if self.left_out:
                self.drop()
                return
        norm = torch.linalg.vector_norm(self.pending_S).item()
        log.warning("updates of norm %.3g are not sent: no round counted in %d tries", norm, TRIES_TO_FLUSH)

    def _flush(self, leaves: bool = False) -> bool:
        self.absorb()
        pending_S = self.pending_S
        self.local_S.add_(pending_S)
        outcome = self._peers.round(Payload(pending_S, is_last=leaves), finite=bool(pending_S.isfinite().all()))
        self._record_outcome(outcome, pending_S.nbytes)
        self._apply_received()
        self.write_model()
        return not outcome.returned and self._peers.settled

    def drop(self) -> None:
        """Continue from the global weights without pending updates."""
        self.absorb()
        self.left_out = False
        self.set_pending(torch.zeros_like(self.global_S))
        self.write_model()

    def start_from(
        self,
        weights_S: Tensor,
        rounds: Sequence[Round],
        pending_S: Tensor | None,
        returned: Sequence[Tensor],
        counted: Sequence[Tensor],
    ) -> None:
        """Continue from global weights plus later rounds. See `go_on` for the other arguments."""
        self.receive()
        self._samples = None
        self.global_S.copy_(weights_S)
        for each in rounds:
            self._add_round(each, self.global_S)
        self.go_on(torch.zeros_like(self.global_S) if pending_S is None else pending_S, returned, counted)

    def go_on(self, pending_S: Tensor, returned: Sequence[Tensor], counted: Sequence[Tensor]) -> None:
        """Continue from ``global_S``, and write this node's model into the parameters.

        Args:
            returned: sent tensors that no node counted; they become pending, too.
            counted: sent tensors in ``pending_S`` that the global weights contain already.
        """
        self.behind = self.alone = False
        self._num_nodes = 0  # others have counted without this node
        self._number = self._seen = self._peers.number
        self.set_pending(pending_S)
        self._return_unsent(returned, self.local_S)
        self._return_unsent(counted, self.local_S, -1.0)
        self.write_model()

    def arrive(self, seen: Outcome) -> None:
        """Let the next exchange add rounds that this node has only observed."""
        self.requests_for_me += seen.requests_for_me
        if seen.rounds or seen.returned:
            self.receive()
            self._num_nodes = 0  # others have counted without this node
            self._received += seen.rounds
            self._returned += seen.returned

    @property
    def pending_S(self) -> Tensor:
        if not self._returned:
            return super().pending_S
        local_S = self.local_S.clone()
        self._add_sent(local_S)
        self._return_unsent(self._returned, local_S)
        return self.global_S - local_S

    def set_pending(self, pending_S: Tensor) -> None:
        super().set_pending(pending_S)
        self._returned = []

    def migrate_from(self, before: Any) -> None:
        raise ValueError(
            "parameters were added to an optimizer or unfrozen during the run, and joining nodes would not know them. "
            "Give the optimizer all parameters at the start, unfrozen, or use strategy='mstopk_local'."
        )

    def _job(self, transfer: Transfer) -> RoundJob:
        return RoundJob(transfer, self._peers, self._exchanges)

    def _store_received(self, job: RoundJob) -> None:  # type: ignore[override]
        rounds = job.outcome.rounds
        self._record_outcome(job.outcome, rounds[-1].messages_MB.shape[-1] if rounds else 0)

    def _record_outcome(self, outcome: Outcome, own_bytes: int) -> None:
        """Store the updates of a round, this node's included, until they are added."""
        self.alone, self.behind, self.open_requests = outcome.alone, outcome.behind, outcome.open_requests
        self.left_out |= outcome.left_out
        self.requests_for_me += outcome.requests_for_me
        self._returned += outcome.returned
        if not outcome.rounds:
            return
        self._received += outcome.rounds[:-1]
        last = outcome.rounds[-1]
        self._store_round(last)
        self._number = last.number
        nbytes = last.messages_MB.nbytes + sum(each.nbytes for each in last.dense)
        self._exchange.stats.count_bytes(nbytes if outcome.returned else nbytes - own_bytes)
        changed = last.num_nodes != self._num_nodes
        if changed:
            self._num_nodes, self._exchanges = last.num_nodes, 0  # sample often after a change
        elif not self._changed:  # a round that began before the change counts from before
            self._exchanges = max(self._exchanges, outcome.exchanges)
        self._changed = changed

    def _update_local_fraction(self) -> None:
        if self._correlation is not None and self._num_nodes and not self._config.measures_ahead(self._num_nodes):
            self.local_fraction, self._samples = self._config.ahead(self._num_nodes), None
        else:
            super()._update_local_fraction()

    def _apply_received(self) -> None:
        super()._apply_received()
        self._return_unsent(self._returned, self.local_S)
        self._returned = []

    def _return_unsent(self, returned: Sequence[Tensor], local_S: Tensor, times: float = 1.0) -> None:
        """Make sent messages or updates pending again, in ``local_S``."""
        for each in returned:
            if each.dtype == torch.uint8:
                self._path.add(each[: self._path.message_bytes].view(1, -1).to(local_S.device), local_S, -times)
            else:
                local_S.sub_(each, alpha=times)


class RoundJob:
    """The job of one round.

    Attributes:
        outcome: of the round, after ``transfer``.
    """

    outcome: Outcome

    def __init__(self, transfer: Transfer, peers: RoundProtocol, exchanges: int) -> None:
        self._transfer, self._peers, self._exchanges = transfer, peers, exchanges

    def select(self) -> Sequence[Tensor]:
        return self._transfer.tensors

    def transfer(self) -> Sequence[Tensor]:
        message_B = self._transfer.payload
        finite = not nonfinite_of(message_B)
        self.outcome = self._peers.round(Payload(message_B, self._exchanges), finite=finite)
        return self._transfer.tensors

    def apply(self) -> Sequence[Tensor]:
        return ()


def _own_group(topology: Topology) -> Group:
    """Return a new group of the node's devices. Each thread needs its own group."""
    ranks = tuple(range(topology.world_size))
    handle = dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None
    return Group(ranks, topology.rank, handle if isinstance(handle, dist.ProcessGroup) else None)


def _gather(devices: Group, value: Any) -> list[Any]:
    """Return the values of all devices of the node. A collective."""
    values: list[Any] = [value] * devices.size
    if devices.size > 1:
        dist.all_gather_object(values, value, group=devices.handle)
    return values


def _connect(devices: Group, config: ElasticConfig, name: str) -> Lighthouse | None:
    """Connect to the lighthouse, on the first device of the node. All devices raise its error."""
    connected: list[Lighthouse] = []

    def connect() -> None:
        connected.append(Lighthouse(config.lighthouse, name or socket.gethostname(), config.timeout))

    from_first(devices, connect)
    return connected[0] if connected else None


def _facts(
    module: nn.Module, optimizers: Sequence[Optimizer], config: ElasticConfig, topology: Topology
) -> dict[str, Any]:
    names = {id(p): each for each, p in module.named_parameters()}
    facts = options_to_compare(module, names, optimizers, config)
    facts = {name: value for name, value in facts.items() if name not in ("lighthouse", "timeout")}
    facts |= {"lightning_sparse": __version__, "optimizer": type(optimizers[0]).__name__}
    return {**facts, "devices": topology.world_size}


def _check(optimizers: Sequence[Optimizer], topology: Topology) -> None:
    if topology.num_nodes != 1:
        raise ValueError(
            f"num_nodes={topology.num_nodes}: each elastic node is its own process group. Start each node alone, with "
            f"num_nodes=1."
        )
    if len(optimizers) != 1:
        raise ValueError(
            f"{len(optimizers)} optimizers: elastic nodes exchange the updates of one. Use one optimizer, or "
            f"strategy='mstopk_local'."
        )
    odd = sorted({str(p.dtype) for p in trainable_params(optimizers[0]) if p.dtype not in DTYPES})
    if odd:
        raise ValueError(
            f"parameters have dtype {', '.join(odd)}: elastic nodes support only float32, bfloat16 and "
            f"float16. Convert the model, for example with model.float()."
        )

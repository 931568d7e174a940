"""Updates between elastic nodes: `LocalUpdates` with the rounds of `lightning_sparse.elastic.rounds`.

The algorithm is the same as for fixed nodes, with the M of each round. If a round does not count, its sent updates are
pending again. A node that is alone in a round sends everything. Each node has its own process group of its devices.
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
UNREACHED_TIMEOUTS, LONGEST_WAIT_SECONDS = 4, 1800.0  # of a node that joins
WATCHED_BYTES = 1 << 30
"""Of messages that a node keeps while it does not train; with more it has missed rounds."""


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
                f"exchange={self.exchange!r} needs nodes that stay: between nodes that come and go use "
                f"exchange='sparse', or strategy='mstopk_local'."
            )
        options.whole(self, "min_nodes", low=1)
        options.number(self, "timeout", above=0, hint="in seconds")
        options.whole(self, "flush_every", low=1, optional=True, hint="in exchanges")


class Version(NamedTuple):
    """What the global weights are, as a checkpoint has it.

    Args:
        token, number: their name, and the rounds that led to them.
        place: of samples, up to which nodes had drawn; those of all epochs stand in one line.
        run: the name of their run; empty in old checkpoints, where the token replaces it.
    """

    token: str
    number: int
    place: int = 0
    run: str = ""


class ElasticUpdates(LocalUpdates):
    """Exchanges the updates of this node with the present nodes.

    A node that joins has the parameters, buffers and optimizer state of another one when this returns. In a loop::

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
        topology: of this node alone.
        name: of this node, for the log; default: its host.
        version: of the global weights that the module holds, as ``version`` was when they were saved; default: they
            are new.

    Attributes:
        snapshot: "weights", "optimizer" and "extra" of the peer; None for a node that did not join others.

    Raises:
        ValueError: if no lighthouse is given, the model or optimizer is unsupported, or this node differs from others.
    """

    kind = "elastic"
    in_step = False
    _joined = False  # whether this node joined nodes that train
    _begins: bool  # whether this node begins a run

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
        self._devices = _own_group(topology)
        lighthouse = _connect(self._devices, config, name)
        self._server = SnapshotServer(lighthouse.host) if lighthouse is not None else None
        self.peers = RoundProtocol(
            lighthouse,
            self._devices,
            _facts(module, optimizers, config, topology),
            min_nodes=config.min_nodes,
            timeout=config.timeout,
            server=self._server.address if self._server is not None else "",
            host=lighthouse.host if lighthouse is not None else "",
        )
        self._watch = RoundObserver(self.peers)
        self._least = 0  # samples that the node needs for a batch
        self.snapshot: Any = None
        self.optimizers, self._begins = [], version is None
        try:
            super().__init__(module, optimizers, config, topology)
            self.peers.facts["sizes"] = self._from_first(lambda: list(self.peers.sizes))  # devices differ in theirs
            self.exchange.runner = FifoLanes()  # threads also for GPUs: the host waits for other nodes there
            if version is not None:
                self.peers.token, self.peers.number, place, run = version
                self.peers.run = run or version.token
                self.peers.deals.begin(place)
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
        """Of the global weights, for a checkpoint: while the module holds them, of those."""
        if self._shown:
            return self._shows
        self._stop_watching()
        self._state.receive()
        return Version(self.peers.token, self.peers.number, self.peers.deals.reached, self.peers.run)

    # -- training ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, optimizer: Optimizer | None = None) -> None:
        """After a step of the optimizer.

        Raises:
            ValueError: when the other nodes refuse this one.
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
        """Put this node's own weights back. Changes before the first step are lost on a node that joined others: it
        goes on from their weights."""
        if self._shown and self.steps == 0 and self._joined:
            changed = [one.undo_changes() for one in self.optimizers]
            if any(changed):
                log.warning(
                    "a hook changed the weights before the first step of this node, but the node has joined nodes that "
                    "train: their weights stay. Set weights before the fit, or in the nodes that begin a run."
                )
        super().swap_in_local_weights()

    def _settle_changes(self) -> tuple[bool, bool]:
        """Other nodes do not take part: a change is an update of this node, except before a new run begins."""
        changed = any(one.is_changed() for one in self.optimizers)
        return changed, not changed or (self.steps == 0 and self._begins)

    def shard_loader(self, loader: Any, batches: int = 1) -> None:
        """Have a loader draw what is dealt to this device: one of torch with an `ElasticSampler`, or that of a bundled
        DataModule. Others are left as they are. Every device of the node calls it, and waits until other nodes know how
        far the loader may draw.

        Args:
            batches: between two steps.

        Raises:
            ValueError: for another number of batches than a whole one, at least 1.
        """
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
            raise ValueError(
                f"batches={batches!r} must be a whole number of batches between two steps, at least 1: other nodes are "
                f"told how far this one may draw."
            )
        dealt = sampler_of(loader)
        if dealt is None:
            return
        if isinstance(loader, DataLoader):
            dealt.prefetch_depth = loader.num_workers * (loader.prefetch_factor or 0)
        batch_size = loader.batch_size or 1
        deals, devices = self.peers.deals, self._devices
        self._least = max(self._least, min_samples_per_round(loader) * devices.size)
        ahead = (1 + 2 * batches * self.config.sync_every + dealt.prefetch_depth) * batch_size * devices.size
        if ahead > deals.ahead:
            deals.ahead = ahead
            self.watch()
            self._from_first(self._watch.wait_for_a_round)
        dealt.deal(partial(deals.share, device=devices.place, devices=devices.size))

    def deal(self, loader: Any, batches: int = 1) -> None:
        """Deprecated name of `shard_loader`, until version 0.3."""
        self.shard_loader(loader, batches)

    def has_batch(self, epoch: int) -> bool:
        """Return whether the loaders passed to `shard_loader` have a batch of this epoch left for this node. Every
        device of the node calls it."""
        return bool(self._from_first(lambda: self.peers.deals.leaves(epoch, self._least)))

    def watch(self) -> None:
        """Observe rounds until the next step, so that other nodes do not wait for this one: before a validation, say.
        Every device of the node calls it."""
        self._state.receive()
        self._watch.start()

    def serve(self, extra: Callable[[], Any] | None = None) -> None:
        """Give nodes that join what they ask this one for. Call it between two steps, on all devices of the node.

        Args:
            extra: returns what else they are to have, on the first device; all devices call it if a node asks.
        """
        state = self._state
        names, state.requests_for_me = [each for each in state.requests_for_me if each not in state.answered], []
        if state.open_requests is not None:
            state.answered = [each for each in state.answered if each in state.open_requests]
            if self._server is not None:
                self._server.keep(state.open_requests)
        if not names:
            return
        state.answered += names
        given = {
            "optimizer": to_python(self.optimizers[0].division.optimizer_state()),
            "extra": None if extra is None else to_python(extra()),
            "version": tuple(self.version[:2]),  # where samples are dealt the next quorum says
            "run": self.peers.run,
            "history": list(self.peers.history),
        }
        with self.global_weights():
            if self._server is not None:
                self._server.offer(names, {**given, "weights": self.module.state_dict()})

    def finish(self) -> None:
        """Send everything that is pending. Every device of the node calls it."""
        self.swap_in_local_weights()
        self._stop_watching()
        self._all_sent = False  # not all of it is, where rounds failed
        super().finish()

    def end(self) -> None:
        """Leave the other nodes."""
        self._watch.stop()
        if self.optimizers:
            self.exchange.runner.drain()
            super().end()
        self.peers.leave()
        if self._server is not None:
            self._server.close()
            self._server = None

    @property
    def saves(self) -> bool:
        """Nothing beside the main file."""
        return False

    def gauges(self) -> dict[str, float]:
        """Return, of the rounds so far, what `RoundStats` has."""
        stats = self.peers.stats
        told = {"nodes": stats.nodes, "rounds_lost": stats.lost, "rounds_left_out": stats.left_out}
        return {**super().gauges(), **told, "waited_s": stats.waited_s, "healing_s": stats.healing_s}

    # -- joining -------------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Take up the weights of the nodes that are there; be the first if none is."""
        began = self.peers.token
        self.peers.ask()
        self._watch.start()
        if not self._load_snapshot(pending_S=None):
            log.info("this node goes on from %s", "its checkpoint" if began else "its own weights: it is the first one")

    def _catch_up(self) -> None:
        """Load the global weights after rounds that this node has missed. Its unsent updates stay pending."""
        log.info("this node has missed rounds after %d, and takes up the weights of a peer", self.peers.number)
        self._state.absorb()
        pending_S = self._state.pending_S
        self.peers.ask()
        self._watch.start()
        if not self._load_snapshot(pending_S):  # the other nodes are gone: continue with these weights
            self._state.go_on(pending_S, *self.peers.reconcile())
            self.optimizers[0].gather()
        self._stop_watching()

    def _leave_out(self) -> None:
        """Continue from the global weights, without updates that are not finite."""
        self.log_once(
            "updates of this node are not finite (NaN or infinity): they are left out, and the other nodes continue "
            "without them. This node continues from the global weights, and resets optimizer state that is not finite. "
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
        """Take up a peer's snapshot and the rounds since; False if the next round changes this node's own weights."""
        while True:
            began = time.monotonic()
            given = self._from_first(self._fetch)
            self.peers.stats.healing_s += time.monotonic() - began
            if given is None:
                self.peers.wants = ""
                return False
            self._watch.stop()
            rounds = self.peers.since(given["version"][0])
            if rounds is not None:
                self._install(given, rounds, pending_S)
                self._watch.start()
                return True
            self.peers.ask()
            self._watch.start()

    def _fetch(self) -> Any:
        """Return the snapshot that this node asks for, or None once it needs none.

        Raises:
            RuntimeError: if no node provides it in time.
        """
        wait, download = Wait(), Download("", "")
        while True:
            self._watch.check()
            if self.peers.in_step:
                return None
            if self.peers.source and (download.address, download.name) != (self.peers.source, self.peers.wants):
                download = Download(self.peers.source, self.peers.wants)
            given = download.take(1.0, self.config.timeout) if self.peers.source else None
            if given is not None:
                return given
            wait.check(download if self.peers.source else None, self.config.timeout)
            time.sleep(WATCH_SECONDS)

    @torch.no_grad()
    def _install(self, given: dict[str, Any], rounds: list[Round], pending_S: Tensor | None) -> None:
        one, state = self.optimizers[0], self._state
        self.module.load_state_dict(given["weights"])
        if pending_S is None:
            one.optimizer.load_state_dict(given["optimizer"])
            self.snapshot = given
            self._joined, self._begins = True, False
        token, number = (rounds[-1].token, rounds[-1].number) if rounds else given["version"]
        self.peers.run = given["run"]
        history = [*given["history"], *(each.token for each in rounds)]
        returned, had = self.peers.set_version(token, number, history)
        state.start_from(rounds, pending_S, returned, had)
        one.gather()

    def _stop_watching(self) -> None:
        """Exchange from now on; what came while this node watched arrives with the next exchange."""
        if self._watch.running:
            self._watch.stop()
            self._watch.check()
            self._state.arrive(self._watch.drain())

    def _from_first(self, ask: Callable[[], Any]) -> Any:
        """Beside the rounds, which have a group of their own."""
        return from_first(Group(self._devices.ranks, self._devices.place), ask)


class Wait:
    """The wait of a node that joins others. Its cause is logged, and its duration is limited."""

    def __init__(self) -> None:
        self._began = self._said = time.monotonic()

    def check(self, download: Download | None, timeout: float) -> None:
        """Log the wait every 10 s.

        Args:
            download: None while no node offers weights.

        Raises:
            RuntimeError: if the wait has taken too long.
        """
        now = time.monotonic()
        cause = "no quorum of the lighthouse has a node that offers its weights"
        if download is not None:
            cause = f"no weights from the node at {download.address}: {download.problem}"
        unreached = download is not None and now - download.heard > UNREACHED_TIMEOUTS * max(timeout, 10.0)
        since = max(self._began, 0.0 if download is None else download.advanced)
        if unreached or now - since > LONGEST_WAIT_SECONDS:
            raise RuntimeError(
                f"this node gave up joining the others after {now - self._began:.0f} s: {cause}. Make sure that nodes "
                f"reach one another on all ports, then start this node again."
            )
        if now - self._said > SLOW_AFTER.total_seconds():
            self._said = now
            log.warning("joining the other nodes has taken %.0f s so far: %s", now - self._began, cause)


class RoundObserver:
    """Observes rounds in a thread, so that the others do not wait for this node."""

    def __init__(self, rounds: RoundProtocol) -> None:
        self._peers = rounds
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._seen = Outcome()
        self._begun = self._ended = 0  # rounds

    @property
    def running(self) -> bool:
        """Whether it observes."""
        return self._thread is not None

    def start(self) -> None:
        """Begin."""
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="lightning_sparse", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """After the round under way."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def wait_for_a_round(self) -> None:
        """Wait for one that begins from now on; not where none does."""
        last = self._begun
        while self._ended <= last and self._thread is not None and self._thread.is_alive():
            time.sleep(WATCH_SECONDS)

    def check(self) -> None:
        """Raise the error that ended it, if one did."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def drain(self) -> Outcome:
        """Return what it has seen."""
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
                kept += sum(each.nbytes for found in outcome.rounds for each in (found.messages_MB, *found.dense))
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
            raise ValueError("a device has no parameters to exchange: use fewer devices for a model so small.")
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
        # by the number of a round: all nodes flush in the same one
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
        self, rounds: Sequence[Round], pending_S: Tensor | None, returned: Sequence[Tensor], counted: Sequence[Tensor]
    ) -> None:
        """Continue from the weights in the parameters plus later rounds. See `go_on` for the other arguments."""
        self.receive()
        self._samples = None
        self.slices.copy_to(self.global_S)
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
        local_S = self.local_S.clone()
        self._add_sent(local_S)
        self._return_unsent(self._returned, local_S)
        return self.global_S - local_S

    def set_pending(self, pending_S: Tensor) -> None:
        super().set_pending(pending_S)
        self._returned = []

    def migrate_from(self, before: Any) -> None:
        raise ValueError(
            "parameters were added to an optimizer, or are frozen no more, in the middle of a run, and nodes that join "
            "would not know: give the optimizer all parameters at the start, none of them frozen that will be trained, "
            "or use strategy='mstopk_local'."
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
            self._num_nodes, self._exchanges = last.num_nodes, 0  # samples come often after a change
        elif not self._changed:  # then this round had begun before, and counts from before
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
    """The node's devices, for the thread of the exchange alone."""
    ranks = tuple(range(topology.world_size))
    handle = dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None
    return Group(ranks, topology.rank, handle if isinstance(handle, dist.ProcessGroup) else None)


def _connect(devices: Group, config: ElasticConfig, name: str) -> Lighthouse | None:
    """The lighthouse, on the first device of the node. All devices raise its error."""
    found: list[Lighthouse] = []

    def connect() -> None:
        found.append(Lighthouse(config.lighthouse, name or socket.gethostname(), config.timeout))

    from_first(devices, connect)
    return found[0] if found else None


def _facts(
    module: nn.Module, optimizers: Sequence[Optimizer], config: ElasticConfig, topology: Topology
) -> dict[str, Any]:
    """What must be the same on all nodes."""
    names = {id(p): each for each, p in module.named_parameters()}
    facts = options_to_compare(module, names, optimizers, config)
    facts = {name: value for name, value in facts.items() if name not in ("lighthouse", "timeout")}
    facts |= {"lightning_sparse": __version__, "optimizer": type(optimizers[0]).__name__}
    return {**facts, "devices": topology.world_size}


def _check(optimizers: Sequence[Optimizer], topology: Topology) -> None:
    if topology.num_nodes != 1:
        raise ValueError(
            f"the world has {topology.num_nodes} nodes, and each node that may come and go is a world of its own: "
            f"start it alone, with num_nodes=1."
        )
    if len(optimizers) != 1:
        raise ValueError(f"{len(optimizers)} optimizers: one is exchanged between nodes that come and go.")
    odd = sorted({str(p.dtype) for p in trainable_params(optimizers[0]) if p.dtype != torch.float32})
    if odd:
        raise ValueError(
            f"parameters of {', '.join(odd)}: a node that joins receives the weights as the module holds them, so hold "
            f"them in float32 (precision='bf16-mixed' computes in bfloat16)."
        )

"""Updates between elastic nodes: `LocalUpdates` with the rounds of `lightning_sparse.elastic.rounds`.

The algorithm is that of fixed nodes, with the number of nodes M of each round. Each node has its own process group.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from lightning_sparse.agree import fingerprint, gather
from lightning_sparse.elastic.device_state import DeviceReceiver, OtherParameters, snapshot_of
from lightning_sparse.elastic.lighthouse import Lighthouse
from lightning_sparse.elastic.observer import WATCH_SECONDS, RoundObserver
from lightning_sparse.elastic.rounds import Layout, Round, RoundProtocol, from_first
from lightning_sparse.elastic.sampling import min_samples_per_round, name_of, sampler_of
from lightning_sparse.elastic.snapshots import Download, SnapshotServer
from lightning_sparse.elastic.state import ElasticUpdateState, OptimizerRounds, sizes_of
from lightning_sparse.elastic.wait import UNANSWERED, Wait
from lightning_sparse.exchange import Exchange
from lightning_sparse.exchange.communicator import Group
from lightning_sparse.exchange.lanes import FifoLanes
from lightning_sparse.messages import log
from lightning_sparse.sharding import local_of, parameter_names, parameters_of, trainable_params
from lightning_sparse.topology import Topology
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.local import LocalUpdates, options_to_compare
from lightning_sparse.updates.optimizer import LocalOptimizer
from lightning_sparse.updates.optimizer_state import to_python
from lightning_sparse.updates.slices import Slices
from lightning_sparse.updates.state import UpdateState

CHANGE_TIMEOUTS = 10
"""Timeouts that a node with added or unfrozen parameters waits for the same change of other nodes."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Supported dtypes of parameters."""


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(UpdatesConfig):
    """Options of ``ElasticUpdates``, in addition to the options of `UpdatesConfig` for ``exchange="sparse"``.

    Args:
        lighthouse: Address of torchft's lighthouse, such as ``"http://host:29510"``. Default: the environment variable
            TORCHFT_LIGHTHOUSE.
        min_nodes: Smallest number of nodes that train, equal on all nodes. With fewer nodes, an exchange first waits up
            to ``timeout`` for others.
        timeout: Seconds after which a round fails because a node did not answer. The lighthouse's own
            ``--join_timeout_ms`` must be shorter. A node that hangs while others connect to it costs them five
            timeouts.
        flush_every: Number of exchanges after which the nodes send all pending updates and wait for the result. A node
            that dies later then loses less. It costs 4 bytes per parameter. Default: only a node that leaves sends
            everything.
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
        options.number(self, "timeout", above=0, hint="it is a number of seconds")
        options.whole(self, "flush_every", low=1, optional=True, hint="it is a number of exchanges")


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

    The constructor of a joining node loads the parameters, buffers and optimizer states of another node. Several
    optimizers exchange their updates in common rounds. In a loop::

        updates = ElasticUpdates(model, optimizer, ElasticConfig(lighthouse=...), topology)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()
            updates.step()
            updates.serve()
        updates.finish()
        updates.close()

    Args:
        topology: topology of this node alone.
        name: name of this node in the log; default: its host name.
        version: version of the weights in the module, from a checkpoint; default: new weights.

    Attributes:
        shown_version: version of the weights that the module held last for hooks and checkpoints.
        progress: the value of ``extra`` that a peer passed to ``serve``; None if the node did not join other nodes.

    Raises:
        ValueError: if no lighthouse is given, the model or optimizer is unsupported, or this node differs from others.
    """

    kind = "elastic"
    in_step = False
    _joined = False  # this node has joined training nodes
    _follows_others = False  # this node adds the parameters that the others train
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
        # Two groups: collectives of two threads on one Gloo group would pair with each other.
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
        # Rounds use the group ``_devices``. They run on the thread of the exchange, on the main thread for a flush, or
        # on the thread of `RoundObserver`; never on two at once. All other collectives of the node use ``_main``.
        self._watch = RoundObserver(self.peers)
        self._rounds = OptimizerRounds(self.peers, config.delay, config.flush_every, self._states)
        self._least = 0  # number of samples that the node needs for a batch
        self._waits_since = -1  # number of steps when ``serve`` found parameters that are not exchanged yet
        self.progress: Any = None
        self.shown_version, self._times_own = Version("", 0), 0  # ``_times_own``: it has shown its own weights
        self.optimizers, self._begins = [], version is None
        try:
            super().__init__(module, optimizers, config, topology)
            self.peers.fit(self._layout_of([local_optimizer.state for local_optimizer in self.optimizers]))
            self.exchange.runner = FifoLanes()  # threads on GPUs, too, because rounds make the host wait
            if version is not None:
                self.peers.token, self.peers.number, place, run = version
                self.peers.run = run or version.token
                self.peers.assigner.start_at(place)
            self._join()
        except BaseException:
            self.close()
            raise

    def _has_others(self) -> bool:
        return True

    # The number of nodes changes.
    def _log_exchange(self) -> None: ...

    # A node that makes fewer steps misses rounds, and downloads the weights of other nodes. There is nothing to make
    # up.
    def _make_up(self) -> None: ...

    def _make_state(self, slices: Slices, exchange: Exchange, config: UpdatesConfig) -> ElasticUpdateState:
        return ElasticUpdateState(slices, exchange, config, self._rounds)

    def _layout_of(self, states: Sequence[UpdateState]) -> Layout:
        sizes, parameters = (
            sizes_of(states),
            [[self.names[id(p)] for p in local_optimizer.parameters] for local_optimizer in self.optimizers],
        )
        digest = hashlib.sha256(repr(parameters).encode()).hexdigest()[:8]
        trained = f"{sum(map(len, parameters))} parameters with digest {digest}"
        return Layout(trained, sizes, [list(device_sizes) for device_sizes in _gather(self._main, sizes)])

    def _before_change(self, one: LocalOptimizer, after: UpdateState) -> None:
        layout = self._layout_of(
            [after if local_optimizer is one else local_optimizer.state for local_optimizer in self.optimizers]
        )
        # The other nodes have made this change before, so there is nothing to agree on.
        if self._follows_others:
            return
        old_ids = {id(p) for p, _ in one.state.slices.pieces}
        added = [
            (self.names[id(p)], int(fingerprint(local_of(p)))) for p, _ in after.slices.pieces if id(p) not in old_ids
        ]
        # Nodes must add the same values, or their global weights would differ.
        values = repr(_gather(self._main, added))
        change = f"{layout.trained} and values {hashlib.sha256(values.encode()).hexdigest()[:8]}"
        self._stop_watching()
        self._rounds.receive()
        log.info("this node added or unfroze parameters: it waits until the other nodes do the same")
        # From here on, this node observes. Once all nodes want the same change, one quorum makes it on all of them.
        self.peers.propose(layout, change)
        self._watch.start()
        wait, until = Wait(), time.monotonic() + CHANGE_TIMEOUTS * self.config.timeout
        while not self._from_first(partial(self._is_changed, wait)):
            if self.peers.unanswered:  # nodes that cannot reach the lighthouse have not refused the change
                until = time.monotonic() + CHANGE_TIMEOUTS * self.config.timeout
            # After this time, most nodes are enough, and a node without a majority raises ValueError.
            self.peers.impatient = time.monotonic() > until
            time.sleep(WATCH_SECONDS)
        self._stop_watching()
        self.peers.changed = False

    def _is_changed(self, wait: Wait) -> bool:
        self._watch.check()
        cause = f"the same change is missing on {self.peers.awaited}" if self.peers.awaited else "no round has begun"
        if self.peers.unanswered:
            cause = UNANSWERED
        wait.warn("train its new parameters", cause)
        return self.peers.changed

    def _adopt(self, trained: list[dict[str, Any]]) -> None:
        parameters = dict(self.module.named_parameters())
        self._check_adopted(trained, parameters)
        log.info("this node adds or unfreezes the parameters that the other nodes already train")
        self._follows_others = True
        # Devices have equal ``trained``, so they make the collectives of ``follow_groups`` in the same order.
        for local_optimizer, theirs in zip(self.optimizers, trained, strict=True):
            groups = [[parameters[name] for name in names] for names in theirs["groups"]]
            optimizer = local_optimizer.optimizer
            del optimizer.param_groups[len(groups) :]
            for group, params in zip(optimizer.param_groups, groups, strict=False):
                group["params"] = params
            for params in groups[len(optimizer.param_groups) :]:
                optimizer.add_param_group({"params": params})
            for name in theirs["exchanged"]:
                parameters[name].requires_grad_(True)
            local_optimizer.follow_groups()
        self._follows_others = False
        self.peers.fit(self._layout_of([local_optimizer.state for local_optimizer in self.optimizers]))

    def _check_adopted(self, trained: list[dict[str, Any]], parameters: Mapping[str, nn.Parameter]) -> None:
        theirs = {name: place for place, of in enumerate(trained) for group in of["groups"] for name in group}
        missing = sorted(theirs.keys() - parameters.keys())
        if missing:
            raise RuntimeError(
                f"the other nodes train {len(missing)} parameters that the model of this node does not have, such as "
                f"{missing[0]}: they were added during the run, so no node can join. Start all nodes with a model that "
                f"has all parameters, and unfreeze some later."
            )
        for place, local_optimizer in enumerate(self.optimizers):
            held = [self.names[id(p)] for p in parameters_of(local_optimizer.optimizer)]
            moved = [name for name in held if theirs.get(name, place) != place]
            if moved:
                raise RuntimeError(
                    f"{type(local_optimizer.optimizer).__name__} {place} of this node has {moved[0]}, but on the other "
                    f"nodes optimizer {theirs[moved[0]]} has it. Create the optimizers in the same order on all nodes."
                )

    def _states(self) -> list[ElasticUpdateState]:
        return [
            local_optimizer.state
            for local_optimizer in self.optimizers
            if isinstance(local_optimizer.state, ElasticUpdateState)
        ]

    @property
    def version(self) -> Version:
        """Version of the global weights for a checkpoint; of the shown weights while the module holds them."""
        if self._shown:
            return self.shown_version
        self._stop_watching()
        self._rounds.receive()
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
        if self._rounds.written and len(self.optimizers) > 1:  # the round has changed the other optimizers' parameters
            self._gather_models()
        self._rounds.written = False
        if self._rounds.left_out:
            self._leave_out()
        if self._rounds.behind:
            self._catch_up()

    def _gather_models(self) -> None:
        for local_optimizer in self.optimizers:
            local_optimizer.gather()

    def _flush(self) -> None:
        for local_optimizer in self.optimizers:
            local_optimizer.cancel_probe()
        self._rounds.flush()
        self._gather_models()

    @torch.no_grad()
    def swap_in_global_weights(self, wait: bool = True) -> None:
        self._swap_in()

    def _swap_in(self, serves: bool = False) -> None:
        if not self._shown:
            version = self.version
            # Other nodes get the global weights. Hooks and checkpoints see weights that contain this node's training.
            own = self._rounds.is_cut_off and not serves
            self._rounds.show_own(own)
            self.shown_version = self._own_version(version) if own else version
        super().swap_in_global_weights()

    def _own_version(self, version: Version) -> Version:
        self._times_own += 1
        token = name_of(version.token, self.peers.name, self._times_own)
        # One round more: nodes with the older weights take over these, and keep their own updates pending.
        return version._replace(token=token, number=version.number + 1)

    @torch.no_grad()
    def swap_in_local_weights(self) -> None:
        """Restore this node's weights. A node that joined others drops changes from before its first step."""
        if not self._shown:
            return
        if self.steps == 0 and self._joined:
            changed = [local_optimizer.undo_changes() for local_optimizer in self.optimizers]
            if any(changed):
                log.warning(
                    "a hook changed the weights before the first step of this node, which dropped the change because "
                    "it joined a run. Set weights before fit, on the node that begins the run."
                )
        super().swap_in_local_weights()
        self._rounds.show_own(False)

    def _agree_on_changes(self) -> tuple[bool, bool]:
        # Other nodes take no part: a change is an update of this node, except before a new run begins.
        changed = any(local_optimizer.is_changed() for local_optimizer in self.optimizers)
        return changed, not changed or (self.steps == 0 and self._begins)

    def shard_loader(self, loader: Any, batches: int = 1) -> None:
        """Let a loader draw the samples that are assigned to this device. Every device of the node calls it.

        It works for a DataLoader of torch with an `ElasticSampler`, and for the loaders of the bundled DataModules.
        Other loaders stay unchanged.

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
        # With several optimizers, one may make two steps before a round.
        batches *= self.config.sync_every * min(2, len(self.optimizers))
        ahead = (1 + 2 * batches + source.prefetch_depth) * batch_size * devices.size
        # The other nodes must know a higher limit before the loader draws: a round that begins from now on reports it.
        if ahead > assigner.ahead:
            assigner.ahead = ahead
            self.watch()
            self._from_first(self._watch.wait_for_a_round)
        assigner.expect(getattr(source, "num_samples", 0))
        source.set_share(partial(assigner.share, device=devices.place, devices=devices.size))
        source.before_epoch = self._begin_epoch

    def _begin_epoch(self, epoch: int) -> None:
        skips = self.peers.assigner.skip_to(epoch, self._least)
        # The next epoch may be beyond the limit that the other nodes know.
        if self._from_first(lambda: skips):
            self.watch()
            self._from_first(self._watch.wait_for_a_round)

    def deal(self, loader: Any, batches: int = 1) -> None:
        """Deprecated name of `shard_loader`, until version 0.3."""
        self.shard_loader(loader, batches)

    def has_batch(self, epoch: int) -> bool:
        """Return whether sharded loaders have a batch of this epoch left for this node. A collective of the node."""
        return bool(self._from_first(lambda: self.peers.assigner.has_left(epoch, self._least)))

    def any_device(self, *conditions: bool) -> list[bool]:
        """Return for each condition whether it holds on any device of the node. A collective of the node."""
        if self._main.size == 1:
            return list(conditions)
        flags = torch.tensor(conditions, dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._main.handle)
        return [bool(flag) for flag in flags.tolist()]

    def watch(self) -> None:
        """Observe rounds until the next step, for example during a validation, so that other nodes do not wait.

        Every device of the node calls it.
        """
        self._rounds.receive()  # the round in flight must end before another thread makes rounds
        self._watch.start()

    def serve(self, extra: Callable[[], Any] | None = None) -> None:
        """Offer the snapshots that joining nodes request from this node. Call it between two steps, on all devices.

        Args:
            extra: returns additional state for them, on the first device; called on all devices if a node asks.
        """
        rounds = self._rounds
        names, rounds.requests_for_me = [name for name in rounds.requests_for_me if name not in rounds.answered], []
        if rounds.open_requests is not None:
            rounds.answered = [name for name in rounds.answered if name in rounds.open_requests]
            self._server.keep(rounds.open_requests)
        if not names:
            return
        if self._must_step_first():
            rounds.requests_for_me = names
            return
        rounds.answered += names
        progress = None if extra is None else to_python(extra())
        head = {
            "extra": progress if self._devices.place == 0 else None,
            "version": tuple(self.version[:2]),  # the next quorum gives the place
            "run": self.peers.run,
            "history": list(self.peers.history),
        }
        # All devices come here together, because requests are part of the outcome of a round.
        self._swap_in(serves=True)
        try:
            snapshot = snapshot_of(self.optimizers, self.module, self.names, head)
        finally:
            self.swap_in_local_weights()
        self.keep_global_weights()  # another node has them
        self._server.offer(names, snapshot)

    def _must_step_first(self) -> bool:
        # A node that joins before the step would not make this change: its callbacks have not seen the epoch begin.
        if not any(local_optimizer.must_follow for local_optimizer in self.optimizers):
            self._waits_since = -1
            return False
        if self._waits_since < 0:
            self._waits_since = self.steps
        return self._waits_since == self.steps  # a step of another optimizer changes nothing

    def finish(self) -> None:
        """Send all pending updates. Every device of the node calls it."""
        self.swap_in_local_weights()
        self._stop_watching()
        self._all_sent = False  # rounds may have failed
        super().finish()
        if self._rounds.is_cut_off:
            self.swap_in_global_weights()  # the module keeps all updates of this node, even after ``close``

    def close(self) -> None:
        self._watch.stop()
        # The runner may still make a round, which uses the peers and their groups.
        if self.optimizers:
            self.exchange.runner.discard_errors()
            super().close()
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
        # Observe rounds during the download, so that the other nodes do not wait.
        began = self.peers.token
        # Before the thread starts, because both use the group of the devices.
        self.peers.ask()
        self._watch.start()
        if not self._load_snapshot(pending=None) and self._devices.place == 0:
            log.info("this node starts from its %s", "checkpoint" if began else "own weights: no other node trains")
        if not self._begins:
            self.keep_global_weights()

    def _catch_up(self) -> None:
        log.info("this node has missed rounds after round %d: it loads the weights of another node", self.peers.number)
        # Unsent updates stay pending on top of the downloaded weights.
        pending = self._rounds.absorb()
        self.peers.ask()
        self._watch.start()
        if not self._load_snapshot(pending):  # the other nodes have left: continue with these weights
            self._rounds.go_on(pending, *self.peers.reconcile())
            self._gather_models()
        self._stop_watching()

    def _leave_out(self) -> None:
        self.log_once(
            "updates of this node are not finite (NaN or infinity). This node drops all of its pending updates, resets "
            "optimizer state and batch norm statistics that are not finite, and continues from the global weights. The "
            "other nodes are not affected. If this happens often (metric comm/rounds_left_out), lower the learning "
            "rate, or check for faulty memory.",
            logging.WARNING,
        )
        self._rounds.drop()
        # Otherwise, the optimizer would produce such updates again.
        optimizers = [local_optimizer.optimizer for local_optimizer in self.optimizers]
        for state in (state for optimizer in optimizers for state in optimizer.state.values()):
            tensors = [tensor for tensor in state.values() if isinstance(tensor, Tensor)]
            if not _are_finite(tensors):
                for tensor in tensors:
                    tensor.zero_()
        # The running statistics of batch norm layers would stay NaN, because each forward pass adds to them.
        for module in self.module.modules():
            reset = getattr(module, "reset_running_stats", None)
            if reset is not None and not _are_finite(module.buffers(recurse=False)):
                reset()
        self._gather_models()

    def _load_snapshot(self, pending: Sequence[Tensor] | None) -> bool:
        while True:
            began = time.monotonic()
            # None: the next round changes this node's own weights, so it needs no snapshot.
            received = self._download(joins=pending is None)
            self.peers.stats.healing_s += time.monotonic() - began
            if received is None:
                self.peers.wants = ""
                return False
            self._watch.stop()
            # The rounds from the snapshot to the current weights. If some were not observed, download again.
            rounds = self.peers.since(received.head["version"][0])
            if rounds is not None:
                self._install(received, rounds, pending)
                if self._devices.place == 0:
                    what = "weights and optimizer state" if pending is None else "weights"
                    line = "this node loaded %s in %.1f s, and continues from round %d"
                    log.info(line, what, time.monotonic() - began, self.peers.number)
                self._watch.start()
                return True
            self.peers.ask()
            self._watch.start()

    def _download(self, *, joins: bool) -> DeviceReceiver | None:
        new = partial(DeviceReceiver, self.optimizers, self.module, self.names, joins=joins)
        wait = Wait()
        adopted: list[dict[str, Any]] = []
        download: Download[DeviceReceiver] | None = None
        while True:
            # Decided by the first device: the devices must download one version, each from its counterpart.
            needs_none, source, name = self._from_first(self._find_source)
            if needs_none:
                return None
            address = source[self._devices.place] if source else ""
            if address and (download is None or (download.address, download.name) != (address, name)):
                download = Download(address, name, new)
            reports = _gather(self._main, self._advance(wait, download))
            other = next((report.trained for report in reports if report.trained is not None), None)
            if other is not None and joins and other != adopted:  # the next source may differ from the last one
                self._adopt(other)
                download, adopted = None, other
                continue
            failed = next((report.error for report in reports if report.error), "")
            if failed:
                raise RuntimeError(failed)
            # Devices may have begun on different snapshots: continue until all have one version.
            if download is not None and all(report.version == reports[0].version is not None for report in reports):
                return download.receiver
            time.sleep(WATCH_SECONDS)

    def _find_source(self) -> tuple[bool, tuple[str, ...], str]:
        self._watch.check()
        return self.peers.in_step, self.peers.sources, self.peers.wants

    def _advance(self, wait: Wait, download: Download[DeviceReceiver] | None) -> DownloadReport:
        try:
            if download is not None and download.advance(1.0, self.config.timeout):
                return DownloadReport(version=tuple(download.receiver.head["version"]))
            wait.check(download, self.config.timeout, self.peers.unanswered)
        except OtherParameters as other:
            return DownloadReport(trained=other.trained, error=str(other))
        except RuntimeError as error:
            return DownloadReport(error=str(error))
        return DownloadReport()

    @torch.no_grad()
    def _install(self, received: DeviceReceiver, rounds: list[Round], pending: Sequence[Tensor] | None) -> None:
        head = received.head
        if pending is None:
            received.install()
            self.progress = self._from_first(lambda: head["extra"])
            self._joined, self._begins = True, False
        token, number = (rounds[-1].token, rounds[-1].number) if rounds else head["version"]
        self.peers.run = head["run"]
        history = [*head["history"], *(round_.token for round_ in rounds)]
        # History of the peer, and then the observed rounds: it decides which sent updates the weights contain.
        returned, counted = self.peers.set_version(token, number, history)
        self._rounds.start_from(received.weights, rounds, pending, returned, counted)
        self._gather_models()

    def _stop_watching(self) -> None:
        # Rounds that this node has only observed are added by the next exchange. The thread must end first, because it
        # uses the peers.
        if self._watch.running:
            self._watch.stop()
            self._watch.check()
            self._rounds.arrive(self._watch.drain())

    def _from_first(self, ask: Callable[[], Any]) -> Any:
        return from_first(self._main, ask)


class DownloadReport(NamedTuple):
    """The state of a device's download."""

    version: tuple[Any, ...] | None = None  # of a complete snapshot
    error: str = ""  # message of a failed download
    trained: list[dict[str, Any]] | None = None  # parameters of a peer that trains other parameters


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _own_group(topology: Topology) -> Group:
    ranks = tuple(range(topology.world_size))
    # A collective: all devices make their groups in the same order.
    handle = dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None
    return Group(ranks, topology.rank, handle if isinstance(handle, dist.ProcessGroup) else None)


def _gather(devices: Group, value: Any) -> list[Any]:
    """Return the values of all devices of the node. A collective."""
    return [value] if devices.size == 1 else gather(value, devices.handle)


def _connect(devices: Group, config: ElasticConfig, name: str) -> Lighthouse | None:
    # Only the first device connects. All devices raise its error.
    connected: list[Lighthouse] = []

    def connect() -> None:
        connected.append(Lighthouse(config.lighthouse, name or socket.gethostname(), config.timeout))

    from_first(devices, connect)
    return connected[0] if connected else None


def _facts(
    module: nn.Module, optimizers: Sequence[Optimizer], config: ElasticConfig, topology: Topology
) -> dict[str, Any]:
    names = parameter_names(module)
    facts = options_to_compare(module, names, (), config)
    facts = {name: value for name, value in facts.items() if name not in ("lighthouse", "timeout")}
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    version = str(torch.__version__).partition("+")[0]  # machines may have builds for different CUDA versions
    facts |= {"lightning_sparse": __version__, "torch": version, "optimizers": kinds}
    return {**facts, "devices": topology.world_size}


def _check(optimizers: Sequence[Optimizer], topology: Topology) -> None:
    if topology.num_nodes != 1:
        raise ValueError(
            f"num_nodes={topology.num_nodes}: each elastic node is its own process group. Start each node alone, with "
            f"num_nodes=1."
        )
    trained = (p for optimizer in optimizers for p in trainable_params(optimizer))
    odd = sorted({str(p.dtype) for p in trained if p.dtype not in DTYPES})
    if odd:
        raise ValueError(
            f"parameters have dtype {', '.join(odd)}: elastic nodes support only float32, bfloat16 and "
            f"float16. Convert the model, for example with model.float()."
        )

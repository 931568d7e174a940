"""Rounds between elastic nodes: which nodes take part, whether a round counts, and how a node joins.

The global weights have a name, a *token*. Each round that counts changes it. The first token names the *run*; nodes
with the weights of another run are refused. A round has three steps:

1. All nodes ask the lighthouse. Nodes with the newest token contribute. All other nodes observe: they only receive.
2. The nodes all-gather their messages, each after the token of the next weights. A node is *prepared* once all of its
   devices have all messages.
3. The nodes all-gather an empty row. A node that completes it knows that all nodes are prepared, and the round counts.

If a node fails in step 2, the round counts nowhere, and each node gets back its sent updates. A node that fails in step
3 keeps the messages. The round counts if a node of the next quorum has its token, otherwise nowhere. So all nodes that
continue apply a round, or none does.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.agree import all_agree, on_first
from lightning_sparse.elastic.lighthouse import Lighthouse, Member, NodeStatus
from lightning_sparse.elastic.quorum import Quorum, Sizes, describe_layout, quorum_of
from lightning_sparse.elastic.sampling import SampleAssigner, name_of
from lightning_sparse.elastic.wait import UNANSWERED, Wait
from lightning_sparse.exchange.communicator import GlooCollectives, Group
from lightning_sparse.internals import gloo_group
from lightning_sparse.messages import log

REMEMBERED, LEDGER = 4096, 8  # number of tokens, and of rounds
IDLE_SECONDS = 0.1  # between quorums without a round
PIECE = 1 << 18
"""Number of elements of its pending updates that a node sends at once. Each piece must arrive within the timeout."""
FAILURES = 10
"""Number of failed rounds in a row after which a node logs the error. A node that dies makes a few rounds fail."""


@dataclass(frozen=True)
class Round:
    """A round that counts."""

    base: str
    token: str
    number: int  # of rounds from the start to ``token``
    num_nodes: int  # M, number of contributing nodes
    messages_MB: Tensor  # of the nodes that sent a message, in node order, uint8
    dense: tuple[Tensor, ...] = ()  # updates of the nodes that sent all entries, fp32 [S]


@dataclass
class Outcome:
    """The result of a round on one node."""

    rounds: list[Round] = field(default_factory=list)  # they count from now on, in order
    returned: list[Tensor] = field(default_factory=list)  # messages or updates of this node that no node counted
    requests_for_me: list[str] = field(default_factory=list)  # names of snapshots to serve to other nodes
    open_requests: list[str] | None = None  # names of all requested snapshots; None without a quorum
    alone: bool = False  # no other node took part
    behind: bool = False  # the round changed other weights than this node's
    left_out: bool = False  # this node's updates were not finite: returned, and not sent
    exchanges: int = 0  # largest number of exchanges of a contributor


class Sent(NamedTuple):
    """A tensor of a round that other nodes may have counted differently."""

    base: str
    token: str
    tensor: Tensor  # a message, or all pending updates
    is_pending: bool = False  # the round did not count here, and the tensor is pending again


class Layout(NamedTuple):
    """The exchanged parameters."""

    trained: str  # description of the parameters, equal on all nodes
    sizes: Sizes  # of this device
    everywhere: Sequence[Sequence[int]]  # `Sizes` of each device of the node

    @property
    def description(self) -> str:
        return describe_layout(self.trained, self.everywhere)


class Payload(NamedTuple):
    """The tensor that a device sends in a round."""

    tensor: Tensor  # a message, uint8, perhaps with a sample behind it; or all pending updates, fp32 [S]
    exchanges: int = 0  # of this node so far
    is_last: bool = False  # the node leaves: the round counts even with fewer than ``min_nodes``

    @property
    def is_dense(self) -> bool:
        return self.tensor.dtype != torch.uint8

    def has_sample(self, sizes: Sizes) -> bool:
        return not self.is_dense and self.tensor.numel() > sizes.message_bytes


@dataclass
class RoundStats:
    """Statistics of one device."""

    nodes: int = 0
    lost: int = 0  # rounds that failed
    left_out: int = 0  # rounds without this node's updates, because they were not finite
    waited_s: float = 0.0  # waiting for other nodes
    healing_s: float = 0.0  # until it had the weights of others, after it joined or missed rounds


class RoundProtocol:
    """The rounds of one device. One thread at a time may call `round`.

    Args:
        lighthouse: on the first device of a node, None on the others.
        devices: group of the node's devices. Nothing else may use it.
        facts: values that must be equal on all nodes.
        timeout: seconds of collectives, and of waiting for ``min_nodes``.
        servers: addresses of the snapshots of this node's devices.
        host: address of this machine for other nodes, on the first device; empty: from the host name.
    """

    def __init__(
        self,
        lighthouse: Lighthouse | None,
        devices: Group,
        facts: Mapping[str, Any],
        *,
        min_nodes: int,
        timeout: float,
        servers: Sequence[str] = (),
        host: str = "",
    ) -> None:
        self._lighthouse, self._devices, self.facts = lighthouse, devices, dict(facts)
        self._min_nodes, self._timeout, self._servers = min_nodes, timeout, tuple(servers)
        self._process_group = _process_group(str(self._from_first(lambda: host)), timedelta(seconds=timeout))
        # ``_group`` connects the nodes ``_connected``, in rank order, and has a unique name.
        self._group: Group | None = None
        self._group_name, self._connected = "", tuple[str, ...]()
        self.name = str(self._from_first(lambda: lighthouse.name if lighthouse else ""))
        # The weights of this device once all outcomes so far are applied; whether the next round changes them.
        self.token, self.number, self.in_step = "", 0, False
        # The run of these weights; empty until the node has joined a run.
        self.run, self._trains = "", False
        self.wants = self.observed_from = self._now = ""  # ``wants``: name of the requested snapshot
        self.sources: tuple[str, ...] = ()  # address of that snapshot for each device of this node
        # Rounds from ``observed_from`` to the current weights, while this device has other weights.
        self.observed: list[Round] = []
        self.history: deque[str] = deque(maxlen=REMEMBERED)  # tokens of the last rounds
        self.stats, self.is_first = RoundStats(), True  # is_first: of the nodes that missed no round
        self.assigner = SampleAssigner(self.name)
        self._tries = self._failed = 0
        self._unsettled: tuple[Round, Tensor | None] | None = None
        self._ledger: deque[Sent] = deque(maxlen=LEDGER)  # sent in rounds that may have to be reconciled
        self._names: tuple[str, ...] = ()
        self._next = self._layout = Layout("", Sizes(), ())
        # ``impatient``: this node has waited for the same change of other nodes as long as it may. ``changed``: a
        # quorum has changed the exchanged parameters.
        self._change, self.impatient, self.changed = "", False, False
        # ``unanswered``: the lighthouse gave no quorum to the last request. ``awaited``: names of the nodes that do not
        # want this node's change yet; empty before a quorum.
        self.unanswered, self.awaited = False, ""
        self._told_place = False
        self._wait_for_nodes: Wait | None = None  # while fewer than ``min_nodes`` train

    @property
    def sizes(self) -> Sizes:
        return self._layout.sizes

    def fit(self, layout: Layout) -> None:
        self._layout = layout

    def propose(self, layout: Layout, change: str) -> None:
        """Exchange these parameters once all nodes make the same change."""
        self._next, self._change, self.impatient, self.changed = layout, change, False, False
        self.awaited = ""

    def try_again(self) -> None:
        if self._lighthouse is not None:
            self._lighthouse.ask_again()

    @property
    def settled(self) -> bool:
        """Whether this node knows of every round whether it counts."""
        return self._unsettled is None

    @property
    def proposes(self) -> bool:
        """Whether this node waits for the other nodes to make its change of parameters."""
        return bool(self._change)

    @property
    def uncertain(self) -> Tensor | None:
        """This node's payload of a round that others may have counted."""
        return self._unsettled[1] if self._unsettled else None

    def fall_behind(self, rounds: Sequence[Round]) -> list[Tensor]:
        """Go back to the weights before these rounds. They are the last that counted, and their messages are dropped.

        Returns:
            This node's payloads in them. They are pending again until another node's weights turn out to contain them.
        """
        if self._devices.place == 0:
            line = (
                "this node drops the messages of %d rounds to save memory, and later loads the weights of another node"
            )
            log.info(line, len(rounds))
        self.token, self.number = rounds[0].base, rounds[0].number - 1
        while self.history and self.history[-1] != self.token:
            self.history.pop()
        tokens = {round_.token for round_ in rounds}
        is_dropped = [sent.token in tokens and not sent.is_pending for sent in self._ledger]
        returned = [sent.tensor for sent, dropped in zip(self._ledger, is_dropped, strict=True) if dropped]
        entries = [
            sent._replace(is_pending=sent.is_pending or dropped)
            for sent, dropped in zip(self._ledger, is_dropped, strict=True)
        ]
        self._ledger = deque(entries, maxlen=LEDGER)
        return returned

    def first_device_wants(self, wanted: bool) -> bool:
        return bool(self._from_first(lambda: wanted))

    # -- a round -------------------------------------------------------------------------------------------------------

    def round(self, payload: Payload | None = None, *, finite: bool = True) -> Outcome:
        """Take part in the next round. All devices of a node call it.

        Args:
            payload: None to observe.
            finite: whether all sent values are finite. Otherwise the node only observes.

        Raises:
            ValueError: if this node differs from the training nodes in a value that must be equal.
        """
        # All devices decide alike: a slice that is not finite on one device keeps the whole node from sending.
        if payload is None or self._all_devices(finite):
            return self._round(payload)
        outcome = self._round(None)
        self.stats.left_out += 1
        outcome.left_out = True
        outcome.returned.append(payload.tensor)
        return outcome

    def _round(self, payload: Payload | None) -> Outcome:
        outcome = Outcome()
        quorum = self._join_quorum(payload, outcome)
        contributors = [] if quorum is None else quorum.contributors
        contributes = self.name in [member.name for member in contributors]
        sent = payload.tensor if payload is not None and contributes else None
        # No update is lost: a payload that is not sent returns at once.
        if payload is not None and sent is None:
            outcome.returned.append(payload.tensor)
        if quorum is None or not contributors:
            self.stats.lost += payload is not None
            return outcome
        outcome.alone = contributes and len(quorum.members) == 1
        outcome.exchanges = max(member.status.exchanges for member in contributors)
        token = quorum.next_token
        # Phase 1: each node receives the payloads of all contributors. If that fails here, it may have succeeded
        # elsewhere, but no node counts the round without phase 2.
        rows = self._transfer(sent, quorum, _tag(token))
        if rows is None:
            self.stats.lost += 1
            outcome.returned += [] if sent is None else [sent]
            return outcome
        round_ = Round(quorum.token, token, quorum.number + 1, len(contributors), *rows)
        # Phase 2: all nodes confirm phase 1. If this node misses a confirmation, others may have counted the round, and
        # the token of the next quorum tells.
        if self._all_are_prepared(_tag(token)):
            self._failed = 0
            self._count(round_, sent, outcome)
        else:
            self._unsettled = round_, sent
        return outcome

    def _join_quorum(self, payload: Payload | None, outcome: Outcome) -> Quorum | None:
        # Returns None if there is no quorum, or if it has no weights or too few nodes.
        began, is_last = time.monotonic(), payload is not None and payload.is_last
        while True:
            status = NodeStatus(
                token=self.token,
                number=self.number,
                run=self.run,
                trains=self._trains,
                prepared=self._unsettled[0].token if self._unsettled else "",
                tries=self._tries,
                group=self._group_name,
                observes=payload is None,
                flushes=payload is not None and payload.is_dense,
                leaves=is_last,
                sampled=payload is not None and payload.has_sample(self.sizes),
                exchanges=0 if payload is None else payload.exchanges,
                wants=self.wants,
                servers=self._servers,
                progress=self.assigner.report(),
                facts=self.facts,
                trained=self._layout.trained,
                sizes=self._layout.everywhere,
                change=self._change,
                impatient=self.impatient,
            )
            # Only the first device asks, and its answer reaches all devices: they decide alike.
            members, waited = self._from_first(partial(self._ask, status, began))
            self.unanswered = members is None
            quorum = None if members is None else self._quorum_of(members, outcome)
            too_few = self._are_few(members, quorum)  # equal on all devices
            if payload is not None:
                self._log_wait(quorum if too_few else None, too_few=too_few)
            if too_few or (members is None and payload is None):  # a node that observes asks in a loop
                time.sleep(IDLE_SECONDS)
            if not too_few or payload is None or is_last or outcome.requests_for_me or waited > self._timeout:
                self.stats.waited_s += waited
                return None if too_few else quorum

    def _ask(self, status: NodeStatus, began: float) -> tuple[list[Member] | None, float]:
        members = None if self._lighthouse is None else self._lighthouse.quorum(status)
        return members, time.monotonic() - began

    def _are_few(self, members: list[Member] | None, quorum: Quorum | None) -> bool:
        if members is None:
            # Without a quorum, a node knows only itself.
            return self._min_nodes > 1
        return quorum is not None and quorum.is_too_small(self._min_nodes)

    def _log_wait(self, quorum: Quorum | None, *, too_few: bool) -> None:
        if not too_few:
            self._wait_for_nodes = None
        elif self._devices.place == 0:
            self._wait_for_nodes = self._wait_for_nodes or Wait()
            names = _shown(member.name for member in ([] if quorum is None else quorum.contributors)) or "none"
            fewer = f"fewer than min_nodes={self._min_nodes} nodes train ({names})"
            self._wait_for_nodes.warn("exchange updates", UNANSWERED if self.unanswered else fewer)

    def _quorum_of(self, members: list[Member], outcome: Outcome) -> Quorum | None:
        self._tries += 1
        if not any(member.status.token for member in members):
            # No node has weights yet. The first node's weights become the global weights, unless the next quorum has a
            # node that trains.
            if members[0].name == self.name:
                self.token = self.name
            time.sleep(IDLE_SECONDS)
            return None
        quorum = quorum_of(members)
        if self.run not in ("", quorum.run):
            raise ValueError(_refusal_of_run(self.run, self.number, quorum))
        if self.facts != quorum.facts:
            raise ValueError(_refusal(self.facts, quorum.facts))
        if self._trains and self._layout.description != quorum.layout_description:
            raise ValueError(_refusal_after_change(self._layout.description, quorum.layout_description))
        self._check_place(members, quorum)
        self._check_data(quorum)
        self.assigner.update([member.name for member in quorum.members], quorum.progress)
        # Before the comparison with ``token``: it may count the uncertain round, which changes this node's token.
        self._settle(quorum.token, outcome)
        self._now, self.in_step = quorum.token, self.token == quorum.token
        if self.in_step and self._layout.description != quorum.layout_description:
            raise ValueError(_refusal({"trained": self._layout.description}, {"trained": quorum.layout_description}))
        if self.in_step:
            self.run, self._trains = quorum.run, True
        self._follow_change(quorum)
        outcome.behind = not self.in_step
        self._assign_snapshots(quorum, outcome)
        self._log_membership(quorum)
        return quorum

    def _follow_change(self, quorum: Quorum) -> None:
        if not quorum.change:
            self.awaited = _shown(member.name for member in quorum.training if member.status.change != self._change)
            # As this quorum knows it: all devices of the node decide alike.
            if any(
                member.name == self.name and member.status.change and member.status.impatient
                for member in quorum.training
            ):
                raise ValueError(_refusal_of_change(self._change, f"not on {self.awaited}"))
            return
        if self.in_step:
            if self._change != quorum.change:
                raise ValueError(_refusal_of_change(quorum.change, "only on the other nodes, not on this node"))
            # The token changes with the parameters, so that no node continues from older weights.
            self._layout, self._change, self.changed = self._next, "", True
            self.token, self.number = quorum.token_after_change, quorum.number + 1
            self.history.append(self.token)
            self._ledger.clear()  # its payloads have the old sizes
        self._now, self.observed, self.observed_from = quorum.token_after_change, [], ""

    def _check_place(self, members: Sequence[Member], quorum: Quorum) -> None:
        # A node that cannot reach the others would make every round fail.
        own_member = next(member for member in members if member.name == self.name)
        local = next((member for member in quorum.training if member.is_local), own_member)
        if own_member not in quorum.members:
            raise ValueError(_refusal_of_place(own_member if own_member.is_local else local))
        if own_member.is_local and quorum.unreached and not self._told_place:
            self._told_place = True
            names = _shown(member.name for member in quorum.unreached)
            log.warning("this node excludes %s: %s", names, _refusal_of_place(own_member))

    def _check_data(self, quorum: Quorum) -> None:
        own_member = next(member for member in quorum.members if member.name == self.name)
        # The node that has made most rounds stays.
        oldest = max(
            (member for member in quorum.training if member.status.progress.size),
            key=lambda member: (member.status.tries, member.name),
            default=own_member,
        )
        own_member.status.progress.check(oldest.status.progress)

    def _transfer(self, sent: Tensor | None, quorum: Quorum, tag: Tensor) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        # The result is None unless all devices of this node have all messages and dense updates.
        sparse = [member for member in quorum.contributors if not member.status.flushes]
        row_B = quorum.row_of(sent, self._sizes_in(quorum))
        cause = "no error on this device"
        try:
            group = self._group_for(quorum.members)
            # Every node makes these collectives in this order: one all-gather, then a broadcast per node that flushes.
            rows_PB, whole = _gather(torch.cat([tag, row_B]), group, tag)
            dense = tuple(
                self._dense(member, sent, quorum, group) for member in quorum.contributors if member.status.flushes
            )
        except RuntimeError as error:
            whole, cause = False, " ".join(str(error).split())
        # A node is prepared only if all of its devices are. Otherwise it closes its connections, so that no node waits.
        if not self._all_devices(whole):
            self._abort_group()
            self._log_failure(cause, quorum)
            return None
        places = [place for place, member in enumerate(quorum.members) if member in sparse]
        return rows_PB[places, len(tag) :], dense

    def _dense(self, member: Member, sent: Tensor | None, quorum: Quorum, group: Group | None) -> Tensor:
        own = sent if member.name == self.name else None
        updates_S = torch.empty(self._sizes_in(quorum).numel, dtype=torch.float32) if own is None else own.cpu()
        if group is not None and group.handle is not None:
            options = dist.BroadcastOptions()
            options.rootRank = quorum.members.index(member)
            # dist.broadcast does not know this group, and would raise its own error instead of Gloo's.
            for piece in torch.split(updates_S, PIECE):
                group.handle.broadcast([piece], options).wait()
        return updates_S

    def _sizes_in(self, quorum: Quorum) -> Sizes:
        # The sizes of the training nodes: a row of another length would make Gloo end the receiver's process.
        return Sizes(*quorum.sizes[self._devices.place]) if quorum.sizes else self.sizes

    def _log_failure(self, cause: str, quorum: Quorum) -> None:
        log.debug("round %d failed before this node had its messages: %s", quorum.number + 1, cause)
        self._failed += 1
        if self._failed == FAILURES and self._devices.place == 0:
            others = _shown(member.name for member in quorum.members if member.name != self.name)
            log.warning(
                "%d rounds in a row with %s have failed (%s). Nodes exchange nothing until a round succeeds. Make sure "
                "that they reach each other on all ports, all by IPv4 or all by IPv6",
                FAILURES,
                others,
                cause,
            )

    def _all_are_prepared(self, tag: Tensor) -> bool:
        try:
            # False only says that a node may lack messages: others may have counted the round.
            _, prepared = _gather(tag, self._group, tag)
        except RuntimeError as error:
            prepared = False
            log.debug("a round failed while nodes confirmed its messages: %s", error)
        if not self._all_devices(prepared):
            self._abort_group()
            return False
        return True

    def _count(self, round_: Round, sent: Tensor | None, outcome: Outcome) -> None:
        self.stats.nodes = round_.num_nodes
        if sent is not None:
            # Even a round that counts here may be lost with its weights. ``reconcile`` then returns the updates.
            self._remember(Sent(round_.base, round_.token, sent))
        if self.token == round_.base:
            outcome.rounds.append(round_)
            self.token, self.number = round_.token, round_.number
            self.history.append(round_.token)
            return
        # Only a node that has requested a snapshot needs observed rounds. Only an unbroken chain of rounds leads from a
        # snapshot to the current weights.
        if not self.wants:
            return
        if not self.observed or self.observed[-1].token != round_.base:
            self.observed, self.observed_from = [], round_.base
        self.observed.append(round_)

    def _settle(self, token: str, outcome: Outcome) -> None:
        if self._unsettled is None:
            return
        round_, sent = self._unsettled
        self._unsettled = None
        # A node that has the token has counted the round, so it counts here, too. With the old token, no
        # remaining node counted it. With another token, only the history of a snapshot can tell: see ``reconcile``.
        if token == round_.token:
            self._count(round_, sent, outcome)
        elif sent is not None:
            self._remember(Sent(round_.base, round_.token, sent, is_pending=token == round_.base))
            outcome.returned += [sent] if token == round_.base else []

    def _remember(self, sent: Sent) -> None:
        if sent.tensor.dtype != torch.uint8:
            self._ledger.clear()  # dense updates are as large as the model
        self._ledger.append(sent)

    # -- the group -----------------------------------------------------------------------------------------------------

    def _group_for(self, members: Sequence[Member]) -> Group | None:
        names = tuple(member.name for member in members)
        # Reused only if all of them have it open. Nodes that continued without one of them have made another group.
        if names == self._connected and {member.status.group for member in members} == {self._group_name}:
            return self._group
        self._forget_group()
        if len(members) == 1:
            return None
        tries = [(member.name, member.status.tries) for member in members]
        name = name_of(tries)
        # Each device has its own group with its counterparts on the other nodes.
        store = f"{members[0].store}/{name}/{self._devices.place}"
        self._process_group.configure(store, self.name, names.index(self.name), len(names))
        self._group = Group(tuple(range(len(names))), names.index(self.name), self._process_group.parent)
        self._group_name, self._connected = name, names
        return self._group

    def _forget_group(self) -> None:
        self._group, self._group_name, self._connected = None, "", ()

    def _abort_group(self) -> None:
        # Closes the connections, so that the other nodes notice at once.
        self._forget_group()
        self._process_group.abort(errored=False)

    def _all_devices(self, condition: bool) -> bool:
        if self._devices.size == 1:
            return condition
        return all_agree(condition, partial(dist.all_reduce, group=self._devices.handle), torch.device("cpu"))

    def _from_first(self, ask: Callable[[], Any]) -> Any:
        return from_first(self._devices, ask)

    # -- nodes that join -----------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Request a snapshot, from the next quorum on. A collective of the node."""
        self.sources, self.wants = (), str(self._from_first(lambda: uuid.uuid4().hex[:16]))

    def since(self, token: str) -> list[Round] | None:
        """Return the rounds from the weights ``token`` to the current weights, or None if they are unknown."""
        tokens = [self.observed_from, *(round_.token for round_ in self.observed)]
        if token in tokens:
            return self.observed[tokens.index(token) :]
        return [] if token == self._now else None

    def set_version(self, token: str, number: int, history: Sequence[str]) -> tuple[list[Tensor], list[Tensor]]:
        self.history = deque([*history, token], maxlen=REMEMBERED)
        self.token, self.number, self.wants, self.observed = token, number, "", []
        return self.reconcile()

    def reconcile(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return sent tensors that become pending, and sent tensors that are pending but counted elsewhere."""
        to_resend, already_counted, tokens = list[Tensor](), list[Tensor](), set(self.history)
        for entry in self._ledger:
            # The weights lack its round. Rounds on top of a lost round are lost, too.
            if entry.base in tokens and not entry.is_pending and entry.token not in self.history:
                to_resend.append(entry.tensor)
                tokens.add(entry.token)
            # The round did not count here, but another node counted it, so the weights contain it.
            elif entry.is_pending and entry.token in self.history:
                already_counted.append(entry.tensor)
        entries = [entry for entry in self._ledger if entry.token in self.history and not entry.is_pending]
        self._ledger = deque(entries, maxlen=LEDGER)
        return to_resend, already_counted

    def _assign_snapshots(self, quorum: Quorum, outcome: Outcome) -> None:
        outcome.open_requests = [member.status.wants for member in quorum.members if member.status.wants]
        offering = quorum.contributors or [member for member in quorum.training if not member.status.wants]
        for member in quorum.members:
            if member.status.wants and offering:
                # The random name of a request spreads requests over nodes. All nodes choose the same source.
                source = offering[int(member.status.wants[:8], 16) % len(offering)]
                if source.name == self.name:
                    outcome.requests_for_me.append(member.status.wants)
                if member.name == self.name:
                    self.sources = tuple(source.status.servers)

    # -- the end -------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        self._abort_group()
        if self._lighthouse is not None:
            self._lighthouse.leave()

    def _log_membership(self, quorum: Quorum) -> None:
        # With nodes that only observe, such as in a validation.
        names = tuple(member.name for member in quorum.training)
        self.is_first = quorum.training[0].name == self.name
        if self._devices.place > 0 or names == self._names:
            return
        come, gone = (_shown(a - b) for a, b in ((set(names), set(self._names)), (set(self._names), set(names))))
        changes = [f"{come} joined"] * bool(come and self._names) + [f"{gone} left or failed"] * bool(gone)
        self._names = names
        log.info("round %d: %s", quorum.number + 1, "; ".join([*changes, f"training nodes: {_shown(names)}"]))


def _process_group(host: str, timeout: timedelta) -> Any:
    # torchft's Gloo group, on the node's own address unless the user names an interface.
    from torchft.process_group import ProcessGroupGloo

    class OnAddress(ProcessGroupGloo):  # type: ignore[misc]
        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            return gloo_group(store, rank, world_size, timeout, host)

    kind = OnAddress if host and not os.environ.get("GLOO_SOCKET_IFNAME") else ProcessGroupGloo
    return kind(timeout=timeout)


def from_first(devices: Group, ask: Callable[[], Any]) -> Any:
    """Return the result of ``ask`` on the first device, or raise its error, on all devices. A collective."""
    return ask() if devices.size == 1 else on_first(ask, devices.handle)


def _tag(token: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(token), dtype=torch.uint8)


def _gather(row_B: Tensor, group: Group | None, tag: Tensor) -> tuple[Tensor, bool]:
    """Return the rows of all nodes, and whether all of them have this tag."""
    rows_PB = row_B.view(1, -1) if group is None else GlooCollectives().all_gather(row_B, group)
    return rows_PB, bool((rows_PB[:, : len(tag)] == tag).all())


def _refusal(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    different = [name for name in {**theirs, **mine} if mine.get(name, ...) != theirs.get(name, ...)]
    values = ", ".join(f"{name}={_of(mine, name)}, theirs {_of(theirs, name)}" for name in different)
    return (
        f"this node differs from the training nodes: {values}. The other nodes continue without it. Start it with the "
        f"same options, model and versions."
    )


def _refusal_of_run(run: str, number: int, quorum: Quorum) -> str:
    names = _shown(member.name for member in quorum.training)
    return (
        f"this node resumes round {number} of run {run!r}, but the training nodes ({names}) are "
        f"at round {quorum.number} of run {quorum.run!r}. They continue without it. Start this node without a "
        f"checkpoint or from a checkpoint of their run, or give it its own lighthouse."
    )


def _refusal_of_change(change: str, where: str) -> str:
    return (
        f"parameters were added or unfrozen (now {change}), but {where}. The other nodes continue without this node. "
        f"Let all nodes make the same change in the same epoch: give them the same callbacks."
    )


def _refusal_after_change(mine: str, theirs: str) -> str:
    return (
        f"while this node missed rounds, the other nodes have added or unfrozen parameters: they train {theirs}, and "
        f"this node {mine}. They continue without it. Start this node again."
    )


def _refusal_of_place(local: Member) -> str:
    name, address = local.name.rpartition(":")[0], local.store.rpartition(":")[0]
    return (
        f"other machines cannot reach node {name} at {address}, because its lighthouse address resolves to a loopback "
        f"address on that machine (see its /etc/hosts). Start node {name} with an IP address of the lighthouse, such "
        f"as http://10.0.0.1:29510."
    )


def _of(facts: Mapping[str, Any], name: str) -> str:
    return repr(facts[name]) if name in facts else "missing"


def _shown(names: Iterable[str]) -> str:
    return ", ".join(sorted(name.rpartition(":")[0] for name in names))

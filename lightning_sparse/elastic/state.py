"""The update states of one device of an elastic node, and the rounds that exchange all of them.

The payload of a round is the concatenation of the payloads of all optimizers. So all optimizers have the same version
of the global weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_sparse.elastic.quorum import Sizes
from lightning_sparse.elastic.rounds import FAILURES, Outcome, Payload, Round, RoundProtocol
from lightning_sparse.exchange import Exchange
from lightning_sparse.kernels.wire import nonfinite_of
from lightning_sparse.messages import log
from lightning_sparse.updates.agreement import UpdateCorrelation
from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.slices import Slices
from lightning_sparse.updates.state import InFlight, SparseUpdateState, UpdateState

TRIES_TO_FLUSH = 3


class ElasticUpdateState(SparseUpdateState):
    """The state of one optimizer on one device of an elastic node."""

    def __init__(self, slices: Slices, exchange: Exchange, config: UpdatesConfig, rounds: OptimizerRounds) -> None:
        super().__init__(slices, exchange, config)
        self.exchange, self._rounds = exchange, rounds
        self._returned: list[Tensor] = []  # messages or updates of this node that no node counted
        if config.measures_ahead(3):
            self._correlation, self.local_fraction = UpdateCorrelation(max(1, slices.numel)), 1.0

    @property
    def message_bytes(self) -> int:
        return self._path.message_bytes if self.slices.numel else 0

    @property
    def sample_bytes(self) -> int:
        return self._correlation.sample_bytes if self._correlation is not None and self.slices.numel else 0

    @property
    def exchanges(self) -> int:
        return self._exchanges

    @property
    def has_news(self) -> bool:
        """Whether the models lack received or returned updates."""
        return bool(self._received or self._returned)

    def exchange_step(self, step_id: int = 0) -> None:
        self._rounds.request(self)

    def may_change_without_exchange(self, since: int) -> bool:
        return True

    def receive(self) -> None:
        self._rounds.receive()

    def add_to_models(self) -> None:
        self._apply_received()
        self.write_model()

    def take(self, rounds: Sequence[Round], returned: Sequence[Tensor], *, observed: bool) -> None:
        """Store this slice's part of rounds, and of returned updates, until the next exchange adds them."""
        self._returned += returned
        # A node that only observed does not measure ``step_ahead``. Only the last round belongs to this exchange, and
        # may carry samples. Rounds before it were uncertain until now.
        self._received += rounds if observed else rounds[:-1]
        if rounds and not observed:
            self._store_round(rounds[-1])

    def sample_soon(self) -> None:
        # Samples are frequent at first: the correlation changes with the nodes.
        self._exchanges = 0

    def count_exchanges(self, exchanges: int) -> None:
        self._exchanges = max(self._exchanges, exchanges)

    def start_from(self, weights_S: Tensor, rounds: Sequence[Round]) -> None:
        """Set the global weights to the weights after these rounds. Call ``go_on`` afterwards."""
        self._samples = None
        self.global_S.copy_(weights_S)
        for round_ in rounds:
            self._add_round(round_, self.global_S)

    def go_on(self, pending_S: Tensor, returned: Sequence[Tensor], counted: Sequence[Tensor]) -> None:
        """Continue from ``global_S``, and write this node's model into the parameters.

        Args:
            returned: sent tensors that no node counted; they become pending, too.
            counted: sent tensors in ``pending_S`` that the global weights contain already.
        """
        self.set_pending(pending_S)
        self._return_unsent(returned, self.local_S)
        # Otherwise these updates would count twice.
        self._return_unsent(counted, self.local_S, -1.0)
        self.write_model()

    @property
    def pending_S(self) -> Tensor:
        # Returned updates are pending, but ``local_S`` gets them back only in the next exchange.
        if not self._returned:
            return super().pending_S
        local_S = self.local_S.clone()
        self._add_sent(local_S)
        self._return_unsent(self._returned, local_S)
        return self.global_S - local_S

    def read_global(self) -> Tensor:
        """Return the global weights, or this node's own weights while it shows them."""
        global_S = super().read_global()
        if not self._rounds.shows_own:
            return global_S
        own_S = global_S - self.pending_S
        self._return_unsent(self._rounds.uncertain_of(self), own_S)
        return own_S

    def set_pending(self, pending_S: Tensor) -> None:
        super().set_pending(pending_S)
        self._returned = []

    def _update_local_fraction(self) -> None:
        nodes = self._rounds.num_nodes
        if self._correlation is not None and nodes and not self._config.measures_ahead(nodes):
            self.local_fraction, self._samples = self._config.ahead(nodes), None
        else:
            super()._update_local_fraction()

    def _apply_received(self) -> None:
        super()._apply_received()
        self._return_unsent(self._returned, self.local_S)
        self._returned = []

    def _return_unsent(self, returned: Sequence[Tensor], local_S: Tensor, times: float = 1.0) -> None:
        for payload in returned:
            if payload.dtype == torch.uint8:
                self._path.add(payload[: self._path.message_bytes].view(1, -1).to(local_S.device), local_S, -times)
            else:
                local_S.sub_(payload, alpha=times)


class OptimizerRounds:
    """Exchanges the updates of all optimizers of a device in common rounds.

    Args:
        flush_every: number of rounds after which nodes send all pending updates; None for never.
    """

    def __init__(
        self,
        peers: RoundProtocol,
        delay: int,
        flush_every: int | None,
        states: Callable[[], Sequence[ElasticUpdateState]],
    ) -> None:
        self._peers, self._flush_every, self._all_states = peers, flush_every, states
        self._flight: InFlight[RoundJob] = InFlight(delay)
        self._requested: list[ElasticUpdateState] = []
        # M of the last round; 0 if other nodes have counted rounds without this node.
        self.num_nodes, self._changed = 0, False  # whether M differed from M of the round before
        self._number = self._seen = 0  # of the last round, and of the last round before the last exchange
        # ``alone``: no other node took part in the last round. ``behind``: the global weights have moved on without
        # this node. ``left_out``: updates of this node were not finite, and so not sent. ``written``: a round has
        # written the models of all states; the engine gathers them, and resets it.
        self.alone = self.behind = self.left_out = self.written = False
        # ``shows_own``: the shown weights are this node's own weights, with its parts ``_uncertain`` of a payload that
        # other nodes may have counted.
        self.shows_own, self._uncertain = False, list[Tensor]()
        self._flush_failed, self._without_round = False, 0  # ``_without_round``: exchanges since the last round
        self.open_requests: list[str] | None = None  # snapshots that nodes request
        self.requests_for_me: list[str] = []  # snapshots that other nodes request from this node
        self.answered: list[str] = []  # requested snapshots that this node has served

    @property
    def states(self) -> list[ElasticUpdateState]:
        # Devices of a node may have no element of a small optimizer.
        return [state for state in self._all_states() if state.slices.numel]

    @property
    def exchange(self) -> Exchange:
        return self._all_states()[0].exchange

    @property
    def is_cut_off(self) -> bool:
        """Whether no round counts any more, so the global weights do not change."""
        return self._flush_failed or self._without_round >= FAILURES

    def show_own(self, own: bool) -> None:
        """Let the states show this node's own weights, or the global weights."""
        self.shows_own, uncertain = own, self._peers.uncertain
        # Kept, because a thread may settle the round before the parameters are restored.
        self._uncertain = [] if uncertain is None or not own else self._split(uncertain)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def request(self, state: ElasticUpdateState) -> None:
        # A round begins once every optimizer has stepped, or once an optimizer has stepped twice. So with two
        # optimizers that step in turn, nodes make one round for both steps.
        repeats = any(requester is state for requester in self._requested)
        self._requested.append(state)
        if repeats or len(self._requested) == len(self._all_states()):
            self._requested, self.written = [], True
            self._exchange()

    def _exchange(self) -> None:
        every, before, self._seen = self._flush_every, self._seen, self._number
        states = self.states
        # By the number of rounds, so that all nodes flush in the same round.
        due = every is not None and self._number // every > before // every
        if due or (self.alone and not any(state.has_news for state in states)):
            self._flush()
            return
        # As in `SparseUpdateState`: select, wait for the last round, start this round, and then add the last round.
        transfers = [state.begin_exchange() for state in states]
        job = RoundJob(
            [transfer.payload for transfer, _ in transfers], self._message_sizes(), self._peers, states[0].exchanges
        )
        self.receive()
        self._finish(self._flight.start(self.exchange, job, states[0].global_S))
        for state, (_, sent) in zip(states, transfers, strict=True):
            state.end_exchange(sent)

    def receive(self) -> None:
        self._finish(self._flight.wait(self.exchange))

    def flush(self) -> None:
        """Send all pending updates to the present nodes. If rounds fail, some updates stay pending."""
        for _ in range(TRIES_TO_FLUSH):
            self._peers.try_again()
            if self._flush(leaves=True):
                return
            if self.left_out:
                self.drop()
                return
        self._flush_failed = True
        norm = torch.stack([torch.linalg.vector_norm(state.pending_S) for state in self.states]).norm().item()
        log.warning(
            "%d attempts to send the pending updates of this node failed, so the other nodes lack them (norm %.3g). "
            "The model of this node contains them. Check the lighthouse and the links between the nodes.",
            TRIES_TO_FLUSH,
            norm,
        )

    def _flush(self, leaves: bool = False) -> bool:
        states = self.states
        for state in states:
            state.absorb()
        pending = [state.pending_S for state in states]
        for state, pending_S in zip(states, pending, strict=True):
            # Nothing is pending now. If the round fails, the outcome returns the payload, and it is pending again.
            state.local_S.add_(pending_S)
        payload = _joined(pending)
        outcome = self._peers.round(Payload(payload, is_last=leaves), finite=bool(payload.isfinite().all()))
        self._record(outcome, payload.nbytes)
        for state in states:
            state.add_to_models()
        # An uncertain round is settled by the quorum of the next try.
        return not outcome.returned and self._peers.settled

    def _finish(self, job: RoundJob | None) -> None:
        if job is not None:
            rounds = job.outcome.rounds
            self._record(job.outcome, rounds[-1].messages_MB.shape[-1] if rounds else 0)

    def _record(self, outcome: Outcome, own_bytes: int) -> None:
        self.alone, self.behind, self.open_requests = outcome.alone, outcome.behind, outcome.open_requests
        # Kept until ``drop``.
        self.left_out |= outcome.left_out
        self.requests_for_me += outcome.requests_for_me
        self._hand_out(outcome, observed=False)
        self._without_round += 1
        if not outcome.rounds:
            return
        last = outcome.rounds[-1]
        self._number, self._flush_failed, self._without_round = last.number, False, 0
        nbytes = last.messages_MB.nbytes + sum(update.nbytes for update in last.dense)
        # Received bytes: this node's own row does not travel.
        self.exchange.stats.count_bytes(nbytes if outcome.returned else nbytes - own_bytes)
        changed = last.num_nodes != self.num_nodes
        for state in self._all_states():
            if changed:
                state.sample_soon()
            elif not self._changed:  # a round that began before the change counts from before
                state.count_exchanges(outcome.exchanges)
        self.num_nodes, self._changed = last.num_nodes, changed

    def uncertain_of(self, state: ElasticUpdateState) -> list[Tensor]:
        """Return this state's part of a payload that other nodes may have counted, if it is shown."""
        return [part for owner, part in zip(self.states, self._uncertain, strict=False) if owner is state]

    def _hand_out(self, outcome: Outcome, *, observed: bool) -> None:
        rounds = [self._split_round(round_) for round_ in outcome.rounds]
        returned = [self._split(payload) for payload in outcome.returned]
        for place, state in enumerate(self.states):
            state.take([of[place] for of in rounds], [of[place] for of in returned], observed=observed)

    # -- the weights of other nodes ------------------------------------------------------------------------------------

    def absorb(self) -> list[Tensor]:
        """Return the pending updates of each state, after all received updates."""
        for state in self.states:
            state.absorb()
        return [state.pending_S for state in self.states]

    def drop(self) -> None:
        """Continue from the global weights without pending updates."""
        self.absorb()
        self.left_out = False
        for state in self.states:
            state.set_pending(torch.zeros_like(state.global_S))
            state.write_model()

    def start_from(
        self,
        weights: Sequence[Tensor],
        rounds: Sequence[Round],
        pending: Sequence[Tensor] | None,
        returned: Sequence[Tensor],
        counted: Sequence[Tensor],
    ) -> None:
        self.receive()
        # Nothing is in flight from here on.
        parts = [self._split_round(round_) for round_ in rounds]
        for place, (state, weights_S) in enumerate(zip(self.states, weights, strict=True)):
            state.start_from(weights_S, [of[place] for of in parts])
        zeros = [torch.zeros_like(state.global_S) for state in self.states] if pending is None else pending
        self.go_on(zeros, returned, counted)

    def go_on(self, pending: Sequence[Tensor], returned: Sequence[Tensor], counted: Sequence[Tensor]) -> None:
        """Continue from the global weights of the states. See `ElasticUpdateState.go_on`."""
        self.behind = self.alone = False
        self.num_nodes = 0
        self._number = self._seen = self._peers.number
        returned_parts, counted_parts = (
            [self._split(payload) for payload in payloads] for payloads in (returned, counted)
        )
        for place, (state, pending_S) in enumerate(zip(self.states, pending, strict=True)):
            state.go_on(pending_S, [of[place] for of in returned_parts], [of[place] for of in counted_parts])

    def arrive(self, seen: Outcome) -> None:
        """Let the next exchange add rounds that this node has only observed."""
        self.requests_for_me += seen.requests_for_me
        if seen.rounds or seen.returned:
            self.receive()
            self._without_round = 0
            self.num_nodes = 0
            self._hand_out(seen, observed=True)

    # -- payloads ------------------------------------------------------------------------------------------------------

    def _message_sizes(self) -> list[int]:
        return [state.message_bytes for state in self.states]

    def _split_round(self, round_: Round) -> list[Round]:
        messages, dense = self._split(round_.messages_MB), [self._split(update) for update in round_.dense]
        return [
            replace(round_, messages_MB=messages_MB, dense=tuple(of[place] for of in dense))
            for place, messages_MB in enumerate(messages)
        ]

    def _split(self, payload: Tensor) -> list[Tensor]:
        """Return the part of a payload, or of rows of payloads, for each state."""
        states = self.states
        if len(states) == 1:
            return [payload]
        if payload.dtype != torch.uint8:
            return list(torch.split(payload, [state.slices.numel for state in states], dim=-1))
        # Layout of a row: the messages of all states, and then their samples, or no sample at all.
        messages = self._message_sizes()
        sampled = payload.shape[-1] > sum(messages)
        samples = [state.sample_bytes if sampled else 0 for state in states]
        parts = torch.split(payload[..., : sum(messages) + sum(samples)], [*messages, *samples], dim=-1)
        pairs = zip(parts[: len(states)], parts[len(states) :], strict=True)
        return [torch.cat(pair, dim=-1) for pair in pairs]  # new memory, which kernels may read as 32-bit words


class RoundJob:
    """The job of one round: the message of each state, perhaps with a sample behind it."""

    outcome: Outcome  # of the round, after ``transfer``

    def __init__(self, payloads: Sequence[Tensor], sizes: Sequence[int], peers: RoundProtocol, exchanges: int) -> None:
        self._payloads, self._sizes, self._peers, self._exchanges = payloads, sizes, peers, exchanges

    def select(self) -> Sequence[Tensor]:
        return self._payloads

    def transfer(self) -> Sequence[Tensor]:
        # All samples come last: `Quorum.row_of` cuts them off if they are not comparable.
        samples = [payload[size:] for payload, size in zip(self._payloads, self._sizes, strict=True)]
        messages = [payload[:size] for payload, size in zip(self._payloads, self._sizes, strict=True)]
        payload = self._payloads[0] if len(self._payloads) == 1 else torch.cat([*messages, *samples])
        # A message that is not finite would spoil the weights of all nodes.
        finite = not any(map(nonfinite_of, self._payloads))
        self.outcome = self._peers.round(Payload(payload, self._exchanges), finite=finite)
        return self._payloads

    def apply(self) -> Sequence[Tensor]:
        return ()


def sizes_of(states: Sequence[UpdateState]) -> Sizes:
    """Return the sizes of this device's payloads.

    Raises:
        ValueError: if this device has nothing to exchange.
    """
    elastic_states = [state for state in states if isinstance(state, ElasticUpdateState) and state.slices.numel]
    if not elastic_states:
        raise ValueError(
            "this device has no parameters to exchange, because the model is too small. Use fewer devices per node."
        )
    return Sizes(
        sum(state.message_bytes for state in elastic_states),
        sum(state.sample_bytes for state in elastic_states),
        sum(state.slices.numel for state in elastic_states),
    )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

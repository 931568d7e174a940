"""A thread that observes rounds, so that other nodes do not wait for this node."""

from __future__ import annotations

import threading
import time

import torch

from lightning_sparse.elastic.rounds import Outcome, RoundProtocol

WATCH_SECONDS = 0.05
WATCHED_BYTES = 1 << 30
"""Limit of the messages that an observing node stores. Beyond it, the node loads the weights of another node."""


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

    def _drop_rounds(self) -> None:
        # If this node stopped observing instead, the other nodes would wait for it.
        self._seen.returned += self._peers.fall_behind(self._seen.rounds)
        self._seen.rounds = []

    def _run(self) -> None:
        stored_bytes = 0
        try:
            # The first device decides for all, because the devices stop at different times.
            # After a change of the parameters, this node must follow first.
            while self._peers.first_device_wants(not (self._stopped.is_set() or self._peers.changed)):
                self._begun += 1
                with torch.no_grad():
                    outcome = self._peers.round()
                self._ended += 1
                stored_bytes += sum(
                    tensor.nbytes for round_ in outcome.rounds for tensor in (round_.messages_MB, *round_.dense)
                )
                self._seen.rounds += outcome.rounds
                self._seen.returned += outcome.returned
                self._seen.requests_for_me += outcome.requests_for_me
                # A node that waits for a change must make it with its present weights.
                changes = self._peers.proposes or self._peers.changed
                is_full = stored_bytes > WATCHED_BYTES and not changes
                if self._peers.first_device_wants(is_full):
                    self._drop_rounds()
                    stored_bytes = 0
        except BaseException as error:
            self._error = error

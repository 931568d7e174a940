"""Act on a signal after the same step on all ranks, although it reaches them at different times, or only one of them.

A rank that stops alone leaves the others in a collective. A collective in each step could prevent this, but the host
would wait for it, also over a slow link. So a thread of each rank watches the store of the process group. Until there
is a signal, the training waits for nothing.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Literal

import torch.distributed as dist

from lightning_sparse.checkpoint.verdict import Reports, decide
from lightning_sparse.internals import default_store
from lightning_sparse.messages import SLOW_AFTER, log

POLL_SECONDS = 0.5


class SharedSignal:
    """A signal that all ranks act on together.

    All ranks make it at the start of a fit, and call `end_step` after each step.

    Args:
        aim: the action that follows, for the log.
    """

    def __init__(self, aim: str) -> None:
        self._store = default_store()
        # Each fit has its own key.
        number = self._store.add(f"lightning_sparse/signals/{dist.get_rank()}", 1)
        self._aim, self._key = aim, f"lightning_sparse/signal {number}"
        self.received = False
        """Whether this process has received the signal."""
        self._ended = 0  # number of steps
        self._state: Literal["no signal", "deciding", "over"] = "no signal"
        self._last: int | None = None  # number of the step after which all ranks act
        self._wake, self._changed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="lightning_sparse", daemon=True)
        self._thread.start()

    def receive(self) -> None:
        """Note the signal. Signal handlers may call it."""
        self.received = True
        self._wake.set()

    def end_step(self) -> bool:
        """Return whether to act after this step. All ranks act after the same step."""
        with self._changed:
            # The decision counts the steps of this rank, so it must not begin another one.
            self._changed.wait_for(lambda: self._state != "deciding")
            self._ended += 1
            return self._ended == self._last

    def close(self) -> None:
        """End the fit. Other ranks may still decide, and do not wait for this one."""
        if self._leave("no signal", "over"):
            with contextlib.suppress(RuntimeError):  # the process with the store has ended
                self._store.set(f"{self._key}/{dist.get_rank()}", str(self._ended))
        self._wake.set()
        # A thread that calls the store while Python ends would abort the process.
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._is_shared() and self._leave("no signal", "deciding"):
                # This rank's step may need other ranks. Their threads answer during a step, too.
                verdict, _ = decide(self._key, str(self._ended + 1), _last_step, SLOW_AFTER)
                self._last = int(verdict) if verdict.isdigit() else None
                if self._last is None and dist.get_rank() == 0:
                    log.warning("cannot %s: %s", self._aim, verdict)
        except RuntimeError as error:
            log.debug("the store of the process group does not answer (%s)", error)
        finally:
            self._leave("deciding", "over")

    def _is_shared(self) -> bool:
        """Wait until any rank has received the signal. Return False at the end of the fit."""
        key = f"{self._key}/received"
        while self._state == "no signal":
            self._wake.wait(POLL_SECONDS)
            if self.received:
                self._store.set(key, "1")
            if self._store.check([key]):
                return True
        return False

    def _leave(self, old: str, new: Literal["deciding", "over"]) -> bool:
        """Change the state, unless it has changed already."""
        with self._changed:
            if self._state != old:
                return False
            self._state = new
            self._changed.notify_all()
            return True


def _last_step(reports: Reports) -> str:
    missing = [str(rank) for rank, report in enumerate(reports) if report is None]
    if missing:
        return f"rank(s) {', '.join(missing)} did not answer within {SLOW_AFTER.total_seconds():.0f} s"
    return str(max(int(report) for report in reports if report is not None))

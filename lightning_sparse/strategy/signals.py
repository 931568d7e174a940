"""Act on a signal after the same step on all ranks, although it reaches them at different times, or only one of them.

A rank that stops alone leaves the others in a collective. A collective in each step could prevent this, but the host
would wait for it, also over a slow link. So a thread of each rank watches the store of the process group. Until there
is a signal, the training waits for nothing.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from lightning_sparse.agree import largest
from lightning_sparse.checkpoint.verdict import Reports, decide
from lightning_sparse.internals import default_store
from lightning_sparse.messages import log

POLL_SECONDS, ANSWER_POLL_SECONDS = 0.5, 0.05
ANSWER_SECONDS = 120.0
"""Time limit for the answers of all ranks. Schedulers usually end a program sooner after SIGTERM."""


def replace_sigterm(trainer: Any, receive: Callable[..., None]) -> list[tuple[Any, str]]:
    """Let ``receive(number, frame)`` handle SIGTERM. Return the methods of the Trainer to restore after the fit."""
    connector, epoch = trainer._signal_connector, trainer.fit_loop.epoch_loop
    connector._sigterm_notifier_fn = receive
    connector._sigterm_handler_fn = lambda *_: None  # under SLURM, Lightning's second handler only logs
    epoch._broadcast_sigterm_tensor = lambda: None
    return [
        (connector, "_sigterm_notifier_fn"),
        (connector, "_sigterm_handler_fn"),
        (epoch, "_broadcast_sigterm_tensor"),
    ]


class TrainerSignals:
    """Handles SIGTERM and SLURM's requeue signal in a fit on several ranks, instead of Lightning.

    Lightning's handlers call collectives wherever a rank is in a batch, and then ranks hang. Lightning also broadcasts
    before each batch, and the host waits for the result.

    Attributes:
        replaced: methods of the Trainer to restore after the fit.
    """

    def __init__(self, trainer: Any) -> None:
        connector, checkpoints = trainer._signal_connector, trainer._checkpoint_connector
        epoch = trainer.fit_loop.epoch_loop
        self._strategy, self._connector, self._epoch = trainer.strategy, connector, epoch
        self._raise_on_all_ranks, self._requeue = epoch._broadcast_sigterm_tensor, connector._slurm_sigusr_handler_fn
        find_path = checkpoints.hpc_save_path
        self._stop, self._save = SharedSignal("stop"), SharedSignal("save a checkpoint")
        connector._slurm_sigusr_handler_fn = lambda number, _: self._save.receive(number)
        # The path contains the number of the next file, which a rank may find too late.
        checkpoints.hpc_save_path = lambda folder: self._strategy.broadcast(find_path(folder))
        self.replaced: Sequence[tuple[Any, str]] = [
            *replace_sigterm(trainer, lambda number, _: self._stop.receive(number)),
            (connector, "_slurm_sigusr_handler_fn"),
            (checkpoints, "hpc_save_path"),
        ]

    def end_batch(self) -> None:
        """Save, requeue or stop, if the ranks have decided to do so after this batch."""
        # A checkpoint has no accumulated gradients. In a resumed run, Lightning also counts the last batch of the
        # checkpoint.
        if self._epoch.restarting or self._epoch._should_accumulate():
            return
        if self._save.end_step():
            self._requeue(signal.SIGUSR1, None)
            self._save.close()
            self._save = SharedSignal("save a checkpoint")
        if self._stop.end_step():
            self._raise()

    def end_fit(self) -> None:
        """Stop the program if a signal has arrived after the last step. A collective of the world."""
        if largest(float(self._stop.received > 0), dist.all_reduce, self._strategy.root_device):
            self._stop.tell()
            self._raise()

    def close(self) -> None:
        self._stop.close()
        self._save.close()

    def _raise(self) -> None:
        self._connector.received_sigterm = True
        self._raise_on_all_ranks()


class SharedSignal:
    """A signal that all ranks act on together.

    All ranks make it at the start of a fit, and call `end_step` after each step.

    Args:
        action: the action that follows, for the log.

    Attributes:
        received: number of the signal that this process has received; 0 for none.
    """

    def __init__(self, action: str) -> None:
        self._store = default_store()
        # Each fit has its own key.
        number = self._store.add(f"lightning_sparse/signals/{dist.get_rank()}", 1)
        self.action, self.received, self._logged = action, 0, False
        self._key = f"lightning_sparse/signal {number}"
        self._ended = 0  # number of steps
        self._state: Literal["no signal", "deciding", "over"] = "no signal"
        self._last: int | None = None  # number of the step after which all ranks act
        self._closed, self._changed = threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="lightning_sparse", daemon=True)
        self._thread.start()

    def receive(self, number: int) -> None:
        """Handle the signal."""
        # It may interrupt the main thread while it writes a log line, and Python refuses a write within a write. The
        # thread may also hold a lock. So this only notes the signal.
        self.received = number

    def tell(self) -> None:
        """Log a received signal, once."""
        if self.received and not self._logged:
            self._logged = True
            log.info("received %s: all ranks %s after the same step", signal.Signals(self.received).name, self.action)

    def end_step(self) -> bool:
        """Return whether to act after this step. All ranks act after the same step."""
        with self._changed:
            # The decision counts the steps of this rank, so it must not begin another one.
            self._changed.wait_for(lambda: self._state != "deciding")
            self._ended += 1
            return self._ended == self._last

    def close(self) -> None:
        """End the fit. Other ranks may still decide, and do not wait for this one."""
        with contextlib.suppress(RuntimeError):  # the process with the store has ended
            if self._leave("no signal", "over"):
                self._store.set(f"{self._key}/{dist.get_rank()}", str(self._ended))
            elif self._leave("deciding", "over"):  # after an error
                self._store.set(f"{self._key}/failed", "1")
        self._closed.set()
        # A thread that calls the store while Python ends would abort the process.
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._is_shared() and self._leave("no signal", "deciding"):
                self._decide()
        except RuntimeError as error:
            log.debug("the store of the process group does not answer (%s)", error)
        finally:
            self._leave("deciding", "over")

    def _decide(self) -> None:
        report, ranks = str(self._ended + 1), range(dist.get_world_size())
        self._store.set(f"{self._key}/{dist.get_rank()}", report)
        until = time.monotonic() + ANSWER_SECONDS
        # The step of this rank may need other ranks. Their threads answer during a step, too.
        while not self._store.check([f"{self._key}/{rank}" for rank in ranks]):
            failed = self._store.check([f"{self._key}/failed"])
            if failed or time.monotonic() > until or self._closed.wait(ANSWER_POLL_SECONDS):
                break
        verdict, _ = decide(self._key, report, _last_step, timedelta(milliseconds=1))
        self._last = int(verdict) if verdict.isdigit() else None
        if self._last is None:
            log.warning("ranks do not %s together: %s", self.action, verdict)

    def _is_shared(self) -> bool:
        """Wait until any rank has received the signal. Return False at the end of the fit."""
        key = f"{self._key}/received"
        while self._state == "no signal":
            self._closed.wait(POLL_SECONDS)
            if self.received:
                self.tell()
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
        return f"rank(s) {', '.join(missing)} did not answer"
    return str(max(int(report) for report in reports if report is not None))

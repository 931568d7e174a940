"""Calls in a process of their own. One that dies is named, with how it ended."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any


@contextmanager
def own_process() -> Iterator[Callable[..., Any]]:
    """Yield ``call(what, work, *arguments)``, which returns ``work(*arguments)`` of a process that starts afresh.

    `what` names the work in the RuntimeError that `call` raises if the process ends before.
    """
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:

        def call(what: str, work: Callable[..., Any], *arguments: object) -> Any:
            future = executor.submit(work, *arguments)
            own = set(multiprocessing.active_children()) - others
            try:
                return future.result()
            except BrokenProcessPool as error:
                executor.shutdown()  # its thread waits for the process, and until then the exit status is not known
                raise RuntimeError(f"the process of {what} {' and '.join(map(_end, own))}") from error

        yield call


def _end(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None or code >= 0:
        return f"(pid {process.pid}) ended with status {code}: what it printed above says why."
    end = f"(pid {process.pid}) was ended by {signal.Signals(-code).name}."
    if code == -signal.SIGKILL:
        end += " The kernel does that where memory is short (`dmesg | grep -i kill` tells): free some, or measure less."
    return end

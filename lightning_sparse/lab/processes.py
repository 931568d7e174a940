"""Find and kill all processes of a run.

Launchers, file system mounts and scripts start processes in new sessions, so process groups do not cover them. Each run
therefore has a name, which all its processes inherit in the environment variable `RUN_VARIABLE`;
``/proc/<pid>/environ`` shows it.

On exit, the lab signals its launchers, waits, then kills the remaining processes. If the lab itself is killed, a
parent-death signal ends the launchers, and the next lab kills the rest.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

RUN_VARIABLE = "LIGHTNING_SPARSE_LAB"
PROC = Path("/proc")
KILL_S = 10.0


@dataclass(frozen=True)
class RunName:
    """``lslab.<pid>.<start>.<token>``: the owner of a run. The start time detects a reused process id."""

    PREFIX: ClassVar[str] = "lslab."
    pid: int
    start: int
    token: str

    @classmethod
    def new(cls) -> RunName:
        return cls(os.getpid(), _start_time(os.getpid()) or 0, secrets.token_hex(3))

    @classmethod
    def parse(cls, text: str) -> RunName | None:
        """Parse the name of a namespace or run; None if it is not a lab's."""
        fields = text.removeprefix(cls.PREFIX).split(".")
        if not text.startswith(cls.PREFIX) or len(fields) < 3 or not (fields[0] + fields[1]).isdigit():
            return None
        return cls(int(fields[0]), int(fields[1]), fields[2])

    def owner_lives(self) -> bool:
        return _start_time(self.pid) == self.start

    def __str__(self) -> str:
        return f"{self.PREFIX}{self.pid}.{self.start}.{self.token}"


def _start_time(pid: int) -> int | None:
    """Start time of a running process in clock ticks since boot; None if there is no such process, or no /proc."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _processes() -> Iterator[tuple[int, str]]:
    """(process, name of its run) of all processes of all runs."""
    mark = f"{RUN_VARIABLE}=".encode()
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                if entry.startswith(mark):
                    yield int(folder.name), entry.removeprefix(mark).decode(errors="replace")


def processes_of(run: str) -> list[int]:
    """The running processes of a run."""
    return [pid for pid, name in _processes() if name == run and _start_time(pid) is not None]


def kill_processes(run: str, exclude: Collection[int] = ()) -> None:
    """Kill all processes of a run except `exclude`, and wait for their end.

    Scans ``/proc`` until two scans in a row find none: one scan can miss a process that forks and exits meanwhile.
    """
    deadline = time.monotonic() + KILL_S
    empty_scans = 0
    while empty_scans < 2 and time.monotonic() < deadline:
        left = [pid for pid in processes_of(run) if pid not in exclude]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        empty_scans = 0 if left else empty_scans + 1
        time.sleep(0.05)


def kill_orphans() -> None:
    """Kill the processes of runs whose owner died, for example of a killed lab without namespaces."""
    for pid, name in _processes():
        run = RunName.parse(name)
        if run is not None and not run.owner_lives():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def die_with_parent() -> list[str]:
    """The command prefix that terminates a command when this process dies."""
    return ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, so that context managers clean up as they do after Ctrl-C."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled_by(leave, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM during clean-up. Has no effect outside the main thread, which gets no signals."""
    is_main = threading.current_thread() is threading.main_thread()
    with _handled_by(signal.SIG_IGN, *([signal.SIGINT, signal.SIGTERM] if is_main else [])):
        yield


@contextlib.contextmanager
def _handled_by(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    former = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)

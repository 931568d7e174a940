"""Every process of a run can be found again, and none outlives it.

A launcher starts workers in sessions of their own, a file system mount is a daemon, and a script may start whatever it
likes: process groups do not hold them together. So each run has a name that its processes carry in their environment
(`RUN_VARIABLE`), which the kernel shows in ``/proc/<pid>/environ`` however often a process forked.

Three lines of defence against leftovers: an orderly end forwards the signal to the launchers, waits, then kills what is
left; a lab that is itself killed takes its launchers along (parent-death signal); and the next lab ends the processes
of runs whose owner is dead.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar

RUN_VARIABLE = "LIGHTNING_SPARSE_LAB"
PROC = Path("/proc")
KILL_S = 10.0


@dataclass(frozen=True)
class RunName:
    """``lslab.<pid>.<start>.<token>``: who owns a run. The start time tells a process id that was used again."""

    PREFIX: ClassVar[str] = "lslab."
    pid: int
    start: int
    token: str

    @classmethod
    def new(cls) -> RunName:
        return cls(os.getpid(), _start_time(os.getpid()) or 0, secrets.token_hex(3))

    @classmethod
    def parse(cls, text: str) -> RunName | None:
        """The run that a namespace or an environment belongs to; None for a name of somebody else."""
        fields = text.removeprefix(cls.PREFIX).split(".")
        if not text.startswith(cls.PREFIX) or len(fields) < 3 or not (fields[0] + fields[1]).isdigit():
            return None
        return cls(int(fields[0]), int(fields[1]), fields[2])

    def owner_lives(self) -> bool:
        return _start_time(self.pid) == self.start

    def __str__(self) -> str:
        return f"{self.PREFIX}{self.pid}.{self.start}.{self.token}"


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a living process, None when there is none (or no /proc)."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def processes_of(run: str) -> list[int]:
    """Living processes of a run, wherever they were started from."""
    mark = f"{RUN_VARIABLE}={run}".encode()
    found = []
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to another user
            if mark in (folder / "environ").read_bytes().split(b"\0") and _start_time(int(folder.name)) is not None:
                found.append(int(folder.name))
    return found


def end_processes(run: str, spare: int | None = None) -> None:
    """Kill what is left of a run, but not process `spare`, and wait until it is gone.

    A process that forks and ends while ``/proc`` is read shows neither itself nor its child: only a second look that
    finds nothing either is believed.
    """
    deadline = time.monotonic() + KILL_S
    looks_without = 0
    while looks_without < 2 and time.monotonic() < deadline:
        left = [pid for pid in processes_of(run) if pid != spare]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        looks_without = 0 if left else looks_without + 1
        time.sleep(0.05)


def end_orphans() -> None:
    """Kill processes of runs whose owner is dead: what a killed rehearsal without namespaces leaves behind."""
    mark = f"{RUN_VARIABLE}={RunName.PREFIX}".encode()
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                if entry.startswith(mark):
                    run = RunName.parse(entry.partition(b"=")[2].decode(errors="replace"))
                    if run is not None and not run.owner_lives():
                        os.kill(int(folder.name), signal.SIGKILL)


def tether() -> list[str]:
    """The words that, before a command, end it when this process dies."""
    return ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that a lab is taken down whichever arrives."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    former = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Clean-up that an impatient second Ctrl-C must not cut short. Signals only reach the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)

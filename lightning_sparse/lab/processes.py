"""The processes of a run: start one torchrun per node, signal them, and kill leftover processes.

Processes start others in new sessions, so process groups do not cover them. Each run therefore has a name, which all
its processes inherit in the environment variable `RUN_VARIABLE`. If the lab is killed, a parent-death signal ends the
launchers, and the next lab kills the rest.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from lightning_sparse.lab.output import LabeledOutput

RUN_VARIABLE = "LIGHTNING_SPARSE_LAB"
PROC = Path("/proc")
KILL_S = 10.0
GRACE_S = 5.0  # until processes that are still running after a signal are killed
LATE_LAUNCHER_S = 5.0
LAUNCHER = -1  # instead of a local rank
READ_BYTES = 1 << 16  # the capacity of a pipe: one read after the end gets the rest


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
        fields = text.removeprefix(cls.PREFIX).split(".")
        if not text.startswith(cls.PREFIX) or len(fields) < 3 or not (fields[0] + fields[1]).isdigit():
            return None
        return cls(int(fields[0]), int(fields[1]), fields[2])

    def owner_lives(self) -> bool:
        return _start_time(self.pid) == self.start

    def __str__(self) -> str:
        return f"{self.PREFIX}{self.pid}.{self.start}.{self.token}"


def _start_time(pid: int) -> int | None:
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # in clock ticks since boot
    return None if fields[0] in "ZX" else int(fields[19])


def _processes_of_runs() -> Iterator[tuple[int, str]]:
    mark = f"{RUN_VARIABLE}=".encode()
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                if entry.startswith(mark):
                    yield int(folder.name), entry.removeprefix(mark).decode(errors="replace")


def processes_of(run: str) -> list[int]:
    return [pid for pid, name in _processes_of_runs() if name == run and _start_time(pid) is not None]


def kill_processes(run: str, exclude: Collection[int] = ()) -> None:
    """Kill all processes of a run except `exclude`, and wait for their end."""
    deadline = time.monotonic() + KILL_S
    empty_scans = 0
    # two scans in a row: one scan can miss a process that forks and exits meanwhile
    while empty_scans < 2 and time.monotonic() < deadline:
        left = [pid for pid in processes_of(run) if pid not in exclude]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        empty_scans = 0 if left else empty_scans + 1
        time.sleep(0.05)


def kill_orphans() -> None:
    """Kill the processes of runs whose owner died."""
    for pid, name in _processes_of_runs():
        run = RunName.parse(name)
        if run is not None and not run.owner_lives():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def pdeathsig_prefix() -> list[str]:
    """Return the command prefix that terminates a command when this process dies."""
    return ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, so that context managers clean up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled_by(leave, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM during clean-up."""
    # other threads get no signals
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


# -- launchers ---------------------------------------------------------------------------------------------------------


def torchrun_command(*options: str) -> list[str]:
    """Return the command of a launcher: torchrun, except that the launcher of node 0 ends last."""
    return [sys.executable, "-c", f"from {__name__} import run_torchrun; run_torchrun()", *options]


def run_torchrun() -> None:
    from torch.distributed import TCPStore, run  # type: ignore[attr-defined]  # the store is re-exported, unannounced

    # When their ranks have ended, launchers meet once more at a store that the launcher of node 0 serves. If it ended
    # first, the others could lose the store while they wait, and would print a C++ traceback though nothing failed.
    options = run.get_args_parser().parse_args(sys.argv[1:])
    is_first = options.node_rank == 0
    # torch's own handle of the store, which it drops at the end, shares the server with this one
    store = TCPStore(
        options.master_addr, options.master_port, is_master=is_first, wait_for_workers=False, multi_tenant=True
    )
    run.main(sys.argv[1:])
    store.add("ended", 1)
    deadline = time.monotonic() + LATE_LAUNCHER_S  # other launchers may have been killed
    while is_first and store.add("ended", 0) < int(options.nnodes) and time.monotonic() < deadline:
        time.sleep(0.02)


def redirect_to_pipe(command: list[str]) -> list[str]:
    """Return the command of a rank with its output redirected to its pipe from `Launchers`."""
    if not PROC.is_dir():
        return command  # not Linux: lines can interleave
    # the ranks of a node inherit the launcher's output, where their lines could interleave
    return ["sh", "-c", 'eval "exec >\\$LAB_OUTPUT_$LOCAL_RANK 2>&1"; exec "$@"', "sh", *command]


class Launchers:
    """The launchers of a run. `codes` maps ended nodes to exit codes, in the order of their ends."""

    def __init__(
        self, commands: Sequence[tuple[list[str], Mapping[str, str]]], devices: int, output: LabeledOutput
    ) -> None:
        self.codes: dict[int, int] = {}
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[int] = []
        for node, (command, environment) in enumerate(commands):
            process = subprocess.Popen(
                [*pdeathsig_prefix(), *command],
                env={**environment, **self._rank_outputs(node, devices)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # launchers forward signals to their ranks, so a Trainer receives Ctrl-C
                start_new_session=True,  # Ctrl-C reaches only the lab, which forwards it
            )
            self._processes.append(process)
            assert process.stdout is not None
            self._selector.register(process.stdout, selectors.EVENT_READ, (node, LAUNCHER))

    def wait(self, timeout: float | None, check: Callable[[], None]) -> None:
        """Wait until all nodes end, until `GRACE_S` seconds after the first failure, or until `check` raises."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        give_up = float("inf")
        while self._running():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nodes {self._running()} were still running after {timeout:g} s")
            if time.monotonic() > give_up:
                return self.terminate(signal.SIGTERM)
            check()
            self._step()
            if any(self.codes.values()):
                give_up = min(give_up, time.monotonic() + GRACE_S)
        return None

    def terminate(self, number: signal.Signals) -> None:
        """Send a signal to the running launchers, and kill each launcher that does not end in time."""
        with signals_ignored():
            for node in self._running():
                self._processes[node].send_signal(number)
            deadline = time.monotonic() + GRACE_S
            while self._running() and time.monotonic() < deadline:
                self._step()
            for node in self._running():
                self._processes[node].kill()
            while self._running():
                self._step()

    def close(self) -> None:
        """Release pipes. All processes must have ended or been killed."""
        self._selector.close()
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for end in self._pipes:
            os.close(end)
        self._output.close()

    def _rank_outputs(self, node: int, devices: int) -> dict[str, str]:
        variables = {}
        for device in range(devices if PROC.is_dir() else 0):
            read, write = os.pipe()
            self._pipes += [read, write]  # keep the write end open, so that reads never see the end of the file
            self._selector.register(read, selectors.EVENT_READ, (node, device))
            variables[f"LAB_OUTPUT_{device}"] = f"/proc/{os.getpid()}/fd/{write}"
        return variables

    def _running(self) -> list[int]:
        return [node for node in range(len(self._processes)) if node not in self.codes]

    def _step(self) -> None:
        # poll before reading: the pipe then holds all output of the processes that ended
        ended = [node for node in self._running() if self._processes[node].poll() is not None]
        for key, _ in self._selector.select(timeout=0 if ended else 0.1):
            data = os.read(key.fd, READ_BYTES)
            if data:
                node, rank = key.data
                self._output.feed(node, rank, data)
            else:
                self._selector.unregister(key.fileobj)
        for node in ended:
            self._output.finish(node)
            code = self._processes[node].returncode
            self.codes[node] = code if code >= 0 else 128 - code

"""The launchers of one run, one a node: started, followed to their end, and wound down when they must end early.

A signal to the lab is passed on to the launchers, which pass it on to their ranks: Ctrl-C reaches a Trainer as Ctrl-C,
and its last words are still read and shown. Who has not left after `PATIENCE_S` seconds is killed.

Ranks of a node share the launcher's output, where a line of one may end in the middle of another's. So each rank gets
a pipe of its own: the lab makes it, and the rank opens it as ``/proc/<lab>/fd/<n>``, the launcher none the wiser.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_sparse.lab.output import LabelledOutput
from lightning_sparse.lab.processes import tether, uninterrupted

PATIENCE_S = 5.0
PROC = Path("/proc/self/fd")
LAUNCHER = -1  # in the place of a local rank
READ_BYTES = 1 << 16  # what a pipe holds, so that one read after the end gets all of it


def with_own_output(command: list[str]) -> list[str]:
    """The command of a rank, writing to the pipe that `Launchers` made for it."""
    if not PROC.is_dir():
        return command  # not Linux: lines may mix
    return ["sh", "-c", 'eval "exec >\\$LAB_OUTPUT_$LOCAL_RANK 2>&1"; exec "$@"', "sh", *command]


class Launchers:
    """Processes by node. `codes` holds the exit codes of those that ended, in the order of their ends."""

    def __init__(
        self, commands: Sequence[tuple[list[str], Mapping[str, str]]], devices: int, output: LabelledOutput
    ) -> None:
        """commands: (command, environment) of each node."""
        self.codes: dict[int, int] = {}
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[int] = []
        for node, (command, environment) in enumerate(commands):
            process = subprocess.Popen(
                [*tether(), *command],
                env={**environment, **self._rank_outputs(node, devices)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is for the lab, which passes it on
            )
            self._processes.append(process)
            assert process.stdout is not None
            self._selector.register(process.stdout, selectors.EVENT_READ, (node, LAUNCHER))

    def follow(self, timeout: float | None) -> None:
        """Until every node ended, or a while after the first failed."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        give_up = float("inf")
        while self._running():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nodes {self._running()} were still running after {timeout:g} s")
            if time.monotonic() > give_up:
                return self.wind_down(signal.SIGTERM)
            self._step()
            if any(self.codes.values()):
                give_up = min(give_up, time.monotonic() + PATIENCE_S)
        return None

    def wind_down(self, number: signal.Signals) -> None:
        """Ask what still runs to leave, and kill what does not."""
        with uninterrupted():
            for node in self._running():
                self._processes[node].send_signal(number)
            deadline = time.monotonic() + PATIENCE_S
            while self._running() and time.monotonic() < deadline:
                self._step()
            for node in self._running():
                self._processes[node].kill()
            while self._running():
                self._step()

    def close(self) -> None:
        """All processes have ended, or were killed by whoever calls this."""
        self._selector.close()
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for end in self._pipes:
            os.close(end)
        self._output.close()

    def _rank_outputs(self, node: int, devices: int) -> dict[str, str]:
        """A pipe for each rank of a node; returns the variables that tell ranks where theirs is."""
        variables = {}
        for device in range(devices if PROC.is_dir() else 0):
            read, write = os.pipe()
            self._pipes += [read, write]  # holding the writing end too, so that it never reads as ended
            self._selector.register(read, selectors.EVENT_READ, (node, device))
            variables[f"LAB_OUTPUT_{device}"] = f"/proc/{os.getpid()}/fd/{write}"
        return variables

    def _running(self) -> list[int]:
        return [node for node in range(len(self._processes)) if node not in self.codes]

    def _step(self) -> None:
        """Wait for output a moment, copy it, and note who ended."""
        # asked before reading: what a process wrote before it ended is then in the pipe
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

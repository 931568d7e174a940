"""The launchers of one run, one a node: started, followed to their end, and wound down when they must end early.

A signal to the lab is passed on to the launchers, which pass it on to their ranks: Ctrl-C reaches a Trainer as Ctrl-C,
and its last words are still read and shown. Who has not left after `PATIENCE_S` seconds is killed.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from lightning_sparse.lab.output import LabelledOutput
from lightning_sparse.lab.processes import tether, uninterrupted

PATIENCE_S = 10.0
READ_BYTES = 1 << 16  # what a pipe holds, so that one read after the end gets all of it


class Launchers:
    """Processes by node. `codes` holds the exit codes of those that ended, in the order of their ends."""

    def __init__(self, commands: Sequence[tuple[list[str], Mapping[str, str]]], output: LabelledOutput) -> None:
        """commands: (command, environment) of each node."""
        self.codes: dict[int, int] = {}
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._processes: list[subprocess.Popen[bytes]] = []
        for node, (command, environment) in enumerate(commands):
            process = subprocess.Popen(
                [*tether(), *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is for the lab, which passes it on
            )
            self._processes.append(process)
            assert process.stdout is not None
            self._selector.register(process.stdout, selectors.EVENT_READ, node)

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
        self._output.close()

    def _running(self) -> list[int]:
        return [node for node in range(len(self._processes)) if node not in self.codes]

    def _step(self) -> None:
        """Wait for output a moment, copy it, and note who ended."""
        # asked before reading: what a process wrote before it ended is then in the pipe
        ended = [node for node in self._running() if self._processes[node].poll() is not None]
        for key, _ in self._selector.select(timeout=0 if ended else 0.1):
            data = os.read(key.fd, READ_BYTES)
            if data:
                self._output.feed(key.data, data)
            else:
                self._selector.unregister(key.fileobj)
        for node in ended:
            self._output.finish(node)
            code = self._processes[node].returncode
            self.codes[node] = code if code >= 0 else 128 - code

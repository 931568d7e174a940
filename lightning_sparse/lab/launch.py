"""The launchers of one run: one torchrun process per node.

The lab forwards signals to the launchers, which forward them to their ranks, so a Trainer receives Ctrl-C. Processes
that are still running after `GRACE_S` seconds are killed. Output is read until the end.

The ranks of a node inherit the launcher's output, where their lines can interleave. Each rank therefore writes to its
own pipe, which the lab creates and the rank opens as ``/proc/<lab>/fd/<n>``.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning_sparse.lab.output import LabelledOutput
from lightning_sparse.lab.processes import die_with_parent, signals_ignored

GRACE_S = 5.0
PROC = Path("/proc/self/fd")
LAUNCHER = -1  # instead of a local rank
READ_BYTES = 1 << 16  # the capacity of a pipe: one read after the end gets the rest


def redirect_to_pipe(command: list[str]) -> list[str]:
    """The command of a rank, with its output redirected to its pipe from `Launchers`."""
    if not PROC.is_dir():
        return command  # not Linux: lines can interleave
    return ["sh", "-c", 'eval "exec >\\$LAB_OUTPUT_$LOCAL_RANK 2>&1"; exec "$@"', "sh", *command]


class Launchers:
    """The launchers by node. `codes` maps ended nodes to exit codes, in the order of their ends."""

    def __init__(
        self, commands: Sequence[tuple[list[str], Mapping[str, str]]], devices: int, output: LabelledOutput
    ) -> None:
        """commands: (command, environment) per node."""
        self.codes: dict[int, int] = {}
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[int] = []
        for node, (command, environment) in enumerate(commands):
            process = subprocess.Popen(
                [*die_with_parent(), *command],
                env={**environment, **self._rank_outputs(node, devices)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
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
        """Send a signal to the running launchers, and kill those that do not end in time."""
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
        """Create a pipe for each rank of a node; return the environment variables with their paths."""
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
        """Copy available output and record the launchers that ended."""
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

"""Elastic nodes and a lighthouse of torchft, each in its own process, for tests that kill, stop and disconnect them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_sparse.lab.cluster import free_port
from tests.helpers import distributed

# One server starts the processes of all tests, so it imports the modules of ranks too.
PRELOAD = [*distributed.PRELOAD, "torchft.process_group", "torchft.coordination", "tests.helpers.nodes"]
# Before the server starts: the lighthouse would log the status of all nodes in each round.
os.environ.setdefault("RUST_LOG", "warn")
Main = Callable[[str, str, dict[str, Any]], None]
WAIT_SECONDS = 180.0  # for an event. A test of several waits ends at its own limit


class Nodes:
    """Nodes of one lighthouse.

    Args:
        main: the function that each node runs with its name, the lighthouse and options.
        host: of the lighthouse.
        lighthouse: its options.
    """

    def __init__(self, main: Main, folder: Path, host: str, **lighthouse: int) -> None:
        self._main, self._folder, self._host = main, folder, host
        self._options = {"min_replicas": 1, "join_timeout_ms": 4000, "heartbeat_timeout_ms": 1500, **lighthouse}
        self._port = free_port(host)
        self.address = f"http://{host}:{self._port}"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._processes: dict[str, Any] = {}
        self._reports: dict[str, tuple[int, list[dict[str, Any]]]] = {}  # bytes read, and the reports in them
        self.light()

    def light(self) -> None:
        """Start the lighthouse, in a process of its own."""
        self._lighthouse = self._context.Process(
            target=_shine, args=(f"{self._host}:{self._port}", self._options), daemon=True
        )
        self._lighthouse.start()

    def darken(self) -> None:
        """Kill the lighthouse."""
        self._lighthouse.kill()
        self._lighthouse.join()

    def start(self, name: str, main: Main | None = None, **options: Any) -> None:
        """Start a node, or restart it. `main` replaces the function of the other nodes."""
        arguments = (main or self._main, name, self.address, options, self._folder / f"{name}.txt")
        self._processes[name] = self._context.Process(target=_run, args=arguments, daemon=True)
        self._processes[name].start()

    def runs(self, name: str) -> bool:
        return name in self._processes and self._processes[name].is_alive()

    def send(self, name: str, number: signal.Signals) -> None:
        """Send the node a signal."""
        os.kill(self._processes[name].pid, number)

    def kill(self, name: str) -> None:
        """Kill the node, unless it has ended, and wait for its end."""
        self._processes[name].kill()
        self._processes[name].join()

    def wait_for_death(self, names: Sequence[str], timeout: float = WAIT_SECONDS) -> str:
        """Wait until one of these processes is killed, and return its name."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            for name in names:
                if self._processes[name].exitcode == -signal.SIGKILL:
                    return name
            time.sleep(0.02)
        raise AssertionError("\n\n".join(["no process was killed", *map(self._state, names)]))

    def join(self, *names: str, code: int = 0, timeout: float = WAIT_SECONDS) -> None:
        """Wait for the ends of nodes, and check their exit status."""
        for name in names:
            self._processes[name].join(timeout)
        wrong = [name for name in names if self._processes[name].exitcode != code]
        assert not wrong, "\n\n".join(map(self._state, wrong))

    def output(self, name: str) -> str:
        """Return the output of all processes of the node."""
        path = self._folder / f"{name}.txt"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def reports(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of JSON in the output."""
        path, (read, reports) = self._folder / f"{name}.txt", self._reports.get(name, (0, []))
        if path.exists():
            with open(path, "rb") as file:  # the last line may still be incomplete
                file.seek(read)
                lines, end, _ = file.read().rpartition(b"\n")
            found = [json.loads(line) for line in lines.splitlines() if line.startswith(b"{") and line.endswith(b"}")]
            self._reports[name] = read + len(lines + end), [*reports, *found]
        return list(self._reports.get(name, (0, []))[1])

    def wait_for(
        self, name: str, condition: Callable[[dict[str, Any]], bool], timeout: float = WAIT_SECONDS
    ) -> dict[str, Any]:
        """Wait for a new report of the node that meets the condition."""
        seen, until = len(self.reports(name)), time.monotonic() + timeout
        while time.monotonic() < until:
            found = next((each for each in self.reports(name)[seen:] if condition(each)), None)
            if found is not None:
                return found
            time.sleep(0.05)
        lighthouse = "runs" if self._lighthouse.is_alive() else "has ended"
        states = [f"node {name} did not come so far", f"the lighthouse {lighthouse}"]
        raise AssertionError("\n\n".join([*states, *map(self._state, self._processes)]))

    def _state(self, name: str) -> str:
        code = self._processes[name].exitcode
        state = "runs" if code is None else f"has ended with {code}"
        return f"node {name} {state}, and wrote\n{self.output(name)[-3000:]}"

    def close(self) -> None:
        """Stop everything."""
        for each in (*self._processes.values(), self._lighthouse):
            each.kill()
            each.join()


@contextmanager
def nodes_of(main: Main, host: str = "127.0.0.1", **lighthouse: int) -> Iterator[Nodes]:
    """Start a lighthouse, and stop it and all nodes at the end."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = Nodes(main, Path(folder), host, **lighthouse)
        try:
            yield nodes
        finally:
            nodes.close()


def _shine(bind: str, options: dict[str, int]) -> None:
    distributed.leave_with_parent()
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=bind, **options)
    signal.pause()
    server.shutdown()


def _run(main: Main, name: str, lighthouse: str, options: dict[str, Any], output: Path) -> None:
    distributed.leave_with_parent()
    warnings.simplefilter("ignore")
    file = open(output, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    main(name, lighthouse, options)

"""`Cluster`: make the network, run a command in every node as a launcher would, count, and leave nothing behind.

In each node runs torchrun of this interpreter, which starts L copies of the command with RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT; NODE_RANK and GLOO_SOCKET_IFNAME are added here. The command
is run as given (``--no-python``), so a Python script, a shell script and any other program work alike, and a command
that is just ``train.py`` is run by this interpreter.

When a node fails, the others can only wait for it: they get a few seconds to notice and are then stopped. The first
failure in time decides the exit code.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from lightning_sparse.lab import storage
from lightning_sparse.lab.config import LabConfig, LabUnavailableError
from lightning_sparse.lab.launch import Launchers, with_own_output
from lightning_sparse.lab.network import (
    INTERFACE,
    STORAGE_ADDRESS,
    Network,
    NodeTraffic,
    node_address,
    remove_leftovers,
)
from lightning_sparse.lab.output import LabelledOutput
from lightning_sparse.lab.processes import (
    RUN_VARIABLE,
    RunName,
    end_orphans,
    end_processes,
    tether,
    uninterrupted,
)

MASTER_PORT = 29500  # free in a namespace that was just made
LOOPBACK_PORTS = range(20000, 32000)  # below the range from which the kernel takes ports for others


@dataclass(frozen=True)
class RunResult:
    """How a command ended. `traffic` is what this run put on each node's link, None without a network."""

    exit_code: int
    node_exit_codes: tuple[int, ...]
    seconds: float
    traffic: tuple[NodeTraffic, ...] | None
    storage_traffic: NodeTraffic | None = None

    @property
    def bytes_between_nodes(self) -> int | None:
        """Bytes that nodes sent to each other; what the storage node sent or got is not among them."""
        if self.traffic is None:
            return None
        storage_received = 0 if self.storage_traffic is None else self.storage_traffic.received
        return sum(node.sent for node in self.traffic) - storage_received

    def summary(self) -> str:
        ended = f"{len(self.node_exit_codes)} nodes ended with {self.exit_code} after {self.seconds:.1f} s"
        if self.traffic is None:
            return f"{ended}; loopback only, so nothing was shaped or counted"
        text = f"{ended}; bytes sent between nodes: {self.bytes_between_nodes:,}"
        if self.storage_traffic is not None:
            text += f"; from storage: {self.storage_traffic.sent:,}"
        return text


class Cluster:
    """``with Cluster(LabConfig(nodes=2, gbps=0.1)) as cluster: cluster.run(["train.py"])``, as often as wanted."""

    def __init__(self, config: LabConfig) -> None:
        self.config = config
        self.name = RunName.new()
        self._network: Network | None = None
        self._storage: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        end_orphans()
        if self.config.network:
            remove_leftovers()
            if self.config.storage is not None and (reason := storage.why_not()):
                raise LabUnavailableError(f"cannot serve storage={self.config.storage}: {reason}")
            try:
                self._network = Network(self.name, self._links())
                self._start_storage()
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with uninterrupted():
            end_processes(str(self.name))
            if self._storage is not None:
                self._storage.wait()
                assert self._storage.stdout is not None
                self._storage.stdout.close()
            if self._network is not None:
                self._network.close()
            self._network = self._storage = None

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: TextIO | None = None,
        timeout: float | None = None,
    ) -> RunResult:
        """Run `command` in every node until it ended everywhere, or failed somewhere; `output` None is stdout.

        Raises TimeoutError, with all processes stopped, when it takes longer than `timeout` seconds.
        """
        if not command:
            raise ValueError(
                "command=[]: there is nothing to run. Give the command after --, as in: -- python train.py"
            )
        path = (env or {}).get("PATH")
        if not command[0].endswith(".py") and shutil.which(command[0], path=path) is None:
            raise ValueError(
                f"command={command[0]!r} is no program on PATH, nor a .py file. As in: -- python train.py; under sudo, "
                f"whose PATH is another: -- train.py, which runs with {sys.executable}."
            )
        before = self._network.traffic() if self._network else {}
        started = time.monotonic()
        commands = self._commands(list(command), env or {})
        launchers = Launchers(commands, self.config.devices, LabelledOutput(output or sys.stdout))
        try:
            launchers.follow(timeout)
        except BaseException as error:
            launchers.wind_down(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
        finally:
            with uninterrupted():  # mounts and whatever the command left behind, but not the storage node
                end_processes(str(self.name), spare=self._storage.pid if self._storage else None)
                launchers.close()
        seconds = time.monotonic() - started
        traffic = _difference(self._network.traffic() if self._network else {}, before)
        return RunResult(
            exit_code=next((code for code in launchers.codes.values() if code), 0),
            node_exit_codes=tuple(code for _, code in sorted(launchers.codes.items())),
            seconds=seconds,
            traffic=tuple(traffic[part] for part in self._parts()) if self._network else None,
            storage_traffic=traffic.get("storage"),
        )

    def reshape(self, gbps: float) -> None:
        """Another rate for all links, also while a command runs (from another thread)."""
        if self._network is not None:
            self._network.reshape(gbps)

    def switch_link(self, node: int, *, on: bool) -> None:
        """Pull the plug of a node, or put it back, also while a command runs (from another thread)."""
        if self._network is not None:
            self._network.switch_link(f"node{node}", on=on)

    def traffic(self) -> dict[str, NodeTraffic]:
        """Bytes on each link since the lab was made, also while a command runs; nothing without a network."""
        return self._network.traffic() if self._network else {}

    # ------------------------------------------------------------------------------------------ parts and commands

    def _parts(self) -> list[str]:
        return [f"node{node}" for node in range(self.config.nodes)]

    def _links(self) -> list[tuple[str, str, float]]:
        links = [(part, node_address(node), self.config.gbps) for node, part in enumerate(self._parts())]
        if self.config.storage is not None:
            links.append(("storage", STORAGE_ADDRESS, self.config.storage_gbps or self.config.gbps))
        return links

    def _start_storage(self) -> None:
        if self._network is None or self.config.storage is None:
            return
        command = [*tether(), *self._network.enter("storage"), *storage.server_command(STORAGE_ADDRESS)]
        self._storage = subprocess.Popen(
            command, env=self._environment({}), stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._storage.stdout is not None
        if self._storage.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the storage node did not start: `{' '.join(command)}` ended; its error is above")

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        ranks = self.config.nodes * self.config.devices
        defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), "PYTHONUNBUFFERED": "1"}
        return {**defaults, **os.environ, **extra, RUN_VARIABLE: str(self.name)}

    def _commands(self, command: list[str], env: Mapping[str, str]) -> list[tuple[list[str], dict[str, str]]]:
        """What to start in each node, and its environment."""
        if command[0].endswith(".py"):
            command = [sys.executable, *command]
        port = MASTER_PORT if self._network else _free_port()
        master = node_address(0) if self._network else "127.0.0.1"
        interface = INTERFACE if self._network else _loopback()
        commands = []
        for node, part in enumerate(self._parts()):
            enter = self._network.enter_node(part) if self._network else []
            if self.config.storage is not None:
                enter = [*enter, *storage.mount_then(STORAGE_ADDRESS, self.config.storage)]
            launcher = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--max-restarts=0"]
            launcher += [f"--nnodes={self.config.nodes}", f"--node-rank={node}"]
            launcher += [f"--nproc-per-node={self.config.devices}", f"--master-addr={master}", f"--master-port={port}"]
            place = {"NODE_RANK": str(node), "GLOO_SOCKET_IFNAME": interface}
            commands.append(([*enter, *launcher, *with_own_output(command)], self._environment({**env, **place})))
        return commands


def _difference(after: Mapping[str, NodeTraffic], before: Mapping[str, NodeTraffic]) -> dict[str, NodeTraffic]:
    return {
        part: NodeTraffic(now.sent - before[part].sent, now.received - before[part].received)
        for part, now in after.items()
    }


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _free_port() -> int:
    for port in random.sample(LOOPBACK_PORTS, len(LOOPBACK_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port in {LOOPBACK_PORTS}")

"""`Cluster`: create the network, run a command on every node, count bytes, clean up.

torchrun starts the command L times per node. The lab adds NODE_RANK, GLOO_SOCKET_IFNAME and the variables of `GPUPlan`.
A ``.py`` file runs with this interpreter.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import TextIO

from lightning_sparse.lab import network, processes, storage
from lightning_sparse.lab.gpus import GPUPlan, find_gpus
from lightning_sparse.lab.network import LabUnavailableError, Network, NodeTraffic
from lightning_sparse.lab.output import LabeledOutput
from lightning_sparse.lab.processes import (
    Launchers,
    RunName,
    kill_processes,
    pdeathsig_prefix,
    redirect_to_pipe,
    signals_ignored,
    torchrun_command,
)

MAX_NODES = 250  # each has an address in 10.77.0.0/24
MASTER_PORT = 29500  # always free in a new namespace
LOOPBACK_PORTS = range(20000, 32000)  # below the kernel's ephemeral ports


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """A cluster of `nodes` nodes with `devices` ranks each. If there are fewer GPUs than ranks, ranks share GPUs.

    Args:
        gbps: rate of each node's link in Gbit/s, per direction.
        rtt_ms: round-trip time between nodes in milliseconds, in addition to the time that the rate takes.
        network: if False, run on loopback: no root needed, no rates limited, no bytes counted.
        storage: a folder that nodes access only through a network file system.
        storage_gbps: rate of the storage node's link in Gbit/s. Default: `gbps`.
        cpu: hide all GPUs.
    """

    nodes: int = 2
    devices: int = 2
    gbps: float = 1.0
    rtt_ms: float = 0.0
    network: bool = True
    storage: Path | None = None
    storage_gbps: float | None = None
    cpu: bool = False

    def __post_init__(self) -> None:
        if not _is_whole(self.nodes) or not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"nodes={self.nodes!r} must be from 1 to {MAX_NODES}. Use 2 or more to emulate a network.")
        if not _is_whole(self.devices) or self.devices < 1:
            raise ValueError(f"devices={self.devices!r} must be at least 1. Use 2, for example.")
        if not _is_number(self.rtt_ms) or not 0 <= self.rtt_ms <= 10_000:
            raise ValueError(f"rtt_ms={self.rtt_ms!r} must be 0 to 10,000 milliseconds, for example 100.")
        for name, gbps in (("gbps", self.gbps), ("storage_gbps", self.storage_gbps)):
            if gbps is not None and not (_is_number(gbps) and 0.001 <= gbps <= 100):
                raise ValueError(f"{name}={gbps!r} must be between 0.001 and 100 Gbit/s, for example 1 or 10.")
        for name, value in (("rtt_ms", self.rtt_ms), ("storage", self.storage)):
            if value and not self.network:
                raise ValueError(f"{name}={value} needs a network, but network=False (--no-net). Omit one of the two.")
        if self.storage_gbps is not None and self.storage is None:
            raise ValueError(f"storage_gbps={self.storage_gbps} needs storage. Set storage too, or omit storage_gbps.")
        if self.storage is not None and not self.storage.is_dir():
            raise ValueError(f"storage={self.storage} is not a folder. Give an existing folder, which nodes mount.")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


@dataclass(frozen=True)
class RunResult:
    """The result of a command. `traffic` is None without a network."""

    exit_code: int
    node_exit_codes: tuple[int, ...]
    seconds: float
    traffic: tuple[NodeTraffic, ...] | None
    storage_traffic: NodeTraffic | None = None

    @property
    def bytes_between_nodes(self) -> int | None:
        if self.traffic is None:
            return None
        # traffic to and from the storage node is not traffic between nodes
        storage_received = 0 if self.storage_traffic is None else self.storage_traffic.received
        return sum(node.sent for node in self.traffic) - storage_received

    def summary(self) -> str:
        ended = f"{len(self.node_exit_codes)} nodes exited with code {self.exit_code} after {self.seconds:.1f} s"
        if self.exit_code:
            ended += "; the first error above is the cause"
        if self.traffic is None:
            return f"{ended} (--no-net: loopback at full speed, traffic not counted)"
        text = f"{ended}; bytes sent between nodes: {self.bytes_between_nodes:,}"
        if self.storage_traffic is not None:
            text += f"; from storage: {self.storage_traffic.sent:,}"
        return text


class Cluster:
    """``with Cluster(LabConfig(nodes=2, gbps=0.1)) as cluster: cluster.run(["train.py"])``; run as often as needed."""

    def __init__(self, config: LabConfig) -> None:
        self.config = config
        self.name = RunName.new()
        self._network: Network | None = None
        self._storage: subprocess.Popen[bytes] | None = None
        self._delay: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        processes.kill_orphans()
        if self.config.network:
            network.remove_leftovers()
            if self.config.storage is not None and (reason := storage.unavailable_reason()):
                raise LabUnavailableError(f"cannot serve storage={self.config.storage}: {reason}")
            try:
                self._network = Network(self.name, self._links(), delayed=self.config.rtt_ms > 0)
                if self.config.rtt_ms:
                    # a packet and its answer pass four ends of links
                    relay = self._network.relay_command(self.config.rtt_ms / 1e3 / 4)
                    self._delay = self._start(relay, "the delay of links")
                if self.config.storage is not None:
                    serve = storage.server_command(network.STORAGE_ADDRESS)
                    self._storage = self._start([*self._network.enter("storage"), *serve], "the storage node")
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with signals_ignored():
            kill_processes(str(self.name))
            for server in filter(None, (self._storage, self._delay)):
                server.wait()
                assert server.stdout is not None
                server.stdout.close()
            if self._network is not None:
                self._network.close()
            self._network = self._storage = self._delay = None

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: TextIO | None = None,
        timeout: float | None = None,
    ) -> RunResult:
        """Run `command` on every node until all end or one fails. `output` defaults to stdout.

        Raises:
            ValueError: if `command` is empty or not a program.
            TimeoutError: if it takes longer than `timeout` seconds; all processes are stopped.
            RuntimeError: if the process that delays links ends.
        """
        env = env or {}
        if not command:
            raise ValueError("command=[] is empty. Pass the command after --, for example: -- python train.py")
        if not command[0].endswith(".py") and shutil.which(command[0], path=env.get("PATH")) is None:
            raise ValueError(
                f"command={command[0]!r} is neither a program on PATH nor a .py file. Use -- python train.py; under "
                f"sudo, which resets PATH, use -- train.py, which runs with {sys.executable}."
            )
        commands = self._commands(list(command), env)
        before = self.traffic()
        started = time.monotonic()
        launchers = Launchers(commands, self.config.devices, LabeledOutput(output or sys.stdout))
        try:
            launchers.wait(timeout, self._check_delay)
        except BaseException as error:
            launchers.terminate(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
        finally:
            with signals_ignored():  # mounts and background processes of the command, but not the storage node
                kill_processes(
                    str(self.name), exclude={server.pid for server in (self._storage, self._delay) if server}
                )
                launchers.close()
        seconds = time.monotonic() - started
        traffic = {host: now - before[host] for host, now in self.traffic().items()}
        return RunResult(
            # of the earliest failure
            exit_code=next((code for code in launchers.codes.values() if code), 0),
            node_exit_codes=tuple(code for _, code in sorted(launchers.codes.items())),
            seconds=seconds,
            traffic=tuple(traffic[name] for name in self._nodes()) if self._network else None,
            storage_traffic=traffic.get("storage"),
        )

    def _check_delay(self) -> None:
        if self._delay is not None and self._delay.poll() is not None:
            raise RuntimeError(f"the process that delays links ended with {self._delay.returncode}: no link is up")

    def reshape(self, gbps: float) -> None:
        """Change the rate of all links, even while a command runs (from another thread)."""
        if self._network is not None:
            self._network.reshape(gbps)

    def switch_link(self, node: int, *, on: bool) -> None:
        """Take a node's link down, or up again. As `reshape`."""
        if self._network is not None:
            self._network.switch_link(f"node{node}", on=on)

    def traffic(self) -> dict[str, NodeTraffic]:
        """Return the bytes on each link since the lab was created; empty without a network."""
        return self._network.traffic() if self._network else {}

    def _nodes(self) -> list[str]:
        return [f"node{node}" for node in range(self.config.nodes)]

    def _links(self) -> list[tuple[str, str, float]]:
        links = [(name, network.node_address(node), self.config.gbps) for node, name in enumerate(self._nodes())]
        if self.config.storage is not None:
            links.append(("storage", network.STORAGE_ADDRESS, self.config.storage_gbps or self.config.gbps))
        return links

    def _start(self, command: list[str], description: str) -> subprocess.Popen[bytes]:
        command = [*pdeathsig_prefix(), *command]
        env = self._environment({})
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout is not None
        # a server of the lab prints this when it is ready
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{description} did not start: `{' '.join(command)}` ended; its error is above")
        return process

    def _environment(self, extra: Mapping[str, str], more_defaults: Mapping[str, str] = {}) -> dict[str, str]:
        ranks = self.config.nodes * self.config.devices
        defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), "PYTHONUNBUFFERED": "1"}
        return {**defaults, **more_defaults, **os.environ, **extra, processes.RUN_VARIABLE: str(self.name)}

    def _plan_gpus(self, env: Mapping[str, str]) -> GPUPlan:
        gpus = [] if self.config.cpu else find_gpus(self._environment(env))
        plan = GPUPlan(self.config.nodes, self.config.devices, gpus, self.config.cpu)
        if plan.shared:
            print(plan.message(), file=sys.stderr, flush=True)
        return plan

    def _commands(self, command: list[str], env: Mapping[str, str]) -> list[tuple[list[str], dict[str, str]]]:
        if command[0].endswith(".py"):
            command = [sys.executable, *command]
        plan = self._plan_gpus(env)
        port = MASTER_PORT if self._network else free_port()
        master = network.node_address(0) if self._network else "127.0.0.1"
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        interface = network.INTERFACE if self._network else loopback
        command = redirect_to_pipe(plan.wrap_rank(command))
        commands = []
        for node, name in enumerate(self._nodes()):
            enter = self._network.enter_node(name) if self._network else []
            if self.config.storage is not None:
                enter = [*enter, *storage.mount_prefix(network.STORAGE_ADDRESS, self.config.storage)]
            launcher = torchrun_command(
                "--no-python",
                "--max-restarts=0",
                f"--nnodes={self.config.nodes}",
                f"--node-rank={node}",
                f"--nproc-per-node={self.config.devices}",
                f"--master-addr={master}",
                f"--master-port={port}",
            )
            place = {"NODE_RANK": str(node), "GLOO_SOCKET_IFNAME": interface, **plan.variables(node, interface)}
            commands.append(([*enter, *launcher, *command], self._environment({**env, **place}, plan.defaults())))
        return commands


def free_port(host: str = "127.0.0.1") -> int:
    """Return a random TCP port that nothing uses, and that no program gets unless it asks for it."""
    for port in random.SystemRandom().sample(LOOPBACK_PORTS, len(LOOPBACK_PORTS)):  # programs may seed ``random``
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise RuntimeError(f"no free port in {LOOPBACK_PORTS} at {host}")

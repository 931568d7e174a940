"""Network namespaces, a bridge, links with a limited rate, and their byte counters.

::

    node 0: L ranks   node 1: L ranks        storage (optional)
        | eth0            | eth0                 | eth0         tbf on eth0 limits sending
        | node0           | node1                | storage      tbf on the port limits receiving
    +---+-----------------+----------------------+---+
    |                  bridge                        |          in its own namespace: the lab adds no interface,
    +------------------------------------------------+          address, route or firewall rule to the host
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_sparse.lab.processes import RunName, kill_processes

STORAGE_ADDRESS = "10.77.255.1"
INTERFACE = "eth0"
NETNS_FOLDER = Path("/run/netns")
# A small bucket limits the burst that passes unshaped after a pause, since sparse messages are short. A smaller bucket
# would lose bandwidth when timers fire late on a busy machine.
MIN_BURST_BYTES = 16 * 1024  # a few full frames
BURST_S = 500e-6
MAX_GSO_BYTES = 65_536
QUEUE_MS = 50
# `ip netns exec` runs the command in its own mount namespace, so these mounts do not affect the host
_NODE_SETUP_SCRIPT = """
echo "$1" > /proc/sys/kernel/hostname
mount -t tmpfs lab /run/netns
printf %s "$2" > /run/netns/hosts
mount --bind /run/netns/hosts /etc/hosts
shift 2
exec "$@"
"""
MAX_FRAME_BYTES = 1 << 17
RELAY_BUFFER_BYTES = 1 << 24
# of linux/if_packet.h and linux/if_ether.h; Python's socket module lacks them
_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING, _ETH_P_ALL = 15, 23, 3
_SOL_PACKET, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 263, 32, 33
LOOPBACK_HINT = "Or use loopback without rate limits and byte counts: --no-net (in Python: network=False)."


class LabUnavailableError(RuntimeError):
    """This machine or user cannot create network namespaces."""


def node_address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def unavailable_reason() -> str | None:
    """Return why this process cannot create a lab, and the fix; None if it can."""
    if platform.system() != "Linux":
        return f"network namespaces need Linux, and this is {platform.system()}"
    if os.geteuid() != 0:  # first: /usr/sbin, where the tools are, is not on the PATH of every user
        with_path = 'sudo -E env "PATH=$PATH" COMMAND'  # sudo resets PATH, which drops the virtual environment
        return f"network namespaces need root, and this is user {os.geteuid()}: {with_path}"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install them (apt-get install iproute2 util-linux)"
    probe = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *_shape(1.0)]
    done = subprocess.run(probe, capture_output=True, text=True)
    if done.returncode != 0:
        return (
            f"cannot create a namespace with a rate-limited link ({done.stderr.strip()}): a container needs "
            f"--cap-add SYS_ADMIN --cap-add NET_ADMIN, and the kernel needs sch_tbf"
        )
    return None


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes on one node's link since its creation, including frame headers."""

    sent: int
    received: int

    def __sub__(self, before: NodeTraffic) -> NodeTraffic:
        return NodeTraffic(self.sent - before.sent, self.received - before.received)


class Network:
    """A switch with one link per host. `close` may be called at any time, and repeatedly.

    Namespaces are named ``lslab.<pid>.<start>.<token>.<host>``.
    """

    def __init__(self, run: RunName, links: Sequence[tuple[str, str, float]], *, delayed: bool = False) -> None:
        """Create the network.

        Args:
            links: (host, address, Gbit/s), for example ("node0", "10.77.0.1", 1.0).
            delayed: nothing passes between hosts until a process in ``switch`` runs `relay_command`.
        """
        reason = unavailable_reason()
        if reason:
            raise LabUnavailableError(f"cannot create a lab: {reason}. {LOOPBACK_HINT}")
        self.run, self._delayed = run, delayed
        self.addresses = {host: address for host, address, _ in links}
        try:
            self._build_switch()
            for host, address, gbps in links:
                self._build_link(host, address, gbps)
        except BaseException:
            self.close()
            raise

    def namespace(self, host: str) -> str:
        return f"{self.run}.{host}"

    def enter(self, host: str) -> list[str]:
        """Return the command prefix that runs a command in this host's namespace."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def enter_node(self, host: str) -> list[str]:
        """Like `enter`, with the host's own hostname and an /etc/hosts that lists all hosts."""
        hosts = "127.0.0.1 localhost\n::1 localhost\n" + "".join(
            f"{address} {name}\n::ffff:{address} {name}\n" for name, address in self.addresses.items()
        )
        return [*self.enter(host), "unshare", "--uts", "sh", "-e", "-c", _NODE_SETUP_SCRIPT, "sh", host, hosts]

    def relay_command(self, seconds: float) -> list[str]:
        # the end of each link, and the interface that represents it at the bridge
        pairs = [(host, f"{host}-relay") for host in self.addresses]
        script = f"from {__name__} import relay; relay({seconds:.6f}, {pairs})"
        return [*self.enter("switch"), sys.executable, "-c", script]

    def traffic(self) -> dict[str, NodeTraffic]:
        listing = _run(["ip", "-n", self.namespace("switch"), "-s", "-j", "link", "show"])
        ports = {entry["ifname"]: entry["stats64"] for entry in json.loads(listing)}
        # The switch port receives the bytes that the node sends.
        return {host: NodeTraffic(ports[host]["rx"]["bytes"], ports[host]["tx"]["bytes"]) for host in self.addresses}

    def reshape(self, gbps: float) -> None:
        """Change the rate of all links. Create the network with the lowest rate: its GSO size stays."""
        for host in self.addresses:
            self._shape_ends("change", host, gbps)

    def switch_link(self, host: str, *, on: bool) -> None:
        # the switch port: frames are dropped silently
        _run(["ip", "-n", self.namespace("switch"), "link", "set", host, "up" if on else "down"])

    def close(self) -> None:
        for name in _namespaces_of(str(self.run)):
            _run(["ip", "netns", "delete", name])

    def _build_switch(self) -> None:
        switch = self.namespace("switch")
        _run(["ip", "netns", "add", switch])
        _run(["ip", "-n", switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0"])
        _run(["ip", "-n", switch, "link", "set", "br0", "addrgenmode", "none", "up"])

    def _build_link(self, host: str, address: str, gbps: float) -> None:
        switch, node = self.namespace("switch"), self.namespace(host)
        _run(["ip", "netns", "add", node])
        _run(["ip", "-n", node, "link", "set", "lo", "up"])
        _run(["ip", "-n", switch, "link", "add", host, "type", "veth", "peer", "name", INTERFACE, "netns", node])
        self._shape_ends("add", host, gbps)
        for place, name in self._ends(host):
            # tbf splits packets above the size of its bucket into single frames: with two CPU cores, that alone
            # reduced four links of 1 Gbit/s to a third of their rate. Sockets read the GSO size only when they
            # connect, so reshape() does not change it.
            gso_bytes = min(MAX_GSO_BYTES, _burst_bytes(gbps) // 2)
            _run(["ip", "-n", place, "link", "set", name, "gso_max_size", str(gso_bytes)])
            # no IPv6 link-local address: its discovery traffic would distort the counters
            _run(["ip", "-n", place, "link", "set", name, "addrgenmode", "none"])
        bridge_end = host
        # tbf adds no latency; netem would, but many kernels lack it. So a link with a delay does not end in the bridge:
        # `relay` copies its frames to and from a pair of interfaces that does.
        if self._delayed:
            relay_end, bridge_end = f"{host}-relay", f"{host}-bridge"
            _run(["ip", "-n", switch, "link", "set", host, "up"])
            _run(["ip", "-n", switch, "link", "add", relay_end, "type", "veth", "peer", "name", bridge_end])
            _run(["ip", "-n", switch, "link", "set", relay_end, "addrgenmode", "none", "up"])
            _run(["ip", "-n", switch, "link", "set", bridge_end, "addrgenmode", "none"])
        _run(["ip", "-n", switch, "link", "set", bridge_end, "master", "br0", "up"])
        _run(["ip", "-n", node, "address", "add", f"{address}/16", "dev", INTERFACE])
        _run(["ip", "-n", node, "link", "set", INTERFACE, "up"])

    def _shape_ends(self, verb: str, host: str, gbps: float) -> None:
        for place, name in self._ends(host):
            _run(["tc", "-n", place, "qdisc", verb, "dev", name, "root", *_shape(gbps)])

    def _ends(self, host: str) -> list[tuple[str, str]]:
        return [(self.namespace("switch"), host), (self.namespace(host), INTERFACE)]


def relay(seconds: float, pairs: list[tuple[str, str]]) -> None:
    """Copy frames between the interfaces of each pair, both ways, with a delay. Does not return."""

    # a program of the switch, for kernels without netem
    def open_interface(name: str) -> socket.socket:
        opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # type: ignore[attr-defined, unused-ignore]
        # Frames keep the header of virtual networks, which has the pending checksums and segmentation. So large frames
        # pass unsplit, and a CPU that also runs the ranks keeps up.
        opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):  # more than a link queues: a full link holds up no other
            opened.setsockopt(socket.SOL_SOCKET, option, RELAY_BUFFER_BYTES)
        opened.bind((name, _ETH_P_ALL))
        return opened

    peers: dict[socket.socket, socket.socket] = {}
    for pair in pairs:
        first, second = map(open_interface, pair)
        peers[first], peers[second] = second, first
    print("ready", flush=True)
    queue: deque[tuple[float, socket.socket, bytes]] = deque()  # all frames have the same delay: the oldest is first
    while True:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        for source in select.select(list(peers), (), (), wait)[0]:
            queue.append((time.monotonic() + seconds, peers[source], source.recv(MAX_FRAME_BYTES)))
        while queue and queue[0][0] <= time.monotonic():
            _, target, frame = queue.popleft()
            try:
                target.send(frame)
            except OSError:  # the link is down, or its queue is full: a switch drops the frame, too
                continue


def remove_leftovers() -> list[str]:
    """Remove the namespaces and processes of labs whose owner died; return the names of those runs."""
    # the name holds the owner's process id and start time
    runs = {run for name in _namespaces_of("") if (run := RunName.parse(name)) is not None}
    dead = sorted(str(run) for run in runs if not run.owner_lives())
    for former in dead:
        kill_processes(former)
        for name in _namespaces_of(former):
            # another lab may be cleaning up at the same time: ignore missing namespaces
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return dead


def _namespaces_of(run: str) -> Iterator[str]:
    prefix = f"{run}." if run else RunName.PREFIX
    names = sorted(os.listdir(NETNS_FOLDER)) if NETNS_FOLDER.is_dir() else []
    return (name for name in names if name.startswith(prefix))


def _shape(gbps: float) -> list[str]:
    return ["tbf", "rate", f"{round(gbps * 1e9)}bit", "burst", f"{_burst_bytes(gbps)}b", "latency", f"{QUEUE_MS}ms"]


def _burst_bytes(gbps: float) -> int:
    return max(MIN_BURST_BYTES, round(gbps * 1e9 / 8 * BURST_S))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout

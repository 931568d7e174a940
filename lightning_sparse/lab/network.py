"""Namespaces, a bridge, shaped links, and what the kernel counted on them.

Everything lives in named network namespaces ``lslab.<pid>.<start>.<token>.<part>``, where part is ``switch``,
``node0``, ``node1``, ... or ``storage``. The bridge is in ``switch``, not on the host, so two labs cannot collide: each
has the same addresses in a world of its own. Owner and start time are in the name (`processes.RunName`), so a later run
can tell what a *dead* lab left behind from what a living one is using. Deleting a namespace deletes the interfaces in
it. A command in a node also has a hostname and an ``/etc/hosts`` of its own, in namespaces that end with it.

Shaping is ``tc tbf`` at both ends of a link, netem being absent from many kernels: it gives a rate, not a latency. The
bucket is kept small, because what fits into it passes unshaped after a pause, and a sparse message is short. It is not
smaller, because a timer that fires later than the bucket lasts is bandwidth lost, and on a busy machine timers are
late. TCP's super-packets (GSO) are kept to half a bucket: tbf would cut one that is larger than its bucket into single
frames, and that work alone keeps two processors from filling four links of 1 Gbit/s (measured: a third of the rate).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_sparse.lab.config import LabUnavailableError
from lightning_sparse.lab.processes import RunName, end_processes

STORAGE_ADDRESS = "10.77.255.1"
INTERFACE = "eth0"
NETNS_FOLDER = Path("/run/netns")
MIN_BURST_BYTES = 16 * 1024  # a few full frames
MAX_GSO_BYTES = 65_536
BURST_S = 500e-6
QUEUE_MS = 50
# `ip netns exec` has given the command a mount namespace of its own: the host does not see these mounts
_BECOME_NODE = """
echo "$1" > /proc/sys/kernel/hostname
mount -t tmpfs lab /run/netns
printf %s "$2" > /run/netns/hosts
mount --bind /run/netns/hosts /etc/hosts
shift 2
exec "$@"
"""
WAY_OUT = "Or rehearse on loopback, where nothing is shaped or counted: --no-net (in Python: network=False)."


def node_address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def why_not() -> str | None:
    """Why this process cannot make a lab, and what would help, without a full stop; None when it can."""
    if platform.system() != "Linux":
        return f"network namespaces are a part of Linux, and this is {platform.system()}"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found: install them (apt-get install iproute2 util-linux)"
    if os.geteuid() != 0:
        with_path = 'sudo -E env "PATH=$PATH" COMMAND'  # sudo has a PATH of its own, without the virtual environment
        return f"network namespaces need root, and this is user {os.geteuid()}: {with_path}"
    probe = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *_shape(1.0)]
    done = subprocess.run(probe, capture_output=True, text=True)
    if done.returncode != 0:
        return (
            f"the kernel refused a namespace with a shaped link ({done.stderr.strip()}): a container needs "
            f"--cap-add SYS_ADMIN --cap-add NET_ADMIN, and the kernel sch_tbf"
        )
    return None


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes on one node's link since it was made, frames and all, counted by the kernel at the switch."""

    sent: int
    received: int


class Network:
    """The switch and one link for each part. `close` may be called at any time, and again."""

    def __init__(self, run: RunName, links: Sequence[tuple[str, str, float]]) -> None:
        """links: (part, address, Gbit/s), for instance ("node0", "10.77.0.1", 1.0)."""
        reason = why_not()
        if reason:
            raise LabUnavailableError(f"cannot build a lab here: {reason}. {WAY_OUT}")
        self.run = run
        self.addresses = {part: address for part, address, _ in links}
        try:
            self._build_switch()
            for part, address, gbps in links:
                self._build_link(part, address, gbps)
        except BaseException:
            self.close()
            raise

    def namespace(self, part: str) -> str:
        return f"{self.run}.{part}"

    def enter(self, part: str) -> list[str]:
        """The words that, before a command, run it inside that part."""
        return ["ip", "netns", "exec", self.namespace(part)]

    def enter_node(self, part: str) -> list[str]:
        """As `enter`, with the hostname of that part and the names of all others known."""
        hosts = "127.0.0.1 localhost\n::1 localhost\n" + "".join(
            f"{address} {name}\n::ffff:{address} {name}\n" for name, address in self.addresses.items()
        )
        return [*self.enter(part), "unshare", "--uts", "sh", "-e", "-c", _BECOME_NODE, "sh", part, hosts]

    def traffic(self) -> dict[str, NodeTraffic]:
        listing = _run(["ip", "-n", self.namespace("switch"), "-s", "-j", "link", "show"])
        ports = {entry["ifname"]: entry["stats64"] for entry in json.loads(listing)}
        # what the port received is what the node sent
        return {part: NodeTraffic(ports[part]["rx"]["bytes"], ports[part]["tx"]["bytes"]) for part in self.addresses}

    def reshape(self, gbps: float) -> None:
        """Give all links this rate from now on. Build the network with the lowest: its super-packets suit that one."""
        for part in self.addresses:
            self._shape_ends("change", part, gbps)

    def switch_link(self, part: str, *, on: bool) -> None:
        """Pull the plug of a part at the switch, or put it back: frames are lost, and nobody is told."""
        _run(["ip", "-n", self.namespace("switch"), "link", "set", part, "up" if on else "down"])

    def close(self) -> None:
        for name in _namespaces_of(str(self.run)):
            _run(["ip", "netns", "delete", name])

    def _build_switch(self) -> None:
        switch = self.namespace("switch")
        _run(["ip", "netns", "add", switch])
        _run(["ip", "-n", switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0"])
        _run(["ip", "-n", switch, "link", "set", "br0", "addrgenmode", "none", "up"])

    def _build_link(self, part: str, address: str, gbps: float) -> None:
        switch, node = self.namespace("switch"), self.namespace(part)
        _run(["ip", "netns", "add", node])
        _run(["ip", "-n", node, "link", "set", "lo", "up"])
        _run(["ip", "-n", switch, "link", "add", part, "type", "veth", "peer", "name", INTERFACE, "netns", node])
        self._shape_ends("add", part, gbps)
        for place, name in self._ends(part):
            # a socket asks its interface once, when it connects: so this one stays through reshape()
            super_packet = min(MAX_GSO_BYTES, _burst_bytes(gbps) // 2)
            _run(["ip", "-n", place, "link", "set", name, "gso_max_size", str(super_packet)])
            # no IPv6 link-local address: its discovery traffic would be counted
            _run(["ip", "-n", place, "link", "set", name, "addrgenmode", "none"])
        _run(["ip", "-n", switch, "link", "set", part, "master", "br0", "up"])
        _run(["ip", "-n", node, "address", "add", f"{address}/16", "dev", INTERFACE])
        _run(["ip", "-n", node, "link", "set", INTERFACE, "up"])

    def _shape_ends(self, verb: str, part: str, gbps: float) -> None:
        for place, name in self._ends(part):
            _run(["tc", "-n", place, "qdisc", verb, "dev", name, "root", *_shape(gbps)])

    def _ends(self, part: str) -> list[tuple[str, str]]:
        """Namespace and interface of both ends of a link."""
        return [(self.namespace("switch"), part), (self.namespace(part), INTERFACE)]


def remove_leftovers() -> list[str]:
    """Remove the namespaces and processes of labs whose owner is dead; returns the names of those runs."""
    runs = {run for name in _namespaces_of("") if (run := RunName.parse(name)) is not None}
    dead = sorted(str(run) for run in runs if not run.owner_lives())
    for former in dead:
        end_processes(former)
        for name in _namespaces_of(former):
            # two labs may start at once and both clean up: what is already gone is fine
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

"""Shared by clients and servers: messages, encryption keys, addresses, and the limit of open files.

========  ==========================================================================================
request   "get", number, int64 indices            or "ping", number
answer    "have", number, format, int64 [n, 4] of (requested index, index, height, width), then n
          frames of bytes; height 0: the frame is the reason why the file cannot be used
          "pong", number                          or "fail", number, reason: the request failed
========  ==========================================================================================

A node serves on the address of one interface, never of all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import resource
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from lightning_sparse.data.config import DataError


class Keys(NamedTuple):
    """CURVE keys, 40 characters of Z85 each."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def of(cls, run: bytes) -> Keys:
        import zmq
        from zmq.utils import z85

        pairs = []
        # derived from the secret of the run
        for role in (b"server", b"client"):
            secret = z85.encode(hashlib.blake2b(run, digest_size=32, person=role).digest())
            pairs += [zmq.curve_public(secret), secret]
        return cls(*pairs)


_SIOCGIFADDR = 0x8915
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def node_address(given: str | None) -> str:
    """Return an IP address of this node. `given` is an address or the name of an interface.

    None: the interface that the environment names for the process group, otherwise the interface that routes to the
    master.
    """
    if given is not None:
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(given))
        return _address_of(given)
    for variable in _VARIABLES:
        names = os.environ.get(variable, "").lstrip("=").split(",")
        if names[0] and not names[0].startswith("^"):
            with contextlib.suppress(ValueError):  # NCCL also accepts the prefix of a name
                return _address_of(names[0].partition(":")[0])
    return _address_towards(os.environ.get("MASTER_ADDR", "localhost"))


def reachable(address: str, others: Sequence[str]) -> str:
    """Return an address of this node that other nodes can reach. `others` holds the addresses of all nodes."""
    if not ipaddress.ip_address(address).is_loopback:
        return address
    # On the master itself, its name may resolve to a loopback address (Debian's hosts file).
    routes = (_address_towards(other) for other in others if not ipaddress.ip_address(other).is_loopback)
    return next((route for route in routes if not ipaddress.ip_address(route).is_loopback), address)


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"peer_address={interface!r} is neither an IP address nor an interface of this node that has one. "
                f"Give one of its interfaces: {names}."
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _address_towards(host: str) -> str:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends no packet, but selects the interface
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


RESERVE = 64  # for the files of everything else


def allow_connections(count: int) -> None:
    """Raise the limit of open files of this process and of its children by `count`, if needed."""
    # a process at its limit can neither accept nor open connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + RESERVE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise DataError(
            f"this process needs {needed:,} open files for {count:,} connections to other nodes, but may have {hard:,} "
            "(`ulimit -Hn`). Raise the limit, or set shuffle='local', which needs no connections."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

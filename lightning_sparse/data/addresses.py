"""The address on which a node serves its samples: of one interface, never of all."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def own_address(given: str | None) -> str:
    """An IP address of this node.

    Args:
        given: an address, the name of an interface, or None: the interface that the process group is told to use, else
            the one that leads to the master.

    Raises:
        ValueError: when this node has no such interface.
    """
    if given is not None:
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(given))
        return _of_interface(given)
    for variable in _INTERFACES:
        names = os.environ.get(variable, "").lstrip("=").split(",")
        if names[0] and not names[0].startswith("^"):
            with contextlib.suppress(ValueError):  # NCCL also takes the beginning of a name
                return _of_interface(names[0].partition(":")[0])
    return _towards(os.environ.get("MASTER_ADDR", "localhost"))


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:
            known = ", ".join(interface for _, interface in socket.if_nameindex())
            raise ValueError(
                f"peer_address={name!r} is neither an IP address nor an interface of this node with one. "
                f"It has: {known}."
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _towards(host: str) -> str:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # sends nothing, but chooses the interface
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"

"""Address on which a node serves its samples: that of one interface, never of all."""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence

_SIOCGIFADDR = 0x8915
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def node_address(given: str | None) -> str:
    """Return an IP address of this node.

    Args:
        given: address or name of an interface. None: the interface that the environment names for the process group,
            else the one that routes to the master.

    Raises:
        ValueError: if this node has no such interface.
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
    """Return an address of this node that other nodes can reach.

    The name of the master resolves to a loopback address on the master itself, if its hosts file says so, as Debian's
    does. Then this is the address of the interface that routes to the others.

    Args:
        address: of this node, from `node_address`.
        others: those of all nodes.
    """
    if not ipaddress.ip_address(address).is_loopback:
        return address
    towards = (_address_towards(other) for other in others if not ipaddress.ip_address(other).is_loopback)
    return next((each for each in towards if not ipaddress.ip_address(each).is_loopback), address)


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"peer_address={interface!r} is neither an IP address nor an interface of this node that has one. "
                f"Give one of its interfaces: {known}."
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

"""Ports of this machine."""

import socket


def free_port() -> int:
    """Return a TCP port that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

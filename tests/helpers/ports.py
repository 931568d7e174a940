"""Ports of this machine."""

import random
import socket
from contextlib import suppress

# Below the kernel's ephemeral ports: servers of other tests take those at any time, also before the caller binds one.
PORTS = range(10000, 20000)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a random TCP port that nothing uses."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):  # tests set the seed of ``random``
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise RuntimeError(f"no free port in {PORTS} at {host}")

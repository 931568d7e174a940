"""Delays what passes between pairs of interfaces: a program of the lab's switch, for kernels without netem.

Each frame is read from one interface by a packet socket, kept, and written to the other one. Frames keep the header of
virtual networks, which says what of checksums and segmentation is still to be done: so large frames pass as one, and a
processor that also runs the ranks keeps up with them.

    python -m lightning_sparse.lab.delay SECONDS INTERFACE INTERFACE [INTERFACE INTERFACE ...]
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque

LARGEST_FRAME = 1 << 17
BUFFER_BYTES = 1 << 24
# of linux/if_packet.h and linux/if_ether.h; Python's socket module lacks them
_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING, _ETH_P_ALL = 15, 23, 3
_SOL_PACKET, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 263, 32, 33


def _opened(interface: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # type: ignore[attr-defined, unused-ignore]
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for size in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):  # more than a link queues: a full link must not hold up the others
        opened.setsockopt(socket.SOL_SOCKET, size, BUFFER_BYTES)
    opened.bind((interface, _ETH_P_ALL))
    return opened


def relay(seconds: float, pairs: list[tuple[str, str]]) -> None:
    """Copy frames both ways, each `seconds` after it came. Does not return."""
    towards: dict[socket.socket, socket.socket] = {}
    for pair in pairs:
        one, other = map(_opened, pair)
        towards[one], towards[other] = other, one
    print("ready", flush=True)
    kept: deque[tuple[float, socket.socket, bytes]] = deque()  # the delay is one for all, so the first is due first
    while True:
        wait = max(0.0, kept[0][0] - time.monotonic()) if kept else None
        for source in select.select(list(towards), (), (), wait)[0]:
            frame = source.recv(LARGEST_FRAME)
            kept.append((time.monotonic() + seconds, towards[source], frame))
        while kept and kept[0][0] <= time.monotonic():
            _, target, frame = kept.popleft()
            try:
                target.send(frame)
            except OSError:  # the link is down, or its queue is full: a switch drops the frame, too
                continue


if __name__ == "__main__":
    names = sys.argv[2:]
    relay(float(sys.argv[1]), list(zip(names[::2], names[1::2], strict=True)))

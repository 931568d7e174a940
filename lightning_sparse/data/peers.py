"""Samples from the memory of the node that owns them: requests over zmq, encrypted and authenticated with CURVE.

Each node runs one server (`peer_server.py`), a process that reads the node's tiers as any rank does. Ranks ask it for
a batch of indices at once and get one frame a sample.

Keys are derived from the run's secret, which only its ranks have: a server answers nobody who does not hold the run's
client key, and a client talks to nobody who does not hold the run's server key. Nothing is sent in the clear.

A server that is slow, because it reads from storage itself, still answers pings; one that answers nothing for `DEAD_S`
is dead. Then local disk and network storage are asked instead, and the server is tried again from time to time.

========  ==========================================================================================
request   "get", number, int64 indices            or "ping", number
answer    "have", number, format, int64 [n, 4] of (asked, got, height, width), then n frames of bytes;
          height 0: the frame says what is wrong with the file
          "pong", number                          or "fail", number, why: nothing of this request can be had
========  ==========================================================================================
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.config import Format
from lightning_sparse.data.memory_cache import View

if TYPE_CHECKING:
    import zmq

PING_S = 1.0
DEAD_S = 5.0
REVIVE_S, MOST_REVIVE_S = 30.0, 600.0  # a dead peer is tried again after a pause that doubles, as each try costs DEAD_S
REQUEST_SAMPLES = 32  # a request's share of a batch: several are on their way, so reading and sending overlap


class Keys(NamedTuple):
    """Z85 texts of 40 bytes each."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def of(cls, run: bytes) -> Keys:
        """The keys of a run, the same wherever its secret is known."""
        import zmq
        from zmq.utils import z85

        pairs = []
        for role in (b"server", b"client"):
            secret = z85.encode(hashlib.blake2b(run, digest_size=32, person=role).digest())
            pairs += [zmq.curve_public(secret), secret]
        return cls(*pairs)


class PeerClient:
    """What one process asks other nodes for. Used by several threads, each of which has sockets of its own.

    Args:
        endpoints: of the servers, by node; None for the own node.
        format: that this node keeps; a server that keeps another is of no use.
        say: called with (topic, text) when a peer is found dead; says a topic once.
    """

    def __init__(
        self, endpoints: Mapping[int, str], run: bytes, format: Format, say: Callable[[str, str], None]
    ) -> None:
        import zmq

        self._endpoints, self._format, self._say = dict(endpoints), format.encode(), say
        self._keys = Keys.of(run)
        self._context = zmq.Context()
        self._numbers = itertools.count(1)
        self._own = threading.local()
        self._dead_until: dict[int, float] = {}
        self._pauses: dict[int, float] = {}

    def fetch(self, indices: Sequence[int], nodes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, View | str]]:
        """(index asked for, index of the sample, sample) of what can be had; a text says what is wrong with a file.

        nodes: the owner of each sample. What is not among the answers has to come from elsewhere.
        """
        requests: dict[bytes, int] = {}
        for node in np.unique(nodes).tolist():
            mine = [index for index, owner in zip(indices, nodes.tolist(), strict=True) if owner == node]
            if not self._usable(node):
                continue
            for begin in range(0, len(mine), REQUEST_SAMPLES):
                part = mine[begin : begin + REQUEST_SAMPLES]
                number = next(self._numbers).to_bytes(8, "little")
                if not self._send(node, b"get", number, np.array(part, np.int64).tobytes()):
                    break
                requests[number] = node
        yield from self._answers(requests)

    def _answers(self, requests: dict[bytes, int]) -> Iterator[tuple[int, int, View | str]]:
        import zmq

        heard = dict.fromkeys(requests.values(), time.monotonic())
        sockets = {self._socket(node): node for node in heard}
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        pinged = time.monotonic()
        while requests:
            for socket, _ in poller.poll(int(PING_S * 1000)):
                frames = socket.recv_multipart(copy=False)
                heard[sockets[socket]] = time.monotonic()
                # an answer to a request that was given up on has no entry
                if frames[0].bytes != b"pong" and requests.pop(frames[1].bytes, None) is not None:
                    yield from self._samples(frames)
            now = time.monotonic()
            if now - pinged >= PING_S:
                pinged = now
                waiting = set(requests.values())
                for node in waiting:
                    if now - heard[node] > DEAD_S or not self._send(node, b"ping", b""):
                        poller.unregister(next(each for each, of in sockets.items() if of == node))
                        self._give_up(node)
                        requests = {number: each for number, each in requests.items() if each != node}

    def _samples(self, frames: Sequence[zmq.Frame]) -> Iterator[tuple[int, int, View | str]]:
        if frames[0].bytes != b"have" or frames[2].bytes != self._format:
            return
        about = np.frombuffer(frames[3].bytes, np.int64).reshape(-1, 4).tolist()
        for (asked, got, height, width), frame in zip(about, frames[4:], strict=True):
            if height == 0:
                yield asked, got, frame.bytes.decode("utf-8", "replace")
                continue
            data = np.frombuffer(frame.buffer, np.uint8)
            yield (
                asked,
                got,
                View(data.reshape(height, width, 3) if self._format == b"decoded" else data, height, width),
            )

    def _send(self, node: int, *frames: bytes) -> bool:
        """False when zmq takes no more for that node: it refused this process, or has not read for long."""
        import zmq

        try:
            self._socket(node).send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _usable(self, node: int) -> bool:
        return node in self._endpoints and time.monotonic() >= self._dead_until.get(node, 0.0)

    def _give_up(self, node: int) -> None:
        self._pauses[node] = pause = min(2 * self._pauses.get(node, REVIVE_S / 2), MOST_REVIVE_S)
        self._dead_until[node] = time.monotonic() + pause
        self._sockets().pop(node).close(linger=0)
        self._say(
            f"dead peer {node}",
            f"node {node} ({self._endpoints[node]}) does not answer: its samples are read from local disk, else from "
            "network storage, until it does.",
        )

    def _sockets(self) -> dict[int, zmq.Socket[bytes]]:
        if not hasattr(self._own, "sockets"):
            self._own.sockets = {}
        sockets: dict[int, zmq.Socket[bytes]] = self._own.sockets
        return sockets

    def _socket(self, node: int) -> zmq.Socket[bytes]:
        import zmq

        sockets = self._sockets()
        if node not in sockets:
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.ipv6 = ":" in self._endpoints[node].removeprefix("tcp://").rpartition(":")[0]
            socket.curve_serverkey = self._keys.server_public
            socket.curve_publickey, socket.curve_secretkey = self._keys.client_public, self._keys.client_secret
            socket.connect(self._endpoints[node])
            sockets[node] = socket
        return sockets[node]

    def close(self) -> None:
        """Close the sockets of all threads, which must not be fetching any more."""
        self._context.destroy(linger=0)

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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """What one process asks other nodes for. Used by several threads at once.

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
        self._idle: list[_Sockets] = []  # a socket serves one call at a time; threads come and go
        self._dead_until: dict[int, float] = {}
        self._pauses: dict[int, float] = {}

    def fetch(self, indices: Sequence[int], nodes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, View | str]]:
        """(index asked for, index of the sample, sample) of what can be had; a text says what is wrong with a file.

        nodes: the owner of each sample. What is not among the answers has to come from elsewhere.
        """
        now = time.monotonic()
        wanted: dict[int, list[int]] = {}
        for index, node in zip(indices, nodes.tolist(), strict=True):
            if node in self._endpoints and now >= self._dead_until.get(node, 0.0):
                wanted.setdefault(node, []).append(index)
        if not wanted:
            return
        try:
            sockets = self._idle.pop()
        except IndexError:
            sockets = _Sockets(self._context, self._endpoints, self._keys)
        try:
            yield from self._answers(sockets, self._requests(sockets, wanted))
        finally:
            self._idle.append(sockets)

    def _requests(self, sockets: _Sockets, wanted: Mapping[int, Sequence[int]]) -> dict[bytes, int]:
        """Ask; returns the node of each request by its number."""
        requests: dict[bytes, int] = {}
        for node, indices in wanted.items():
            for begin in range(0, len(indices), REQUEST_SAMPLES):
                number = next(self._numbers).to_bytes(8, "little")
                part = np.array(indices[begin : begin + REQUEST_SAMPLES], np.int64)
                sockets.send(node, b"get", number, part.tobytes())  # one that is not taken is never answered
                requests[number] = node
        return requests

    def _answers(self, sockets: _Sockets, requests: dict[bytes, int]) -> Iterator[tuple[int, int, View | str]]:
        heard = dict.fromkeys(requests.values(), time.monotonic())
        pinged = time.monotonic()
        while requests:
            for node, frames in sockets.receive(heard):
                heard[node] = time.monotonic()
                # an answer to a request of a call that ended early has no entry
                if frames[0].bytes != b"pong" and requests.pop(frames[1].bytes, None) is not None:
                    self._pauses.pop(node, None)
                    yield from self._samples(node, frames)
            now = time.monotonic()
            if now - pinged < PING_S:
                continue
            pinged = now
            for node in set(requests.values()):
                if now - heard[node] > DEAD_S or not sockets.send(node, b"ping", b""):
                    del heard[node]
                    sockets.close(node)
                    self._give_up(node)
            requests = {number: node for number, node in requests.items() if node in heard}

    def _samples(self, node: int, frames: Sequence[zmq.Frame]) -> Iterator[tuple[int, int, View | str]]:
        if frames[0].bytes != b"have":
            return
        if frames[2].bytes != self._format:
            theirs, ours = frames[2].bytes.decode(), self._format.decode()
            self._say(
                f"other format {node}",
                f"node {node} keeps samples as {theirs}, this node as {ours}, so neither can use the other's memory "
                'and disk is read instead. Give the same format to all nodes, as in format="jpeg".',
            )
            return
        about = np.frombuffer(frames[3].bytes, np.int64).reshape(-1, 4).tolist()
        for (asked, got, height, width), frame in zip(about, frames[4:], strict=True):
            if height == 0:
                yield asked, got, frame.bytes.decode("utf-8", "replace")
                continue
            data = np.frombuffer(frame.buffer, np.uint8)
            if self._format == b"decoded":
                data = data.reshape(height, width, 3)
            yield asked, got, View(data, height, width)

    def _give_up(self, node: int) -> None:
        self._pauses[node] = pause = min(2 * self._pauses.get(node, REVIVE_S / 2), MOST_REVIVE_S)
        self._dead_until[node] = time.monotonic() + pause
        self._say(
            f"dead peer {node}",
            f"node {node} ({self._endpoints[node]}) does not answer: its samples are read from local disk, else from "
            "network storage, until it does.",
        )

    def close(self) -> None:
        """Close all sockets. Nobody may be fetching any more."""
        self._context.destroy(linger=0)


class _Sockets:
    """One socket to each node that was asked, for one call at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Mapping[int, str], keys: Keys) -> None:
        self._context, self._endpoints, self._keys = context, endpoints, keys
        self._open: dict[int, zmq.Socket[bytes]] = {}

    def send(self, node: int, *frames: bytes) -> bool:
        """False when zmq takes no more for that node: it refused this process, or has not read for long."""
        import zmq

        if node not in self._open:
            self._open[node] = self._connected(self._endpoints[node])
        try:
            self._open[node].send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, nodes: Iterable[int]) -> Iterator[tuple[int, list[zmq.Frame]]]:
        """What came from these nodes, within `PING_S`."""
        import zmq

        sockets = {self._open[node]: node for node in nodes}
        for socket, node in [(each, sockets[each]) for each, _ in _poller(sockets).poll(int(PING_S * 1000))]:
            yield node, socket.recv_multipart(zmq.NOBLOCK, copy=False)

    def close(self, node: int) -> None:
        self._open.pop(node).close(linger=0)

    def _connected(self, endpoint: str) -> zmq.Socket[bytes]:
        import zmq

        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.ipv6 = "[" in endpoint
        socket.curve_serverkey = self._keys.server_public
        socket.curve_publickey, socket.curve_secretkey = self._keys.client_public, self._keys.client_secret
        socket.connect(endpoint)
        return socket


def _poller(sockets: Iterable[zmq.Socket[bytes]]) -> zmq.Poller:
    import zmq

    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    return poller

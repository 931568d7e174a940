"""Reads samples from the memory of other nodes: requests over zmq, encrypted and authenticated with CURVE.

Each node runs one server process (`server.py`). Keys are derived from the secret of the run, which only its ranks hold:
a server answers only clients that hold the client key, and a client connects only to servers that hold the server key.

A slow server still answers pings. A server that sends nothing for `DEAD_S` is considered dead: the caller reads from
local disk and network storage, and the client retries the server after a pause.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.peers.protocol import Keys
from lightning_sparse.data.sample import Format, View

if TYPE_CHECKING:
    import zmq

PING_S = 1.0
DEAD_S = 5.0
MIN_PAUSE_S, MAX_PAUSE_S = 30.0, 600.0  # before the next try; doubles each time, because each try costs DEAD_S
REQUEST_SAMPLES = 32  # samples per request: several requests in flight overlap reading with sending


class PeerClient:
    """Reads samples from other nodes. Thread-safe.

    Args:
        endpoints: endpoints of the servers, by node; without the own node.
        format: format that this node keeps. Samples of a server that keeps another format are not used.
        warn_once: called with (topic, text); logs each topic once.
    """

    def __init__(
        self, endpoints: Mapping[int, str], run: bytes, format: Format, warn_once: Callable[[str, str], None]
    ) -> None:
        import zmq

        self._endpoints, self._format, self._warn_once = dict(endpoints), format.encode(), warn_once
        self._keys = Keys.of(run)
        self._context = zmq.Context()
        self._numbers = itertools.count(1)
        self._idle: list[_Sockets] = []  # one call uses a set of sockets at a time; threads come and go
        self._dead_until: dict[int, float] = {}
        self._pauses: dict[int, float] = {}

    def fetch(self, indices: Sequence[int], nodes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, View | str]]:
        """Yield (requested index, index, sample); a str is the reason why a file cannot be used.

        Samples that no server sends are missing from the result.

        Args:
            nodes: owner of each sample.
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
            yield from self._answers(sockets, self._send_requests(sockets, wanted))
        finally:
            self._idle.append(sockets)

    def _send_requests(self, sockets: _Sockets, wanted: Mapping[int, Sequence[int]]) -> dict[bytes, int]:
        """Send requests; return the node of each request by its number."""
        requests: dict[bytes, int] = {}
        for node, indices in wanted.items():
            for begin in range(0, len(indices), REQUEST_SAMPLES):
                number = next(self._numbers).to_bytes(8, "little")
                part = np.array(indices[begin : begin + REQUEST_SAMPLES], np.int64)
                sockets.send(node, b"get", number, part.tobytes())  # a request that zmq drops times out below
                requests[number] = node
        return requests

    def _answers(self, sockets: _Sockets, requests: dict[bytes, int]) -> Iterator[tuple[int, int, View | str]]:
        heard = dict.fromkeys(requests.values(), time.monotonic())
        pinged = time.monotonic()
        while requests:
            for node, frames in sockets.receive(heard):
                heard[node] = time.monotonic()
                # skip answers to a call that ended early: their number is unknown
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
            self._warn_once(
                f"other format {node}",
                f"node {node} keeps samples as {theirs}, this node as {ours}, so they cannot use each other's memory "
                'and read from disk instead. Set the same format on all nodes, such as sample_format="jpeg".',
            )
            return
        rows = np.frombuffer(frames[3].bytes, np.int64).reshape(-1, 4).tolist()
        for (requested, index, height, width), frame in zip(rows, frames[4:], strict=True):
            if height == 0:
                yield requested, index, frame.bytes.decode("utf-8", "replace")
                continue
            data = np.frombuffer(frame.buffer, np.uint8)
            if self._format == b"decoded":
                data = data.reshape(height, width, 3)
            yield requested, index, View(data, height, width)

    def _give_up(self, node: int) -> None:
        self._pauses[node] = pause = min(2 * self._pauses.get(node, MIN_PAUSE_S / 2), MAX_PAUSE_S)
        self._dead_until[node] = time.monotonic() + pause
        self._warn_once(
            f"dead peer {node}",
            f"node {node} ({self._endpoints[node]}) does not respond: its samples are read from local disk or network "
            "storage until it does.",
        )

    def close(self) -> None:
        """Close all sockets. No thread may call `fetch` any more."""
        self._context.destroy(linger=0)


class _Sockets:
    """Sockets to other nodes, one per node, used by one call at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Mapping[int, str], keys: Keys) -> None:
        self._context, self._endpoints, self._keys = context, endpoints, keys
        self._open: dict[int, zmq.Socket[bytes]] = {}

    def send(self, node: int, *frames: bytes) -> bool:
        """Return False if the queue to that node is full: it refused this process, or has not read for long."""
        import zmq

        if node not in self._open:
            socket = self._open[node] = self._context.socket(zmq.DEALER)
            socket.linger, socket.ipv6 = 0, "[" in self._endpoints[node]
            socket.curve_serverkey = self._keys.server_public
            socket.curve_publickey, socket.curve_secretkey = self._keys.client_public, self._keys.client_secret
            socket.connect(self._endpoints[node])
        try:
            self._open[node].send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, nodes: Iterable[int]) -> Iterator[tuple[int, list[zmq.Frame]]]:
        """Yield what these nodes sent, waiting up to `PING_S`."""
        import zmq

        sockets = {self._open[node]: node for node in nodes}
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        for socket, node in [(each, sockets[each]) for each, _ in poller.poll(int(PING_S * 1000))]:
            yield node, socket.recv_multipart(zmq.NOBLOCK, copy=False)

    def close(self, node: int) -> None:
        self._open.pop(node).close(linger=0)

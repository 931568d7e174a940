"""Reads samples from the memory of other nodes: requests over zmq, encrypted and authenticated with CURVE.

Keys are derived from the secret of the run, which only its ranks hold. A server answers only clients with the client
key, and a client connects only to servers with the server key.

A server that sends nothing for `DEAD_S`, not even answers to pings, is considered dead. Pings are sent only while
requests wait. The caller then reads from lower tiers, and the client retries the server after a pause.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.decode import Format, View
from lightning_sparse.data.peers import Keys

if TYPE_CHECKING:
    import zmq

PING_S = 1.0
DEAD_S = 5.0
MIN_PAUSE_S, MAX_PAUSE_S = 30.0, 600.0  # before the next try; doubles each time, because each try costs DEAD_S
REQUEST_SAMPLES = 32  # samples per request: several requests in flight overlap reading with sending


class _Request(NamedTuple):
    node: int
    indices: bytes
    answers: SimpleQueue[tuple[int, list[zmq.Frame] | None]]


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
        self._endpoints, self._format, self._warn_once = dict(endpoints), format.encode(), warn_once
        self._connections = _Connections(self._endpoints, Keys.of(run), self._give_up)
        self._dead_until: dict[int, float] = {}
        self._pauses: dict[int, float] = {}

    def fetch(self, indices: Sequence[int], nodes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, View | str]]:
        """Yield (requested index, index, sample); a str is the reason why a file cannot be used.

        The indices differ if the server replaced a corrupt sample. Samples that no server sends are missing. `nodes`
        holds the owner of each sample.
        """
        now = time.monotonic()
        wanted: dict[int, list[int]] = {}
        for index, node in zip(indices, nodes.tolist(), strict=True):
            if node in self._endpoints and now >= self._dead_until.get(node, 0.0):
                wanted.setdefault(node, []).append(index)
        answers: SimpleQueue[tuple[int, list[zmq.Frame] | None]] = SimpleQueue()
        requests = [
            _Request(node, np.array(of_node[begin : begin + REQUEST_SAMPLES], np.int64).tobytes(), answers)
            for node, of_node in wanted.items()
            for begin in range(0, len(of_node), REQUEST_SAMPLES)
        ]
        self._connections.send(requests)
        for _ in requests:
            node, frames = answers.get()
            if frames is not None:
                self._pauses.pop(node, None)
                yield from self._samples(node, frames)

    def _samples(self, node: int, frames: Sequence[zmq.Frame]) -> Iterator[tuple[int, int, View | str]]:
        # lightning_sparse.data.peers describes the frames of messages
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

    def _give_up(self, node: int, reason: str) -> None:
        self._pauses[node] = pause = min(2 * self._pauses.get(node, MIN_PAUSE_S / 2), MAX_PAUSE_S)
        self._dead_until[node] = time.monotonic() + pause
        self._warn_once(
            f"dead peer {node}",
            f"node {node} ({self._endpoints[node]}) {reason}. Until it responds, this node reads its samples from "
            "local disk or network storage.",
        )

    def close(self) -> None:
        """Close all connections. Threads that wait in `fetch` get no more samples."""
        self._connections.close()


class _Connections:
    """One connection per node, which one thread holds, because zmq's sockets must not be shared.

    `give_up` is called with a node that does not answer, and the reason.
    """

    def __init__(self, endpoints: Mapping[int, str], keys: Keys, give_up: Callable[[int, str], None]) -> None:
        import zmq

        self._endpoints, self._keys, self._give_up = endpoints, keys, give_up
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, len(endpoints) + 16)
        self._open: dict[int, zmq.Socket[bytes]] = {}
        self._numbers = itertools.count(1)
        self._requests: dict[bytes, _Request] = {}  # sent, by number
        self._last_answer: dict[int, float] = {}  # per node: time of the last answer, or of the first request
        self._to_send: deque[_Request] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._wake, woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        woken.connect("inproc://wake")
        self._thread = threading.Thread(target=self._run, args=(woken,), name="lightning_sparse peers", daemon=True)
        self._thread.start()

    def send(self, requests: Sequence[_Request]) -> None:
        with self._lock:
            if not self._closed and requests:
                self._to_send.extend(requests)
                self._wake.send(b"")
                return
        for request in requests:
            request.answers.put((request.node, None))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake.send(b"")
        self._thread.join()
        self._wake.close(linger=0)
        self._context.destroy(linger=0)

    def _run(self, woken: zmq.Socket[bytes]) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(woken, zmq.POLLIN)
        pinged = time.monotonic()
        try:
            while not self._closed:
                for socket, _ in poller.poll(int(PING_S * 1000) if self._requests else None):
                    if socket is woken:
                        woken.recv()
                    else:
                        self._receive(socket)
                while self._to_send:
                    self._send(self._to_send.popleft(), poller)
                if self._requests and time.monotonic() - pinged >= PING_S:
                    pinged = time.monotonic()
                    self._ping(poller)
        finally:
            with self._lock:
                self._closed = True
                left = [*self._requests.values(), *self._to_send]
            for request in left:
                request.answers.put((request.node, None))
            for socket in (woken, *self._open.values()):
                socket.close(linger=0)

    def _send(self, request: _Request, poller: zmq.Poller) -> None:
        import zmq

        node, number = request.node, next(self._numbers).to_bytes(8, "little")
        self._requests[number] = request
        try:
            if node not in self._open:
                self._open[node] = self._connected(node)
                poller.register(self._open[node], zmq.POLLIN)
            if sum(request.node == node for request in self._requests.values()) == 1:
                self._last_answer[node] = time.monotonic()
            self._open[node].send_multipart((b"get", number, request.indices), zmq.NOBLOCK)
        except zmq.Again:  # it refused this process, or has not read for long
            self._drop(node, "does not respond", poller)
        except zmq.ZMQError as error:  # such as too many open files
            self._drop(node, f"cannot be reached ({error})", poller)

    def _connected(self, node: int) -> zmq.Socket[bytes]:
        import zmq

        socket = self._context.socket(zmq.DEALER)
        socket.linger, socket.ipv6 = 0, "[" in self._endpoints[node]
        socket.curve_serverkey = self._keys.server_public
        socket.curve_publickey, socket.curve_secretkey = self._keys.client_public, self._keys.client_secret
        socket.connect(self._endpoints[node])
        return socket

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        import zmq

        node = next((node for node, open_socket in self._open.items() if open_socket is socket), None)
        if node is None:
            return  # closed meanwhile
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        self._last_answer[node] = time.monotonic()
        request = None if frames[0].bytes == b"pong" else self._requests.pop(frames[1].bytes, None)
        if request is not None:
            request.answers.put((node, frames))

    def _ping(self, poller: zmq.Poller) -> None:
        import zmq

        for node in {request.node for request in self._requests.values()}:
            if time.monotonic() - self._last_answer[node] > DEAD_S:
                self._drop(node, "does not respond", poller)
                continue
            try:
                self._open[node].send_multipart((b"ping", b""), zmq.NOBLOCK)
            except zmq.ZMQError:
                self._drop(node, "does not respond", poller)

    def _drop(self, node: int, reason: str, poller: zmq.Poller) -> None:
        socket = self._open.pop(node, None)
        if socket is not None:
            poller.unregister(socket)
            socket.close(linger=0)
        self._give_up(node, reason)
        for number in [number for number, request in self._requests.items() if request.node == node]:
            # Each request gets exactly one answer, so `fetch` cannot hang.
            self._requests.pop(number).answers.put((node, None))

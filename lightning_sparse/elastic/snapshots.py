"""Downloads of one node's state by other nodes, over HTTP, while the node keeps training."""

from __future__ import annotations

import http.client
import io
import pickle
import re
import socket
import threading
import time
from collections.abc import Collection
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from lightning_sparse.elastic.direct import answer_of

ATTEMPT_SECONDS = 0.2
PAUSE_SECONDS = 30.0
CHUNK = 1 << 20


class SnapshotServer:
    """Serves states by name.

    Args:
        host: the address of this machine that other nodes reach.
    """

    def __init__(self, host: str) -> None:
        self._offered: dict[str, bytes] = {}
        self._server = _Server((host, 0), _handler(self._offered))
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def offer(self, names: list[str], state: Any) -> None:
        """Serve a state under each of these names."""
        written = io.BytesIO()
        torch.save(state, written)
        self._offered.update(dict.fromkeys(names, written.getvalue()))

    def keep(self, names: Collection[str]) -> None:
        """Drop all states except these."""
        for name in self._offered.keys() - set(names):
            del self._offered[name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def is_safe(value: Any) -> bool:
    """Return whether a node that fetches this value accepts it."""
    written = io.BytesIO()
    try:
        torch.save(value, written)
        _loaded(written.getvalue())
    except (RuntimeError, pickle.PicklingError, AttributeError, TypeError):  # pickle raises the last two, too
        return False
    return True


def fetch(address: str, name: str, timeout: float, pause: float = PAUSE_SECONDS) -> Any:
    """Return the state of that name, as ``Download.take`` does."""
    return Download(address, name).take(timeout, pause)


class Download:
    """A download of one state, which resumes where it stopped.

    Attributes:
        problem: why the state is incomplete, for the log.
        heard, advanced: time of the last answer, and of the last bytes, by ``time.monotonic()``.
    """

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name
        self.problem, self.heard, self.advanced = "no answer", time.monotonic(), 0.0
        self._received, self._size = bytearray(), 0

    def take(self, timeout: float, pause: float) -> Any:
        """Return the state once a node offers it, or None after ``timeout`` seconds.

        Args:
            pause: seconds without a byte after which a started download fails, too.

        Raises:
            RuntimeError: if the state has types that a safe load refuses.
        """
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            before = len(self._received)
            try:
                if self._receive(timeout, pause):
                    return _loaded(bytes(self._received))
            except (OSError, http.client.HTTPException) as error:  # the peer has died, or a link is cut
                self.problem = f"{type(error).__name__}: {error}"
            if self._received:
                self.problem = f"{len(self._received):,} of {self._size:,} bytes received, {self.problem}"
            if len(self._received) > before:
                until = time.monotonic() + pause
            time.sleep(ATTEMPT_SECONDS)
        return None

    def _receive(self, timeout: float, pause: float) -> bool:
        """Receive the missing bytes. Return whether the state is complete."""
        begin = len(self._received)
        headers = {"Range": f"bytes={begin}-"} if begin else {}
        with answer_of(f"{self.address}/{self.name}", timeout, pause, headers) as answer:
            self.heard = time.monotonic()
            if answer.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                self.problem = "it does not offer its weights yet"
                return False
            if answer.status == HTTPStatus.OK:
                self._received.clear()
            self._size = len(self._received) + int(answer.headers["Content-Length"])
            while chunk := answer.read1(CHUNK):
                self._received += chunk
                self.heard = self.advanced = time.monotonic()
        self.problem = "the connection was closed"
        return len(self._received) == self._size


def _loaded(state: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RuntimeError(
            f"the state of a training node has types that a safe load refuses ({error}). Keep only tensors and plain "
            f"values in optimizers, schedulers and state_dict()."
        ) from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, place: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        super().__init__(place, handler)

    def handle_error(self, *_: Any) -> None:
        """Ignore it: a node may die while it downloads."""


def _begin_of(wanted: str, size: int) -> int:
    """Return the first byte of a ``Range`` header; 0 for the whole state."""
    found = re.fullmatch(r"bytes=(\d+)-", wanted)
    begin = int(found[1]) if found else 0
    return begin if begin < size else 0


def _handler(offered: dict[str, bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state = offered.get(self.path.strip("/"))
            if state is None:
                self.send_error(404)
                return
            begin = _begin_of(self.headers.get("Range", ""), len(state))
            self.send_response(HTTPStatus.PARTIAL_CONTENT if begin else HTTPStatus.OK)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(state) - 1}/{len(state)}")
            self.send_header("Content-Length", str(len(state) - begin))
            self.end_headers()
            self.wfile.write(memoryview(state)[begin:])

        def log_message(self, *_: Any) -> None:
            return

    return Handler

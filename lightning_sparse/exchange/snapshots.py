"""Hands the state of one node to others, over HTTP, while it trains on."""

from __future__ import annotations

import http.client
import io
import pickle
import socket
import threading
import time
import urllib.request
from collections.abc import Collection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

ATTEMPT_SECONDS = 0.2


class SnapshotServer:
    """Serves what is offered, by name.

    Args:
        host: the address of this machine that other nodes reach.
    """

    def __init__(self, host: str) -> None:
        self._offered: dict[str, bytes] = {}
        self._server = _Server((host, 0), _handler(self._offered))
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def offer(self, names: list[str], state: Any) -> None:
        """Offer a state under these names."""
        written = io.BytesIO()
        torch.save(state, written)
        self._offered.update(dict.fromkeys(names, written.getvalue()))

    def keep(self, names: Collection[str]) -> None:
        """Offer none but these from now on."""
        for name in self._offered.keys() - set(names):
            del self._offered[name]

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()


def is_safe(value: Any) -> bool:
    """Whether a node that fetches this value accepts it."""
    written = io.BytesIO()
    try:
        torch.save(value, written)
        _loaded(written.getvalue())
    except (RuntimeError, pickle.PicklingError, AttributeError, TypeError):  # pickle raises the latter two as well
        return False
    return True


def fetch(address: str, name: str, timeout: float) -> Any:
    """Return the state that is offered under that name, once it is; None if it is not within the timeout, in seconds.

    Raises:
        RuntimeError: if it has other types than a safe load reads.
    """
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{address}/{name}", timeout=timeout) as answer:
                return _loaded(answer.read())
        except (OSError, http.client.HTTPException):  # it is not offered yet, or the peer dies meanwhile
            time.sleep(ATTEMPT_SECONDS)
    return None


def _loaded(state: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RuntimeError(
            f"a node that trains offers state that a safe load refuses ({error}): keep tensors and plain values in "
            f"optimizers, schedules and state_dict()s."
        ) from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, place: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        super().__init__(place, handler)

    def handle_error(self, *_: Any) -> None:
        """Say nothing: a node that asks for a snapshot may end at any time."""


def _handler(offered: dict[str, bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state = offered.get(self.path.strip("/"))
            if state is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(state)))
            self.end_headers()
            self.wfile.write(state)

        def log_message(self, *_: Any) -> None:
            return

    return Handler

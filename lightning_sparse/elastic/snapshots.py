"""Downloads of a device's state by joining devices, over HTTP, while the device keeps training.

A snapshot is a stream: 8 bytes with the length of the head (big-endian), the head (``torch.save``), and flat tensors.
"""

from __future__ import annotations

import http.client
import io
import pickle
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_sparse.elastic.direct import answer_of

ATTEMPT_SECONDS = 0.2
LONGEST_SECONDS = 60.0  # during this time, the other devices of the node wait in a collective
CHUNK = 1 << 20
LENGTH_BYTES = 8
ONLY_NODES = "Make sure that only nodes of this run use the lighthouse."


class Entry(NamedTuple):
    """A tensor of a snapshot: name, dtype (such as "float32"), and number of elements."""

    name: str
    dtype: str
    numel: int


class Snapshot:
    """A state to download, of ``size`` bytes.

    Args:
        tensors: flat tensors by name, in the order of the download. They may change during a download.
    """

    def __init__(self, head: Any, tensors: Sequence[tuple[str, Tensor]]) -> None:
        layout = [(name, str(tensor.dtype).removeprefix("torch."), tensor.numel()) for name, tensor in tensors]
        written = io.BytesIO()
        torch.save({"head": head, "layout": layout}, written)
        packed = written.getvalue()
        self._head = len(packed).to_bytes(LENGTH_BYTES, "big") + packed
        self._tensors = [tensor.detach().view(torch.uint8) for _, tensor in tensors if tensor.numel()]
        self.size = len(self._head) + sum(map(len, self._tensors))

    def read(self, begin: int) -> Iterator[memoryview]:
        """Yield the bytes from `begin` on."""
        if begin < len(self._head):
            yield memoryview(self._head)[begin:]
        begin -= len(self._head)
        for tensor in self._tensors:
            for first in range(max(begin, 0), len(tensor), CHUNK):
                # Read only when a peer downloads it, so that the server needs no second copy.
                yield tensor[first : first + CHUNK].cpu().numpy().data
            begin -= len(tensor)


class SnapshotServer:
    """Serves snapshots by name, on the address of this machine that other nodes reach."""

    def __init__(self, host: str) -> None:
        self._offered: dict[str, Snapshot] = {}
        self._server = _Server((host, 0), _handler(self._offered))
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def offer(self, names: list[str], snapshot: Snapshot) -> None:
        self._offered.update(dict.fromkeys(names, snapshot))

    def keep(self, names: Collection[str]) -> None:
        """Drop all snapshots except these."""
        for name in self._offered.keys() - set(names):
            del self._offered[name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def is_safe(value: Any) -> bool:
    """Return whether a node that downloads this value accepts it."""
    written = io.BytesIO()
    try:
        torch.save(value, written)
        _loaded(written.getvalue())
    except (RuntimeError, pickle.PicklingError, AttributeError, TypeError):  # pickle raises the last two, too
        return False
    return True


class Receiver(ABC):
    """Stores a snapshot as it arrives."""

    head: Any = None  # until it has arrived

    @abstractmethod
    def begin(self, head: Any, layout: Sequence[Entry]) -> int:
        """Store the head, and return the number of tensors to receive.

        Raises:
            RuntimeError: for a snapshot of another model.
        """

    @abstractmethod
    def take(self, name: str, tensor: Tensor) -> None:
        """Store a tensor, flat and on the CPU."""


Kind = TypeVar("Kind", bound=Receiver)


class Download(Generic[Kind]):
    """A download of one snapshot, which resumes where it stopped."""

    def __init__(self, address: str, name: str, make_receiver: Callable[[], Kind]) -> None:
        self.address, self.name = address, name
        # The reason that the snapshot is incomplete, and the monotonic times of the last answer and of the last bytes.
        self.problem, self.last_answer, self.advanced = "no answer", time.monotonic(), 0.0
        self._make_receiver = make_receiver
        self._begin(0)

    def _begin(self, size: int) -> None:
        self._size, self._received = size, 0
        self.receiver = self._make_receiver()
        self._parts = self._memory_of_parts()
        self._part: memoryview | None = next(self._parts)
        self._filled = 0

    def advance(self, timeout: float, pause: float) -> bool:
        """Return whether the snapshot is complete.

        Args:
            timeout: seconds to wait for the first bytes. In total, it waits up to `LONGEST_SECONDS`.
            pause: seconds without a byte after which a started download fails.

        Raises:
            RuntimeError: if the snapshot is unreadable, or of another model.
        """
        until = time.monotonic() + timeout
        end = time.monotonic() + LONGEST_SECONDS
        while not self.complete and time.monotonic() < min(until, end):
            before = self._received
            try:
                self._receive(timeout, pause, end)
            except (OSError, http.client.HTTPException) as error:  # the peer has died, or a link is cut
                self.problem = f"{type(error).__name__}: {error}"
            if self._received:
                self.problem = f"{self._received:,} of {self._size:,} bytes received, {self.problem}"
            if self._received > before:
                until = time.monotonic() + pause
            if not self.complete:
                time.sleep(ATTEMPT_SECONDS)
        return self.complete

    @property
    def complete(self) -> bool:
        return self._part is None

    def _receive(self, timeout: float, pause: float, end: float) -> None:
        headers = {"Range": f"bytes={self._received}-"} if self._received else {}
        with answer_of(f"{self.address}/{self.name}", timeout, pause, headers) as answer:
            self.last_answer = time.monotonic()
            if answer.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                self.problem = "it does not offer its weights yet"
                return
            size = int(answer.headers["Content-Length"] or 0)
            # The whole snapshot: a new name, or a server that starts again. A new receiver drops the old tensors.
            if answer.status == HTTPStatus.OK:
                self._begin(size)
            while not self.complete and time.monotonic() < end and (chunk := answer.read1(CHUNK)):
                self._store(memoryview(chunk))
                self.last_answer = self.advanced = time.monotonic()
        self.problem = "the connection was closed"

    def _store(self, chunk: memoryview) -> None:
        while len(chunk) and self._part is not None:
            count = min(len(chunk), len(self._part) - self._filled)
            self._part[self._filled : self._filled + count] = chunk[:count]
            chunk = chunk[count:]
            self._received += count
            self._filled += count
            if self._filled == len(self._part):
                self._part, self._filled = next(self._parts, None), 0

    def _memory_of_parts(self) -> Iterator[memoryview]:
        # Each yielded part is memory to fill. The code after a yield runs once it is full, so that only one tensor is
        # held at a time.
        length = bytearray(LENGTH_BYTES)
        yield memoryview(length)
        size = int.from_bytes(length, "big")
        if not 0 < size <= self._size - LENGTH_BYTES:
            raise RuntimeError(f"the node at {self.address} sent no snapshot. {ONLY_NODES}")
        packed = bytearray(size)
        yield memoryview(packed)
        try:
            # Without this check, torch.load would try the older formats of torch.save.
            if not packed.startswith(b"PK"):
                raise ValueError("its head is not an archive of torch.save")
            content = _loaded(bytes(packed))
            layout = [Entry(*row) for row in content["layout"]]
            kinds = [getattr(torch, entry.dtype) for entry in layout]
            if (
                size
                + LENGTH_BYTES
                + sum(entry.numel * kind.itemsize for entry, kind in zip(layout, kinds, strict=True))
                != self._size
            ):
                raise ValueError(f"its size of {self._size:,} bytes does not match its tensors")
            wanted = self.receiver.begin(content["head"], layout)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise RuntimeError(f"the node at {self.address} sent no snapshot ({error!r}). {ONLY_NODES}") from error
        for (name, _, numel), kind in zip(layout[:wanted], kinds, strict=False):
            tensor = torch.empty(numel, dtype=kind)
            if numel:
                yield tensor.view(torch.uint8).numpy().data
            try:
                self.receiver.take(name, tensor)
            except (KeyError, RuntimeError) as error:
                raise RuntimeError(
                    f"the node at {self.address} sent {name} with {numel:,} elements, which does not fit this model "
                    f"({error}). {ONLY_NODES}"
                ) from error


def _loaded(state: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError) as error:
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
        pass  # a node may die while it downloads


def _begin_of(wanted: str, size: int) -> int:
    # The only form that `Download` sends. Anything else gets the whole snapshot, from byte 0.
    match = re.fullmatch(r"bytes=(\d+)-", wanted)
    begin = int(match[1]) if match else 0
    return begin if begin < size else 0


def _handler(offered: dict[str, Snapshot]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            snapshot = offered.get(self.path.strip("/"))
            if snapshot is None:
                self.send_error(404)
                return
            begin = _begin_of(self.headers.get("Range", ""), snapshot.size)
            self.send_response(HTTPStatus.PARTIAL_CONTENT if begin else HTTPStatus.OK)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{snapshot.size - 1}/{snapshot.size}")
            self.send_header("Content-Length", str(snapshot.size - begin))
            self.end_headers()
            for chunk in snapshot.read(begin):
                self.wfile.write(chunk)

        def log_message(self, *_: Any) -> None:
            return

    return Handler

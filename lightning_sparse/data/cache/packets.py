"""Requests to the process that reads network storage, and its answers: several messages in a packet.

Of small files, a packet costs more than what is in it. `storage_reader.py` loads this file by its path; it imports the
standard library only.
"""

import contextlib
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NoReturn

REQUEST, ANSWER, LENGTH = struct.Struct("<QB"), struct.Struct("<QBQq"), struct.Struct("<Q")
SEND_BYTES, SEND_S = 1 << 16, 0.02  # answers wait for others up to these


def packet(messages: Sequence[bytes]) -> bytes:
    """Join messages, each after its length."""
    return b"".join(part for each in messages for part in (LENGTH.pack(len(each)), each))


def messages_of(data: bytes) -> Iterator[bytes]:
    """Inverse of `packet`."""
    position = 0
    while position < len(data):
        (length,) = LENGTH.unpack_from(data, position)
        position += LENGTH.size + length
        yield data[position - length : position]


class Answers:
    """Sends answers, together with those that are made at the same time.

    Args:
        requests: what is left to answer.
    """

    def __init__(self, connection: Any, requests: SimpleQueue[bytes]) -> None:
        self._connection, self._requests, self._lock = connection, requests, threading.Lock()
        self._made: list[bytes] = []
        self._size, self._sent = 0, 0.0

    def add(self, number: int, status: int, payload: bytes = b"", size: int = 0, mtime: int = 0) -> None:
        with self._lock:
            self._made.append(ANSWER.pack(number, status, size, mtime) + payload)
            self._size += len(payload)
            late = time.monotonic() - self._sent >= SEND_S
            if late or self._size >= SEND_BYTES or self._requests.empty() or status == ord("p"):
                self._send()

    def _send(self) -> None:
        try:
            self._connection.send_bytes(packet(self._made))
        except OSError:
            leave()  # the socket is closed
        self._made, self._size, self._sent = [], 0, time.monotonic()


def leave() -> NoReturn:
    """End this process without waiting for other threads. One that hangs in the kernel keeps what the process has open,
    so close what a shell may wait for: the output of the program."""
    for each in range(3):
        with contextlib.suppress(OSError):
            os.close(each)
    os._exit(0)

"""The process that reads network storage (`storage_reader.py`), and the thread that listens to it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from lightning_sparse.data.cache.packets import messages_of

END_S = 0.5  # for the end of a reader; one that hangs in the kernel is left to it
_READER = Path(__file__).with_name("storage_reader.py")


class _Owner(Protocol):
    def on_answers(self, messages: Sequence[bytes]) -> None: ...


class ReaderProcess:
    """The reader process, and the thread that listens to it."""

    def __init__(self, source: str, readers: int, owner: _Owner) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, str(_READER), str(theirs.fileno()), str(readers), source]
        # in a session of its own: Ctrl-C goes to the trainer, and the reader ends when the socket closes
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd="/", start_new_session=True
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._sending = threading.Lock()
        self._owner = weakref.ref(owner)  # the thread must not keep the Storage alive
        self.alive = True
        self._stop = weakref.finalize(owner, _stop, self._process, self._connection, os.getpid())
        threading.Thread(target=self._listen, name="storage reader", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send the options; after that, packets of requests."""
        try:
            with self._sending:
                self._connection.send_bytes(message)
        except OSError:
            self.alive = False  # a waiting thread restarts it

    def abandon(self) -> None:
        """Kill the process without waiting for its end: it may hang in the kernel."""
        self.alive = False
        self._stop()

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv_bytes()
            except (EOFError, OSError):
                break
            owner = self._owner()
            if owner is None:
                break
            owner.on_answers(list(messages_of(message)))
            del owner
        self._connection.close()
        self.alive = False


def _stop(process: subprocess.Popen[bytes], connection: Connection, pid: int) -> None:
    if os.getpid() != pid:
        return  # this is a forked copy; the process belongs to the parent
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)  # ends the process, and the thread that listens, which closes the connection
    if _ended(process):
        return
    process.kill()
    if not _ended(process):
        process.returncode = -9  # hangs in the kernel; suppresses the warning about a child that was not waited for


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        return False
    return True

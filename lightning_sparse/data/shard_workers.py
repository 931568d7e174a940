"""Processes that encode shards on all cores of a host.

Each process has one thread. It runs this module, so a training script needs no ``if __name__ == "__main__"``. This
module does not import torch, so that the processes start fast.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import cast

from tqdm import tqdm

from lightning_sparse.data.config import DataError
from lightning_sparse.data.shards import LeftOut, Shard, TokenSource, some
from lightning_sparse.data.sources.storage import Storage
from lightning_sparse.messages import log

MAX_WORKERS = 16


class Workers:
    """Processes that write missing shards to the cache. The first call of `done` starts them.

    Args:
        quiet: show no progress bar.
    """

    def __init__(self, source: TokenSource, shards: Sequence[Shard], *, quiet: bool = False) -> None:
        self._source, self._shards, self._quiet = source, shards, quiet
        self._running: dict[Connection, subprocess.Popen[bytes]] = {}
        self._bar: tqdm[None] | None = None
        self._left_out = LeftOut()

    def done(self, patience_s: float) -> bool:
        """Wait up to `patience_s`, then return whether the cache has all shards.

        Raises:
            ValueError, DataError: as `TokenSource.make` in one of the processes.
        """
        if self._bar is None:
            self._start()
        end = time.monotonic() + patience_s
        while self._running and (left := end - time.monotonic()) > 0:
            for connection in wait([*self._running], left):
                self._receive(cast(Connection, connection))
        return not self._running

    def _start(self) -> None:
        missing = sorted((each for each in self._shards if not self._source.is_kept(each)), key=lambda each: -each.size)
        total, name = sum(each.size for each in missing), f"tokens of {self._source.config.source}"
        hidden = self._quiet or not missing
        if missing:
            self._source.create_folder()
        self._bar = tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=hidden)
        count = min(len(missing), len(os.sched_getaffinity(0)), MAX_WORKERS)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        own = replace(self._source)  # a copy without the tokenizer, which starts threads
        for number in range(count):
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            with theirs:
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
            connection = Connection(ours.detach())
            self._running[connection] = process
            connection.send((own, missing[number::count]))

    def _receive(self, connection: Connection) -> None:
        assert self._bar is not None
        try:
            kind, value = connection.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                f"a process that tokenizes {self._source.config.source} ended early, probably because memory "
                "ran out: start again with fewer cores or smaller documents."
            ) from error
        if kind == "read":
            self._bar.update(value)
        elif kind == "error":
            raise value
        else:
            self._left_out = LeftOut(*(own + more for own, more in zip(self._left_out, value, strict=True)))
            self._running.pop(connection).wait()
            connection.close()

    def close(self) -> None:
        """End the processes."""
        for connection, process in self._running.items():
            process.kill()
            process.wait()
            connection.close()
        self._running = {}
        if self._bar is not None:
            self._bar.close()
        (empty, corrupt), source = self._left_out, self._source.config.source
        if self._quiet:
            return
        if empty:
            log.info("%s: skipped %s empty document(s)", source, f"{empty:,}")
        if corrupt:
            log.warning("%s: skipped %s corrupt document(s): %s", source, f"{len(corrupt):,}", some(corrupt))


def main(file: int) -> None:
    """Receive shards from the parent process, and write them to the cache."""
    connection = Connection(file)
    source, shards = connection.recv()

    def leave_with_parent() -> None:
        with contextlib.suppress(EOFError, OSError):
            connection.recv()  # nothing comes
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    try:
        with Storage(source.config) as storage:
            made = [source.make(each, storage, lambda size: connection.send(("read", size))) for each in shards]
        empty, corrupt = zip(*made, strict=True)
        connection.send(("end", LeftOut(sum(empty), sum(corrupt, ()))))
    except Exception as error:
        message = str(error) if isinstance(error, (ValueError, DataError)) else f"{type(error).__name__}: {error}"
        connection.send(("error", ValueError(message) if isinstance(error, ValueError) else DataError(message)))
    os._exit(0)  # does not wait for the thread, which still reads


if __name__ == "__main__":
    main(int(sys.argv[1]))

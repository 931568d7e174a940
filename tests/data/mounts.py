"""A folder that is mounted over sshfs, without an SSH server."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_sparse.lab.storage import sftp_server


@contextlib.contextmanager
def sshfs_mount(real: Path, place: Path) -> Iterator[int]:
    """Mount a folder that is not empty on a new folder. Yields the process that serves it."""
    place.mkdir()
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack, ours, theirs:
        serves = stack.enter_context(subprocess.Popen([str(sftp_server())], stdin=theirs, stdout=theirs))
        command = ["sshfs", "-f", "-o", "passive", f"here:{real}", str(place)]
        mounts = stack.enter_context(subprocess.Popen(command, stdin=ours, stdout=ours))
        try:
            while not any(place.iterdir()):
                assert mounts.poll() is None
                time.sleep(0.02)
            yield serves.pid
        finally:
            serves.kill()  # reads that hang fail
            mounts.terminate()  # unmounts

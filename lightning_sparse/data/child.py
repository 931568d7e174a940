"""Child processes that end when the connection to their parent closes, even if the parent dies.

A child does not import the program of its parent, so a training script needs no ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

END_S = 0.5  # for the end of a child that was killed


class Child:
    """A child process, which forked copies of its parent cannot end.

    Args:
        run: A script, which gets the connection's file number as its first argument; or a function
            ``"module:function"``, which is called with the `Connection`.
        own_session: Whether Ctrl-C goes to the parent alone.
    """

    def __init__(self, run: Path | str, *arguments: str, own_session: bool = True) -> None:
        ours, theirs = socket.socketpair()
        file = str(theirs.fileno())
        if isinstance(run, Path):  # from another folder, so that modules of the program do not shadow others
            command, folder, environment = [str(run), file, *arguments], "/", None
        else:
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            command, folder, environment = ["-m", __name__, file, run], None, {**os.environ, "PYTHONPATH": paths}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=folder,
                env=environment,
                start_new_session=own_session,
            )
        self.connection, self._pid = Connection(ours.detach()), os.getpid()

    def hang_up(self) -> None:
        """Let the child end, which takes a moment. Threads that receive from it get EOFError."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
                ours.shutdown(socket.SHUT_RDWR)

    def end(self, patience_s: float) -> None:
        """End the child, by force after `patience_s`."""
        if os.getpid() != self._pid:
            return
        self.hang_up()
        if self._has_ended(patience_s):
            return
        self.process.kill()
        if not self._has_ended(END_S):
            self._wait_in_background()

    def _wait_in_background(self) -> None:
        # The machine is busy, or the child hangs in the kernel. Without a wait, it would stay as a zombie once it ends.
        try:
            threading.Thread(target=self.process.wait, name="end of a child", daemon=True).start()
        except RuntimeError:  # this process is ending, too
            self.process.returncode = -9  # suppresses the warning about a child that was not waited for

    def _has_ended(self, patience_s: float) -> bool:
        try:
            self.process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def end_with_parent(connection: Connection) -> None:
    """End this process when the parent hangs up. The parent must not send anything more."""

    def wait() -> None:
        with contextlib.suppress(EOFError, OSError):
            connection.recv_bytes()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    module, _, function = sys.argv[2].partition(":")
    getattr(import_module(module), function)(Connection(int(sys.argv[1])))

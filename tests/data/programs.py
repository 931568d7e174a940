"""Programs that tests interrupt, kill or limit: forks of an interpreter that has imported torch and Lightning.

A fork takes a fraction of a second; the imports take five seconds. The program is the main program of its interpreter,
so its traceback and exit status equal the results of ``python -c``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

LIMIT_S = 120
QUICKLY = """
import os, sys
try:
    exec({code!r})
    status = 0
except BaseException:
    sys.excepthook(*sys.exc_info())
    status = 1
sys.stdout.flush()
os._exit(status)
"""
WARM = """
import sys
import lmdb
from tests.data import fits, programs
from tests.helpers import data
fits.ours("pytorch_lightning")
exec(programs.serve(int(sys.argv[1])))
"""


class Ended(NamedTuple):
    status: int
    stdout: str
    stderr: str


class Program:
    """A running program. `pid` is also the id of its session."""

    def __init__(self, code: str, args: tuple[object, ...], whole: bool, environment: dict[str, str]) -> None:
        self._output, write = os.pipe()
        read, stdin = os.pipe()
        self.stdin = open(stdin, "w")  # noqa: SIM115
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        settings = {**os.environ, "PYTHONPATH": path, **environment}
        code = code if whole else QUICKLY.format(code=code)
        request = json.dumps([code, [*map(str, args)], settings, os.getcwd()]).encode()
        socket.send_fds(_warm(), [request], [read, write, self._errors.fileno(), theirs.fileno()])
        os.close(write)
        os.close(read)
        theirs.close()
        self._control.settimeout(LIMIT_S)
        self.pid = int(self._control.recv(20))

    def line(self) -> str:
        """Return the next line of its output, or "" if it has ended."""
        found = b""
        while not found.endswith(b"\n") and (byte := os.read(self._output, 1)):
            found += byte
        return found.decode().strip()

    def wait_for(self, line: str) -> None:
        """Return once it has printed a line."""
        assert line in iter(self.line, ""), f"it has ended without {line!r}: {self.errors()}"

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, limit_s: float = LIMIT_S) -> Ended:
        """Wait until it ends."""
        self.stdin.close()
        self._control.settimeout(limit_s)
        status = os.waitstatus_to_exitcode(int(self._control.recv(20)))
        os.set_blocking(self._output, False)  # a child process may hold the pipe
        output = b""
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self._output, 1 << 16):
                output += more
        return Ended(status, output.decode(), self.errors())

    def wait_until_idle(self) -> None:
        """Return once all of its threads sleep, as they do while they wait for storage."""
        idle = 0
        while idle < 5:
            states = set()
            for each in os.listdir(f"/proc/{self.pid}/task"):
                with contextlib.suppress(OSError):  # the thread has ended
                    states.add(_stat(f"/proc/{self.pid}/task/{each}/stat")[1][0])
            idle = idle + 1 if states == {"S"} else 0
            time.sleep(0.02)

    def wait_until_alone(self) -> None:
        """Return once no process of its session is left."""
        while self.left():
            time.sleep(0.02)

    def left(self) -> list[str]:
        """Return the names of the processes in its session."""
        found = []
        for each in os.listdir("/proc"):
            with contextlib.suppress(OSError):  # the process has ended
                if each.isdigit() and os.getsid(int(each)) == self.pid:
                    name, fields = _stat(f"/proc/{each}/stat")
                    found += [name] if fields[0] != "Z" else []
        return found

    def errors(self) -> str:
        """Return its standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        """Kill all processes of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self._output)
        for each in (self.stdin, self._errors, self._control):
            with contextlib.suppress(BrokenPipeError):
                each.close()


def _stat(path: str) -> tuple[str, list[str]]:
    """Return the name of a process or thread, and its fields from the state on."""
    with open(path) as file:
        name, _, rest = file.read().rpartition(")")
    return name, rest.split()


@contextlib.contextmanager
def program(code: str, *args: object, whole: bool = False, **environment: str) -> Iterator[Program]:
    """Start a program, which is killed at the end.

    Args:
        args: The program's `sys.argv[1:]`.
        whole: Also shut down the interpreter, which takes a second.
    """
    started = Program(code, args, whole, environment)
    try:
        yield started
    finally:
        started.close()


def run(code: str, *args: object, whole: bool = False, **environment: str) -> Ended:
    """Run a program to its end."""
    with program(code, *args, whole=whole, **environment) as started:
        return started.wait()


@cache
def _warm() -> socket.socket:
    """Return a socket to the interpreter that forks. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    command = [sys.executable, "-W", "ignore", "-c", WARM, str(theirs.fileno())]
    server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path})
    theirs.close()
    atexit.register(server.kill)
    return ours


def serve(number: int) -> str:
    """Fork a program for each request. Only the forked program returns, with its code."""
    requests = socket.socket(fileno=number)
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        request, files, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            break
        for each in files:
            os.close(each)
    control = socket.socket(fileno=files.pop())
    if (program := os.fork()) != 0:  # this process waits for the program's end
        requests.close()
        for each in files:
            os.close(each)
        control.send(str(program).encode())
        control.send(f"{os.waitpid(program, 0)[1]}".encode())
        os._exit(0)
    control.close()
    requests.close()
    os.setsid()
    code, args, environment, folder = json.loads(request)
    for standard, each in enumerate(files):
        os.dup2(each, standard)
        os.close(each)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[1:] = args
    return str(code)

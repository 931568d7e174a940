"""Owners of runs, and processes of runs, which are found and ended even if they detach."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lightning_sparse.lab import processes
from lightning_sparse.lab.processes import (
    RUN_VARIABLE,
    RunName,
    exit_on_signals,
    kill_orphans,
    kill_processes,
    processes_of,
    signals_ignored,
)

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc"),
]

# Forks twice, leaves its session, and leads its own process group, as a daemon does.
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setpgid(0, 0)
        time.sleep(60)
"""


def _until(condition, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


def _daemon(run: str) -> None:
    subprocess.run([sys.executable, "-c", DAEMON], env={**os.environ, RUN_VARIABLE: run}, check=True)
    _until(lambda: [_is_settled(pid) for pid in processes_of(run)] == [True])


def _is_settled(pid: int) -> bool:
    """Return whether the process leads a process group in the session of another process, after both forks."""
    try:
        return os.getpgid(pid) == pid != os.getsid(pid)
    except ProcessLookupError:
        return False


def _dead_run() -> RunName:
    """Return a run name whose owner has ended."""
    with subprocess.Popen(["sleep", "60"]) as owner:
        name = RunName(owner.pid, RunName.new().start, "abc123")
        owner.kill()
    return name


def test_owner_is_a_process_id_and_its_start_time():
    name = RunName.new()
    assert name.owner_lives()
    assert not RunName(name.pid, name.start + 1, name.token).owner_lives(), "another process has this id"
    assert not _dead_run().owner_lives()


def test_daemon_is_found_and_ended():
    run = str(RunName.new())
    _daemon(run)
    kill_processes(run)
    assert processes_of(run) == []


def test_kill_processes_scans_twice(monkeypatch):
    """A scan of /proc misses a process that forks and ends during the scan, and its child."""
    run = str(RunName.new())
    _daemon(run)
    missed: list[list[int]] = [[]]
    monkeypatch.setattr(processes, "processes_of", lambda run: missed.pop() if missed else processes_of(run))
    kill_processes(run)
    assert processes_of(run) == []


def test_only_orphans_of_dead_labs_are_ended():
    alive, dead = str(RunName.new()), str(_dead_run())
    _daemon(alive)
    _daemon(dead)
    kill_orphans()
    _until(lambda: processes_of(dead) == [])
    assert len(processes_of(alive)) == 1
    kill_processes(alive)


def test_sigterm_unwinds_the_stack():
    with pytest.raises(SystemExit) as left, exit_on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_cleanup_ignores_signals():
    with signals_ignored():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

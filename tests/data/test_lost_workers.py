"""A process that makes batches is killed, exits or has no memory left: the program ends and says why."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.pictures import numbered_folder

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which needs root")
PROGRAM = """
import logging, os, resource, signal, sys, time
from pathlib import Path
from lightning_sparse.data.decode import decode
from tests.data.fits import *
folder, main, seen = Path(sys.argv[1]), os.getpid(), []
lost = folder / "lost"

def picture(data):
    seen.append(1)
    if len(seen) == 12 and os.getpid() != main and not lost.exists():
        lost.touch()
        LOSS
    return torch.from_numpy(decode(data).copy()).permute(2, 0, 1).float()

given = ours("pytorch_lightning").CachedDataModule(
    str(folder / "source"), str(folder / "cache0"), picture, BATCH, workers=2, memory_gb=0.05, on_corrupt="skip"
)
"""
KILLED, EXITS = "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"
NO_MEMORY = """now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20),) * 2)
        bytearray(1 << 30)"""
FIT = 'trainer("pytorch_lightning").fit(module("pytorch_lightning"), given)\n'
LOOP = """
given.setup("fit")
for batch in given.train_dataloader():
    time.sleep(0.05)
"""
WAS_KILLED = "was killed, mostly because the node or the job ran out of memory"


@pytest.mark.parametrize(
    ("loss", "code", "says"),
    [
        (KILLED, FIT, WAS_KILLED),
        pytest.param(KILLED, LOOP, WAS_KILLED, marks=pytest.mark.slow),
        pytest.param(EXITS, FIT, "ended with status 3 inside decode", marks=pytest.mark.slow),
        pytest.param(NO_MEMORY, LOOP, "decode ran out of memory", marks=pytest.mark.slow),
    ],
    ids=["killed, fit", "killed, loop", "exits, fit", "out of memory, loop"],
)
def test_a_worker_that_is_lost_ends_the_program(tmp_path: Path, loss: str, code: str, says: str) -> None:
    numbered_folder(tmp_path / "source")
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.replace("LOSS", loss) + code, str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    ) as program:
        try:
            output, _ = program.communicate(timeout=60)
        finally:
            left = members(program.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode == 1
    assert says in output
    assert "replaced by another sample" not in output
    assert left == [], "the memory of samples ends with the last process"


def members(session: int) -> list[str]:
    """The processes of a session."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = each.read_text().rpartition(")")
        except OSError:  # ended
            continue
        if rest.split()[3] == str(session) and rest.split()[0] != "Z":
            found.append(name)
    return found


FEW_FILES = """
opened = max(map(int, os.listdir("/proc/self/fd"))) + 8
resource.setrlimit(resource.RLIMIT_NOFILE, (opened, opened))
"""
READ_ONLY_SHM = """
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/dev/shm"], check=True)
"""
START = """
import os, resource, sys
import torch
from lightning_sparse import CachedDataModule
data = CachedDataModule(sys.argv[1], sys.argv[2], bytes, 4, workers=3, memory_gb=MEMORY_GB, collate=list)
data.setup("fit")
loader = data.train_dataloader()
LIMIT
next(iter(loader))
"""


def started(tmp_path: Path, prepare: str, memory_gb: str = "0.0") -> subprocess.CompletedProcess[str]:
    """Run START, which counts the samples of a loader with workers, after some preparation."""
    (tmp_path / "source" / "train").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "source" / "train" / f"{number}.bin").write_bytes(b"x")
    program = START.replace("LIMIT", prepare).replace("MEMORY_GB", memory_gb) + "print(sum(map(len, loader)))"
    own_mounts = ["unshare", "--mount"] if prepare == READ_ONLY_SHM else []
    command = [*own_mounts, sys.executable, "-W", "ignore", "-c", program]
    command += [str(tmp_path / "source"), str(tmp_path / "cache")]
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path}, check=False
    )


@pytest.mark.parametrize(
    ("limit", "memory_gb", "reason"),
    [
        (FEW_FILES, "0.01", "Too many open files"),
        pytest.param(READ_ONLY_SHM, "0.01", "Read-only file system", marks=needs_root),
        pytest.param(READ_ONLY_SHM, "0.0", "Read-only file system", marks=needs_root),
    ],
    ids=["open files", "read-only shared memory", "read-only shared memory, no memory tier"],
)
def test_workers_that_cannot_start_name_the_reason(tmp_path: Path, limit: str, memory_gb: str, reason: str) -> None:
    ended = started(tmp_path, limit, memory_gb)
    assert ended.returncode == 1
    assert "DataError: 3 process(es) that make batches cannot start" in ended.stderr
    assert reason in ended.stderr


# The first HUNG forked processes never reach Python code that comes after the fork, as with a lock that was copied.
HANG = """
import os, sys, time
from pathlib import Path
from lightning_sparse.data.pipeline import workers
workers._START_S = 10.0 if HUNG == 1 else 1.0
folder, main = Path(sys.argv[2]).parent, os.getpid()

def hang() -> None:
    hung = [*folder.glob("hung*")]
    if os.getppid() == main and len(hung) < HUNG:
        (folder / f"hung{os.getpid()}").touch()
        time.sleep(1000)

os.register_at_fork(after_in_child=hang)
"""


EXIT = """
import os
main = os.getpid()
os.register_at_fork(after_in_child=lambda: os.getppid() != main or os._exit(3))
"""


def test_workers_that_end_while_they_start_are_reported(tmp_path: Path) -> None:
    ended = started(tmp_path, EXIT)
    assert "which made batches, ended with status 3" in ended.stderr, ended.stderr
    assert "DataError: a process that makes batches has ended" in ended.stderr
    assert ended.returncode == 1


@pytest.mark.parametrize(("hung", "says"), [(1, "hung while they started: starting them again"), (99, "hung 3 times")])
def test_workers_that_hang_while_they_start_are_started_again(tmp_path: Path, hung: int, says: str) -> None:
    ended = started(tmp_path, HANG.replace("HUNG", str(hung)))
    assert says in ended.stderr, ended.stderr
    assert (ended.returncode, ended.stdout) == ((0, "20\n") if hung == 1 else (1, ""))

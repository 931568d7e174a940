"""A worker process that makes batches is killed, exits or runs out of memory: the program ends with the reason."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.data.programs import Ended, program, run
from tests.helpers.data import numbered_folder, write

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


@pytest.mark.parametrize(
    ("loss", "code", "says"),
    [
        (KILLED, FIT, "was killed, mostly because the node or the job ran out of memory"),
        pytest.param(EXITS, LOOP, "ended with status 3 inside decode", marks=pytest.mark.slow),
        pytest.param(NO_MEMORY, LOOP, "decode ran out of memory", marks=pytest.mark.slow),
    ],
    ids=["killed, fit", "exits, loop", "out of memory, loop"],
)
def test_program_that_loses_a_worker_ends_with_the_reason(tmp_path: Path, loss: str, code: str, says: str) -> None:
    numbered_folder(tmp_path / "source")
    with program(PROGRAM.replace("LOSS", loss) + code, tmp_path, whole=True) as running:
        found = running.wait()
        assert running.left() == [], "the last process frees the memory of samples"
    assert found.status == 1
    assert says in found.stderr
    assert "replaced by another sample" not in found.stderr


START = """
import os, resource, sys, time
from pathlib import Path
from lightning_sparse.data.pipeline import workers
from lightning_sparse.flavours.pytorch_lightning import CachedDataModule
folder, main = Path(sys.argv[1]), os.getpid()
memory_gb = float(sys.argv[2])
data = CachedDataModule(str(folder / "source"), str(folder / "cache"), bytes, 4, workers=3, memory_gb=memory_gb,
                        collate=list)
data.setup("fit")
loader = data.train_dataloader()
LIMIT
print(sum(map(len, loader)))
"""
FEW_FILES = """
opened = max(map(int, os.listdir("/proc/self/fd"))) + 8
resource.setrlimit(resource.RLIMIT_NOFILE, (opened, opened))
"""
READ_ONLY_SHM = """
import ctypes, subprocess
assert ctypes.CDLL(None).unshare(0x20000) == 0  # mounts of its own
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/dev/shm"], check=True)
"""
# The first HUNG forked processes never reach Python code after the fork, as if a locked lock was copied.
HANG = """
workers._START_S = 5.0 if HUNG == 1 else 1.0

def hang() -> None:
    hung = [*folder.glob("hung*")]
    if os.getppid() == main and len(hung) < HUNG:
        (folder / f"hung{os.getpid()}").touch()
        time.sleep(1000)

os.register_at_fork(after_in_child=hang)
"""
EXIT = "os.register_at_fork(after_in_child=lambda: os.getppid() != main or os._exit(3))"


def started(folder: Path, limit: str, memory_gb: float = 0.0) -> Ended:
    """Count the samples of a loader whose workers start under a limit."""
    for number in range(20):
        write(folder / "source" / "train" / f"{number}.bin", b"x")
    return run(START.replace("LIMIT", limit), folder, memory_gb)


@pytest.mark.parametrize(
    ("limit", "memory_gb", "reason"),
    [
        (FEW_FILES, 0.01, "Too many open files"),
        (READ_ONLY_SHM, 0.01, "Read-only file system"),
        (READ_ONLY_SHM, 0.0, "Read-only file system"),
    ],
    ids=["open files", "read-only shared memory", "read-only shared memory without a memory tier"],
)
def test_workers_that_cannot_start_name_the_reason(tmp_path: Path, limit: str, memory_gb: float, reason: str) -> None:
    if limit == READ_ONLY_SHM and os.geteuid() != 0:
        pytest.skip("mounts a file system, which needs root")
    ended = started(tmp_path, limit, memory_gb)
    assert ended.status == 1
    assert "DataError: 3 process(es) that make batches cannot start" in ended.stderr
    assert reason in ended.stderr


def test_workers_that_end_while_they_start_are_reported(tmp_path: Path) -> None:
    ended = started(tmp_path, EXIT)
    # either we or torch's handler of SIGCHLD see the end first
    said = r"DataError: a worker process that makes batches has ended \(.* exit code 3"
    assert re.search(said, ended.stderr), ended.stderr
    assert ended.status == 1


@pytest.mark.parametrize(("hung", "says"), [(1, "hung while they started: starting them again"), (99, "hung 3 times")])
def test_workers_that_hang_while_they_start_are_started_again(tmp_path: Path, hung: int, says: str) -> None:
    ended = started(tmp_path, HANG.replace("HUNG", str(hung)))
    assert says in ended.stderr, ended.stderr
    assert (ended.status, ended.stdout) == ((0, "20\n") if hung == 1 else (1, ""))

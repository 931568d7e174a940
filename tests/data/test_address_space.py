"""A limit on address space (ulimit -v), which maps of files count against: the error says what to change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OPEN = """
import resource, sys
from pathlib import Path
import lmdb
from lightning_sparse.data.cache import disk, memory
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
"""
DISK = "disk.DiskCache(Path(sys.argv[1]) / 'train.lmdb')"
MEMORY = "memory.create('segment', 'bytes', 10, 1 << 30)"


@pytest.mark.parametrize(("code", "size"), [(DISK, "4,398.05"), (MEMORY, "1.07")], ids=["disk", "memory"])
def test_too_little_address_space_is_told_from_a_damaged_cache(tmp_path: Path, code: str, size: str) -> None:
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command = [sys.executable, "-c", OPEN + code, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("lightning_sparse.data.config.DataError: the ")
    assert f"maps {size} GB of address space" in last
    assert "ulimit -v unlimited" in last

"""A limit on address space (ulimit -v) also counts maps of files. The error names the limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.programs import run

LIMITED = """
import resource, sys
from pathlib import Path
import lmdb
from lightning_sparse.data.cache import disk, memory
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
"""


@pytest.mark.parametrize(
    ("code", "size"),
    [
        ("disk.DiskCache(Path(sys.argv[1]) / 'train.lmdb')", "4,398.05"),
        ("memory.create('segment', 'bytes', 10, 1 << 30)", "1.07"),
    ],
    ids=["disk", "memory"],
)
def test_tier_that_lacks_address_space_names_the_limit(tmp_path: Path, code: str, size: str) -> None:
    last = run(LIMITED + code, tmp_path).stderr.splitlines()[-1]
    assert last.startswith("lightning_sparse.data.config.DataError: the ")
    assert f"maps {size} GB of address space" in last
    assert "ulimit -v unlimited" in last

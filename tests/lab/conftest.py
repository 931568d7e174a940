"""A test of the lab must leave the machine as it was."""

import os
from pathlib import Path

import pytest

from lightning_sparse.lab.processes import RunName

NETNS = Path("/run/netns")


def _namespaces() -> set[str]:
    """Return the namespaces of labs that this test process owns, because other labs may run on this machine."""
    names = os.listdir(NETNS) if NETNS.is_dir() else []
    return {name for name in names if name.startswith(f"{RunName.PREFIX}{os.getpid()}.")}


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    assert _namespaces() == set()
    if Path("/proc").is_dir():
        own = f"{RunName.PREFIX}{os.getpid()}."
        marked = Path("/proc").glob("[0-9]*/environ")
        assert [path for path in marked if own in _read(path) and int(path.parent.name) != os.getpid()] == []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

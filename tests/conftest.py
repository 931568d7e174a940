"""Skips tests that this machine cannot run, by marker; no other file does so."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # if pytest only manages workers, it needs no torch
    from tests.helpers.distributed import RunRanks

# Two workers share the CPUs. Idle torch threads of one worker that spin take CPU time from the other, and a test of
# kernels takes twenty times longer.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A process that a shell starts in the background ignores Ctrl-C, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine must not fail tests: pytest's own timeout limits each test.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Restore the environment after each test. A Trainer sets its port there, which later processes would use."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def ranks() -> Iterator[RunRanks]:
    """`run_ranks` with processes that stay until the module's last test."""
    from tests.helpers.distributed import KeptRanks

    kept = KeptRanks()
    yield kept.run
    kept.close()


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device"


def _no_namespaces() -> str | None:
    from lightning_sparse.lab import unavailable_reason

    return unavailable_reason()


def _no_sshfs() -> str | None:
    from lightning_sparse.lab import storage

    return storage.unavailable_reason()


# Marker of a test -> the reason why this machine cannot run it, or None.
NEEDS = {"gpu": _no_gpu, "root": _no_namespaces, "sshfs": _no_sshfs}


@pytest.hookimpl(trylast=True)  # after the selection by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # xdist starts files with many tests first. The longest slow tests are in files with few tests, so a worker would be
    # alone at the end.
    if not config.getoption("loadscopereorder", True):
        tests = Counter(item.path for item in items)
        items.sort(key=lambda item: tests[item.path])
    for marker, why_not in NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (reason := why_not()) is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.freeze()  # otherwise each collection in a test walks all imported objects, 0.25 s each


def pytest_unconfigure() -> None:
    gc.unfreeze()

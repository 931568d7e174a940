"""What a machine cannot run is skipped by name, here and nowhere else."""

import gc
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.helpers.distributed import KeptRanks, RunRanks

# What a shell starts in the background ignores Ctrl-C, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A loaded machine is no failure: pytest's own timeout bounds a test.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RunRanks]:
    """`run_ranks` on processes that stay until the module's last test."""
    kept = KeptRanks()
    yield kept.run
    kept.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()  # tests that collect garbage need not walk all that was imported, a quarter of a second each time


def pytest_unconfigure() -> None:
    gc.unfreeze()

"""Fixtures for tests of the cache tiers. A module that needs another folder overrides the fixture `folder`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.data import Open, make_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "pictures", per_class=10, classes=2)


@pytest.fixture
def stores() -> Iterator[Open]:
    """Yield a list of stores, which are closed after the test."""
    opened: Open = []
    yield opened
    for store in opened:
        store.close()

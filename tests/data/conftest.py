"""Fixtures for tests of the tiers; a module with a folder of its own has it under the same name."""

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
    """Closed at the end, however the test ends."""
    opened: Open = []
    yield opened
    for store in opened:
        store.close()

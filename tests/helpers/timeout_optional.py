"""A pytest plugin for machines that lack pytest-timeout: `pytest -p tests.helpers.timeout_optional`.

Limits are written in the tests and in pyproject.toml, where an unknown option or marker is an error. This makes them
known and does nothing else; with pytest-timeout installed it does nothing at all.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

ABSENT = find_spec("pytest_timeout") is None


def pytest_addoption(parser: pytest.Parser) -> None:
    if ABSENT:
        parser.addini("timeout", "seconds a test may take; not enforced without pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    if ABSENT:
        config.addinivalue_line("markers", "timeout(seconds): not enforced without pytest-timeout")

"""A pytest plugin for machines without pytest-timeout: `pytest -p tests.helpers.timeout_optional`.

The tests and pyproject.toml set time limits, and pytest rejects unknown options and markers. This plugin declares the
options without enforcing them. If pytest-timeout is installed, it does nothing.
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

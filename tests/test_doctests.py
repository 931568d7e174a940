"""The examples in docstrings are run, each module's by itself; those of documents in test_docs.py."""

import doctest
from importlib import import_module

import pytest

MODULES = [
    "lightning_sparse.topology",
    "lightning_sparse.sharding",
    "lightning_sparse.exchange.paths",
    "lightning_sparse.gradients.config",
    "lightning_sparse.kernels.ops",
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.attempted > 0
    assert result.failed == 0

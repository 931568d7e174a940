"""Data-parallel training that stays fast on ordinary networks.

Importing this package makes the strategy names ``"mstopk_hier..."`` known to Lightning (the entry point in `_autoload`
does so even without the import) and does nothing else: no torch, no Lightning, no CUDA, nothing is compiled.

The public names are resolved when they are first used (PEP 562), because they exist twice, once for each flavour of
Lightning, whose classes do not mix. They follow the flavour that the program has imported:

| imported so far | the names come from |
|---|---|
| ``pytorch_lightning`` | ``lightning_sparse.flavours.pytorch_lightning`` |
| ``lightning.pytorch`` | ``lightning_sparse.flavours.lightning`` |
| neither | the first of the two that is installed |
| both | ImportError: say which, by importing from one of the two modules |

They are resolved again at every use rather than stored here: otherwise the answer would depend on who asked first.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lightning_sparse._autoload import autoload

if TYPE_CHECKING:
    from lightning_sparse.flavours.pytorch_lightning import (
        CachedImageDataModule,
        CommStatsCallback,
        MSTopKHierStrategy,
        PTOCallback,
    )

__version__ = "0.1.0"

__all__ = ["CachedImageDataModule", "CommStatsCallback", "MSTopKHierStrategy", "PTOCallback", "__version__"]

# The root module of a flavour, as found in sys.modules -> our module bound to it, in order of preference.
_FLAVOURS = {
    "pytorch_lightning": "lightning_sparse.flavours.pytorch_lightning",
    "lightning.pytorch": "lightning_sparse.flavours.lightning",
}

autoload()


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_flavour(name)), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _flavour(name: str) -> str:
    """The module to take `name` from. ImportError, because ``from ... import`` drops an AttributeError's message."""
    imported = [root for root in _FLAVOURS if root in sys.modules]
    if len(imported) > 1:
        ways_out = " or ".join(f"`from {module} import {name}`" for module in _FLAVOURS.values())
        raise ImportError(
            f"lightning_sparse.{name}: both pytorch_lightning and lightning.pytorch are imported, and their classes do "
            f"not mix. Name the one that your Trainer comes from: {ways_out}."
        )
    if imported:
        return _FLAVOURS[imported[0]]
    from importlib.util import find_spec

    for root, module in _FLAVOURS.items():
        # Only the top-level package is looked for: asking for `lightning.pytorch` itself would import `lightning`.
        if find_spec(root.partition(".")[0]) is not None:
            return module
    raise ImportError(
        f"lightning_sparse.{name} needs PyTorch Lightning, which is not installed: "
        "`pip install pytorch-lightning` or `pip install lightning`."
    )

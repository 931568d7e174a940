"""Data-parallel training for slow networks between nodes.

Importing this package registers the strategies ``"mstopk_hier..."`` with Lightning. It imports neither torch nor
Lightning. The public names exist once for each of Lightning's packages, whose classes do not mix:

| imported package | module |
|---|---|
| ``pytorch_lightning`` | ``lightning_sparse.flavours.pytorch_lightning`` |
| ``lightning.pytorch`` | ``lightning_sparse.flavours.lightning`` |
| neither | the first of the two that is installed |
| both | ImportError: import from one of the two modules |
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lightning_sparse._autoload import autoload
from lightning_sparse._version import __version__

if TYPE_CHECKING:
    from lightning_sparse.flavours.pytorch_lightning import (
        CachedDataModule,
        CachedImageDataModule,
        CommStatsCallback,
        MSTopKElasticFSDPStrategy,
        MSTopKElasticStrategy,
        MSTopKFSDPStrategy,
        MSTopKHierStrategy,
        MSTopKLocalStrategy,
        PTOCallback,
        TokenDataModule,
    )

__all__ = [
    "CachedDataModule", "CachedImageDataModule", "CommStatsCallback", "MSTopKElasticFSDPStrategy",
    "MSTopKElasticStrategy", "MSTopKFSDPStrategy", "MSTopKHierStrategy", "MSTopKLocalStrategy", "PTOCallback",
    "TokenDataModule", "__version__",
]  # fmt: skip

# The root module of a package of Lightning, as in sys.modules -> our module for it, in order of preference.
_PACKAGES = {
    "pytorch_lightning": "lightning_sparse.flavours.pytorch_lightning",
    "lightning.pytorch": "lightning_sparse.flavours.lightning",
}

autoload()


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    # Not cached, so that the result does not depend on the order of imports.
    return getattr(import_module(_module_of(name)), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _module_of(name: str) -> str:
    imported = [root for root in _PACKAGES if root in sys.modules]
    if len(imported) > 1:
        imports = " or ".join(f"`from {module} import {name}`" for module in _PACKAGES.values())
        raise ImportError(
            f"lightning_sparse.{name}: both pytorch_lightning and lightning.pytorch are imported, and their classes do "
            f"not mix. Import from the module of your Trainer's package: {imports}."
        )
    if imported:
        return _PACKAGES[imported[0]]
    from importlib.util import find_spec

    for root, module in _PACKAGES.items():
        # Only the top-level package: find_spec("lightning.pytorch") would import `lightning`.
        if find_spec(root.partition(".")[0]) is not None:
            return module
    raise ImportError(
        f"lightning_sparse.{name} needs PyTorch Lightning, which is not installed: "
        "`pip install pytorch-lightning` or `pip install lightning`."
    )

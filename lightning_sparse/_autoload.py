"""Register the names of our strategies with Lightning without an import in the user's script.

Lightning has no entry points for strategies, but torch calls the entry points ``torch.backends`` at the end of its
import. Ours puts a finder into ``sys.meta_path``, which registers our names after the program has imported a module of
`MODULES`. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables the entry point.

This file runs in every import of torch, so it imports only the standard library and suppresses its errors: a failing
entry point would break ``import torch``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# Lightning's module with the registry of strategies -> our module with its strategies.
MODULES = {
    "pytorch_lightning.strategies": "lightning_sparse.flavours.pytorch_lightning",
    "lightning.pytorch.strategies": "lightning_sparse.flavours.lightning",
    "lightning_fabric.strategies": "lightning_sparse.flavours.lightning_fabric",
    "lightning.fabric.strategies": "lightning_sparse.flavours.fabric",
}
_REGISTRIES = ("StrategyRegistry", "STRATEGY_REGISTRY")  # the Trainer's, Fabric's

# The suffixes and arguments of Lightning's "ddp" strategies (DDPStrategy.register_strategies).
_SUFFIXES: dict[str, dict[str, Any]] = {
    "": {"start_method": "popen"},
    "_spawn": {"start_method": "spawn"},
    "_fork": {"start_method": "fork"},
    "_notebook": {"start_method": "fork"},
    "_find_unused_parameters_true": {"start_method": "popen", "find_unused_parameters": True},
}
_NO_SUFFIXES: dict[str, dict[str, Any]] = {"": {}}
# Strategy name -> class name in each of our modules, description, and suffixes of the name.
CLASSES = {
    "mstopk_hier": ("MSTopKHierStrategy", "Hierarchical top-k gradient communication between nodes", _SUFFIXES),
    "mstopk_local": (
        "MSTopKLocalStrategy",
        "An optimizer per node, and top-k communication of updates between nodes",
        _SUFFIXES,
    ),
    "mstopk_elastic": ("MSTopKElasticStrategy", "As mstopk_local, between nodes that join and leave", _NO_SUFFIXES),
    "mstopk_elastic_fsdp": ("MSTopKElasticFSDPStrategy", "As mstopk_elastic, with FSDP2 per node", _NO_SUFFIXES),
    "mstopk_fsdp": ("MSTopKFSDPStrategy", "FSDP2 per node, and top-k communication of updates between", _NO_SUFFIXES),
}


def autoload() -> None:
    """Register with the packages of Lightning, now or when they are imported. Idempotent."""
    # Importing Lightning here would slow down every ``import torch`` by seconds.
    with contextlib.suppress(Exception):
        if not any(isinstance(finder, _StrategiesFinder) for finder in sys.meta_path):
            # First, so that it sees modules which other finders find.
            sys.meta_path.insert(0, _StrategiesFinder())
    for name in MODULES:
        with contextlib.suppress(Exception):
            _register(sys.modules.get(name))


def _register(strategies: ModuleType | None) -> None:
    # The registry does not exist yet if the module is still being imported.
    registry = next(
        (candidate for name in _REGISTRIES if (candidate := getattr(strategies, name, None)) is not None), None
    )
    if strategies is None or registry is None:
        return
    for base, (cls, does, suffixes) in CLASSES.items():
        # A factory imports our classes only if the user chooses the strategy.
        factory = partial(_create, MODULES[strategies.__name__], cls)
        for suffix, arguments in suffixes.items():
            # `autoload` may run more than once, and a registered name raises an error.
            if f"{base}{suffix}" not in registry:
                described = ", ".join(f"`{key}` {value!r}" for key, value in arguments.items())
                description = f"{does}, with {described}" if described else does
                registry.register(f"{base}{suffix}", factory, description=description, **arguments)
    # In a lab, ranks share GPUs, so the package's devices are mapped to them.
    if "LIGHTNING_SPARSE_LAB_GPUS" in os.environ:
        from lightning_sparse.lab.shared_gpus import patch_lightning

        patch_lightning(strategies.__name__)


def _create(module: str, cls: str, **arguments: Any) -> Any:
    return getattr(import_module(module), cls)(**arguments)


class _StrategiesFinder:
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        for finder in sys.meta_path:
            find_spec = None if isinstance(finder, _StrategiesFinder) else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec is not None else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _RegisteringLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _RegisteringLoader:
    def __init__(self, loader: Any) -> None:
        # Wrap the loader and do not patch it, because modules can share a loader (zipimport).
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet while being copied or unpickled: avoid infinite recursion
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        # importlib looks it up on the type, which bypasses __getattr__.
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        with contextlib.suppress(Exception):
            # Restore the real loader, for inspect, importlib.resources and reload.
            module.__loader__ = self._loader
            if module.__spec__ is not None:
                module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with contextlib.suppress(Exception):
            _register(module)

"""Makes the string ``"mstopk_hier"`` known to Lightning without an import in the user's script.

Lightning has no entry point for strategies and checks the string before it loads any plugin. torch, on the other
hand, calls every entry point of the group ``torch.backends`` at the end of ``import torch``; ours is `autoload`. At
that moment Lightning is usually not imported yet, and importing it here would make every ``import torch`` seconds
slower. So:

1. `autoload` puts a finder at the head of ``sys.meta_path``;
2. the finder waits for ``pytorch_lightning.strategies`` or ``lightning.pytorch.strategies`` (and Fabric's two, which
   they import), lets the real loader run the module, and then adds our names to the registry which the module has just
   created;
3. what is registered is a factory: our classes, and with them the rest of the package, are imported only when
   ``Trainer(strategy="mstopk_hier")`` asks for one.

The two flavours of Lightning have disjoint classes and registries; each gets its own factory.

This file runs inside every ``import torch`` of an environment that has the package installed. Therefore it imports the
standard library only, and nothing that goes wrong in it may reach the user: a strategy that is not found has a clear
error of Lightning's own, a torch that cannot be imported has not. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns the entry
point off; ``import lightning_sparse`` calls `autoload` as well.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# Lightning's module that creates a registry of strategies -> our module with the class of that flavour.
FLAVOURS = {
    "pytorch_lightning.strategies": "lightning_sparse.flavours.pytorch_lightning",
    "lightning.pytorch.strategies": "lightning_sparse.flavours.lightning",
    "lightning_fabric.strategies": "lightning_sparse.flavours.lightning_fabric",
    "lightning.fabric.strategies": "lightning_sparse.flavours.fabric",
}
_REGISTRIES = ("StrategyRegistry", "STRATEGY_REGISTRY")  # the Trainer's, Fabric's

# The suffixes and arguments of Lightning's own "ddp" family (DDPStrategy.register_strategies).
STRATEGIES: dict[str, dict[str, Any]] = {
    "mstopk_hier": {"start_method": "popen"},
    "mstopk_hier_spawn": {"start_method": "spawn"},
    "mstopk_hier_fork": {"start_method": "fork"},
    "mstopk_hier_notebook": {"start_method": "fork"},
    "mstopk_hier_find_unused_parameters_true": {"start_method": "popen", "find_unused_parameters": True},
}


def autoload() -> None:
    """Register with the flavours that are imported, and wait for the others. May be called any number of times."""
    with contextlib.suppress(Exception):
        if not any(isinstance(finder, _StrategiesFinder) for finder in sys.meta_path):
            # First: whoever stands behind us in the list still finds the module, and we see it pass.
            sys.meta_path.insert(0, _StrategiesFinder())
    for name in FLAVOURS:
        with contextlib.suppress(Exception):
            _register(sys.modules.get(name))


def _register(strategies: ModuleType | None) -> None:
    """Add our names to the registry of one flavour; names that are there already stay as they are."""
    # None also while the module is being imported further up the stack and has no registry yet.
    registry = next((found for name in _REGISTRIES if (found := getattr(strategies, name, None)) is not None), None)
    if strategies is None or registry is None:
        return
    factory = partial(_create, FLAVOURS[strategies.__name__])
    for name, arguments in STRATEGIES.items():
        if name not in registry:
            described = ", ".join(f"`{key}` {value!r}" for key, value in arguments.items())
            description = f"Hierarchical top-k gradient communication between nodes, with {described}"
            registry.register(name, factory, description=description, **arguments)


def _create(flavour: str, **arguments: Any) -> Any:
    return import_module(flavour).MSTopKHierStrategy(**arguments)


class _StrategiesFinder:
    """Finds nothing itself: asks the finders behind it, and hands back their spec with the loader wrapped."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in FLAVOURS:
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
    """The module's own loader, plus one call after the module has run. It takes itself out before that.

    A wrapper and not a patched method, because a loader may be shared by many modules (zipimport's is).
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # absent while being copied or unpickled: do not look for it in itself
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        # Looked for by importlib on the type, so __getattr__ does not serve it.
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        with contextlib.suppress(Exception):
            # Sources, resources and reloads of the module go through these: they are to find the real loader.
            module.__loader__ = self._loader
            if module.__spec__ is not None:
                module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with contextlib.suppress(Exception):
            _register(module)

"""A pytest plugin for Lightning's own tests: they run on CPUs, and use our strategy in place of DDP.

LS_STRATEGY names our class. With "stock", DDP stays, which shows the tests that fail on CPUs alone. LS_PACKAGE names
the Lightning package. Tests whose source does not mention ddp are deselected.
"""

import functools
import inspect
import os
from importlib import import_module
from typing import Any

import pytest

PACKAGE = os.environ["LS_PACKAGE"]  # lightning.pytorch or pytorch_lightning
OURS = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}[PACKAGE]


def pytest_configure() -> None:
    _cpus_for_gpus()
    if os.environ["LS_STRATEGY"] != "stock":
        _ours_for_ddp()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if "ddp" in inspect.getsource(item.function).lower()]  # type: ignore[attr-defined]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _cpus_for_gpus() -> None:
    """Run a test that asks for two GPUs in two processes on the CPU."""
    testing: Any = import_module(f"{PACKAGE}.utilities.testing")
    reasons = testing._runif_reasons

    @functools.wraps(reasons)
    def without_gpus(**wanted: object) -> object:
        for needless in ("min_cuda_gpus", "standalone"):  # each test has its own process anyway
            wanted.pop(needless, None)
        return reasons(**wanted)

    testing._runif_reasons = without_gpus
    trainer = import_module(PACKAGE).Trainer
    init = trainer.__init__

    @functools.wraps(init)
    def on_cpus(self: object, *args: object, **options: Any) -> None:
        if options.get("accelerator") in ("gpu", "cuda", "auto"):
            options["accelerator"] = "cpu"
            if isinstance(options.get("devices"), list):  # GPUs by number
                options["devices"] = len(options["devices"])
        init(self, *args, **options)

    trainer.__init__ = on_cpus


def _ours_for_ddp() -> None:
    strategies: Any = import_module(f"{PACKAGE}.strategies")
    stock = strategies.DDPStrategy
    ours = getattr(import_module(f"lightning_sparse.flavours.{OURS}"), os.environ["LS_STRATEGY"])
    registry = strategies.StrategyRegistry
    for name in list(registry):
        if registry[name]["strategy"] is stock:
            registry.register(name, ours, override=True, **registry[name]["init_params"])
    strategies.DDPStrategy = ours

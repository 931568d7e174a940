"""Caches the entry points of installed packages, for the fork server: Lightning reads them for each Trainer, 0.06 s."""

import functools
import importlib.metadata

once = functools.cache(importlib.metadata.entry_points)
for _package in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    once(group=f"{_package}.callbacks_factory")
importlib.metadata.entry_points = once  # type: ignore[assignment]

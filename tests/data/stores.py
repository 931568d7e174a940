"""A store on a small image folder, for tests of what goes wrong around it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lightning_sparse.data.cache.store import SampleStore
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.sources.listing import list_source, load_or_list
from lightning_sparse.data.sources.manifest import Manifest

Open = list[SampleStore]


def config_of(folder: Path, **more: object) -> CacheConfig:
    options = {"source": str(folder), "cache_dir": str(folder.parent / "cache"), "memory_gb": 0.01, **more}
    return CacheConfig(**options)  # type: ignore[arg-type]


def listed(source: str | Path, split: str = "train", **more: object) -> Manifest:
    return list_source(CacheConfig(source=str(source), cache_dir="none", **more), split)  # type: ignore[arg-type]


def store_of(folder: Path, stores: Open, **more: object) -> SampleStore:
    config = config_of(folder, **more)
    stores.append(SampleStore(config, load_or_list(config, "train")))
    return stores[-1]


def contents(store: SampleStore) -> list[bytes]:
    return [sample.data.tobytes() for sample in store.get(range(len(store.manifest)))]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

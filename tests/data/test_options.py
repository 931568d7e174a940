"""Options of the image DataModule: read by a parser as LightningCLI does it, and refused early."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.data.datamodule import CachedImageDataModuleMixin
from tests.data.fits import FLAVOURS
from tests.helpers.distributed import run_ranks

GIVEN = {"image_size": "{0: 128, 6: 224}", "crop_scale": "[0.25, 1]", "shuffle": "local", "val_fraction": "0.1"}
PARSED = {"image_size": {0: 128, 6: 224}, "crop_scale": (0.25, 1.0), "shuffle": "local", "val_fraction": 0.1}
GIVEN |= {"memory_gb": "4", "peer_ports": "[29600, 29699]", "lists": "{train: a.csv}", "on_corrupt": "skip"}
PARSED |= {"memory_gb": 4.0, "peer_ports": (29600, 29699), "lists": {"train": "a.csv"}, "on_corrupt": "skip"}


def parse(module: str, name: str) -> dict[str, Any]:
    """What LightningCLI would make of `GIVEN`."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(getattr(importlib.import_module(module), name), "data")
    words = [f"--data.{name}={value}" for name, value in GIVEN.items()]
    parsed = parser.parse_args(["--data.source=/nfs", "--data.cache_dir=/local", *words]).data
    return {name: parsed[name] for name in GIVEN}


def test_the_options_have_types_that_can_be_parsed() -> None:
    pytest.importorskip("jsonargparse")
    mixin = "lightning_sparse.data.datamodule", "CachedImageDataModuleMixin"
    assert run_ranks(parse, *mixin, nodes=1, devices=1, init=False) == [PARSED]


@pytest.mark.slow
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_lightning_cli_accepts_the_options(flavour: str) -> None:
    """In an interpreter that has one flavour only."""
    pytest.importorskip("jsonargparse")
    cls = f"lightning_sparse.flavours.{flavour}", "CachedImageDataModule"
    assert run_ranks(parse, *cls, nodes=1, devices=1, init=False, start_method="spawn") == [PARSED]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        ({"image_size": {3: 128}}, "starting with epoch 0"),
        ({"image_size": "224"}, "image_size='224' must be a size in pixels"),
        ({"cache_dir": None}, "cache_dir='None': give the folder"),
        ({"image_size": 224, "short_side": 200}, "short_side=200 is less than the largest image_size, 224"),
        ({"shuffle": "all"}, "shuffle='all'"),
        ({"backend": "pil"}, "backend='pil' must be one of 'auto', 'dali', 'torch'"),
        ({"val_fraction": 1.0}, "val_fraction=1.0 must be"),
        ({"threads": 0}, "threads=0 must be"),
        ({"flip": 2.0}, "flip=2.0 must be"),
        ({"std": (0.0, 1.0, 1.0)}, "each std above 0"),
    ],
)
def test_bad_options_are_refused_early(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CachedImageDataModuleMixin(str(tmp_path), **{"cache_dir": str(tmp_path / "cache"), **options})

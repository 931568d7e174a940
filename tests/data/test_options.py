"""Options are parsed as LightningCLI parses them, and bad options are refused early with name and value."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.data.config import CacheConfig, ImageOptions
from lightning_sparse.data.datamodule import CachedImageDataModuleMixin
from lightning_sparse.data.pipeline.sampler import SamplerConfig
from lightning_sparse.data.tokens import TokenDataModuleMixin
from tests.data.fits import PACKAGES, ours
from tests.helpers.data import counted
from tests.helpers.distributed import run_ranks

GIVEN = {"image_size": "{0: 128, 6: 224}", "crop_scale": "[0.25, 1]", "shuffle": "local", "val_fraction": "0.1"}
PARSED = {"image_size": {0: 128, 6: 224}, "crop_scale": (0.25, 1.0), "shuffle": "local", "val_fraction": 0.1}
GIVEN |= {"memory_gb": "4", "peer_ports": "[29600, 29699]", "lists": "{train: a.csv}", "on_corrupt": "skip"}
PARSED |= {"memory_gb": 4.0, "peer_ports": (29600, 29699), "lists": {"train": "a.csv"}, "on_corrupt": "skip"}


def parse(module: str, name: str) -> dict[str, Any]:
    """Parse `GIVEN` as LightningCLI does."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(getattr(importlib.import_module(module), name), "data")
    words = [f"--data.{name}={value}" for name, value in GIVEN.items()]
    parsed = parser.parse_args(["--data.source=/nfs", "--data.cache_dir=/local", *words]).data
    return {name: parsed[name] for name in GIVEN}


def test_options_of_the_image_module_have_types_that_can_be_parsed() -> None:
    pytest.importorskip("jsonargparse")
    mixin = "lightning_sparse.data.datamodule", "CachedImageDataModuleMixin"
    assert run_ranks(parse, *mixin, nodes=1, devices=1, init=False) == [PARSED]


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_cli_accepts_the_options(package: str) -> None:
    """The interpreter has only one Lightning package."""
    pytest.importorskip("jsonargparse")
    cls = ours(package).__name__, "CachedImageDataModule"
    assert run_ranks(parse, *cls, nodes=1, devices=1, init=False, start_method="spawn") == [PARSED]


def cache(folder: Path, **options: Any) -> None:
    CacheConfig(**{"source": "/a", "cache_dir": str(folder / "cache"), **options})


def image_options(_: Path, **options: Any) -> None:
    ImageOptions(**options)


def images(folder: Path, **options: Any) -> None:
    CachedImageDataModuleMixin(str(folder), **{"cache_dir": str(folder / "cache"), **options})


def samples(folder: Path, **options: Any) -> None:
    ours(PACKAGES[0]).CachedDataModule(
        str(folder), str(folder.parent / "cache"), **{"decode": bytes, "batch_size": 3, **options}
    )


def sampler(_: Path, **options: Any) -> None:
    SamplerConfig(**options)


def tokens(folder: Path, **options: Any) -> None:
    TokenDataModuleMixin(**{"train": counted(folder / "0.bin", 41), "context": 4, **options})


BAD: dict[Callable[..., None], list[tuple[str, Any]]] = {
    cache: [
        ("source", ""), ("memory_gb", -1.0), ("disk_gb", float("nan")), ("format", "png"),
        ("shuffle", "some"), ("on_corrupt", "ignore"), ("short_side", 0), ("storage_timeout", 0),
        ("storage_readers", 0), ("peer_address", "0.0.0.0"), ("peer_address", "::"), ("lists", {"val": "val.csv"}),
        ("lists", "train.csv"), ("seed", "a"), *(("peer_ports", each) for each in (29600, "29600-29699", (29600,))),
    ],
    image_options: [
        ("crop_scale", (0.0, 1.0)), ("crop_scale", (0.5, 0.2)), ("flip", 1.001), ("eval_resize", 200),
        ("eval_resize", 256.5), ("image_size", "224"), ("image_size", {3: 128}), ("backend", "pil"), ("threads", 0),
        ("std", (0.0, 1.0, 1.0)), ("crop_scale", 0.08), ("mean", 0.5), ("image_size", True), ("seed", "a"),
    ],
    images: [
        ("cache_dir", None), ("batch_size", 0), ("shuffle", "all"), ("backend", "pil"), ("val_fraction", 1.0),
        ("flip", 2.0), ("short_side", 200), ("limit", -1),
        ("limit", "10"), ("sample_format", "bytes"), ("sample_format", "pixels"), ("with_indices", "yes"),
    ],
    samples: [
        ("decode", None), ("transform", 3), ("workers", -1), ("batch_size", 0), ("lists", {"val": "val.csv"}),
        ("seed", "a"),
    ],
    sampler: [("batch_size", 0)],
    tokens: [
        ("context", 0), ("batch_size", 0), ("val_fraction", 1.001), ("documents", "whole"),
        *(("limit", each) for each in (0, -1, 1.5, 1.0, True, float("nan"), "10")),
        ("seed", "a"), ("tokenizer", None), ("tokenizer", bytes), ("val", ["x.bin"]),
        *(("train", each) for each in (None, ["x.bin"])),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "option", "value"),
    [
        pytest.param(config, *each, id=f"{config.__name__} {each[0]} {number}")
        for config, pairs in BAD.items()
        for number, each in enumerate(pairs)
    ],
)
def test_option_with_a_bad_value_is_refused_by_name(
    tmp_path: Path, config: Callable[..., None], option: str, value: Any
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        config(tmp_path, **{option: value})
    message = str(caught.value)
    assert f"{option}={value!r}" in message or f"{option}={str(value)!r}" in message, message
    assert re.search("must|give|would|is less than", message), message


@pytest.mark.parametrize(
    ("module", "option", "fix"),
    [
        (images, "batchsize", "Did you mean batch_size?"),
        (images, "num_workers", "Use threads."),
        (images, "format", "Did you mean sample_format?"),
        (samples, "num_workers", "Use workers."),
    ],
)
def test_unknown_option_is_refused_with_a_similar_name(
    tmp_path: Path, module: Callable[..., None], option: str, fix: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(f" has no option {option}=4. {fix}")):
        module(tmp_path, **{option: 4})


def test_subclass_with_its_own_constructor_passes_options_on(tmp_path: Path) -> None:
    class Own(ours(PACKAGES[0]).CachedDataModule):  # type: ignore[misc]
        def __init__(self, root: Path, **options: Any) -> None:
            super().__init__(root, tmp_path / "cache", len, 4, workers=0, shuffle="global", **options)

    assert Own(tmp_path)._options.cache.shuffle == "global"
    with pytest.raises(TypeError, match=r"Own has no option format='jpeg'"):
        Own(tmp_path, format="jpeg")


def test_options_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="storage_options are for an fsspec URL"):
        cache(tmp_path, storage_options={"key": "a"})
    with pytest.raises(ValueError, match="val_fraction.*exclude each other"):
        tokens(tmp_path, val_fraction=0.5, val="x.bin")
    with pytest.raises(ValueError, match="short_side=200 is less than the largest image_size, 224"):
        images(tmp_path, image_size=224, short_side=200)
    for inside in (tmp_path, tmp_path / "train" / "cache"):
        with pytest.raises(ValueError, match="would be taken for data: give a folder on a local disk"):
            CacheConfig(source=str(tmp_path), cache_dir=str(inside))
    CacheConfig(source=str(tmp_path), cache_dir=str(tmp_path / "cache"))


def test_lists_may_be_paths(tmp_path: Path) -> None:
    lists: dict[str, Any] = {"train": Path("train.csv")}
    assert CacheConfig(source="/a", cache_dir=str(tmp_path), lists=lists).lists == {"train": "train.csv"}


def test_missing_packages_are_named_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sparse.data.config.is_installed", lambda name: name not in ("lmdb", "xxhash"))
    with pytest.raises(ValueError, match=r"needs lmdb, xxhash: `pip install lmdb .*\[data\]"):
        CacheConfig(source="/there", cache_dir="/here")

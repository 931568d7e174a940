"""Cache folders that are read-only, too small, or damaged."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_sparse.cli import main
from lightning_sparse.data.cache.commands import warm
from lightning_sparse.data.config import DataError
from lightning_sparse.data.folders import cache_folder
from tests.helpers.data import Open, config_of, contents, store_of


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[list[Path]]:
    """Yield a list of mount points, which are unmounted after the test."""
    places: list[Path] = []
    yield places
    for place in places:
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # mapped files stay open


def mount(place: Path, mounted: list[Path], *options: str) -> None:
    place.mkdir(exist_ok=True)
    if subprocess.run(["mount", *options, str(place)], capture_output=True).returncode != 0:
        pytest.skip("needs root to mount a file system")
    mounted.append(place)


def read_only(place: Path, mounted: list[Path]) -> None:
    mount(place, mounted, "--bind", str(place))
    subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)


@pytest.mark.parametrize("format", ["decoded", "jpeg"])
def test_complete_cache_can_be_read_only(
    folder: Path, stores: Open, mounted: list[Path], format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cache was filled before and is mounted into a container. Storage is not read."""
    config = config_of(folder)
    warm(config, "train")
    expected = [(folder / path).read_bytes() for path in store_of(folder, stores, format="jpeg").manifest.paths]
    stores.pop().close()
    read_only(Path(config.cache_dir), mounted)
    store = store_of(folder, stores, format=format)
    for _ in range(2):
        found = contents(store)
    assert found == expected or format == "decoded"
    counts = store.counters()
    assert (counts.storage_samples, counts.disk_samples, counts.memory_samples) == (0, 20, 20)
    store.close()
    assert main(["cache", "info", config.cache_dir]) == 0
    assert "train: 20 of 20 files" in capsys.readouterr().out


def test_read_only_cache_that_lacks_files_reads_them_from_storage(
    folder: Path, stores: Open, mounted: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(folder)
    store = store_of(folder, stores)
    store.get(range(12))
    stores.pop().close()
    read_only(Path(config.cache_dir), mounted)
    (folder / "train" / "c0" / "new.jpg").write_bytes(b"new")
    store = store_of(folder, stores)
    assert len(contents(store)) == 20
    assert (store.counters().storage_samples, store.counters().disk_samples) == (8, 12)
    assert "which cannot be written" in caplog.text  # the list may be older than storage


@pytest.mark.parametrize("content", [None, b"of a later version"], ids=["missing", "unreadable"])
def test_read_only_cache_without_a_list_of_the_split_is_used(
    folder: Path, stores: Open, mounted: list[Path], content: bytes | None
) -> None:
    config = config_of(folder)
    warm(config, "train")
    file = cache_folder(config) / "train.manifest"
    file.unlink() if content is None else file.write_bytes(content)
    read_only(Path(config.cache_dir), mounted)
    store = store_of(folder, stores)
    assert len(contents(store)) == 20
    assert (store.counters().storage_samples, store.counters().disk_samples) == (0, 20)


def test_folder_that_cannot_be_used_is_named(folder: Path, stores: Open, mounted: list[Path]) -> None:
    empty, tiny = folder.parent / "empty", folder.parent / "tiny"
    empty.mkdir()
    read_only(empty, mounted)
    with pytest.raises(DataError, match=rf"cache_dir={empty}.* cannot be used \(Read-only file system\)"):
        store_of(folder, stores, cache=empty)
    mount(tiny, mounted, "-t", "tmpfs", "-o", "size=8k", "tiny")
    with pytest.raises(DataError, match=rf"{tiny}.*No space left"):
        store_of(folder, stores, cache=tiny)


def test_cache_with_an_empty_description_opens(folder: Path, stores: Open, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk leaves such a file."""
    store_of(folder, stores).close()
    own = cache_folder(config_of(folder))
    (own / "cache.json").write_bytes(b"")
    assert main(["cache", "info", str(own.parent)]) == 0
    assert "an unknown source (its cache.json is corrupt)" in capsys.readouterr().out
    store_of(folder, stores).close()
    assert main(["cache", "info", str(own.parent)]) == 0
    assert str(folder) in capsys.readouterr().out
    (own / "cache.json").write_bytes(b"")
    assert main(["cache", "clear", str(own.parent)]) == 0
    assert list(own.parent.iterdir()) == []

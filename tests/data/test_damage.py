"""Flipped bits in the tiers, and files that are damaged, missing, changed or of another kind."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import numpy as np
import pytest

from lightning_sparse.data.cache.commands import warm
from lightning_sparse.data.config import CorruptSampleError
from lightning_sparse.data.folders import cache_folder
from lightning_sparse.data.sources.listing import load_or_list
from tests.helpers.data import Open, config_of, contents, jpeg, store_of, warnings_of

# -- flipped bits ------------------------------------------------------------------------------------------------------


def test_flipped_bit_on_disk_is_read_from_storage_again(folder: Path, stores: Open) -> None:
    first = store_of(folder, stores)
    expected = contents(first)
    first.close()
    path = cache_folder(first.config) / "train.lmdb"
    with lmdb.open(str(path), map_size=1 << 30) as environment, environment.begin(write=True) as transaction:
        digest = first.manifest.key(7).digest()
        value = bytearray(transaction.get(digest) or b"")
        value[300] ^= 1
        transaction.put(digest, bytes(value))
    for flipped in (1, 0):
        store = store_of(folder, stores)
        assert contents(store) == expected
        counts = store.counters()
        found = counts.checksum_errors_disk, counts.storage_samples, counts.disk_samples
        assert found == (flipped, flipped, 20 - flipped)
        store.close()


# -- damaged files -----------------------------------------------------------------------------------------------------

DAMAGE = {
    "empty": (b"", "empty"),
    "truncated": (jpeg(5)[:-300], "truncated"),
    "not an image": (b"<html>404</html>", "not an image"),
    "missing": (None, "No such file"),
    "a link to nothing": ("gone.jpg", "No such file"),
    "a pipe": ("", "not a regular file"),
}


def damage(folder: Path, kind: str) -> None:
    path, content = folder / "train" / "c0" / "5.jpg", DAMAGE[kind][0]
    path.unlink(missing_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path.symlink_to(content)
    elif content == "":
        os.mkfifo(path)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("format", ["decoded", "jpeg"])
def test_damaged_file_ends_the_run_and_is_named(folder: Path, stores: Open, kind: str, format: str) -> None:
    listed_before = kind in ("missing", "a pipe")
    if not listed_before:
        damage(folder, kind)
    store = store_of(folder, stores, format=format)
    if listed_before:
        damage(folder, kind)
    with pytest.raises(CorruptSampleError, match=rf"train/c0/5.jpg cannot be used: .*{DAMAGE[kind][1]}.*on_corrupt"):
        contents(store)
    damage(folder, "missing")
    (folder / "train" / "c0" / "5.jpg").write_bytes(jpeg(5))  # repaired
    assert len(contents(store)) == 20


def test_damaged_file_is_replaced_counted_and_not_read_again(
    folder: Path, stores: Open, caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder, "truncated")
    (folder / "train" / "c0" / "6.jpg").write_bytes(b"<html>404</html>")
    for run in range(2):
        caplog.clear()
        store = store_of(folder, stores, on_corrupt="skip")
        for _ in range(2):
            samples = store.get(range(20))
            used = [sample.index for sample in samples[4:8]]
            assert (used[0], used[3]) == (4, 7)
            assert not {5, 6} & set(used)
            assert all(np.array_equal(samples[at].data, samples[samples[at].index].data) for at in (5, 6))
        counts = store.counters()
        assert counts.replaced == 4
        assert counts.storage_samples == (20 if run == 0 else 0)
        said = warnings_of(caplog)
        assert [text.partition(" ")[0] for text in said] == ["train/c0/5.jpg", "train/c0/6.jpg"]
        store.close()
    with pytest.raises(CorruptSampleError, match="c0/5.jpg"):  # a run without on_corrupt="skip" reads the file again
        contents(store_of(folder, stores))


def test_file_that_changed_on_storage_gives_its_new_contents(
    folder: Path, stores: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds in each run until the source is listed again."""
    config = config_of(folder)
    load_or_list(config, "train")
    path = folder / "train" / "c0" / "5.jpg"
    path.write_bytes(jpeg(99))
    for _ in range(2):
        store = store_of(folder, stores, format="jpeg")
        assert contents(store)[5] == jpeg(99)
        assert contents(store)[5] == jpeg(99)
        assert store.counters().changed == 1
        store.close()
    assert ["train/c0/5.jpg has changed since it was listed" in text for text in warnings_of(caplog)] == [True] * 2
    path.write_bytes(jpeg(98))
    report = warm(config, "train")
    assert (report.present, report.fetched) == (19, 1)
    store = store_of(folder, stores, format="jpeg")
    assert contents(store)[5] == jpeg(98)
    assert store.counters().storage_samples == 0

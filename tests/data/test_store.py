"""`SampleStore`: samples and their tiers."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from lightning_sparse.data import decode
from lightning_sparse.data.cache.store import Placement, SampleStore, new_run
from lightning_sparse.data.sources.listing import load_or_list
from tests.helpers.data import config_of, make_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "pictures", per_class=5, classes=2)


def store_of(folder: Path, place: Placement | None = None, run: bytes | None = None, **more: object) -> SampleStore:
    config = config_of(folder, **more)
    return SampleStore(config, load_or_list(config, "train"), place, run)


@pytest.mark.parametrize("format", ["decoded", "jpeg"])
def test_store_returns_the_samples_of_the_folder(folder: Path, format: str) -> None:
    """Samples are equal from storage, from memory, and from disk in a second run."""
    order = [7, 0, 3, 3, 9]
    seen = []
    for _ in range(2):
        store = store_of(folder, format=format, short_side=24)
        for _ in range(2):  # copied, because a view would keep the memory for the next store
            found = store.get(order)
            assert not any(each.data.flags.writeable for each in found)
            seen.append([each._replace(data=each.data.copy()) for each in found])
        del found
        counts = store.counters()
        store.close()
        tier = (counts.storage_samples, counts.disk_samples)
        assert tier == ((4, 0) if len(seen) == 2 else (0, 4))
        assert counts.memory_samples == 5
    for samples in seen:
        assert [sample.index for sample in samples] == order
        assert [sample.label for sample in samples] == [1, 0, 0, 0, 1]
        for sample in samples:
            data = (folder / store.manifest.paths[sample.index]).read_bytes()
            if format == "jpeg":
                assert sample.data.tobytes() == data
                assert (sample.height, sample.width) == (40, 60)
            else:
                assert np.array_equal(sample.data, decode.decode(data, 24))
                assert sample.data.shape == (sample.height, sample.width, 3) == (24, 36, 3)
            assert sample.data.dtype == np.uint8
            assert sample.data.flags.c_contiguous


def _get_in_child(store: SampleStore, connection) -> None:
    samples = store.get(range(10))
    connection.send(([sample.data.tobytes() for sample in samples], store.counters()))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_store_in_a_worker_reopens_tiers_and_shares_memory(folder: Path, method: str) -> None:
    """The worker also writes the files that it has read when it ends, even without close()."""
    store = store_of(folder)
    expected = [sample.data.tobytes() for sample in store.get(range(5))]
    context = multiprocessing.get_context(method)
    here, there = context.Pipe(duplex=False)
    worker = context.Process(target=_get_in_child, args=(store, there))
    worker.start()
    data, counts = here.recv()
    worker.join()
    assert worker.exitcode == 0
    assert data[:5] == expected
    assert (counts.memory_samples, counts.storage_samples) == (5, 5)
    assert store.node_counters().storage_samples == 10
    assert [sample.data.tobytes() for sample in store.get(range(10))] == data
    assert store.counters().memory_samples == 10
    store.close()
    again = store_of(folder)
    again.get(range(10))
    assert again.counters().disk_samples == 10
    again.close()


def test_nodes_keep_their_own_samples_in_memory(folder: Path) -> None:
    """With a global shuffle, memory holds the node's own samples. Without a peer, others come from disk."""
    run = new_run()
    stores = [store_of(folder, Placement(node, 2), run, shuffle="global") for node in range(2)]
    assert np.array_equal(stores[0].owners, stores[1].owners)
    for store in stores:
        store.get(range(10))
        store.get(range(10))
        store.disk.flush()
        assert store.counters().memory_samples == 5
    assert [store.counters().storage_samples for store in stores] == [10, 0]
    assert [store.counters().disk_samples for store in stores] == [5, 15]
    for store in stores:
        store.close()

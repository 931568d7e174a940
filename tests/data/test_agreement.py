"""All ranks have the same list of samples and the same format in memory, also after a restart."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_sparse.data.cache import segment as segments
from lightning_sparse.data.cache.store import Placement
from lightning_sparse.data.config import CacheConfig, ImageOptions
from lightning_sparse.data.session import DataOptions, broadcast_manifest, common_format, open_session
from lightning_sparse.data.sources import listing
from lightning_sparse.data.sources.listing import load_or_list
from tests.data.fits import data, fitted, module, saver, trainer
from tests.helpers.data import jpeg, listed, make_folder, numbered_folder, write
from tests.helpers.distributed import run_ranks

PACKAGE = "pytorch_lightning"


def config_of_node(folder: str) -> CacheConfig:
    """Return options with one disk per node."""
    return CacheConfig(source=f"{folder}/pictures", cache_dir=f"{folder}/cache{os.environ['NODE_RANK']}")


def on_ranks(folder: str) -> tuple[Any, ...]:
    """Node 0 lists the source, and node 1 receives the list once. Then the cache of node 1 is older than the source.

    Finally, memory is scarce on node 1.
    """
    config, rank = config_of_node(folder), int(os.environ["RANK"])
    node, device = int(os.environ["NODE_RANK"]), int(os.environ["LOCAL_RANK"])
    with mock.patch.object(listing, "list_source", listing.list_source if rank == 0 else None):
        first = broadcast_manifest(config, "train")
        with mock.patch.object(listing, "store_manifest", None):  # nothing is sent again
            again = broadcast_manifest(config, "train")
        is_mapped = "train.manifest" in Path("/proc/self/maps").read_text() and not again.labels.flags.owndata
    found = [first.fingerprint, list(again.paths), is_mapped]
    dist.barrier()
    if rank == 0:
        write(Path(folder) / "pictures" / "train" / "new" / "0.jpg", jpeg(0))
    dist.barrier()
    manifest = broadcast_manifest(config, "train")
    found += [len(manifest), manifest.classes]
    formats = []
    for free in (10**9, 10**9 if node == 0 else 20_000):
        with mock.patch.object(segments, "available_memory", return_value=free):
            for format in ("auto", "jpeg"):
                chosen = replace(config, format=format)
                formats.append(common_format(chosen, manifest, Placement(node, 2, device)))
    return (*found, formats)


def test_ranks_agree_on_the_list_and_on_the_format(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pictures")
    before = listed(folder)
    answers = run_ranks(on_ranks, str(tmp_path), nodes=2, devices=2)
    formats = ["decoded", "jpeg", "jpeg", "jpeg"]
    expected = (before.fingerprint, list(before.paths), True, 13, ("c0", "c1", "c2", "new"), formats)
    assert answers == [expected] * 4
    kept = load_or_list(CacheConfig(source=str(folder), cache_dir=str(tmp_path / "cache1")), "train")
    assert len(kept) == 13, "node 1 keeps the list"


def resumed(folder: str) -> list[Any]:
    """Train with little memory, then with much: resumed twice, from the start, and with an explicit format."""
    root = Path(folder)
    callback = saver(PACKAGE, root, "first", every_n_epochs=1)
    _, t = fitted(PACKAGE, root, {"memory_gb": 0.0}, max_epochs=1, callbacks=[callback], enable_checkpointing=True)
    t.save_checkpoint(root / "after.ckpt")
    used, seen = [], []
    first, after = root / "first.ckpt", root / "after.ckpt"
    for path, options in ((first, {}), (after, {}), (None, {}), (first, {"sample_format": "decoded"})):
        given = data(PACKAGE, root, **options)
        begin = given.train_dataloader

        def train_dataloader(given: Any = given, begin: Any = begin) -> Any:
            used.append(dict(given._session.formats))
            return begin()

        given.train_dataloader = train_dataloader
        model = module(PACKAGE)
        trainer(PACKAGE, max_epochs=2).fit(model, given, ckpt_path=path)
        seen.append([samples for epoch, _, samples in model.train_seen if epoch == 1])
    assert all(each == seen[0] for each in seen)
    return used


def test_resumed_run_keeps_the_format(tmp_path: Path) -> None:
    numbered_folder(tmp_path / "source")
    (used,) = run_ranks(resumed, str(tmp_path), nodes=1, devices=1, timeout=90, init=False)
    assert used == [{"train": each, "val": each} for each in ("jpeg", "jpeg", "decoded", "decoded")]


def hosts_of_a_rack(folder: str) -> tuple[tuple[tuple[int, ...], ...], int, int]:
    """Use the cache on a rack of two hosts, which is one node for gradients. Each host has its own disk.

    Returns the groups, the number of samples read from storage in two epochs, and the number of samples kept.
    """
    host = int(os.environ["RANK"]) // 2
    os.environ["LIGHTNING_SPARSE_NODE"] = "a rack"
    socket.gethostname = lambda: f"host {host}"
    cache = CacheConfig(source=f"{folder}/pictures", cache_dir=f"{folder}/cache{host}", memory_gb=0.01)
    session = open_session(DataOptions(cache=cache, samples=ImageOptions(image_size=16, backend="torch"), batch_size=1))
    assert session.train is not None
    loader = session.train_loader(fixed=False, on_epoch=lambda epoch: None, on_resume=lambda done: None)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for _ in loader:
            pass
    dist.barrier()
    store = session.train.store
    counts = store.node_counters().storage_samples, store.sizes()[0]
    dist.barrier()
    session.close()
    return session.topology.nodes, *counts


@pytest.mark.slow
def test_node_of_several_hosts_reads_each_file_once(tmp_path: Path) -> None:
    """Only one host of the rack keeps each file."""
    for split in ("train", "val"):
        make_folder(tmp_path / "pictures", per_class=20, classes=2, split=split)
    answers = run_ranks(hosts_of_a_rack, str(tmp_path))
    assert [nodes for nodes, *_ in answers] == [((0, 1), (2, 3))] * 4
    read, kept = (sum(each[column] for each in answers[::2]) for column in (1, 2))
    assert kept == 40
    assert 40 <= read < 50, "two ranks may read a file at the same time"

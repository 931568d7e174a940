"""What the ranks of a run agree on: the list of samples, and the format in memory, also after a restart."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_sparse.data.cache import segment as segments
from lightning_sparse.data.cache.store import Placement
from lightning_sparse.data.config import CacheConfig, ImageOptions
from lightning_sparse.data.session import DataOptions, broadcast_manifest, common_format, open_session
from lightning_sparse.data.sources import listing
from lightning_sparse.data.sources.listing import load_or_list
from tests.data.fits import data, fitted, module, saver, trainer
from tests.data.pictures import numbered_folder
from tests.data.small import jpeg, make_folder
from tests.data.stores import listed
from tests.helpers.distributed import run_ranks

FLAVOUR = "pytorch_lightning"


def config_of_node(folder: str) -> CacheConfig:
    """Each node has a disk of its own."""
    return CacheConfig(source=f"{folder}/pictures", cache_dir=f"{folder}/cache{os.environ['NODE_RANK']}")


def mapped(folder: str) -> tuple[str, list[str], bool, bool]:
    """Node 0 lists; the other node is sent the list, once. All ranks map the file of their node."""
    config = config_of_node(folder)
    if os.environ["RANK"] != "0":
        listing.list_source = None  # type: ignore[assignment]
    first = broadcast_manifest(config, "train")
    listing.store_manifest = None  # type: ignore[assignment]  # nothing has to be sent any more
    again = broadcast_manifest(config, "train")
    return first.fingerprint, list(again.paths), again.labels.flags.owndata, "train.manifest" in open_files()


def open_files() -> str:
    return Path("/proc/self/maps").read_text()


def test_all_ranks_map_the_list_of_rank_zero(tmp_path: Path) -> None:
    make_folder(tmp_path / "pictures")
    answers = run_ranks(mapped, str(tmp_path))
    fresh = listed(tmp_path / "pictures")
    assert answers == [(fresh.fingerprint, list(fresh.paths), False, True)] * 4


def stale(folder: str) -> tuple[int, tuple[str, ...]]:
    """The cache of node 1 has another list, from before the source changed."""
    manifest = broadcast_manifest(config_of_node(folder), "train")
    return len(manifest), manifest.classes


def test_a_node_with_another_list_gets_that_of_rank_zero(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pictures")
    load_or_list(CacheConfig(source=str(folder), cache_dir=str(tmp_path / "cache1")), "train")
    (folder / "train" / "new").mkdir()
    (folder / "train" / "new" / "0.jpg").write_bytes(jpeg(0))
    assert run_ranks(stale, str(tmp_path)) == [(13, ("c0", "c1", "c2", "new"))] * 4
    kept = load_or_list(CacheConfig(source=str(folder), cache_dir=str(tmp_path / "cache1")), "train")
    assert len(kept) == 13


def formats(folder: str, little: dict[int, int]) -> tuple[str, str]:
    """`little`: free bytes by node, where memory is scarce."""
    node, device = int(os.environ["NODE_RANK"]), int(os.environ["LOCAL_RANK"])
    if node in little:
        segments.available_memory = lambda: little[node]  # type: ignore[assignment]
    config, place = config_of_node(folder), Placement(node, 2, device)
    manifest = broadcast_manifest(config, "train")
    chosen = common_format(config, manifest, place)
    given = common_format(CacheConfig(source=config.source, cache_dir=config.cache_dir, format="jpeg"), manifest, place)
    return chosen, given


@pytest.mark.parametrize(("little", "format"), [({}, "decoded"), ({1: 20_000}, "jpeg")])
def test_all_nodes_keep_the_same_format(tmp_path: Path, little: dict[int, int], format: str) -> None:
    make_folder(tmp_path / "pictures")
    assert run_ranks(formats, str(tmp_path), little) == [(format, "jpeg")] * 4


def resumed(folder: str) -> list[Any]:
    """A run with little memory, then some with much: two that go on, one that is new, and one that sets the format."""
    root = Path(folder)
    callback = saver(FLAVOUR, root, "first", every_n_epochs=1)
    _, t = fitted(FLAVOUR, root, {"memory_gb": 0.0}, max_epochs=1, callbacks=[callback], enable_checkpointing=True)
    t.save_checkpoint(root / "after.ckpt")
    used, seen = [], []
    first, after = root / "first.ckpt", root / "after.ckpt"
    for path, options in ((first, {}), (after, {}), (None, {}), (first, {"sample_format": "decoded"})):
        given = data(FLAVOUR, root, **options)
        begin = given.train_dataloader

        def train_dataloader(given: Any = given, begin: Any = begin) -> Any:
            used.append(dict(given._session.formats))
            return begin()

        given.train_dataloader = train_dataloader
        model = module(FLAVOUR)
        trainer(FLAVOUR, max_epochs=2).fit(model, given, ckpt_path=path)
        seen.append([samples for epoch, _, samples in model.train_seen if epoch == 1])
    assert all(each == seen[0] for each in seen)
    return used


def test_a_resumed_run_keeps_the_format(tmp_path: Path) -> None:
    numbered_folder(tmp_path / "source")
    (used,) = run_ranks(resumed, str(tmp_path), nodes=1, devices=1, timeout=90, init=False)
    assert used == [{"train": each, "val": each} for each in ("jpeg", "jpeg", "decoded", "decoded")]


def hosts_of_a_rack(folder: str) -> tuple[tuple[tuple[int, ...], ...], int, int]:
    """The gradients see one node, a rack of two hosts; each host has a disk of its own. Returns how the data is
    grouped, what this host has read from storage in two epochs, and the samples that it keeps."""
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
def test_data_is_shared_by_host_where_a_node_has_several(tmp_path: Path) -> None:
    """Each file crosses the storage link once, and is kept on one of them."""
    for split in ("train", "val"):
        make_folder(tmp_path / "pictures", per_class=20, classes=2, split=split)
    answers = run_ranks(hosts_of_a_rack, str(tmp_path))
    assert [nodes for nodes, *_ in answers] == [((0, 1), (2, 3))] * 4
    read, kept = (sum(each[column] for each in answers[::2]) for column in (1, 2))
    assert kept == 40
    assert 40 <= read < 50, "two ranks may read a file at the same time"

"""WebDataset shards: members are found once and read by their place, on a mount and in a fake S3."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.data.cache.store import SampleStore
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.sources.listing import classes_of, has_split, load_or_list
from lightning_sparse.data.sources.manifest import Manifest
from tests.data.fits import FLAVOURS, ours
from tests.data.small import jpeg

needs_s3 = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("s3fs", "moto", "flask")),
    reason="s3fs or moto is not installed",
)
CONFIGS: dict[str, Any] = {"format": "bytes", "memory_gb": 0.01}


def shard(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))


def payload(number: int) -> bytes:
    return f"{number:03} ".encode() * (100 + number)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of four samples; names of over 100 bytes take a header more."""
    for number in range(2):
        members: dict[str, bytes] = {}
        for sample in range(4 * number, 4 * number + 4):
            name = f"{'deep/' * 30 * (sample == 5)}{sample:06}"
            members |= {f"{name}.npy": payload(sample), f"{name}.cls": f"{sample % 3}\n".encode()}
        shard(tmp_path / "source" / "train" / f"{number:03}#{number}.tar", members)
    return tmp_path / "source"


def config_of(folder: Path | str, cache: Path, **more: Any) -> CacheConfig:
    return CacheConfig(source=str(folder), cache_dir=str(cache), **{**CONFIGS, **more})


def contents(config: CacheConfig) -> tuple[Manifest, list[bytes], Any]:
    manifest = load_or_list(config, "train")
    store = SampleStore(config, manifest)
    try:
        return manifest, [each.data.tobytes() for each in store.get(range(len(manifest)))], store.counters()
    finally:
        store.close()


def test_samples_of_shards_are_read_by_their_place(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, tmp_path / "cache")
    manifest, data, counts = contents(config)
    assert data == [payload(number) for number in range(8)]
    assert manifest.labels.tolist() == [[number % 3] for number in range(8)]
    assert list(manifest.paths)[0] == "train/000#0.tar/000000.npy"
    assert classes_of(config, "train")[1] == manifest.num_classes == 3
    assert counts.storage_bytes == sum(map(len, data)), "only the samples, not the shards, cross the link"
    assert counts.changed == 0
    assert Manifest.from_bytes(manifest.to_bytes()).location(7) == manifest.location(7)
    _, again, counts = contents(config)
    assert again == data
    assert (counts.storage_samples, counts.disk_samples) == (0, 8)


def test_shards_of_images_serve_the_image_module(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("test", 2)):
        members = {}
        for n in range(count):
            members |= {f"{n}.jpg": jpeg(n), f"{n}.json": b"{}", f"{n}.cls": str(n % 2).encode()}
        shard(tmp_path / "source" / split / "0.tar", members)
    data = ours(FLAVOURS[0]).CachedImageDataModule(
        str(tmp_path / "source"), str(tmp_path / "cache"), 6, 16, memory_gb=0.01, with_indices=True, backend="torch"
    )
    data.setup("fit")
    ((images, labels, indices),) = list(data.train_dataloader())
    data.teardown("fit")
    assert images.shape == (6, 3, 16, 16)
    assert labels.tolist() == [index % 2 for index in indices.tolist()]
    assert has_split(data._options.cache, "test")
    assert not has_split(data._options.cache, "val")


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"a.npy": b"a", "a.txt": b"b"}, r"sample 'a' has the members a\.npy, a\.txt, of which 2 can be the sample"),
        ({"a.cls": b"1"}, "of which 0 can be the sample"),
        ({"a.npy": b"a", "a.cls": b"1", "b.npy": b"b"}, r"0\.tar/b\.npy has no \.cls member"),
        ({"a.npy": b"a", "a.cls": b"cat"}, r"a \.cls member .* is not a whole number"),
        ({"a.npy": b"a", "a.cls": b"9" * 20}, r"a \.cls member .* is not a whole number"),
        ({}, "contain no samples"),
    ],
)
def test_shards_that_cannot_be_used_say_why(tmp_path: Path, members: dict[str, bytes], says: str) -> None:
    shard(tmp_path / "source" / "train" / "0.tar", members)
    with pytest.raises(ValueError, match=says):
        contents(config_of(tmp_path / "source", tmp_path / "cache"))


def test_the_member_that_is_the_sample_can_be_chosen(tmp_path: Path) -> None:
    shard(tmp_path / "source" / "train" / "0.tar", {"a.seg.npy": b"s", "a.txt": b"t"})
    manifest, data, _ = contents(config_of(tmp_path / "source", tmp_path / "cache", member="seg.npy"))
    assert data == [b"s"]
    assert manifest.labels.shape == (1, 0)


def test_a_compressed_shard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source" / "train").mkdir(parents=True)
    with tarfile.open(tmp_path / "source" / "train" / "0.tar", "w:gz") as tar:
        tar.add(__file__)
    with pytest.raises(ValueError, match=r"train/0\.tar cannot be used: it is not an uncompressed tar file"):
        contents(config_of(tmp_path / "source", tmp_path / "cache"))


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[dict[str, Any], Any]]:
    """A fake server. Yields storage_options, and its file system."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
    try:
        yield options, s3fs.S3FileSystem(**options, skip_instance_cache=True)
    finally:
        server.stop()


@pytest.fixture
def s3(folder: Path) -> Iterator[dict[str, Any]]:
    """The shards, and folders of images, in a bucket. Yields storage_options."""
    with s3_server() as (options, files):
        files.mkdir("shards")
        for path in folder.rglob("*.tar"):
            files.pipe_file(f"shards/{path.relative_to(folder)}", path.read_bytes())
        for number in range(6):
            files.pipe_file(f"shards/pictures/train/c{number % 2}/{number}.jpg", jpeg(number))
        yield options


@needs_s3
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_shards_and_images_of_s3(folder: Path, tmp_path: Path, s3: dict[str, Any]) -> None:
    manifest, data, counts = contents(config_of("s3://shards", tmp_path / "cache", storage_options=s3))
    local, expected, _ = contents(config_of(folder, tmp_path / "other"))
    assert data == expected
    assert counts.storage_bytes == sum(map(len, data))
    assert manifest.offsets.tolist() == local.offsets.tolist()
    images = config_of("s3://shards/pictures", tmp_path / "cache", storage_options=s3, format="jpeg")
    manifest, data, _ = contents(images)
    assert manifest.classes == ("c0", "c1")
    assert data == [jpeg(number) for number in (0, 2, 4, 1, 3, 5)]


def test_s3_without_s3fs_names_the_package_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    if importlib.util.find_spec("s3fs"):
        monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ValueError, match="needs a package that is not installed: Install s3fs to access S3"):
        config_of("s3://bucket/folder", tmp_path / "cache")
    assert not os.path.exists(tmp_path / "cache")

"""Small data sets in files, caches of them, and servers that serve them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import logging
import os
import socket
import subprocess
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_sparse.data.cache.counts import TierCounts
from lightning_sparse.data.cache.store import SampleStore
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.id_files import Corpus
from lightning_sparse.data.shards import files_of
from lightning_sparse.data.sources.listing import list_source, load_or_list
from lightning_sparse.data.sources.manifest import Manifest
from lightning_sparse.lab.storage import sftp_server

# -- files -------------------------------------------------------------------------------------------------------------


def write(path: Path, content: bytes | str = b"") -> Path:
    """Write a file, and create its folders if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def make_image(number: int, height: int = 40, width: int = 60, mode: str = "RGB") -> Image.Image:
    """Return an image of smooth random colors."""
    small = np.random.default_rng(number).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def jpeg(number: int, height: int = 40, width: int = 60, mode: str = "RGB") -> bytes:
    return encoded(make_image(number, height, width, mode), "JPEG", quality=90)


def make_folder(root: Path, per_class: int = 4, classes: int = 3, split: str = "train") -> Path:
    """Write different images to <root>/<split>/c<label>/<number>.jpg."""
    for label in range(classes):
        for number in range(per_class):
            write(root / split / f"c{label}" / f"{number}.jpg", jpeg(label * per_class + number))
    return root


def numbered_folder(root: Path, train: int = 120, val: int = 22, classes: int = 3, edge: int = 18) -> Path:
    """Write images of one color. The color is the place in the manifest, so a crop identifies its image.

    With image_size=16, the cache keeps 19 pixels or less, so the servers of samples need not import torch to resize.
    """
    assert max(train, val) <= 256
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            image = Image.fromarray(np.full((edge, edge + 7, 3), number, np.uint8))
            write(root / split / f"class{number * classes // count}" / f"{number:03}.png", encoded(image))
    return root


def tar_of(members: Mapping[str, bytes], mode: str = "w", **links: tuple[bytes, str]) -> bytes:
    """Return a tar file. `links` gives the type and the target of members that are links."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        for name, data in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
        for name, (kind, target) in links.items():
            about = tarfile.TarInfo(name)
            about.type, about.linkname = kind, target
            tar.addfile(about)
    return buffer.getvalue()


def counted(path: Path, count: int, first: int = 0) -> Path:
    """Write a file of token ids that count up from `first`."""
    write(path, (first + np.arange(count)).astype("<u2").tobytes())
    path.with_suffix(".json").write_text(json.dumps({"dtype": "uint16", "vocab_size": 1000}))
    return path


def corpus_of(path: str | Path) -> Corpus:
    return Corpus(path, files_of(path))


# -- caches ------------------------------------------------------------------------------------------------------------

Open = list[SampleStore]


def config_of(source: Path | str, cache: Path | None = None, **more: Any) -> CacheConfig:
    """Return the options of a cache, which is next to a local source."""
    folder = cache or Path(source).parent / "cache"
    return CacheConfig(source=str(source), cache_dir=str(folder), **{"memory_gb": 0.01, **more})


def bytes_of(source: Path | str, cache: Path | None = None, **more: Any) -> CacheConfig:
    """Return a `config_of` for samples that are not images."""
    return config_of(source, cache, **{"format": "bytes", **more})


def listed(source: str | Path, split: str = "train", **more: Any) -> Manifest:
    return list_source(CacheConfig(source=str(source), cache_dir="none", **more), split)


def store_of(folder: Path, stores: Open, **more: Any) -> SampleStore:
    """Open a store, which the fixture `stores` closes."""
    config = config_of(folder, **more)
    stores.append(SampleStore(config, load_or_list(config, "train")))
    return stores[-1]


def contents(store: SampleStore) -> list[bytes]:
    return [sample.data.tobytes() for sample in store.get(range(len(store.manifest)))]


def read(config: CacheConfig, split: str = "train") -> tuple[Manifest, list[bytes], TierCounts]:
    """Read a split once. Return its manifest, its samples, and the tiers that they came from."""
    manifest = load_or_list(config, split)
    with contextlib.closing(SampleStore(config, manifest)) as store:
        return manifest, contents(store), store.counters()


def flip_in_memory(sample: bytes, place: int = 100) -> None:
    """Flip a bit of a sample in the memory that the caches of this process share with other processes."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the link of this loop's own folder
            if os.readlink(link).startswith("/memfd:lightning_sparse-"):
                with open(link, "r+b", buffering=0) as file:
                    at = file.read().find(sample)
                    if at >= 0:
                        file.seek(at + place)
                        file.write(bytes([sample[place] ^ 1]))
                        return
    raise AssertionError("no memory of this process holds the sample")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- servers -----------------------------------------------------------------------------------------------------------

KEY = {"client_kwargs": {"headers": {"X-Key": "secret"}}}  # storage_options for `Server`
needs_s3 = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("s3fs", "moto", "flask")),
    reason="s3fs or moto is not installed",
)


class Server:
    """Serves a folder over HTTP to clients that send the key. `requests` counts by method and file type."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("aiohttp", reason="fsspec opens http with it")
        requests = self.requests = Counter[tuple[str, str]]()

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                requests[self.command, Path(self.path).suffix] += 1
                if self.headers.get("X-Key") != "secret":
                    self.send_error(403)
                elif self.command == "GET":
                    super().do_GET()
                else:
                    super().do_HEAD()

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[dict[str, Any], Any]]:
    """Start a fake S3 server. Yields storage_options and a file system."""
    s3fs = importlib.import_module("s3fs")
    server = importlib.import_module("moto.server").ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
    try:
        yield options, s3fs.S3FileSystem(**options, skip_instance_cache=True)
    finally:
        server.stop()


def upload(files: Any, folder: Path, bucket: str) -> None:
    """Copy the files of a folder into a bucket."""
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"{bucket}/{path.relative_to(folder)}", path.read_bytes())


@contextlib.contextmanager
def sshfs_mount(real: Path, place: Path) -> Iterator[int]:
    """Mount a folder that is not empty on a new folder, without an SSH server. Yields the process that serves it."""
    place.mkdir()
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack, ours, theirs:
        serves = stack.enter_context(
            subprocess.Popen([str(sftp_server())], stdin=theirs.fileno(), stdout=theirs.fileno())
        )
        command = ["sshfs", "-f", "-o", "passive", f"here:{real}", str(place)]
        mounts = stack.enter_context(subprocess.Popen(command, stdin=ours.fileno(), stdout=ours.fileno()))
        try:
            while not any(place.iterdir()):
                assert mounts.poll() is None
                time.sleep(0.02)
            yield serves.pid
        finally:
            serves.kill()  # lets blocked reads fail
            mounts.terminate()  # unmounts

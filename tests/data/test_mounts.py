"""Random folders give the same samples and windows on a local disk, through ``file://``, on sshfs and on S3.

``MOUNTS_INPUTS`` sets the number of inputs of each kind, ``MOUNTS_SEED`` the first seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.data.sources.manifest import Manifest
from lightning_sparse.data.sources.storage import Storage
from lightning_sparse.flavours.pytorch_lightning import TokenDataModule
from tests.data.mounts import sshfs_mount
from tests.data.test_random_sources import contents, grow, listed, make_tar
from tests.data.test_shards import needs_s3, s3_server
from tests.data.test_token_corpora import MODES, random_files, write

INPUTS = int(os.environ.get("MOUNTS_INPUTS", "4"))
SEEDS = range(int(os.environ.get("MOUNTS_SEED", "0")), int(os.environ.get("MOUNTS_SEED", "0")) + INPUTS)
KINDS = [
    "file",
    pytest.param("sshfs", marks=pytest.mark.sshfs),
    pytest.param("s3", marks=[needs_s3, pytest.mark.filterwarnings("ignore::DeprecationWarning")]),
]
pytestmark = pytest.mark.timeout(7200 if "MOUNTS_INPUTS" in os.environ else 300)


@dataclass
class Mount:
    """A folder and another way to read it. files: the file system of S3, to which each folder is copied."""

    here: Path
    there: str
    options: dict[str, Any] = field(default_factory=dict)
    files: Any = None

    def publish(self, folder: Path) -> None:
        if self.files is not None:
            for path in folder.rglob("*"):
                if path.is_file():
                    self.files.pipe_file(f"mounts/{path.relative_to(self.here)}", path.read_bytes())


@pytest.fixture(scope="module", params=KINDS)
def mount(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    root = tmp_path_factory.mktemp("mount")
    here = root / "here"
    here.mkdir()
    (here / "not empty").touch()
    with contextlib.ExitStack() as stack:
        if request.param == "s3":
            options, files = stack.enter_context(s3_server())
            files.mkdir("mounts")
            yield Mount(here, "s3://mounts", options, files)
        elif request.param == "sshfs":
            stack.enter_context(sshfs_mount(here, root / "there"))
            yield Mount(here, str(root / "there"))
        else:
            yield Mount(here, f"file://{here}")


def make_links_relative(folder: Path) -> None:
    """sshfs refuses links that leave the mount."""
    for path in [each for each in folder.rglob("*") if each.is_symlink()]:
        target = os.path.relpath(path.readlink(), path.parent)
        path.unlink()
        path.symlink_to(target)


def summary(manifest: Manifest, storage: Storage) -> tuple[Any, ...]:
    return manifest.classes, manifest.labels.tolist(), manifest.sizes.tolist(), contents(storage, manifest)


def read_samples(source: str, options: dict[str, Any], splits: list[str]) -> list[Any]:
    """The samples of splits, or why they are refused, without the path of the source. One reader serves all."""
    config = CacheConfig(source=source, cache_dir="none", format="bytes", storage_options=options or None)
    found: list[Any] = []
    with Storage(config, timeout=120.0) as storage:
        for split in splits:
            try:
                found.append(summary(listed(storage, config, split), storage))
            except ValueError as error:
                found.append(str(error).replace(source, "SOURCE"))
    return found


def test_samples_on_every_mount_equal_those_of_the_local_disk(mount: Mount) -> None:
    splits = []
    for seed in SEEDS:
        draw, split = random.Random(f"mounts {seed}"), f"split{seed}"
        splits.append(split)
        if draw.random() < 0.3:
            (mount.here / split).mkdir()
            for number in range(draw.randint(1, 3)):
                make_tar(draw, mount.here / split / f"{number}.tar")
        else:
            for name in draw.sample(["a", "B", "c d", "ä"], draw.randint(1, 3)):
                grow(draw, mount.here / split / name, 2, links=False)
                make_links_relative(mount.here / split / name)
                (mount.here / split / name / "always.bin").write_bytes(draw.randbytes(9))
        mount.publish(mount.here / split)
    expected = read_samples(str(mount.here), {}, splits)
    assert any(isinstance(each, tuple) for each in expected)
    for split, there, local in zip(splits, read_samples(mount.there, mount.options, splits), expected, strict=True):
        assert there == local, split


def read_windows(source: str, **options: Any) -> Any:
    """The batches of an epoch; None if the folder is refused."""
    data = None
    try:
        data = TokenDataModule(source, batch_size=3, **options)
        data.setup("fit")
        return [[each.tolist() for each in batch] for batch in data.train_dataloader()]
    except (ValueError, DataError):
        return None
    finally:
        if data is not None:
            data.teardown("fit")


def test_windows_on_every_mount_equal_those_of_the_local_disk(mount: Mount, tmp_path: Path) -> None:
    complete = 0
    for seed in SEEDS:
        rng = np.random.default_rng([seed, 11])
        folder = write(mount.here / f"tokens{seed}", random_files(rng), rng)
        damage = {}
        if rng.random() < 0.2:
            path = Path(rng.choice(sorted(map(str, folder.rglob("*.json")))))
            damage = {"checksum": 7} if rng.random() < 0.5 else {"vocab_size": 3}
            path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
        mount.publish(folder)
        options = {"context": int(rng.integers(1, 7)), "documents": MODES[seed % 3]}
        expected = read_windows(str(folder), **options)
        cache = {"cache_dir": str(tmp_path / str(seed)), "storage_options": mount.options or None}
        assert expected is None or "checksum" not in damage, folder
        assert read_windows(f"{mount.there}/{folder.name}", **options, **cache) == expected, (folder, options)
        complete += isinstance(expected, list)
    assert complete

"""Check whether a change of the code changes a sample, a label or a pixel, by digests of short runs.

    python -m benchmarks.digests_data before.json                       # before the change; a minute or two
    python -m benchmarks.digests_data after.json --compare before.json  # lists the cases that differ; exit code 1

Photographs of scikit-learn are written in each layout of a source. The DataModules make batches of them for all
layouts, formats of the memory tier and shuffles, on one rank and on two nodes. Every other case interrupts and resumes
an epoch. A digest covers the batches and the fingerprint of the data set. Digests depend on the machine and the
versions of packages, so make both on one machine.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from torch.multiprocessing.spawn import spawn

from lightning_sparse.data.pipeline.sampler import EpochSegment, Sampler, SamplerConfig, evaluation_batches
from lightning_sparse.data.tokens import prepare
from lightning_sparse.flavours import pytorch_lightning as ours

MTIME_NS = 1_700_000_000 * 10**9  # equal for all files, because a fingerprint contains their times
TIMEOUT = timedelta(seconds=120)
Digests = dict[str, str]


def digest_of(values: Iterable[Any]) -> str:
    """Return the hash of tensors, arrays, bytes and plain values, nested in any way."""
    hashed = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.numpy()
        if isinstance(value, np.ndarray):
            hashed.update(f"{value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        elif isinstance(value, (list, tuple)):
            hashed.update(b"[")
            for each in value:
                add(each)
        else:
            hashed.update(value if isinstance(value, bytes) else repr(value).encode())

    for value in values:
        add(value)
    return hashed.hexdigest()


# -- sources -----------------------------------------------------------------------------------------------------------


def photographs(count: int) -> list[tuple[str, bytes, str]]:
    """Return (name, file, class) of pieces of photographs and of digits, in several formats."""
    images, digits = load_sample_images().images, load_digits().images
    random, found = np.random.default_rng(0), []
    for number in range(count):
        height, width = ((120, 150), (150, 120), (97, 131), (60, 64))[number % 4]
        top, left = int(random.integers(0, 427 - height)), int(random.integers(0, 640 - width))
        picture = Image.fromarray(images[number % 2][top : top + height, left : left + width])
        if number % 6 == 5:
            picture = Image.fromarray((digits[number] * 15.9375).astype(np.uint8)).resize((40, 40))
        suffix, stream = ("png", "PNG") if number % 5 == 4 else ("jpg", "JPEG"), io.BytesIO()
        picture.save(stream, suffix[1])
        found.append((f"{number:03}.{suffix[0]}", stream.getvalue(), "abc"[number % 3]))
    return found


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_tar(path: Path, files: list[tuple[str, bytes, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data, label in files:
            stem = name.partition(".")[0]
            for member, content in ((name, data), (f"{stem}.cls", str("abc".index(label)).encode())):
                about = tarfile.TarInfo(member)
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))


def write_parquet(path: Path, files: list[tuple[str, bytes, str]]) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": data, "path": name} for name, data, _ in files]
    labels = ["abc".index(label) for *_, label in files]
    pyarrow.parquet.write_table(pyarrow.table({"image": images, "label": labels}), path, row_group_size=7)


def write_sources(root: Path) -> None:
    """Write all layouts with equal images."""
    files = photographs(72)
    parts = {"train": files[:48], "val": files[48:60], "test": files[60:]}
    for split, some in parts.items():
        for name, data, label in some:
            write(root / "folder" / split / label / name, data)
            write(root / "flat" / split / name, data)
        for number in range(2):
            write_tar(root / "tar" / split / f"{number}.tar", some[number::2])
            write_parquet(root / "parquet" / split / f"{number}.parquet", some[number::2])
            hub = {"val": "validation"}.get(split, split)
            write_parquet(root / "hub" / "data" / f"{hub}-{number:05}-of-00002.parquet", some[number::2])
        columns: dict[str, Callable[[str], list[Any]]] = {"name": lambda label: [label]}
        columns |= {"number": lambda label: ["abc".index(label)], "several": lambda label: [label, 0.5 * ord(label)]}
        for kind, labels in columns.items():
            with io.StringIO() as text:
                rows = [[f"{split}/{label}/{name}", *labels(label)] for name, _, label in some[::-1]]
                head = ["path", "label", "weight"][: len(rows[0])]
                csv.writer(text).writerows([head, *rows])
                write(root / "lists" / f"{kind}-{split}.csv", text.getvalue().encode())
    for path in root.rglob("*"):
        os.utime(path, ns=(MTIME_NS, MTIME_NS))
    os.utime(root, ns=(MTIME_NS, MTIME_NS))


# -- batches -----------------------------------------------------------------------------------------------------------


def passes(data: Any, resumed: Callable[[], Any] | None = None) -> list[Any]:
    """Return all batches of two epochs and of the evaluations; with `resumed`, stop in epoch 1 and continue."""
    data.setup("fit")
    found: list[Any] = [data.num_classes, data.class_names] if hasattr(data, "class_names") else [data.vocab_size]
    loader = data.train_dataloader()
    found += [len(loader), *epoch(loader, 0)]
    if resumed is not None:
        loader.set_epoch(1)
        batches = iter(loader)
        found += [kept(next(batches)) for _ in range(2)]
        state = json.loads(json.dumps(loader.state_dict()))
        batches.close()
        data.teardown("fit")
        data = resumed()
        data.setup("fit")
        loader = data.train_dataloader()
        loader.load_state_dict(state)
    found += [*epoch(loader, 1), loader.state_dict()["fingerprint"]]
    found += list(map(kept, data.val_dataloader()))
    data.teardown("fit")
    data.setup("test")
    found += list(map(kept, data.test_dataloader()))
    data.teardown("test")
    return found


def epoch(loader: Any, number: int) -> list[Any]:
    loader.set_epoch(number)
    return list(map(kept, loader))


def kept(batch: Any) -> Any:
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in batch]


def images(root: Path, cache: Path, source: str = "folder", **options: Any) -> Any:
    given = {"batch_size": 5, "image_size": 32, "backend": "torch", "threads": 2, "with_indices": True, "seed": 3}
    path = source if "://" in source else str(root / source)
    return ours.CachedImageDataModule(path, str(cache), **{**given, **options})


def files(root: Path, cache: Path, source: str, **options: Any) -> Any:
    given = {"batch_size": 5, "collate": list, "workers": 0, "with_indices": True, "memory_gb": 0.05}
    return ours.CachedDataModule(str(root / source), str(cache), bytes, **{**given, **options})


def lists_of(root: Path, kind: str) -> dict[str, str]:
    return {split: str(root / "lists" / f"{kind}-{split}.csv") for split in ("train", "val", "test")}


def cases(root: Path, cache: Path) -> dict[str, Callable[[], Any]]:
    """Return the cases that run on one rank."""
    found: dict[str, Callable[[], Any]] = {}
    pictures, small = partial(images, root, cache), {"memory_gb": 0.05}
    for format in ("decoded", "jpeg", "auto"):
        found[f"images {format}"] = partial(pictures, sample_format=format, **small)
        found[f"images {format}, disk only"] = partial(pictures, sample_format=format, memory_gb=0)
    found["images, two sizes, short side"] = partial(pictures, image_size={0: 24, 1: 40}, short_side=64)
    found["images, fraction held out"] = partial(pictures, val_fraction=0.2, shuffle="local")
    for source in ("tar", "parquet", "hub", f"file://{root / 'folder'}"):
        found[f"images of {source.partition('://')[0]}"] = partial(pictures, source, **small)
    for kind in ("name", "number", "several"):
        found[f"images of a list, {kind}"] = partial(pictures, lists=lists_of(root, kind), **small)
    for source, member in (("folder", None), ("flat", None), ("parquet", "image"), ("hub", "image")):
        found[f"files of {source}"] = partial(files, root, cache, source, member=member)
    found["files of a list"] = partial(files, root, cache, "folder", lists=lists_of(root, "several"))
    found["files, workers"] = partial(files, root, cache, "folder", workers=2)
    tokens = root.parent / "tokens.bin"
    found["tokens"] = partial(ours.TokenDataModule, tokens, val=tokens, context=16, batch_size=4, seed=2)
    found["tokens, fraction"] = partial(ours.TokenDataModule, tokens, context=16, batch_size=4, val_fraction=0.1)
    return found


def orders() -> Digests:
    """Return digests of the sampler's orders, in several worlds, some of them resumed in another world."""
    found, labels = {}, np.arange(211)
    shuffle: Literal["local", "global"]
    for shuffle in ("local", "global"):
        for devices in ((1,), (2, 2), (3, 1, 2), (8,) * 4):
            config = SamplerConfig(batch_size=3, devices=devices, shuffle=shuffle, seed=5)
            sampler = Sampler(labels, lambda nodes: labels * 7919 % 211 % nodes, config)
            before = EpochSegment(SamplerConfig(batch_size=2, devices=(2, 1), shuffle=shuffle, seed=5), 9)
            parts: list[Any] = []
            for plan in (sampler.epoch(0), sampler.epoch(7), sampler.epoch(7, [before])):
                ranks = [(node, device) for node, count in enumerate(devices) for device in range(count)]
                parts += [plan.steps, plan.num_repeated]
                parts += [plan.batch(step, *rank) for step in range(plan.steps) for rank in ranks]
                owners = labels * 7919 % 211 % len(devices)
                parts += [evaluation_batches(labels[:50], owners, config, *rank, pairs=True) for rank in ranks]
            found[f"order {shuffle} {devices}"] = digest_of(parts)
    return found


# -- several nodes -----------------------------------------------------------------------------------------------------

WORLDS: dict[str, dict[str, Any]] = {
    "2 nodes global": {"shuffle": "global"},
    "2 nodes local": {"shuffle": "local"},
    "2 nodes global files": {"shuffle": "global", "sample_format": "jpeg"},
    "2 nodes Parquet": {"shuffle": "global", "source": "parquet"},
}


def rank_of_world(rank: int, root: Path, folder: Path, name: str, port: int) -> None:
    """Run one rank of two nodes of two ranks each."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LIGHTNING_SPARSE_NODE=str(rank // 2))
    dist.init_process_group("gloo", rank=rank, world_size=4, timeout=TIMEOUT)
    cache = folder / f"cache{rank // 2}"

    def made() -> Any:
        return images(root, cache, memory_gb=0.05, **WORLDS[name])

    digest = digest_of(passes(made(), made))
    (folder / f"{rank}.txt").write_text(digest)
    dist.barrier()
    dist.destroy_process_group()


def run(root: Path) -> Digests:
    """Return the digests of all cases."""
    found = orders()
    for number, (name, make) in enumerate(cases(root, root.parent / "cache").items()):
        found[name] = digest_of(passes(make(), None if number % 2 else make))
        print(f"{name}: {found[name][:12]}", file=sys.stderr)
    for number, name in enumerate(WORLDS):
        with tempfile.TemporaryDirectory() as folder:
            port = 29500 + os.getpid() % 900 + number
            spawn(rank_of_world, (root, Path(folder), name, port), nprocs=4)  # type: ignore[no-untyped-call]
            found |= {f"{name}, rank {rank}": (Path(folder) / f"{rank}.txt").read_text() for rank in range(4)}
            print(f"{name}: done", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    # equal in each run, because hashes contain paths
    folder = Path(tempfile.gettempdir()) / f"digests_data-{os.geteuid()}"
    root = folder / "sources"
    shutil.rmtree(folder / "cache", ignore_errors=True)
    if not root.exists():
        write_sources(root)
        text = folder / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
        prepare([text], folder / "tokens.bin")
    found = run(root)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    if options.compare is None:
        return 0
    before = json.loads(options.compare.read_text())
    differ = sorted(name for name in before.keys() | found.keys() if before.get(name) != found.get(name))
    print(f"{len(found) - len(differ)} of {len(found)} digests are equal" + "".join(f"\n  {each}" for each in differ))
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())

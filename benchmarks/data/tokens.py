"""Compare loaders of tokens: bytes on the storage link, and tokens per CPU-second, over three runs.

    sudo python -m benchmarks.data.tokens OUT [--shards 32] [--gbps 0.2] [--rows ROW ...]

One process on a node reads documents from a mount (sshfs) of a storage node behind a slow link (`lightning_sparse.lab`,
which needs root and sshfs). It reads three epochs, and again after each of two restarts, with the node's disk as the
last run left it. All rows make equal batches: 8 shuffled windows of 1,024 tokens, inputs and targets of int64. A token
is a byte, so the speed of a tokenizer does not matter.

=========================== ============================ =============================================================
row                         on storage                   loader
=========================== ============================ =============================================================
TokenDataModule             documents, ``.jsonl``        this library, which tokenizes them and keeps the ids
TokenDataModule, ids        ids, ``.bin``                this library
LitData                     chunks of ids by `optimize`  StreamingDataset of a plain path, TokensLoader, one worker
LitData, cached             chunks of ids by `optimize`  StreamingDataset of a ``local:`` remote with a cache folder
Mosaic                      windows of ids, MDSWriter    StreamingDataset with a remote and a local folder, one worker
Hugging Face                documents, ``.jsonl``        load_dataset(streaming=True), map, shuffle, one worker
=========================== ============================ =============================================================

All files on storage are written before the measurement. The kernel counts the bytes on the storage node's link. The
page cache is dropped before each run. CPU time is that of the process and its children, without sshfs, from the
creation of the loader on; all rows import Lightning before. Missing packages are left out. Writes OUT/data-tokens.json
and .md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.data.loaders import cpu_seconds
from benchmarks.data.storage import DROP_CACHES
from benchmarks.processes import on_clusters, storage_sent
from benchmarks.record import Rows, parser_of, surroundings, write
from lightning_sparse.cli import format_table
from lightning_sparse.topology import Topology

CONTEXT, BATCH, SHARD_BYTES, RUNS, EPOCHS = 1024, 8, 10**6, 3, 3
END = 0  # id at the end of a document
Batches = Callable[[int], Iterator[torch.Tensor]]
"""The windows of an epoch, [B, CONTEXT + 1]."""


# -- files on storage --------------------------------------------------------------------------------------------------


def texts(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text().splitlines()]


def ids(file: str | Path) -> np.ndarray[Any, Any]:
    """Return the ids of a shard of documents, uint16, each document with its end."""
    return np.frombuffer(b"".join(each.encode() + bytes([END]) for each in texts(Path(file))), np.uint8).astype("<u2")


def write_text(source: Path, shards: int) -> list[Path]:
    """Write shards of documents of about 2,000 letters."""
    random, files = np.random.default_rng(0), []
    (source / "text").mkdir(parents=True)
    for number in range(shards):
        letters = random.integers(97, 123, SHARD_BYTES, np.uint8)
        letters[random.random(SHARD_BYTES) < 0.15] = ord(" ")
        ends = np.cumsum(random.integers(500, 3500, SHARD_BYTES // 1000))
        documents = np.split(letters, ends[ends < SHARD_BYTES])
        files.append(source / "text" / f"{number:03}.jsonl")
        files[-1].write_text("".join(json.dumps({"text": each.tobytes().decode()}) + "\n" for each in documents))
    return files


def write_ids(files: list[Path], out: Path) -> None:
    out.mkdir()
    for file in files:
        ids(file).tofile(out / f"{file.stem}.bin")
        (out / f"{file.stem}.json").write_text(json.dumps({"dtype": "uint16", "vocab_size": 256, "end": END}))


def write_chunks(files: list[Path], out: Path) -> None:
    from litdata import TokensLoader, optimize

    size = (CONTEXT + 1) * (SHARD_BYTES // CONTEXT)
    paths = list(map(str, files))
    optimize(_chunk, paths, str(out), chunk_size=size, item_loader=TokensLoader(), num_workers=1, verbose=False)


def _chunk(file: str) -> Iterator[np.ndarray[Any, Any]]:
    yield ids(file)


def write_mds(files: list[Path], out: Path) -> None:
    from streaming import MDSWriter  # type: ignore[import-not-found, unused-ignore]

    columns = {"ids": f"ndarray:uint16:{CONTEXT + 1}"}
    with MDSWriter(out=str(out), columns=columns, size_limit=2 * SHARD_BYTES, progress_bar=False) as writer:
        for file in files:
            for row in _cut(ids(file)):
                writer.write({"ids": row})


def _cut(stream: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    count = len(stream) // (CONTEXT + 1)
    return stream[: count * (CONTEXT + 1)].reshape(count, CONTEXT + 1)


# -- loaders, in the process that is measured --------------------------------------------------------------------------


def ours(folder: Path, work: Path) -> Batches:
    from lightning_sparse.flavours.pytorch_lightning import TokenDataModule

    data = TokenDataModule(str(folder), context=CONTEXT, batch_size=BATCH, cache_dir=str(work))
    data.setup("fit")
    loader = data.train_dataloader()

    def batches(epoch: int) -> Iterator[torch.Tensor]:
        loader.set_epoch(epoch)
        return (inputs for inputs, _ in loader)

    return batches


def litdata(folder: Path, work: Path, cached: bool = False) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    place = {"input_dir": f"local:{folder}", "cache_dir": str(work)} if cached else {"input_dir": str(folder)}
    data = StreamingDataset(**place, item_loader=TokensLoader(block_size=CONTEXT + 1), shuffle=True)
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=1, persistent_workers=True)
    return lambda epoch: (_targets(rows) for rows in loader)


def mosaic(folder: Path, work: Path) -> Batches:
    from streaming import StreamingDataset

    data = StreamingDataset(remote=str(folder), local=str(work), shuffle=True, batch_size=BATCH)
    loader = DataLoader(data, BATCH, num_workers=1, persistent_workers=True)
    return lambda epoch: (_targets(each["ids"]) for each in loader)


def hugging_face(folder: Path, work: Path) -> Batches:
    os.environ |= {"HF_HOME": str(work), "HF_DATASETS_OFFLINE": "1"}
    from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]

    def windows(documents: dict[str, list[str]]) -> dict[str, list[Any]]:
        stream = b"".join(each.encode() + bytes([END]) for each in documents["text"])
        return {"ids": list(_cut(np.frombuffer(stream, np.uint8).astype(np.int64)))}

    files = sorted(map(str, folder.iterdir()))
    data = load_dataset("json", data_files=files, streaming=True, split="train")
    data = data.map(windows, batched=True, remove_columns=["text"]).shuffle(seed=0, buffer_size=1000)
    loader = DataLoader(data.with_format("torch"), BATCH, num_workers=1)

    def batches(epoch: int) -> Iterator[torch.Tensor]:
        data.set_epoch(epoch)
        return (_targets(each["ids"]) for each in loader)

    return batches


def _targets(rows: torch.Tensor) -> torch.Tensor:
    """Return the inputs, after making the targets as a training would."""
    rows = rows.long()
    inputs, _ = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return inputs


LOADERS: dict[str, tuple[str, Callable[..., Batches], str, dict[str, Any]]] = {
    "TokenDataModule": ("text", ours, "", {}),
    "TokenDataModule, ids": ("ids", ours, "", {}),
    "LitData": ("chunks", litdata, "litdata", {}),
    "LitData, cached": ("chunks", litdata, "litdata", {"cached": True}),
    "Mosaic": ("mds", mosaic, "streaming", {}),
    "Hugging Face": ("text", hugging_face, "datasets", {}),
}
"""Row -> (folder on storage, loader, its package, options)."""


def read(topology: Topology, device: torch.device, gbps: float | None, row: str, source: str, work: str) -> Rows:
    """Return tokens, CPU-seconds, seconds and bytes on the storage link per epoch. The first includes the start."""
    import pytorch_lightning  # noqa: F401  # as any training does

    folder, make, _, more = LOADERS[row]
    rows, last = Rows(), (cpu_seconds(os.getpid()), time.perf_counter(), storage_sent())
    loader = make(Path(source, folder), Path(work), **more)
    for epoch in range(EPOCHS):
        tokens = 0
        for inputs in loader(epoch):
            tokens += inputs.numel()
        now = (cpu_seconds(os.getpid()), time.perf_counter(), storage_sent())
        cpu, seconds, sent = (b - a for a, b in zip(last, now, strict=True))
        rows.append({"tokens": tokens, "cpu_seconds": cpu, "seconds": seconds, "storage_bytes": sent})
        last = now
    return rows


# -- the driver --------------------------------------------------------------------------------------------------------


def measure(row: str, source: Path, work: Path, gbps: float) -> list[Rows]:
    """Return the epochs of each run."""
    runs = []
    for _ in range(RUNS):
        subprocess.run(["sync"], check=True)
        DROP_CACHES.write_text("3\n")
        found = on_clusters(read, row, str(source), str(work), clusters=["1x1"], gbps=[1.0], storage=(source, gbps))
        runs.append(found or [])
    return runs


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--shards", type=int, default=32, help="number of shards of a million tokens (default %(default)s)"
    )
    parser.add_argument("--gbps", type=float, default=0.2, help="rate of the storage node's link in Gbit/s")
    parser.add_argument("--rows", nargs="+", choices=list(LOADERS), metavar="ROW", help="default: all installed")
    options = parser.parse_args()
    wanted = [row for row, (*_, package, _) in LOADERS.items() if not package or find_spec(package)]
    systems: dict[str, list[Rows]] = {}
    with tempfile.TemporaryDirectory(prefix="data-tokens-") as folder:
        source, work = Path(folder, "storage"), Path(folder, "work")
        files = write_text(source, options.shards)
        writers = {"ids": write_ids, "chunks": write_chunks, "mds": write_mds}
        rows = options.rows or wanted
        for name in {LOADERS[row][0] for row in rows} - {"text"}:
            writers[name](files, source / name)
        for row in rows:
            work.mkdir()
            systems[row] = measure(row, source, work, options.gbps)
            shutil.rmtree(work)
        sizes = {each.name: sum(f.stat().st_size for f in each.rglob("*")) for each in source.iterdir()}
    record = {**surroundings("litdata", "mosaicml-streaming", "datasets"), "gbps": options.gbps}
    record |= {"on_storage_bytes": sizes, "context": CONTEXT, "batch": BATCH, "systems": systems}
    write(options.out / "data-tokens.json", record, table(record))


def table(record: dict[str, Any]) -> str:
    head = ["", "on storage, MB", "M tokens per CPU-second: epoch 1", "after a restart", "later", "MB read: run 1"]
    lines = []
    for row, runs in record["systems"].items():
        first, restarted = [runs[0][0]], [run[0] for run in runs[1:]]
        speeds = [_speed(each) for each in (first, restarted, [epoch for run in runs for epoch in run[1:]])]
        read = [sum(epoch["storage_bytes"] for epoch in run) / 1e6 for run in runs]
        lines.append([row, record["on_storage_bytes"][LOADERS[row][0]] / 1e6, *speeds, *read])
    return format_table([*head, *(f"run {number + 2}" for number in range(RUNS - 1))], lines)


def _speed(epochs: Rows) -> float:
    """Return millions of tokens per CPU-second."""
    return float(sum(each["tokens"] for each in epochs) / sum(each["cpu_seconds"] for each in epochs) / 1e6)


if __name__ == "__main__":
    main()

"""Token streams: windows of memory-mapped files of token ids.

A file ``<name>.bin`` contains the ids, uint16 or uint32, little-endian, one after the other. Beside it, ``<name>.json``
says ``{"dtype": "uint16", "vocab_size": 50257}``, and may say more. A folder of such files is read as shards, by name.
`prepare` writes such a file from text files; `TokenDataModuleMixin`, which does not import Lightning, makes batches.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.data.base import DataModuleMixin
from lightning_sparse.data.config import DataError
from lightning_sparse.data.peers.collectives import find_topology, on_all_ranks
from lightning_sparse.data.pipeline.batch import BatchRequest
from lightning_sparse.data.pipeline.loader import EvalLoader, TrainLoader
from lightning_sparse.data.pipeline.prefetch import prefetch_map
from lightning_sparse.data.pipeline.sampler import Indices, Sampler, SamplerConfig, evaluation_batches
from lightning_sparse.messages import described
from lightning_sparse.topology import Topology

BYTES = 256  # ids without a tokenizer
_BLOCK = 1 << 24
_PREFETCH = 4  # batches
Loader = TypeVar("Loader", TrainLoader, EvalLoader)
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids, as the JSON beside it describes it.

    Args:
        tokens: number of ids in the file.
        checksum: of the ids, 0 if unknown.
    """

    path: Path
    dtype: np.dtype[Any]
    vocab_size: int
    tokens: int
    checksum: int = 0


def files_of(path: str | Path) -> list[TokenFile]:
    """Return the file at `path`, or all ``*.bin`` in that folder, in order of their names.

    Raises:
        ValueError: if there is none, a file does not match its JSON, or the files have different vocabularies.
    """
    path = Path(path)
    paths = sorted(path.glob("*.bin")) if path.is_dir() else [path]
    if not paths or not path.exists():
        raise ValueError(
            f"{path} is neither a file of token ids nor a folder with *.bin files. Write one with `lightning-sparse "
            "tokens` or `lightning_sparse.data.tokens.prepare`."
        )
    files = [_described(each) for each in paths]
    for each in files:
        if each.vocab_size != files[0].vocab_size:
            raise ValueError(
                f"{each.path} has vocab_size {each.vocab_size}, but {files[0].path} has {files[0].vocab_size}: use one "
                "tokenizer for all files."
            )
    return files


def _described(path: Path) -> TokenFile:
    beside = path.with_suffix(".json")
    try:
        about = json.loads(beside.read_text(encoding="utf-8"))
        dtype, vocab_size = DTYPES[about["dtype"]], int(about["vocab_size"])
        said, checksum = about.get("tokens"), int(about.get("checksum", 0))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{beside} must describe {path.name}, as in "
            f'{{"dtype": "uint16", "vocab_size": 50257}}, with dtype one of {", ".join(DTYPES)} '
            f"({type(error).__name__}: {error})."
        ) from error
    size = path.stat().st_size
    tokens = size // dtype.itemsize
    if size % dtype.itemsize or said not in (None, tokens):
        raise ValueError(
            f"{path} has {size:,} bytes, which are not the {said or 'whole number of'} tokens of {dtype.name} that "
            f"{beside.name} describes: the file is incomplete, or of another run. Write it again."
        )
    if not 1 <= vocab_size <= np.iinfo(dtype).max + 1:
        raise ValueError(f"{beside}: vocab_size={vocab_size} must be between 1 and the {dtype.name} limit.")
    return TokenFile(path, dtype, vocab_size, tokens, checksum)


class TokenStream:
    """Fixed windows of token files. Window i of a file begins at token i * context; no window crosses two files.

    Args:
        path: file or folder of shards.
        context: number of tokens that a model sees; a window has one more, the last target.

    Raises:
        ValueError: as `files_of`; if no file is as long as a window.
    """

    def __init__(self, path: str | Path, context: int) -> None:
        self.path, self.context = Path(path), context
        self._files = files_of(path)
        self.vocab_size = self._files[0].vocab_size
        counts = np.array([max(0, each.tokens - 1) // context for each in self._files])
        self._ends = np.cumsum(counts)
        self._begins = self._ends - counts
        if not len(self):
            longest = max(each.tokens for each in self._files)
            raise ValueError(
                f"{path}: context={context} needs files of {context + 1:,} tokens or more, and the longest has "
                f"{longest:,}. Use a smaller context, or more text."
            )
        self._maps: list[NDArray[Any]] = [
            np.memmap(each.path, each.dtype, "r", shape=each.tokens) if each.tokens else np.zeros(0, each.dtype)
            for each in self._files
        ]

    def __len__(self) -> int:
        """Number of windows."""
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> str:
        """Hash of what a window's number stands for."""
        about = [(each.dtype.name, each.vocab_size, each.tokens, each.checksum) for each in self._files]
        return hashlib.blake2b(repr((self.context, about)).encode(), digest_size=16).hexdigest()

    def windows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return windows, int64 [B, context + 1].

        Raises:
            DataError: if an id is not in the vocabulary.
        """
        out = np.empty((len(indices), self.context + 1), np.int64)
        shards = np.searchsorted(self._ends, indices, side="right")
        starts = (indices - self._begins[shards]) * self.context
        for row, shard, start in zip(out, shards.tolist(), starts.tolist(), strict=True):
            row[:] = self._maps[shard][start : start + self.context + 1]
        if out.size and out.max() >= self.vocab_size:
            row_index = int(out.max(1).argmax())
            raise DataError(
                f"{self._files[int(shards[row_index])].path}: id {out.max()} is not below vocab_size="
                f"{self.vocab_size}. The JSON beside it belongs to another tokenizer, or the file is damaged."
            )
        return out


def prepare(
    texts: Sequence[str | Path],
    out: str | Path,
    tokenizer: Callable[[str], Sequence[int]] | None = None,
    vocab_size: int = BYTES,
) -> Path:
    """Write the ids of text files to ``<out>.bin`` and their description to ``<out>.json``.

    Args:
        texts: files, in order. Nothing is put between them.
        out: path of the file to write; ``.bin`` is added if it is missing.
        tokenizer: makes the ids of one file's text (UTF-8); default: its bytes are the ids.
        vocab_size: number of ids of the tokenizer.

    Returns:
        Path of the ``.bin``.

    Raises:
        ValueError: if there is no text, a text is not UTF-8, or an id is not in the vocabulary.
        OSError: if a file cannot be read or written.
    """
    out = Path(out) if Path(out).suffix == ".bin" else Path(f"{out}.bin")
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size={vocab_size} must be between 1 and 2**32: it is the number of ids.")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        about = _write(temporary, _ids(texts, tokenizer, vocab_size), vocab_size)
        if not about["tokens"]:
            raise ValueError(f"{len(texts)} text file(s) contain no tokens: give files with text.")
        out.with_suffix(".json").unlink(missing_ok=True)  # it would describe the new file wrongly
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    out.with_suffix(".json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    return out


def _write(file: Path, parts: Iterator[NDArray[np.int64]], vocab_size: int) -> dict[str, Any]:
    """Write ids; return their description."""
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    tokens = checksum = 0
    with open(file, "wb") as stream:
        for ids in parts:
            data = ids.astype(DTYPES[dtype]).tobytes()
            stream.write(data)
            tokens, checksum = tokens + len(ids), zlib.crc32(data, checksum)
    return {"dtype": dtype, "vocab_size": vocab_size, "tokens": tokens, "checksum": checksum}


def _ids(
    texts: Sequence[str | Path], tokenizer: Callable[[str], Sequence[int]] | None, vocab_size: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the ids of the texts, in parts."""
    for path in texts:
        if tokenizer is None:
            parts = _bytes_of(path)
        else:
            try:
                parts = iter([np.asarray(tokenizer(Path(path).read_text(encoding="utf-8")), np.int64)])
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 ({error}). Convert it, or leave out the tokenizer.") from error
        for ids in parts:
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise ValueError(
                    f"{path}: the tokenizer made ids from {ids.min()} to {ids.max()}, and vocab_size={vocab_size} "
                    "allows 0 and up to one less. Give the vocab_size of the tokenizer."
                )
            yield ids


def _bytes_of(path: str | Path) -> Iterator[NDArray[np.int64]]:
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            yield np.frombuffer(block, np.uint8).astype(np.int64)


class TokenDataModuleMixin(DataModuleMixin):
    """DataModule for files of token ids, such as `lightning_sparse.data.tokens.prepare` writes.

    A sample is a window of ``context + 1`` tokens. Windows follow one another, and their inputs do not overlap. Each
    epoch sees all of them once, in an order that (seed, epoch) determines. A resumed run continues with the next batch,
    also with other nodes. Files are memory-mapped: give each node a copy on a local disk.

    Batches are (inputs int64 [B, context], targets int64 [B, context]): the targets are the inputs, one token later.

    Args:
        train: a ``.bin`` file, or a folder of them.
        val: the same, to validate on.
        test: the same, to test on; default: `val`.
        context: tokens of a sample.
        batch_size: samples per device and step.
        val_fraction: validate on the end of `train`, this fraction of its windows, instead of on `val`.
        seed: seed of the order.

    Raises:
        ValueError: if an argument is out of range, or a file of `train` cannot be used.
    """

    def __init__(
        self,
        train: str | Path,
        val: str | Path | None = None,
        test: str | Path | None = None,
        context: int = 1024,
        batch_size: int = 8,
        val_fraction: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        SamplerConfig(batch_size=batch_size)
        if context < 1:
            raise ValueError(f"context={context} must be at least 1: it is the number of tokens of a sample.")
        if val_fraction is not None and not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction} must be between 0 and 1: it is a fraction of train.")
        if val is not None and val_fraction is not None:
            raise ValueError(f"val={str(val)!r} and val_fraction={val_fraction} exclude each other: omit one.")
        given = {"train": train, "val": val, "test": test}
        self._paths = {split: str(path) for split, path in given.items() if path is not None}
        self._context, self._val_fraction, self._seed = context, val_fraction, seed
        self.batch_size = batch_size
        self.vocab_size = files_of(train)[0].vocab_size
        """Number of token ids."""
        self._topology: Topology | None = None
        self._streams: dict[str, TokenStream] = {}
        self._loaders: dict[str, TrainLoader | EvalLoader] = {}

    def __str__(self) -> str:
        return described(type(self), {"train": self._paths["train"]})

    def setup(self, stage: str) -> None:
        """Map the files. A collective.

        Raises:
            ValueError: if a file cannot be used, or differs between ranks.
        """
        self._close()

        def opened() -> dict[str, str]:
            self._streams = {split: TokenStream(path, self._context) for split, path in self._paths.items()}
            for stream in self._streams.values():
                if stream.vocab_size != self.vocab_size:
                    raise ValueError(
                        f"{stream.path} has vocab_size {stream.vocab_size}, but train={self._paths['train']!r} has "
                        f"{self.vocab_size}: use one tokenizer for all files."
                    )
            return {split: stream.fingerprint for split, stream in self._streams.items()}

        self._topology = find_topology(*self._position)
        fingerprints = on_all_ranks(opened)
        for rank, each in enumerate(fingerprints):
            for split, fingerprint in each.items():
                if fingerprint != fingerprints[0][split]:
                    raise ValueError(
                        f"{split}={self._paths[split]!r} has other tokens on rank {rank} than on rank 0: copy the "
                        "same files to all nodes."
                    )

    def train_dataloader(self) -> TrainLoader:
        """Random windows of this rank."""
        stream, topology = self._opened("train")
        sampler = Sampler(self._samples("train"), lambda nodes: np.arange(len(stream)) % nodes, self._sampler(topology))
        loader = TrainLoader(
            sampler,
            TokenPipeline(stream, pin=self._device.type == "cuda"),
            rank=(topology.node_index, topology.device_index),
            fingerprint=stream.fingerprint,
            fixed=self._fixed,
            on_resume=self._correct_batch_count,
        )
        return self._resume(self._replace("train", loader))

    def val_dataloader(self) -> EvalLoader:
        """This rank's share of the windows to validate on, in order.

        Raises:
            ValueError: if there are none.
        """
        return self._eval_loader("val")

    def test_dataloader(self) -> EvalLoader:
        """This rank's share of the windows to test on, in order."""
        return self._eval_loader("test" if "test" in self._paths else "val")

    predict_dataloader = test_dataloader

    def teardown(self, stage: str) -> None:
        """Unmap the files."""
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Unmap the files."""
        self._close()

    def _eval_loader(self, split: str) -> EvalLoader:
        held_out = split == "val" and self._val_fraction is not None
        if split not in self._paths and not held_out:
            raise ValueError(
                "there are no tokens to validate on: give val='val.bin', or validate on the end of train: "
                "val_fraction=0.05 (--data.val_fraction=0.05)."
            )
        stream, topology = self._opened("train" if held_out else split)
        rank = (topology.node_index, topology.device_index)
        owners = np.arange(len(stream)) % topology.num_nodes
        batches = evaluation_batches(self._samples(split), owners, self._sampler(topology), *rank)
        return self._replace(split, EvalLoader(batches, TokenPipeline(stream, pin=self._device.type == "cuda")))

    def _samples(self, split: str) -> Indices:
        """Return the windows of a split, in order."""
        fraction = self._val_fraction
        if split == "test" or fraction is None:
            return np.arange(len(self._streams[split]))
        count = len(self._streams["train"])
        if count < 2:
            raise ValueError(f"val_fraction={fraction}: {count} window(s) are too few to split; at least 2 are needed.")
        first = count - min(count - 1, max(1, round(fraction * count)))
        return np.arange(first, count) if split == "val" else np.arange(first)

    def _sampler(self, topology: Topology) -> SamplerConfig:
        devices = tuple(len(node) for node in topology.nodes)
        return SamplerConfig(batch_size=self.batch_size, devices=devices, shuffle="global", seed=self._seed)

    def _opened(self, split: str) -> tuple[TokenStream, Topology]:
        if self._topology is None:
            raise ValueError("TokenDataModule has no loaders before setup(): call it, or use a Trainer.")
        return self._streams[split], self._topology

    def _replace(self, split: str, loader: Loader) -> Loader:
        if split in self._loaders:  # Lightning requests a new loader: stop the old one
            self._loaders[split].close()
        self._loaders[split] = loader
        return loader

    def _close(self) -> None:
        for loader in self._loaders.values():
            loader.close()
        self._loaders, self._streams, self._topology = {}, {}, None
        self._forget_loader()


class TokenPipeline:
    """Makes batches of windows, in a thread: pages of the files are read from disk when they are used.

    Args:
        pin: use pinned memory, for asynchronous copies to a GPU.
    """

    def __init__(self, stream: TokenStream, *, pin: bool = False) -> None:
        self._stream, self._pin = stream, pin

    def run(self, requests: Iterable[BatchRequest]) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Yield (inputs, targets), int64 [B, context] each, in the order of requests."""
        return prefetch_map(self._make, requests, _PREFETCH, "tokens")

    def close(self) -> None:
        """There is nothing to free."""

    def _make(self, request: BatchRequest) -> tuple[Tensor, Tensor]:
        windows = torch.from_numpy(self._stream.windows(request.indices))
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        return (inputs.pin_memory(), targets.pin_memory()) if self._pin else (inputs, targets)

"""Token streams: windows of memory-mapped files of token ids.

A file ``<name>.bin`` contains the ids, uint16 or uint32, little-endian, one after the other. Beside it, ``<name>.json``
says ``{"dtype": "uint16", "vocab_size": 50257}``, and may say more. A folder of such files is read as shards, by name.
`prepare` writes such a file from text files, and `shards` makes them of other sources. `Mixture` joins several streams;
`TokenDataModuleMixin`, which does not import Lightning, makes batches.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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
from lightning_sparse.data.rng import shuffled
from lightning_sparse.data.shards import TokenSource, is_mapped_in_place, prepared
from lightning_sparse.data.text import BYTES, DTYPES, within, write_ids
from lightning_sparse.messages import described
from lightning_sparse.topology import Topology

_BLOCK = 1 << 24
_PREFETCH = 4  # batches
_MIXTURE = 4  # what is drawn from the seed: beside those of `sampler.py`
Loader = TypeVar("Loader", TrainLoader, EvalLoader)


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
            "tokens` or `lightning_sparse.data.tokens.prepare`; or give cache_dir, a local folder, to use text or "
            "network storage."
        )
    return _of_one_tokenizer(paths)


def _of_one_tokenizer(paths: Sequence[Path]) -> list[TokenFile]:
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
        files: the shards, if `path` is where they come from.

    Raises:
        ValueError: as `files_of`; if no file is as long as a window.
    """

    def __init__(self, path: str | Path, context: int, files: Sequence[Path] | None = None) -> None:
        self.path, self.context = path, context
        self._files = files_of(path) if files is None else _of_one_tokenizer(files)
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

    def windows(self, indices: NDArray[np.int64], epoch: int = 0) -> NDArray[np.int64]:
        """Return windows, int64 [B, context + 1], the same in every epoch.

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


class Mixture:
    """Windows of several streams, in proportion to their weights.

    An epoch has as many windows as it takes to use one stream up. The others go on in the next epoch where they
    stopped, and start over at their end: each window of a stream is used once before any is used again.

    Args:
        weights: of the streams, above 0; only their ratios matter.
        seed: seed of the order in which a stream is used up.
    """

    def __init__(self, streams: Sequence[TokenStream], weights: Sequence[float], seed: int) -> None:
        self._streams = streams
        lengths = np.array([len(each) for each in streams])
        shares = np.array(weights) / sum(weights)
        self._counts = np.round(shares * (lengths / shares).min()).clip(1, lengths).astype(np.int64)  # of an epoch
        self._ends = np.cumsum(self._counts)
        self._orders = [shuffled(np.arange(each), seed, number, _MIXTURE) for number, each in enumerate(lengths)]
        self._about = (self._counts.tolist(), seed)

    def __len__(self) -> int:
        """Number of windows of an epoch."""
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> str:
        """Hash of what a number stands for in each epoch."""
        about = (*(each.fingerprint for each in self._streams), *self._about)
        return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()

    def windows(self, indices: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return windows of an epoch, int64 [B, context + 1].

        Raises:
            DataError: as `TokenStream.windows`.
        """
        out = np.empty((len(indices), self._streams[0].context + 1), np.int64)
        numbers = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(numbers).tolist():
            here, order, count = numbers == number, self._orders[number], int(self._counts[number])
            places = indices[here] - (self._ends[number] - count) + epoch * count
            out[here] = self._streams[number].windows(order[places % len(order)])
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
        about = write_ids(temporary, _ids(texts, tokenizer, vocab_size), vocab_size)
        if not about["tokens"]:
            raise ValueError(f"{len(texts)} text file(s) contain no tokens: give files with text.")
        out.with_suffix(".json").unlink(missing_ok=True)  # it would describe the new file wrongly
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    out.with_suffix(".json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    return out


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
            yield within(ids, vocab_size, path)


def _bytes_of(path: str | Path) -> Iterator[NDArray[np.int64]]:
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            yield np.frombuffer(block, np.uint8).astype(np.int64)


class TokenDataModuleMixin(DataModuleMixin):
    """DataModule for token ids, and for text, which it tokenises once.

    A sample is a window of ``context + 1`` tokens. Windows follow one another, and their inputs do not overlap. Each
    epoch sees all of them once, in an order that (seed, epoch) determines. A resumed run continues with the next batch,
    also with other nodes.

    Files ``.bin`` on a disk of the node, such as `lightning_sparse.data.tokens.prepare` writes, are memory-mapped where
    they are. Other sources need `cache_dir`: each host reads each shard from storage once, tokenises it if it is text,
    and keeps its ids there. Shards of ids are ``.bin`` and ``.npy``, shards of text ``.txt``, ``.jsonl``, ``.tar`` and
    ``.parquet``.

    Batches are (inputs int64 [B, context], targets int64 [B, context]): the targets are the inputs, one token later.

    Args:
        train: a file, or a folder of shards: a path or an fsspec URL. Or several with weights, as
            ``{"s3://bucket/web": 0.7, "/data/books": 0.3}``: an epoch takes windows of each in this proportion, and
            ends when all windows of one were used; the others go on in the next epoch.
        val: a file, or a folder of shards, to validate on.
        test: the same, to test on; default: `val`.
        context: tokens of a sample.
        batch_size: samples per device and step.
        val_fraction: validate on the end of `train`, this fraction of its windows, instead of on `val`.
        seed: seed of the order.
        cache_dir: folder on a local disk of each node, for the ids of text and of network storage. Runs may share it.
        tokenizer: of text: ``"bytes"``, ``"tiktoken:<encoding>"`` or ``"tokenizers:<path of tokenizer.json>"``.
        vocab_size: number of ids; needed for ``.npy``; default: that of the tokenizer, or of the JSON beside ``.bin``.
        storage_timeout: seconds to wait for storage that does not respond before the run fails.
        storage_options: arguments for fsspec to open a URL, such as ``{"endpoint_url": "http://minio:9000"}``.

    Raises:
        ValueError: if an argument is out of range, or a file of `train` cannot be used.
    """

    def __init__(
        self,
        train: str | Path | dict[str, float],
        val: str | Path | None = None,
        test: str | Path | None = None,
        context: int = 1024,
        batch_size: int = 8,
        val_fraction: float | None = None,
        seed: int = 0,
        *,
        cache_dir: str | None = None,
        tokenizer: str = "bytes",
        vocab_size: int | None = None,
        storage_timeout: float = 300.0,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        SamplerConfig(batch_size=batch_size)
        _check_options(context, val, val_fraction, vocab_size)
        self._weights = _weights_of(train, val_fraction)
        self._paths = {split: str(path) for split, path in (("val", val), ("test", test)) if path is not None}
        self._context, self._val_fraction, self._seed = context, val_fraction, seed
        self.batch_size = batch_size
        self._sources: dict[str, TokenSource] = {}  # by path
        for path in (*self._weights, *self._paths.values()):
            if cache_dir is not None and not is_mapped_in_place(path):
                options = storage_options if "://" in path else None
                self._sources[path] = TokenSource.of(
                    path, cache_dir, tokenizer, vocab_size, storage_timeout=storage_timeout, storage_options=options
                )
        self._vocab_size = vocab_size
        for path in sorted(self._weights.keys() - self._sources.keys()):
            own = files_of(path)[0].vocab_size
            if self._vocab_size not in (None, own):
                raise ValueError(f"{path} has vocab_size {own}, not {self._vocab_size}: use one tokenizer for all.")
            self._vocab_size = own
        self._topology: Topology | None = None
        self._streams: dict[str, TokenStream | Mixture] = {}
        self._loaders: dict[str, TrainLoader | EvalLoader] = {}

    @property
    def vocab_size(self) -> int:
        """Number of token ids. Available before setup, to create the model: lists the shards, if it depends on them."""
        if self._vocab_size is None:
            source = self._sources[next(iter(self._weights))]
            self._vocab_size = source.size_of_vocabulary(source.listed())
        return self._vocab_size

    def __str__(self) -> str:
        return described(type(self), {"train": ", ".join(self._weights)})

    def setup(self, stage: str) -> None:
        """Map the files, after those that are missing in the cache were made. A collective.

        Raises:
            ValueError: if a file cannot be used, or differs between ranks.
            DataError: if storage or the cache folder cannot be used.
        """
        self._close()
        self._topology = topology = find_topology(*self._position)
        if len(set(on_all_ranks(lambda: tuple(path in self._sources for path in self._all_paths)))) > 1:
            raise ValueError(f"{', '.join(self._all_paths)}: some nodes have the files, others do not.")
        made = {path: prepared(source, topology) for path, source in self._sources.items()}
        fingerprints = on_all_ranks(lambda: self._open(made))
        for rank, each in enumerate(fingerprints):
            for path, own, first in zip(self._all_paths, each, fingerprints[0], strict=True):
                if own != first:
                    raise ValueError(
                        f"{path} has other tokens on rank {rank} than on rank 0: copy the same files to all nodes."
                    )

    @property
    def _all_paths(self) -> tuple[str, ...]:
        return (*self._weights, *self._paths.values())

    def _open(self, made: Mapping[str, Sequence[Path]]) -> list[str]:
        """Map the files; return the fingerprint of each path, in one order on all ranks, since paths may differ.

        Args:
            made: files in the cache, of those paths that are not mapped in place.
        """
        streams = {path: TokenStream(path, self._context, made.get(path)) for path in self._all_paths}
        for path, stream in streams.items():
            if stream.vocab_size != self.vocab_size:
                raise ValueError(
                    f"{path} has vocab_size {stream.vocab_size}, but train={next(iter(self._weights))!r} has "
                    f"{self.vocab_size}: use one tokenizer for all files."
                )
        self._streams = {split: streams[path] for split, path in self._paths.items()}
        mixed = [streams[path] for path in self._weights]
        self._streams["train"] = mixed[0] if len(mixed) == 1 else Mixture(mixed, [*self._weights.values()], self._seed)
        return [streams[path].fingerprint for path in self._all_paths]

    def train_dataloader(self) -> TrainLoader:
        """Random windows of this rank."""
        stream, topology = self._opened("train")
        sampler = Sampler(self._samples("train"), lambda nodes: np.arange(len(stream)) % nodes, self._sampler(topology))
        loader = TrainLoader(
            sampler,
            TokenPipeline(stream, pin=self._device.type == "cuda", fixed=self._fixed),
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

    def _opened(self, split: str) -> tuple[TokenStream | Mixture, Topology]:
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


def _check_options(context: int, val: object, val_fraction: float | None, vocab_size: int | None) -> None:
    """Raise ValueError if an option of `TokenDataModuleMixin` is out of range."""
    if context < 1:
        raise ValueError(f"context={context} must be at least 1: it is the number of tokens of a sample.")
    if val_fraction is not None and not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction} must be between 0 and 1: it is a fraction of train.")
    if val is not None and val_fraction is not None:
        raise ValueError(f"val={str(val)!r} and val_fraction={val_fraction} exclude each other: omit one.")
    if vocab_size is not None and not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size={vocab_size} must be between 1 and 2**32: it is the number of ids.")


def _weights_of(train: str | Path | Mapping[str, float], val_fraction: float | None) -> dict[str, float]:
    """Return the weight of each path of `train`."""
    if not isinstance(train, Mapping):
        return {str(train): 1.0}
    if not train:
        raise ValueError("train={} names no source: give a path, or paths with weights.")
    for path, weight in train.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ValueError(
                f"train: the weight {weight!r} of {path} must be a finite number above 0: omit a source that is not "
                "used."
            )
    if val_fraction is not None and len(train) > 1:
        raise ValueError(f"val_fraction={val_fraction} is the end of one source, and train has {len(train)}: use val.")
    return {str(path): float(weight) for path, weight in train.items()}


class TokenPipeline:
    """Makes batches of windows, in a thread: pages of the files are read from disk when they are used.

    Args:
        pin: use pinned memory, for asynchronous copies to a GPU.
        fixed: use the windows of epoch 0 in every epoch.
    """

    def __init__(self, stream: TokenStream | Mixture, *, pin: bool = False, fixed: bool = False) -> None:
        self._stream, self._pin, self._fixed = stream, pin, fixed

    def run(self, requests: Iterable[BatchRequest]) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Yield (inputs, targets), int64 [B, context] each, in the order of requests."""
        return prefetch_map(self._make, requests, _PREFETCH, "tokens")

    def close(self) -> None:
        """There is nothing to free."""

    def _make(self, request: BatchRequest) -> tuple[Tensor, Tensor]:
        windows = torch.from_numpy(self._stream.windows(request.indices, 0 if self._fixed else request.epoch))
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        return (inputs.pin_memory(), targets.pin_memory()) if self._pin else (inputs, targets)

"""`lightning-sparse cache warm | info | clear`."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from typing import Any

from lightning_sparse.data.cache.commands import caches, clear, warm_splits
from lightning_sparse.data.cache.store import Placement
from lightning_sparse.data.config import CacheConfig


def declare(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    fill = actions.add_parser("warm", help="copy a data set to local disk before a run; continues if interrupted")
    fill.add_argument("source", help="folder on network storage: a path or an fsspec URL")
    fill.add_argument("cache_dir", help="folder on a local disk of this node")
    fill.add_argument(
        "--splits", nargs="+", metavar="NAME", help="splits to copy (default: train, and val and test if they exist)"
    )
    fill.add_argument("--nodes", type=int, default=1, metavar="M", help="copy only this node's share of M nodes")
    fill.add_argument(
        "--node", type=int, default=0, metavar="I", help="index of this node, from 0 (default 0; SLURM: $SLURM_NODEID)"
    )
    fill.add_argument("--seed", type=int, default=0, help="seed of the run, which decides the samples of each node")
    fill.add_argument("--disk-gb", type=float, metavar="GB", help="size limit per split")
    fill.add_argument("--threads", type=int, default=4, metavar="N", help="reader threads (default %(default)s)")
    skip = "'skip' records corrupt files, so that later runs with on_corrupt='skip' do not read them"
    fill.add_argument("--on-corrupt", choices=("raise", "skip"), default="raise", help=skip)
    options = "arguments for fsspec to open the source, as in CachedImageDataModule"
    fill.add_argument("--storage-options", type=_options, metavar="JSON", help=options)
    fill.set_defaults(run=_warm)
    fill.add_argument(
        "--bytes", action="store_true", help="cache files of any kind, for CachedDataModule (default: images)"
    )
    named = "CSV or Parquet file that names the samples of a split, as in the option lists"
    fill.add_argument("--list", dest="lists", action="append", type=_pair, metavar="SPLIT=FILE", help=named)
    fill.add_argument("--member", metavar="EXT", help="extension of the shard member that contains the sample")
    fill.add_argument("--prune", action="store_true", help="first remove files that the source no longer has")
    verify = "read the source again; name and replace cached files that differ from it"
    fill.add_argument("--verify", action="store_true", help=verify)
    info = actions.add_parser("info", help="list the caches in a folder")
    info.add_argument("cache_dir", help="folder that contains the caches")
    info.set_defaults(run=_info)
    remove = actions.add_parser("clear", help="remove the caches in a folder")
    remove.add_argument("cache_dir", help="folder that contains the caches")
    remove.add_argument("--source", help="remove only the cache of this data set")
    remove.set_defaults(run=_clear)


def _options(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        options = json.loads(text)
        if isinstance(options, dict):
            return options
    raise argparse.ArgumentTypeError(f'{text!r} must be JSON, such as {{"key": 1}}')


def _pair(text: str) -> tuple[str, str]:
    split, mark, file = text.partition("=")
    if not mark:
        raise argparse.ArgumentTypeError(f"{text!r} is not SPLIT=FILE, such as train=train.csv")
    return split, file


def _warm(arguments: argparse.Namespace) -> int:
    config = CacheConfig(
        source=arguments.source,
        cache_dir=arguments.cache_dir,
        disk_gb=arguments.disk_gb,
        on_corrupt=arguments.on_corrupt,
        seed=arguments.seed,
        storage_options=arguments.storage_options,
        format="bytes" if arguments.bytes else "auto",
        member=arguments.member,
        lists=dict(arguments.lists) if arguments.lists else None,
    )
    placement = Placement(arguments.node, arguments.nodes)
    reports = warm_splits(
        config,
        arguments.splits,
        placement=placement,
        threads=arguments.threads,
        prune=arguments.prune,
        verify=arguments.verify,
    )
    for report in reports:
        print(report.describe())
        for path, reason in report.corrupt:
            print(f"  {path}: {reason}")
        for path in report.differing:
            print(f"  {path}: replaced, because the cached file differed from the source")
    corrupt = any(report.corrupt for report in reports) and arguments.on_corrupt == "raise"
    return int(corrupt or any(report.differing for report in reports))


def _info(arguments: argparse.Namespace) -> int:
    print("\n".join(cache.describe() for cache in caches(arguments.cache_dir)) or "no caches found")
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    removed = clear(arguments.cache_dir, arguments.source)
    for cache in removed:
        print(f"removed {cache.folder}, the cache of {cache.source}")
    if not removed:
        others = ", ".join(sorted({cache.source for cache in caches(arguments.cache_dir)}))
        print(f"no cache of {arguments.source} found. There are caches of: {others}" if others else "no caches found")
    return 0

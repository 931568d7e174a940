"""`lightning-sparse cache warm | info | clear`."""

from __future__ import annotations

import argparse

from lightning_sparse.cli.common import Subcommands


def add(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser("cache", help="fill, look at and remove the local disk cache of a data set")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    fill = actions.add_parser("warm", help="bring a data set to local disk before a run; goes on where it was ended")
    fill.add_argument("source", help="the image folder on network storage: a path or an fsspec URL")
    fill.add_argument("cache_dir", help="a folder on a disk of this node")
    fill.add_argument("--splits", nargs="+", metavar="NAME", help="default: train, and val if there is one")
    fill.add_argument("--nodes", type=int, default=1, metavar="M", help="fetch only this node's part of M")
    fill.add_argument("--node", type=int, default=0, metavar="I", help="which part, from 0 (SLURM: $SLURM_NODEID)")
    fill.add_argument("--seed", type=int, default=0, help="that the run will use; it decides which node owns what")
    fill.add_argument("--disk-gb", type=float, metavar="GB", help="stop at this size of a split")
    fill.add_argument("--threads", type=int, default=4, metavar="N", help="that read and decode (default %(default)s)")
    fill.add_argument("--on-corrupt", choices=("raise", "skip"), default="raise", help="skip: note damaged files")
    fill.set_defaults(run=_warm)
    info = actions.add_parser("info", help="what a cache folder holds")
    info.add_argument("cache_dir")
    info.set_defaults(run=_info)
    clear = actions.add_parser("clear", help="remove what a cache folder holds")
    clear.add_argument("cache_dir")
    clear.add_argument("--source", help="of this data set only")
    clear.set_defaults(run=_clear)


def _warm(arguments: argparse.Namespace) -> int:
    from lightning_sparse.data.cache.placement import Placement
    from lightning_sparse.data.cache.warm import warm_splits
    from lightning_sparse.data.config import CacheConfig

    config = CacheConfig(
        source=arguments.source,
        cache_dir=arguments.cache_dir,
        disk_gb=arguments.disk_gb,
        on_corrupt=arguments.on_corrupt,
        seed=arguments.seed,
    )
    place = Placement(arguments.node, arguments.nodes)
    reports = warm_splits(config, arguments.splits, place=place, threads=arguments.threads)
    for report in reports:
        print(report.describe())
        for path, reason in report.damaged:
            print(f"  {path}: {reason}")
    return int(any(report.damaged for report in reports) and arguments.on_corrupt == "raise")


def _info(arguments: argparse.Namespace) -> int:
    from lightning_sparse.data.cache.inventory import caches

    print("\n".join(each.describe() for each in caches(arguments.cache_dir)) or "nothing is cached here")
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    from lightning_sparse.data.cache.inventory import clear

    for each in clear(arguments.cache_dir, arguments.source):
        print(f"removed {each.folder} of {each.source}")
    return 0

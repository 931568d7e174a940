"""Check whether a change of the code changes any bit of trained weights, by digests of short runs.

    python -m benchmarks.digests before.json                          # before the change; some minutes
    python -m benchmarks.digests after.json --compare before.json     # lists the cases that differ; exit code 1 if any
    python -m benchmarks.digests some.json --only "2x2 sparse"        # cases whose names begin so; or updates, pto, ...

Real Gloo ranks train small models, one case of digests_cases.py at a time. Cases with DDP and the hook train 20 steps,
for each path, dtype, topology and event. Other cases cover updates, FSDP2, the sharded step, and checkpoints of a
Trainer. The digest of a case covers all parameters after each step and the optimizer's final state, on all ranks;
``CASE / residual`` covers the residuals. -0.0 counts as 0.0. If all ranks refuse a case, the digest is their error.

Digests depend on the type of CPU and the version of torch, so make both on one machine. ``_paths`` lists how many
entries took which path.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore  # torch.distributed re-exports it without declaring it
from torch.multiprocessing.spawn import spawn

from benchmarks.digests_cases import TOPOLOGIES, Case, cases
from benchmarks.digests_engines import ENGINES, Trail
from lightning_sparse.topology import Topology, with_groups

TIMEOUT = timedelta(minutes=5)  # machines may be busy
RESIDUAL = " / residual"
Digests = dict[str, Any]


def rank_main(rank: int, world_size: int, chosen: list[Case], folder: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = FileStore(f"{folder}/store{world_size}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    topologies: dict[str, Topology] = {}
    results: Digests = {"_paths": {}}
    for case in chosen:
        if case.topology not in topologies:
            topologies[case.topology] = with_groups(TOPOLOGIES[case.topology])
        trail, everyone = Trail(), [("", "")] * world_size
        try:
            ENGINES[case.engine](case, topologies[case.topology], trail)
            told = trail.digest()
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            told = f"{type(error).__name__}: {error}"
        dist.all_gather_object(everyone, (told, trail.residual))
        digests, residuals = zip(*everyone, strict=True)
        refused = len(set(digests)) == 1 and ":" in digests[0]
        results[case.title] = digests[0] if refused else joined(digests)
        if all(residuals):
            results[case.title + RESIDUAL] = joined(residuals)
        results["_paths"][case.title] = trail.paths
    if rank == 0:
        Path(folder, f"results{world_size}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def joined(digests: tuple[str, ...]) -> str:
    """Return one digest of all ranks."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def run(chosen: list[Case]) -> Digests:
    """Run all cases of a world size with one start of its ranks."""
    results: Digests = {"_paths": {}, "_of": f"torch {torch.__version__}, {platform.machine()}"}
    with tempfile.TemporaryDirectory(prefix="digests-") as folder:
        for world_size in sorted({case.world_size for case in chosen}):
            own, begun = [case for case in chosen if case.world_size == world_size], time.perf_counter()
            spawn(rank_main, (world_size, own, folder), nprocs=world_size)  # type: ignore[no-untyped-call]
            found = json.loads(Path(folder, f"results{world_size}.json").read_text())
            results["_paths"].update(found.pop("_paths"))
            results.update(found)
            print(f"{world_size} rank(s): {len(own)} cases in {time.perf_counter() - begun:.0f} s", flush=True)
    return results


def compare(ours: Digests, other: Digests, titles: list[str]) -> bool:
    """Report which digests differ. A residual that is missing on one side is reported, but is not a difference."""
    if ours["_of"] != other.get("_of"):
        print(f"made with {ours['_of']}, and the others with {other.get('_of')}: they may differ by that alone")
    names = [name for title in titles for name in (title, title + RESIDUAL)]
    missing = [name for name in names if (name in ours) != (name in other)]
    differing = [name for name in names if name in ours and name in other and ours[name] != other[name]]
    differing += [name for name in missing if not name.endswith(RESIDUAL)]
    for name in differing:
        print(f"differs: {name}" + (f": {ours[name]}" if ":" in str(ours.get(name)) else ""))
    absent = [name for name in missing if name.endswith(RESIDUAL)]
    if absent:
        print(f"{len(absent)} residuals were found on one side alone, and are not compared")
    print(f"{len(differing)} of {len([n for n in names if n in ours or n in other])} digests differ")
    return not differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the .json file to write")
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="compare with this earlier .json file")
    parser.add_argument("--only", default="", metavar="NAME", help="only cases whose names begin with NAME")
    given = parser.parse_args()
    # DDP warns of find_unused_parameters in the ranks' first step
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    chosen = [case for case in cases() if case.title.startswith(given.only)]
    if not chosen:
        parser.error(f"no case begins with {given.only!r}")
    results = run(chosen)
    given.out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    refused = [title for title in (case.title for case in chosen) if ":" in results[title]]
    for title in refused:
        print(f"refused: {title}: {results[title]}")
    if given.compare and not compare(results, json.loads(given.compare.read_text()), [each.title for each in chosen]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

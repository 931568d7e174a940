"""Does a change of the code change a bit of what is trained? Digests of short runs, to be held against earlier ones.

    python benchmarks/digests.py before.json                          # with the code as it was; some minutes
    python benchmarks/digests.py after.json --compare before.json     # names the cases that differ; exit code 1 if any
    python benchmarks/digests.py some.json --only "2x2 sparse"        # cases whose names begin so; or updates, pto, ...

Real Gloo ranks train a small model for 20 steps through DDP and the hook, once a case of digests_cases.py: each path,
dtype, topology, and each thing that may become of a round. The digest of a case is of all parameters after each step
and of the optimizer's state at the end, of all ranks; ``CASE / residual`` is that of what waits in residuals then,
where the code as it is lets them be found. -0.0 counts as 0.0. A case that all ranks refuse has what they said for a
digest. Cases of digests_engines.py do as much with updates, FSDP2, the shared step, and checkpoints of a Trainer.

Digests are those of one kind of processor and one version of torch: both runs on one machine. ``_paths`` says, for
information, how many entries took which path.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore  # torch.distributed re-exports it unannounced
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: which lightning_sparse is tested, PYTHONPATH may say

from benchmarks.digests_cases import SMALL_MB, TOPOLOGIES, Case, Net, batch, cases, optimizer_of, raw
from benchmarks.digests_engines import EngineCase, engine_cases

STEPS, BAD_STEP = 20, 8
TIMEOUT = timedelta(minutes=5)  # machines may be busy
RESIDUAL = " / residual"
Digests = dict[str, Any]
AnyCase = Case | EngineCase


# -- the code under test, by whatever names it has ---------------------------------------------------------------------


def library() -> Any:
    """Where HierConfig, HierState and hier_hook are."""
    try:
        return importlib.import_module("lightning_sparse.gradients")
    except ModuleNotFoundError:
        return importlib.import_module("lightning_sparse.strategy")


def inside(held: Any, has: Callable[[Any], bool], depth: int = 4) -> Iterator[Any]:
    """The objects of the library that a state holds and that look so, each once."""
    seen: set[int] = set()
    todo = [(held, 0)]
    while todo:
        each, level = todo.pop(0)
        if id(each) in seen or not type(each).__module__.startswith("lightning_sparse"):
            continue
        seen.add(id(each))
        if has(each):
            yield each
        if level < depth:
            names = [*getattr(each, "__dict__", {}), *getattr(type(each), "__slots__", ())]
            values = [getattr(each, name, None) for name in names]
            values += [one for value in values if isinstance(value, (list, tuple)) for one in value]
            todo += [(value, level + 1) for value in values]


def residual_digest(state: Any, hasher: Any) -> str:
    """Of what waits in residuals, and in velocities: nothing and zeros are the same. Empty if they cannot be found."""
    stores = list(inside(state, lambda each: all(isinstance(getattr(each, n, None), dict) for n in STORE)))
    if not stores:
        return ""
    found = []
    for store in stores:
        one = hasher()
        for group in sorted(store.current, key=lambda each: each.names):
            if torch.count_nonzero(store.current[group]):
                one.update(repr(group.names).encode())
                one.update(raw(store.current[group]))
        for name in sorted(store.parked):
            if torch.count_nonzero(store.parked[name]):
                one.update(name.encode())
                one.update(raw(store.parked[name]))
        found.append(one.hexdigest())
    return hasher("".join(sorted(set(found))).encode()).hexdigest()  # type: ignore[no-any-return]


STORE = ("current", "parked")


def paths_of(state: Any) -> dict[str, int]:
    """Entries by the path that they took; nothing if that cannot be found."""
    found = next(inside(state, lambda each: isinstance(getattr(each, "paths", None), Counter)), None)
    return {} if found is None else {str(path): count for path, count in found.paths.items()}


def set_loss_scale(state: Any, scale: Callable[[], Tensor | None]) -> None:
    """Where the reduction asks for it."""
    for each in inside(state, lambda each: hasattr(each, "loss_scale")):
        each.loss_scale = scale
        return
    raise LookupError("the state asks for no loss scale")


def make_inside_slow(state: Any) -> None:
    """The network inside a node costs a second a byte from now on, so that "auto" all-reduces over all ranks."""
    for choices in inside(state, lambda each: dataclasses.is_dataclass(getattr(each, "rates", None))):
        slow = dataclasses.replace(choices.rates.intra, seconds_per_byte=1.0)
        choices.rates = dataclasses.replace(choices.rates, intra=slow)
        return
    raise LookupError("the state holds no rates")


# -- one run -----------------------------------------------------------------------------------------------------------


def train(case: Case, topology: Any) -> tuple[str, str, dict[str, int]]:
    """Digests of this rank, and the entries by path."""
    code, rank = library(), dist.get_rank()
    module = Net().to(case.dtype)
    config = code.HierConfig(**{"density": 0.05, "warmup_epochs": 0, **case.config})
    unused = bool(case.ddp.get("find_unused_parameters", False))
    state = code.HierState(module, config, topology, find_unused_parameters=unused)
    ddp = wrap(case, module, state)
    optimizer = optimizer_of(case.optimizer, module)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5, enabled="scaler" in case.events)
    if scaler.is_enabled():
        set_loss_scale(state, scaler._get_scale_async)
    if case.watch:
        state.watch([optimizer])
    hasher = hashlib.sha256()
    for step in range(STEPS):
        if "epochs" in case.events:
            state.epoch = step // 3
        if step == STEPS // 2:
            if "rewrap" in case.events:
                ddp = wrap(case, module, state, bucket_cap_mb=3 * SMALL_MB)
            if "flat" in case.events:
                make_inside_slow(state)
        optimizer.zero_grad()
        backward(case, ddp, state, scaler, step, rank)
        dropped = drop(case, module, step)
        if not (dropped and "throw away" in case.events):
            scaler.step(optimizer)
        scaler.update() if scaler.is_enabled() else None
        for parameter in module.parameters():
            hasher.update(raw(parameter))
    if not all(bool(p.isfinite().all()) for p in module.parameters()):
        raise FloatingPointError("parameters are not finite: the case says nothing")
    state.before_backward()  # settles the last round
    for parameter in module.parameters():
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            hasher.update(name.encode())
            hasher.update(raw(value) if isinstance(value, Tensor) else repr(value).encode())
    residual, paths = residual_digest(state, hashlib.sha256), paths_of(state)
    state.detach()
    return hasher.hexdigest(), residual, paths


def wrap(case: Case, module: nn.Module, state: Any, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(module, **{**case.ddp, **options})
    ddp.register_comm_hook(state, library().hier_hook)
    return ddp


def backward(case: Case, ddp: DistributedDataParallel, state: Any, scaler: Any, step: int, rank: int) -> None:
    """The passes before a step: of several, "several" reduces each and "accumulate" the last."""
    passes = 2 if "several" in case.events else 3 if "accumulate" in case.events else 1
    for part in range(passes):
        x, y = batch(step, part, rank, case.dtype)
        last = part == passes - 1
        side = "unused" not in case.events or step % 4 in (0, 3) or (step % 4 == 2 and rank == 0)
        with ddp.no_sync() if "accumulate" in case.events and not last else nullcontext():
            if case.watch:
                bypass = "bypass" in case.events and step in (BAD_STEP, BAD_STEP + 1)
                state.before_backward(*(["as the case wants it"] if bypass else []))
            loss = nn.functional.mse_loss(ddp(x, side), y)
            if "scaler" in case.events and step == BAD_STEP and rank == dist.get_world_size() - 1:
                loss = loss + float("inf") * ddp.module.wide.weight.flatten()[7]
            scaler.scale(loss).backward()


def drop(case: Case, module: nn.Module, step: int) -> bool:
    """Take the widest layer's gradient away, or all of them: rounds that must leave no trace there."""
    events = {event for event in case.events if event == "throw away" or event.startswith("drop")}
    if not events or step < 6 or step % 3:
        return False
    assert isinstance(module, Net)
    weight = module.wide.weight
    if "drop none" in events:
        weight.grad = None
    return True


# -- worlds ------------------------------------------------------------------------------------------------------------


def run_case(case: AnyCase, topology: Any) -> tuple[str, str, dict[str, int]]:
    """Digests of this rank, and the entries by path."""
    return train(case, topology) if isinstance(case, Case) else (case.run(topology), "", {})


def rank_main(rank: int, world_size: int, chosen: list[AnyCase], folder: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = FileStore(f"{folder}/store{world_size}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    with_groups = importlib.import_module("lightning_sparse.topology").with_groups
    topologies: dict[str, Any] = {}
    results: Digests = {"_paths": {}}
    for case in chosen:
        if case.topology not in topologies:
            topologies[case.topology] = with_groups(TOPOLOGIES[case.topology])
        try:
            told = run_case(case, topologies[case.topology])
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            told = f"{type(error).__name__}: {error}", "", {}
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, told)
        digests = [each[0] for each in everyone]
        refused = len(set(digests)) == 1 and ":" in digests[0]
        results[case.title] = digests[0] if refused else hashlib.sha256("".join(digests).encode()).hexdigest()
        if all(each[1] for each in everyone):
            joined = "".join(each[1] for each in everyone)
            results[case.title + RESIDUAL] = hashlib.sha256(joined.encode()).hexdigest()
        results["_paths"][case.title] = everyone[0][2]
    if rank == 0:
        Path(folder, f"results{world_size}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def run(chosen: list[AnyCase]) -> Digests:
    """All cases of a world size in one start of its ranks."""
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
    """Say which digests differ; residuals that one side could not find are no difference, but said."""
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
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="an earlier one")
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose names begin so")
    given = parser.parse_args()
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # DDP warns of find_unused_parameters in the ranks' first step
    every: list[AnyCase] = [*cases(), *engine_cases()]
    chosen = [case for case in every if case.title.startswith(given.only)]
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

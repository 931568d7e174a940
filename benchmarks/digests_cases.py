"""The cases of digests.py by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

TOPOLOGIES: dict[str, tuple[tuple[int, ...], ...]] = {
    "1x1": ((0,),),
    "1x2": ((0, 1),),
    "1x4": ((0, 1, 2, 3),),
    "2+1": ((0, 1), (2,)),
    "2x1": ((0,), (1,)),
    "3x1": ((0,), (1,), (2,)),
    "4x1": ((0,), (1,), (2,), (3,)),
    "2x2": ((0, 1), (2, 3)),
    "2x2-dealt": ((0, 2), (1, 3)),
    "2x2-swapped": ((2, 3), (0, 1)),
}
FLAT = ("1x1", "1x2", "1x4", "2+1")
HIERARCHICAL = tuple(name for name in TOPOLOGIES if name not in FLAT)
PATHS = ("sparse", "regional", "dense", "dense16")
SMALL_MB = 0.01
"""Several buckets, rebuilt after the first round."""


@dataclass(frozen=True)
class Case:
    """One training run.

    Args:
        name: distinguishes it from other cases, without engine and topology.
        topology: one of TOPOLOGIES.
        config: options of the engine; for "gradients", in addition to ``density=0.05`` and ``warmup_epochs=0``.
        ddp: options of DistributedDataParallel.
        dtype: dtype of the parameters.
        optimizer: a key of digests_engines.OPTIMIZERS.
        watch: pass the optimizer to the state, and call before_backward().
        events: other events of the run (see digests_engines.py).
        engine: a key of digests_engines.ENGINES.
    """

    name: str
    topology: str
    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    optimizer: str = "sgd"
    watch: bool = False
    events: frozenset[str] = frozenset()
    engine: str = "gradients"

    @property
    def title(self) -> str:
        """Return the name of the case in files."""
        engine = "" if self.engine == "gradients" else f"{self.engine} "
        return f"{engine}{self.topology} {self.name}"

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return sum(map(len, TOPOLOGIES[self.topology]))


def of(engine: str, name: str, topology: str, config: dict[str, Any], *events: str, **options: Any) -> Case:
    """Return a case for an engine other than "gradients"."""
    return Case(name, topology, config, engine=engine, events=frozenset(events), **{"optimizer": "adamw", **options})


def cases() -> list[Case]:
    """Return all cases."""
    of_gradients = (_paths(), _types(), _auto(), _options(), _lives())
    every = [replace(case, ddp={"bucket_cap_mb": SMALL_MB, **case.ddp}) for group in of_gradients for case in group]
    every += [case for group in (_updates(), _fsdp(), _pto(), _trainers()) for case in group]
    titles = [case.title for case in every]
    assert len(titles) == len(set(titles)), "a name stands for two cases"
    return every


# -- gradients ---------------------------------------------------------------------------------------------------------


def _paths() -> Iterator[Case]:
    for topology, path in itertools.product(HIERARCHICAL, PATHS):
        yield Case(path, topology, {"exchange": path})
    for topology, path in itertools.product(FLAT, ("auto", "sparse")):
        yield Case(path, topology, {"exchange": path, "inter_gbps": 1.0 if path == "auto" else None})
    for topology, path in itertools.product(("2x2", "3x1"), PATHS):
        yield Case(f"{path} without overlap", topology, {"exchange": path, "overlap": False})
        yield Case(f"{path} watched view", topology, {"exchange": path}, {"gradient_as_bucket_view": True}, watch=True)


def _types() -> Iterator[Case]:
    for topology, path in itertools.product(("2x2", "3x1"), ("sparse", "regional")):
        for value_dtype in ("float32", "2bit"):
            yield Case(f"{path} values {value_dtype}", topology, {"exchange": path, "value_dtype": value_dtype})
    for topology, path in itertools.product(("2x2", "3x1"), PATHS):
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            yield Case(f"{path} parameters {str(dtype)[6:]}", topology, {"exchange": path}, dtype=dtype)


def _auto() -> Iterator[Case]:
    """Return cases with given rates, so that nothing is measured. The resulting paths are in the results."""
    ways = {"sparse": (0.05, "bfloat16"), "dense": (0.6, "float32"), "dense16": (0.6, "bfloat16")}
    for topology, (name, (density, value_dtype)) in itertools.product(("2x2", "3x1", "4x1"), ways.items()):
        config = {"exchange": "auto", "inter_gbps": 1.0, "density": density, "value_dtype": value_dtype}
        yield Case(f"auto {name}", topology, config)
        yield Case(f"auto {name} warm-up", topology, {**config, "warmup_epochs": 4}, events=frozenset({"epochs"}))
    config = {"exchange": "auto", "inter_gbps": 1.0}
    yield Case("auto flat later", "2x2", config, events=frozenset({"flat"}))
    yield Case("auto flat of one element", "2x2", {**config, "exclude": ("scale",)})


def _options() -> Iterator[Case]:
    for topology, path in itertools.product(("2x2", "3x1"), PATHS):
        for optimizer in ("momentum", "nesterov"):
            config = {"exchange": path, "momentum_correction": True}
            yield Case(f"{path} corrected {optimizer}", topology, config, optimizer=optimizer, watch=True)
        yield Case(f"{path} exclude", topology, {"exchange": path, "exclude": "vectors"}, optimizer="momentum")
        yield Case(f"{path} adamw", topology, {"exchange": path}, optimizer="adamw", watch=True)
    for topology, path in itertools.product(("2x2", "3x1"), ("sparse", "regional")):
        warm = {"exchange": path, "warmup_epochs": 3}
        yield Case(f"{path} warm-up", topology, warm, events=frozenset({"epochs"}))
        yield Case(f"{path} all of it", topology, {"exchange": path, "density": 1.0})
    corrected = {"exchange": "sparse", "momentum_correction": True, "overlap": False, "exclude": "vectors"}
    yield Case("sparse corrected exclude", "2x2-dealt", corrected, optimizer="nesterov", watch=True)


def _lives() -> Iterator[Case]:
    """Return cases with events of rounds, parameters and wrappers."""
    watched = ("throw away", "drop none", "several", "scaler", "bypass", "rewrap")
    for topology, path in itertools.product(("2x2", "3x1", "2x2-dealt"), ("sparse", "regional", "dense16")):
        for event in watched:
            config = {"exchange": path, "density": 0.5 if event.startswith("drop") else 0.05}
            yield Case(f"{path} {event}", topology, config, optimizer="momentum", watch=True, events=frozenset({event}))
    for topology, path in itertools.product(("2x2", "3x1", "2+1"), PATHS):
        unused = {"find_unused_parameters": True}
        yield Case(f"{path} unused", topology, {"exchange": path}, unused, events=frozenset({"unused"}))
        yield Case(f"{path} accumulate", topology, {"exchange": path}, watch=True, events=frozenset({"accumulate"}))
        yield Case(f"{path} one bucket", topology, {"exchange": path}, {"bucket_cap_mb": 25})
    config = {"exchange": "sparse", "momentum_correction": True}
    for events in ("unused", "scaler", "rewrap", "throw away", "accumulate"):
        ddp = {"find_unused_parameters": events == "unused"}
        case = Case(f"sparse corrected {events}", "2x2", config, ddp, optimizer="nesterov", watch=True)
        yield replace(case, events=frozenset({events}))


# -- other engines -----------------------------------------------------------------------------------------------------


def _updates() -> Iterator[Case]:
    case = partial(of, "updates")
    for topology, path, delay in itertools.product(("2x1", "2x2", "4x1"), PATHS, (0, 1)):
        yield case(f"{path} delay {delay}", topology, {"exchange": path, "delay": delay})
    for path in PATHS:
        replicated = {"exchange": path, "shard_optimizer": False}
        yield case(f"{path} replicated", "2x2", replicated)
        yield case(f"{path} momentum", "2x2", {"exchange": path}, optimizer="momentum")
        yield case(f"{path} sync_every 2", "2x2", {"exchange": path, "sync_every": 2})
        yield case(f"{path} bfloat16", "2x2", {"exchange": path}, dtype=torch.bfloat16)
        yield case(f"{path} bfloat16 replicated", "2x2", replicated, dtype=torch.bfloat16, optimizer="momentum")
    for topology in ("2x1", "4x1"):
        yield case("sparse momentum", topology, {}, optimizer="momentum")
        yield case("sparse sync_every 2", topology, {"sync_every": 2})
        yield case("sparse step_ahead", topology, {"step_ahead": 0.6})
        yield case("sparse step_ahead sync_every 2 delay 0", topology, {"step_ahead": 0.3, "sync_every": 2, "delay": 0})
    yield case("regional step_ahead", "4x1", {"exchange": "regional", "step_ahead": 0.6})
    yield case("sparse auto ahead momentum", "4x1", {"density": 0.3}, optimizer="momentum")
    for value_dtype in ("float32", "bfloat16"):
        yield case(f"sparse values {value_dtype}", "2x2", {"value_dtype": value_dtype})
    for sharded in (True, False):
        name = "" if sharded else " replicated"
        yield case(f"sparse group{name}", "2x2", {"shard_optimizer": sharded}, "group")
        yield case(f"regional group{name}", "2x2", {"exchange": "regional", "shard_optimizer": sharded}, "group")
        yield case(f"sparse skip{name}", "2x2", {"shard_optimizer": sharded}, "skip")
        yield case(f"sparse two optimizers{name}", "2x2", {"shard_optimizer": sharded}, "two optimizers")
    yield case("sparse group", "2x1", {}, "group", optimizer="momentum")
    yield case("dense without overlap", "2x2", {"exchange": "dense", "overlap": False})
    yield case("sparse without overlap", "2x2", {"overlap": False})


def _fsdp() -> Iterator[Case]:
    for topology, path in itertools.product(("2x2", "2x1"), PATHS):
        config = {"exchange": path}
        yield of("fsdp", path, topology, config, optimizer="momentum")
        yield of("fsdp", f"{path} accumulate", topology, config, "accumulate", optimizer="momentum")
        yield of("fsdp-updates", path, topology, config)
    for path in ("dense16", "sparse"):
        config = {"exchange": path}
        yield of("fsdp", f"{path} frozen", "2x2", config, "frozen")
        yield of("fsdp", f"{path} bfloat16", "2x2", config, dtype=torch.bfloat16, optimizer="momentum")
        yield of("fsdp-updates", f"{path} bfloat16", "2x2", config, dtype=torch.bfloat16)
        yield of("fsdp-updates", f"{path} momentum delay 0", "2x2", {**config, "delay": 0}, optimizer="momentum")


def _pto() -> Iterator[Case]:
    for topology, scope in (("2x2", "node"), ("2x2", "world"), ("1x2", "node"), ("1x2", "world")):
        case, config = partial(of, "pto"), {"scope": scope}
        for optimizer in ("adam", "adamw", "momentum", "nesterov", "adagrad"):
            yield case(f"{scope} {optimizer}", topology, config, optimizer=optimizer)
        for event in ("big", "group", "resume", "closure"):
            events = {event, "big"} if event == "resume" else {event}
            yield case(f"{scope} {event}", topology, config, *events, optimizer="adam")
        yield case(f"{scope} big momentum", topology, config, "big", optimizer="momentum")


def _trainers() -> Iterator[Case]:
    case, sparse = partial(of, "trainer"), {"density": 0.05, "exchange": "sparse"}
    hier = {"strategy": "MSTopKHierStrategy", "warmup_epochs": 0, **sparse}
    updates = {"strategy": "MSTopKLocalStrategy", **sparse}
    fsdp = {"strategy": "MSTopKFSDPStrategy", **sparse}
    yield case("mstopk_hier", "2x1", hier, optimizer="momentum")
    yield case("mstopk_hier corrected", "2x1", {**hier, "momentum_correction": True}, optimizer="momentum")
    yield case("mstopk_hier pto", "2x1", hier, "pto", optimizer="momentum")
    yield case("mstopk_local", "2x1", updates)
    yield case("mstopk_local dense16", "2x1", {**updates, "exchange": "dense16"})
    yield case("mstopk_local regional", "2x2", {**updates, "exchange": "regional"})
    yield case("mstopk_local", "2x2", updates)
    yield case("mstopk_fsdp", "2x1", fsdp)
    yield case("mstopk_fsdp", "2x2", fsdp)
    yield case("mstopk_fsdp in one file", "2x1", {**fsdp, "save_distributed_checkpoint": False})
    yield case("mstopk_fsdp gradients", "2x1", {**fsdp, "send": "gradients"}, optimizer="momentum")

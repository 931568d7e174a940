"""What digests.py trains: the cases by name, and the model, whose sizes divide by nothing convenient."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
        name: what differs from others, without the topology.
        topology: one of TOPOLOGIES.
        config: options of HierConfig beside ``density=0.05`` and ``warmup_epochs=0``.
        ddp: options of DistributedDataParallel.
        dtype: of parameters.
        optimizer: "sgd", "momentum", "nesterov" or "adamw".
        watch: tell the state of the optimizer, and call before_backward().
        events: what else happens (see digests.py).
    """

    name: str
    topology: str
    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    optimizer: str = "sgd"
    watch: bool = False
    events: frozenset[str] = frozenset()

    @property
    def title(self) -> str:
        """Names the case in files."""
        return f"{self.topology} {self.name}"

    @property
    def world_size(self) -> int:
        """P."""
        return sum(map(len, TOPOLOGIES[self.topology]))


class Net(nn.Module):
    """19,000 parameters: channels_last convolutions, a bucket's worth of linear layer, a branch that may go unused, and
    a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.Conv2d(3, 13, 3, padding=1)
        self.second = nn.Conv2d(13, 23, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(1, 23)
        self.wide = nn.Linear(23 * 16, 41)
        self.out = nn.Linear(41, 7)
        self.side = nn.Linear(41, 7)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, side: bool) -> Tensor:
        x = self.first(x).tanh()
        x = self.norm(self.second(x)).tanh().flatten(1)
        x = self.wide(x).tanh()
        y: Tensor = self.out(x) * self.scale
        return y + self.side(x).tanh() if side else y


def raw(tensor: Tensor) -> bytes:
    """In the order of dims, -0.0 as 0.0."""
    flat = (tensor.detach() + 0.0).reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().tobytes()


def batch(step: int, part: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same in every run."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * part + rank)
    x, y = torch.randn(6, 3, 8, 8, generator=generator), torch.randn(6, 7, generator=generator)
    return x.to(dtype), y.to(dtype)


def optimizer_of(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """By the name in a case."""
    if name == "adamw":
        return torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.01)
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.1)
    weights = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": 0.01}, {"params": rest}]
    return torch.optim.SGD(groups, lr=0.03, momentum=0.9, nesterov=name == "nesterov")


def cases() -> list[Case]:
    """All of them."""
    every = [case for group in (_paths(), _types(), _auto(), _options(), _lives()) for case in group]
    titles = [case.title for case in every]
    assert len(titles) == len(set(titles)), "a name stands for two cases"
    return [Case(**{**vars(case), "ddp": {"bucket_cap_mb": SMALL_MB, **case.ddp}}) for case in every]


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
        for value_dtype in ("float32", "float16"):
            yield Case(f"{path} values {value_dtype}", topology, {"exchange": path, "value_dtype": value_dtype})
    for topology, path in itertools.product(("2x2", "3x1"), PATHS):
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            yield Case(f"{path} parameters {str(dtype)[6:]}", topology, {"exchange": path}, dtype=dtype)


def _auto() -> Iterator[Case]:
    """Rates are given, so nothing is measured. The paths that they lead to stand in the results."""
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
    """What becomes of rounds, parameters and wrappers."""
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
        yield Case(**{**vars(case), "events": frozenset({events})})

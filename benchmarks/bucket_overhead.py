"""What the hook costs a bucket beside the network and the kernels: its Python, for few and for many groups.

    python benchmarks/bucket_overhead.py OUT.json [--groups 5 100 1000] [--rounds 8]

One process calls ``hier_hook`` as DDP would, a bucket of one small parameter after the other, for as many buckets as
there are groups. Its process groups are torch's "fake" ones, of two nodes of one device: nothing is sent, and the other
node is a mirror that answers with what it was given. What that takes is timed and left out. The kernels are in the
numbers, on 64 entries, and so is what the host does for any bucket; what matters is whether a row grows with the number
of groups, for each bucket is one of a round.

    hook     microseconds a bucket in hier_hook, without collectives
    before   microseconds a bucket in before_backward(), which is called once a round
    step     microseconds a bucket that the optimizer's step takes longer where the state watches it

Each is the least of all rounds, since whatever else the machine does only adds to it; medians are in the file.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from digests import library, paths_of
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_sparse.bench.report import commit, surroundings
from lightning_sparse.topology import with_groups

NUMEL, SETTLING = 64, 4
WAYS: dict[str, dict[str, Any]] = {
    "sparse": {"exchange": "sparse"},
    "auto": {"exchange": "auto", "inter_gbps": 1.0},
    "dense": {"exchange": "dense"},
    "dense16": {"exchange": "dense16"},
    "regional": {"exchange": "regional"},
    "sparse, vectors excluded": {"exchange": "sparse", "exclude": ("0", "2")},
    "sparse, momentum": {"exchange": "sparse", "momentum_correction": True},
}


class Bucket:
    """What the hook asks of DDP's GradBucket."""

    def __init__(self, index: int, parameter: nn.Parameter, last: bool) -> None:
        self._index, self._parameter, self._last = index, parameter, last
        self._flat = torch.zeros(parameter.numel())
        parameter.grad = self._flat.view_as(parameter)

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return [self._flat.view_as(self._parameter)]

    def parameters(self) -> list[nn.Parameter]:
        return [self._parameter]

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def fill(self, generator: torch.Generator) -> None:
        """As backward would; the gradient is that of the parameter, whatever the optimizer did to it."""
        self._flat.normal_(generator=generator)
        self._parameter.grad = self._flat.view_as(self._parameter)


class Done:
    """Work that is over, or that takes place when it is waited for."""

    def __init__(self, do: Callable[[], Any] = lambda: None) -> None:
        self._do = do

    def wait(self) -> None:
        self._do()


class Mirror:
    """The other node: sends what it is sent. Takes the place of torch.distributed's functions, and counts seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._sent = torch.empty(0)
        for name in (
            "isend",
            "irecv",
            "all_reduce",
            "all_to_all_single",
            "all_gather_into_tensor",
            "all_gather_single",
        ):
            if hasattr(dist, name):
                setattr(dist, name, self._timed(getattr(self, name)))

    def isend(self, tensor: Tensor, *_: Any, **__: Any) -> Done:
        self._sent = tensor
        return Done()

    def irecv(self, tensor: Tensor, *_: Any, **__: Any) -> Done:
        return Done(self._timed(lambda: tensor.copy_(self._sent)))

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, *_: Any, **__: Any) -> Done:
        tensor.mul_(2 if op == dist.ReduceOp.SUM else 1)
        return Done()

    def all_to_all_single(self, output: Tensor, tensor: Tensor, *_: Any, **__: Any) -> Done:
        output.copy_(tensor)
        return Done()

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, *_: Any, **__: Any) -> Done:
        output.view(2, -1).copy_(tensor.view(1, -1))
        return Done()

    all_gather_single = all_gather_into_tensor

    def _timed(self, do: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            answer = do(*args, **kwargs)
            self.seconds += time.perf_counter() - begin
            return answer

        return timed


def seconds_of(groups: int, rounds: int, options: dict[str, Any], mirror: Mirror, watch: bool) -> list[list[float]]:
    """Seconds a round of the hook, of before_backward() and of the step; a row each."""
    code, generator = library(), torch.Generator().manual_seed(0)
    module = nn.ParameterList(nn.Parameter(torch.zeros(NUMEL)) for _ in range(groups))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, foreach=True)
    config = code.HierConfig(**{"density": 0.05, "warmup_epochs": 0, "overlap": False, **options})
    state = code.HierState(module, config, with_groups(((0,), (1,))))
    if watch:
        state.watch([optimizer])
    buckets = [Bucket(i, parameter, i == groups - 1) for i, parameter in enumerate(module)]
    taken: list[list[float]] = [[], [], []]
    gc.disable()
    for _ in range(SETTLING + rounds):
        for bucket in buckets:
            bucket.fill(generator)
        begin = time.perf_counter()
        if watch:
            state.before_backward()
        taken[1].append(time.perf_counter() - begin)
        mirror.seconds, begin = 0.0, time.perf_counter()
        with torch.no_grad():
            for bucket in buckets:
                code.hier_hook(state, bucket)
        taken[0].append(time.perf_counter() - begin - mirror.seconds)
        begin = time.perf_counter()
        optimizer.step()
        taken[2].append(time.perf_counter() - begin)
        gc.collect(0)
    gc.enable()
    assert paths_of(state), "the hook reduced nothing, or its statistics are elsewhere by now"
    state.detach()
    return [each[SETTLING:] for each in taken]


def row(way: str, groups: int, rounds: int, mirror: Mirror) -> dict[str, Any]:
    """Microseconds a bucket."""
    watched = "momentum" in way
    plain = seconds_of(groups, rounds, WAYS[way], mirror, watch=watched)
    watching = plain if watched else seconds_of(groups, rounds, WAYS[way], mirror, watch=True)

    def both(seconds: list[float], but: float = 0.0) -> dict[str, float]:
        return {"least": 1e6 * (min(seconds) - but) / groups, "median": 1e6 * (median(seconds) - but) / groups}

    found = {"way": way, "groups": groups, "hook": both(plain[0]), "hook watched": both(watching[0])}
    found["before"] = both(watching[1])
    if not watched:
        found["step"] = both(watching[2], min(plain[2]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the .json file to write")
    parser.add_argument("--groups", type=int, nargs="+", default=[5, 100, 1000])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME", help=", ".join(WAYS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mirror, rows = Mirror(), []
    print("| way | groups | hook | hook, watched | before | step |\n|---|---|---|---|---|---|")
    for way in given.ways:
        for groups in given.groups:
            rows.append(found := row(way, groups, given.rounds, mirror))
            cells = [f"{found[key]['least']:.1f}" if key in found else "" for key in COLUMNS]
            print(f"| {way} | {groups} | {' | '.join(cells)} |", flush=True)
    about = {**surroundings("python benchmarks/bucket_overhead.py OUT.json"), "commit": commit()}
    given.out.write_text(json.dumps({"about": about, "unit": "microseconds a bucket", "rows": rows}, indent=1) + "\n")


COLUMNS = ("hook", "hook watched", "before", "step")

if __name__ == "__main__":
    main()

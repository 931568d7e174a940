"""How long a training step takes on links of 0.1 and 1 Gbit/s: exchanging updates beside other ways to train.

    sudo python -m benchmarks.exchange.updates OUT [--clusters 4x1] [--gbps 0.1 1] [--ways DDP "updates 1 %"] [--quick]

Clusters are network namespaces on this machine (`lightning_sparse.lab`), so the network is real and slow on purpose,
and all ranks share the processors. A step is zero_grad, a backward pass that hands out random gradients of ResNet-50's
shapes (25.6 M in fp32; no other compute), SGD, and the way's exchange. Ways take turns in blocks of steps, so that what
hides behind the next step can; a block ends when nothing is under way. "no exchange" is DDP inside the node alone,
"messages alone" the all-gather of messages of 1 % and nothing else: what the link takes.

Writes OUT/updates.json and OUT/updates.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.convergence.ways import WAYS, Updates, Way
from benchmarks.exchange.gradients import Rates
from benchmarks.exchange.ranks import ask
from lightning_sparse.bench import models
from lightning_sparse.bench.exchange import FASTEST, QUICK, SPARE, Gradients, received_bytes
from lightning_sparse.bench.report import commit, format_table, surroundings
from lightning_sparse.exchange import HierCommunicator
from lightning_sparse.exchange.paths import num_selected
from lightning_sparse.kernels import message_bytes
from lightning_sparse.lab import Cluster, LabConfig, signals_as_exit
from lightning_sparse.topology import Topology, discover

NONE = "no exchange"
ALONE = "messages alone"
ROWS: dict[str, dict[str, Any]] = {
    NONE: {"way": "average", "every": 10**9},
    ALONE: {},
    "DDP": {"way": "ddp"},
    "bf16 hook": {"way": "ddp"},
    "PowerSGD r1": {"way": "ddp", "bucket_cap_mb": 1000},
    "gradients 1 %": {"way": "gradients", "exchange": "sparse"},
    "updates 1 %": {"way": "updates"},
    "updates 1 %, ahead 1": {"way": "updates", "step_ahead": 1},
    "updates 1 %, delay 0": {"way": "updates", "delay": 0},
    "average every 50": {"way": "average", "every": 50},
}
BLOCK = 5  # steps
BESIDE = 25  # of ways that exchange beside the next step: the first step of a block hides nothing, and the last waits


class Turns(ABC):
    """What takes turns: blocks of steps, timed, and their bytes counted."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: list[float] = []
        self.received: list[float] = []

    def block(self, steps: int) -> None:
        dist.barrier()
        before, begin = received_bytes(), time.perf_counter()
        for _ in range(steps):
            self.step()
        self.finish()
        self.seconds.append((time.perf_counter() - begin) / steps)
        self.received.append((received_bytes() - before) / steps)

    @abstractmethod
    def step(self) -> None: ...

    def finish(self) -> None:  # noqa: B027  # most have nothing under way
        """Wait for what is under way."""


class Messages(Turns):
    """The all-gather of messages between nodes, one after the other."""

    def __init__(self, topology: Topology, quick: bool) -> None:
        super().__init__(BESIDE)
        numel = -(-_numel(_shapes(quick)) // topology.num_devices)
        self._message = torch.zeros(message_bytes(numel, num_selected(0.01, numel), torch.bfloat16), dtype=torch.uint8)
        self._communicator = HierCommunicator(topology)

    def step(self) -> None:
        self._communicator.exchange(self._message)


class Stepper(Turns):
    """One way on one rank, with a model and an optimizer of its own."""

    def __init__(self, name: str, options: dict[str, Any], topology: Topology, quick: bool) -> None:
        shapes = _shapes(quick)
        numel = _numel(shapes)
        torch.manual_seed(dist.get_rank())
        self.model = Gradients(shapes, torch.zeros(numel), SOURCE.setdefault(numel, torch.randn(numel + SPARE)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, foreach=True)
        options = dict(options)
        self.way: Way = WAYS[options.pop("way")](self.model, self.optimizer, topology, options)
        _register(name, self.way.ddp)
        super().__init__(BESIDE if isinstance(self.way, Updates) else BLOCK)
        self._offset = 0

    def step(self) -> None:
        self._offset = (self._offset + 4099) % SPARE
        self.optimizer.zero_grad()
        loss = self.way.ddp(self._offset)
        self.way.before_backward()
        loss.backward()
        self.optimizer.step()
        self.way.after_step()

    def finish(self) -> None:
        self.way.receive()


SOURCE: dict[int, torch.Tensor] = {}


def _shapes(quick: bool) -> Sequence[torch.Size]:
    return QUICK if quick else models.find("resnet50").shapes


def _numel(shapes: Sequence[torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes)


def _register(name: str, ddp: DistributedDataParallel) -> None:
    if name == "bf16 hook":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif name == "PowerSGD r1":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def on_ranks(folder: Path, options: argparse.Namespace, rate: Callable[[float], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = discover()
    gbps = options.gbps[0]
    steppers: dict[str, Turns] = {
        name: Messages(topology, options.quick) if name == ALONE else Stepper(name, ROWS[name], topology, options.quick)
        for name in options.ways
    }
    rate(FASTEST)
    for stepper in steppers.values():
        stepper.block(4)  # layouts settle
    rate(gbps)
    begin = time.perf_counter()
    for repeat in range(20):
        for name, stepper in steppers.items():
            stepper.block(50 if name.startswith("average") and not repeat else stepper.steps)
        spent = torch.tensor(time.perf_counter() - begin)
        dist.broadcast(spent, 0)
        if repeat >= 2 and spent > options.seconds:
            break
    rows = []
    for name, stepper in steppers.items():
        taken = torch.tensor(stepper.seconds[1:], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        received = stepper.received[1] if name.startswith("average") else stepper.received[-1]
        step = stepper.seconds[1] if name.startswith("average") else taken[1:].median().item()
        rows.append({"way": name, "gbps": gbps, "step s": step, "received by this node, bytes": received})
    if dist.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measure(nodes: int, devices: int, gbps: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    words = ["-m", "benchmarks.exchange.updates", "x", "--gbps", str(gbps), "--seconds", str(options.seconds)]
    words += ["--ways", *options.ways, *(["--quick"] if options.quick else [])]
    config = LabConfig(nodes=nodes, devices=devices, gbps=gbps)
    with tempfile.TemporaryDirectory() as folder, Cluster(config) as cluster, Rates(cluster, Path(folder)):
        env = {"EXCHANGE_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        ran = cluster.run([sys.executable, *words], env=env)
        if ran.exit_code != 0:
            raise SystemExit("the ranks failed; their output is above")
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
    return [{"cluster": f"{nodes}x{devices}", **row} for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    blocks = []
    for cluster, gbps in dict.fromkeys((row["cluster"], row["gbps"]) for row in rows):
        here = {row["way"]: row for row in rows if (row["cluster"], row["gbps"]) == (cluster, gbps)}
        ddp = here["DDP"]["step s"] if "DDP" in here else float("nan")
        lines = [
            (way, 1e3 * row["step s"], ddp / row["step s"], row["received by this node, bytes"] / 1e6)
            for way, row in here.items()
        ]
        blocks.append(f"{cluster}, {gbps:g} Gbit/s\n\n" + format_table(("", "step ms", "DDP's over it", "MB"), lines))
    return "\n\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--clusters", nargs="+", default=["4x1"], metavar="MxL")
    parser.add_argument("--gbps", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--seconds", type=float, default=90.0, help="for one rate, where it allows three repeats")
    parser.add_argument("--ways", nargs="+", choices=ROWS, default=list(ROWS), metavar="WAY")
    parser.add_argument("--quick", action="store_true", help="1 M gradients, and seconds instead of minutes")
    options = parser.parse_args()
    options.seconds = min(options.seconds, 3.0) if options.quick else options.seconds
    if "EXCHANGE_FOLDER" in os.environ:
        folder = Path(os.environ["EXCHANGE_FOLDER"])
        return on_ranks(folder, options, lambda gbps: ask(folder, gbps))
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with signals_as_exit():
        for cluster in options.clusters:
            for gbps in options.gbps:
                nodes, devices = map(int, cluster.split("x"))
                rows += measure(nodes, devices, gbps, options)
    command = " ".join(["python", "-m", "benchmarks.exchange.updates", "OUT", *sys.argv[2:]])
    record = {**surroundings(command), "commit": commit(), "rows": rows}
    (options.out / "updates.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "updates.md").write_text(f"`{command}`, {commit()}\n\n{table(rows)}\n")
    print(table(rows), flush=True)
    return None


if __name__ == "__main__":
    main()

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

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.convergence.ways import WAYS, Updates, Way
from benchmarks.exchange.gradients import FASTEST, QUICK, SPARE, Gradients, register
from benchmarks.processes import on_clusters, received_bytes, set_rate, slowest
from benchmarks.record import Rows, add_clusters, parser_of, surroundings, write
from lightning_sparse.cli import models
from lightning_sparse.cli.report import format_table
from lightning_sparse.exchange import HierCommunicator
from lightning_sparse.exchange.paths import num_selected
from lightning_sparse.kernels import message_bytes
from lightning_sparse.topology import Topology

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
        register(name, self.way.ddp)
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


def measure(
    topology: Topology, device: torch.device, gbps: float | None, names: Sequence[str], seconds: float, quick: bool
) -> Rows:
    """One row a way. A collective. `seconds` limits all but the first three repeats."""
    steppers: dict[str, Turns] = {
        name: Messages(topology, quick) if name == ALONE else Stepper(name, ROWS[name], topology, quick)
        for name in names
    }
    set_rate(FASTEST)
    for stepper in steppers.values():
        stepper.block(4)  # layouts settle
    set_rate(gbps or FASTEST)
    begin = time.perf_counter()
    for repeat in range(20):
        for name, stepper in steppers.items():
            stepper.block(50 if name.startswith("average") and not repeat else stepper.steps)
        spent = torch.tensor(time.perf_counter() - begin)
        dist.broadcast(spent, 0)
        if repeat >= 2 and spent > seconds:
            break
    rows = Rows()
    for name, stepper in steppers.items():
        taken = slowest(stepper.seconds[1:], device)
        received = stepper.received[1] if name.startswith("average") else stepper.received[-1]
        step = stepper.seconds[1] if name.startswith("average") else taken[1:].median().item()
        rows.append({"way": name, "step s": step, "received by this node, bytes": received})
    return rows


def table(rows: Rows) -> str:
    blocks = []
    for cluster, gbps in dict.fromkeys((row["cluster"], row["gbps"]) for row in rows):
        here = {row["way"]: row for row in rows if (row["cluster"], row["gbps"]) == (cluster, gbps)}
        ddp = here["DDP"]["step s"] if "DDP" in here else float("nan")
        lines = [
            (way, 1e3 * row["step s"], ddp / row["step s"], row["received by this node, bytes"] / 1e6)
            for way, row in here.items()
        ]
        blocks.append(f"{cluster}, {gbps} Gbit/s\n\n" + format_table(("", "step ms", "DDP's over it", "MB"), lines))
    return "\n\n".join(blocks)


def main() -> None:
    parser = parser_of(__doc__, quick="1 M gradients, and seconds instead of minutes")
    add_clusters(parser, ["4x1"], [0.1, 1.0])
    parser.add_argument("--seconds", type=float, default=90.0, help="for one rate, where it allows three repeats")
    parser.add_argument("--ways", nargs="+", choices=ROWS, default=list(ROWS), metavar="WAY")
    options = parser.parse_args()
    arguments = options.ways, 3.0 if options.quick else options.seconds, options.quick
    rows = on_clusters(measure, *arguments, clusters=options.clusters, gbps=options.gbps)
    if rows is not None:
        write(options.out / "updates.json", {**surroundings(), "rows": rows}, table(rows))


if __name__ == "__main__":
    main()

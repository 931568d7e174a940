"""Memory per rank and time per step under FSDP2, on an emulated cluster of slow links: updates compared with native
HSDP.

    sudo python -m benchmarks.exchange.fsdp OUT [--clusters 2x2] [--gbps 1] [--width 1024] [--layers 12] [--quick]

Nodes are network namespaces on this machine (`lightning_sparse.lab`), and all ranks share its CPUs. The model is a
stack of perceptron blocks in fp32 with AdamW, with 8 rows per batch, so compute is small. Methods run one after the
other, each with its own model. A step is the median without the first three steps. Memory is that of a rank's tensors
between two steps: parameters, gradients, optimizer state, and exchange. Writes OUT/fsdp.json and OUT/fsdp.md.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.processes import on_clusters, received_bytes, slowest
from benchmarks.record import Rows, add_clusters, parser_of, surroundings, write
from lightning_sparse.cli import format_table
from lightning_sparse.exchange import ExchangeConfig
from lightning_sparse.fsdp import ShardedGradients, blocks, mesh_of, shard
from lightning_sparse.sharding import local_of
from lightning_sparse.topology import Topology
from lightning_sparse.updates import LocalUpdates, UpdatesConfig

Step = Callable[[], None]
ROWS, WARM, STEPS = 8, 3, 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Way:
    """One method on one rank.

    Attributes:
        module: module that gets a batch.
        called: the module, or its DDP wrapper.
        after: runs after the optimizer's step.
    """

    def __init__(self, name: str, topology: Topology, width: int, layers: int) -> None:
        model = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.module: nn.Module = nn.Sequential(model)
        self.after: Step = lambda: None
        self.finish: Step = lambda: None
        self.updates: LocalUpdates | None = None
        self.gradients: ShardedGradients | None = None
        mesh = mesh_of(topology)
        if name == "native HSDP":
            for block in blocks(self.module):
                fully_shard(block, mesh=mesh)
            fully_shard(self.module, mesh=mesh)
        elif name.startswith("FSDP2"):
            shard(self.module, mesh)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), 1e-4)
        if "updates" in name:
            self.updates = LocalUpdates(self.module, self.optimizer, UpdatesConfig(), topology)
            self.after, self.finish = self.updates.step, self.updates.finish
        if "gradients" in name:
            config = ExchangeConfig(exchange="dense16") if "16" in name else ExchangeConfig(exchange="sparse")
            self.gradients = ShardedGradients(self.module, config, topology)
            self.after = self.gradients.step
        self.called: nn.Module = self.module
        if name == "DDP":
            self.called = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        elif name.startswith("DDP inside"):
            self.called = DistributedDataParallel(
                self.module, process_group=topology.intra, gradient_as_bucket_view=True
            )

    def step(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        self.called(batch).square().mean().backward()
        self.optimizer.step()
        self.after()

    def tensors(self) -> Iterator[Tensor]:
        for parameter in self.module.parameters():
            yield local_of(parameter)
            if parameter.grad is not None:
                yield local_of(parameter.grad)
            yield from (local_of(each) for each in self.optimizer.state[parameter].values() if isinstance(each, Tensor))
        for node in self.updates.optimizers if self.updates is not None else ():
            yield from (each for each in vars(node.state).values() if isinstance(each, Tensor))
        for managed in self.gradients.managed if self.gradients is not None else ():
            yield from (each for each in vars(managed).values() if isinstance(each, Tensor))

    def nbytes(self) -> int:
        """Return the bytes of all storages, each counted once."""
        return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in self.tensors())}.values())


WAYS = (
    "DDP",
    "native HSDP",
    "DDP inside, updates 1 %",
    "FSDP2, updates 1 %",
    "FSDP2, gradients 1 %",
    "FSDP2, gradients dense16",
)


def measure(topology: Topology, device: torch.device, gbps: float | None, width: int, layers: int) -> Rows:
    """Return one row per method. A collective."""
    rows = Rows()
    for name in WAYS:
        torch.manual_seed(0)
        way = Way(name, topology, width, layers)
        batch = torch.randn(ROWS, width)
        seconds, received = [], 0
        for step in range(WARM + STEPS):
            dist.barrier()
            if step == WARM:
                received = received_bytes()
            begin = time.perf_counter()
            way.step(batch)
            seconds.append(time.perf_counter() - begin)
        taken = slowest(seconds[WARM:], device)
        nbytes = (received_bytes() - received) / STEPS
        memory, numel = way.nbytes(), sum(p.numel() for p in way.module.parameters())
        rows.append(
            {"way": name, "step s": taken.median().item(), "node received": nbytes, "memory": memory, "numel": numel}
        )
        way.finish()
        del way
        gc.collect()
    return rows


def table(rows: Rows) -> str:
    """Return a block per cluster and rate."""
    blocks = []
    for place in dict.fromkeys((row["cluster"], row["gbps"]) for row in rows):
        here = [row for row in rows if (row["cluster"], row["gbps"]) == place]
        lines = [
            (
                row["way"],
                row["memory"] / 1e6,
                1e3 * row["step s"],
                here[0]["step s"] / row["step s"],
                row["node received"] / 1e6,
            )
            for row in here
        ]
        link = f"{place[0]}, {place[1]} Gbit/s"
        head = (link, "MB per rank", "ms per step", "speedup over DDP", "MB received per node")
        blocks.append(f"{here[0]['numel'] / 1e6:.1f} M parameters\n\n{format_table(head, lines)}")
    return "\n\n".join(blocks)


def main() -> None:
    parser = parser_of(__doc__, quick="0.1 M parameters, and seconds instead of minutes")
    add_clusters(parser, ["2x2"], [1.0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    size = (64, 3) if options.quick else (options.width, options.layers)
    rows = on_clusters(measure, *size, clusters=options.clusters, gbps=options.gbps)
    if rows is not None:
        write(options.out / "fsdp.json", {**surroundings(), "rows": rows}, table(rows))


if __name__ == "__main__":
    main()

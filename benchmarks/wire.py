"""How long the exchange between nodes takes by itself, beside other ways to do the same, and what bytes cost it.

    sudo python benchmarks/wire.py OUT [--nodes 2 4 8] [--gbps 0.1 1 10] [--turns 12]

Clusters of one rank a node are network namespaces on this machine (`lightning_sparse.lab`). Messages are those of
ResNet-50's buckets at 1 %. All ways live in the same processes, each with a group of its own, and take turns; ranks
begin at an agreed moment of the clock they share, and the last to end counts. They run at real-time priority: at the
usual one, whatever else the machine does would be most of what is measured, and differ from run to run.

Bytes are counted three times: as the cost model has them, as the node's interface counts them (a super-packet of many
frames once, with one header), and as the shaped link does (each frame with its headers, answers too).

Appends to OUT/wire.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.bench import models
from lightning_sparse.bench.exchange import received_bytes
from lightning_sparse.bench.report import commit
from lightning_sparse.kernels import message_bytes
from lightning_sparse.lab import Cluster, LabConfig, signals_as_exit
from lightning_sparse.strategy import HierCommunicator
from lightning_sparse.topology import with_groups

SOON_S, WARM, COUNTED = 0.004, 2, 4
BUCKETS = (1 << 20, 25 << 20)  # bytes; DDP's first, and the others

Way = Callable[[HierCommunicator, Tensor], Tensor]


def gloo(comm: HierCommunicator, message_B: Tensor) -> Tensor:
    messages_MB = message_B.new_empty(comm.topology.num_nodes, message_B.numel())
    dist.all_gather_into_tensor(messages_MB.view(-1), message_B, group=comm.topology.inter)
    return messages_MB


def broadcasts(comm: HierCommunicator, message_B: Tensor) -> Tensor:
    messages_MB = message_B.new_empty(comm.topology.num_nodes, message_B.numel())
    messages_MB[comm.topology.node_index].copy_(message_B)
    rows = enumerate(messages_MB.unbind())
    _wait([dist.broadcast(row, src=node, group=comm.topology.inter, async_op=True) for node, row in rows])
    return messages_MB


def in_halves(comm: HierCommunicator, message_B: Tensor) -> Tensor:
    half, nodes = message_B.numel() // 2, comm.topology.num_nodes
    pieces = (message_B[:half], message_B[half:])
    arrived = [piece.new_empty(nodes, piece.numel()) for piece in pieces]
    _wait(
        [
            dist.all_gather_into_tensor(out.view(-1), piece, group=comm.topology.inter, async_op=True)
            for out, piece in zip(arrived, pieces, strict=True)
        ]
    )
    return torch.cat(arrived, 1)


def repeated(comm: HierCommunicator, message_B: Tensor) -> Tensor:
    return gloos_own(comm, message_B.repeat(comm.topology.num_nodes, 1))


def at_once(comm: HierCommunicator, message_B: Tensor) -> Tensor:
    nodes, node, group = comm.topology.num_nodes, comm.topology.node_index, comm.topology.inter
    messages_MB = message_B.new_empty(nodes, message_B.numel())
    messages_MB[node].copy_(message_B)
    others = [(node + step) % nodes for step in range(1, nodes)]
    receiving = [dist.irecv(messages_MB[other], src=other, group=group) for other in others[::-1]]
    _wait([*receiving, *(dist.isend(message_B, dst=other, group=group) for other in others)])
    return messages_MB


def direct(comm: HierCommunicator, message_B: Tensor) -> Tensor:
    return step_by_step(comm, message_B.expand(comm.topology.num_nodes, -1))


def step_by_step(comm: HierCommunicator, messages_MB: Tensor) -> Tensor:
    nodes, node, group = comm.topology.num_nodes, comm.topology.node_index, comm.topology.inter
    arrived_MB = torch.empty_like(messages_MB)
    arrived_MB[node].copy_(messages_MB[node])
    for step in range(1, nodes):
        to, source = (node + step) % nodes, (node - step) % nodes
        receiving = dist.irecv(arrived_MB[source], src=source, group=group)
        _wait([receiving, dist.isend(messages_MB[to], dst=to, group=group)])
    return arrived_MB


def gloos_own(comm: HierCommunicator, messages_MB: Tensor) -> Tensor:
    arrived_MB = torch.empty_like(messages_MB)
    dist.all_to_all_single(arrived_MB.view(-1), messages_MB.view(-1), group=comm.topology.inter)
    return arrived_MB


def _wait(under_way: list[Any]) -> None:
    for work in under_way:
        work.wait()


GATHERS: dict[str, Way] = {
    "Gloo's all-gather": gloo,
    "ours, a ring": lambda comm, message_B: comm.exchange(message_B),
    "step by step to each": direct,
    "to all at once": at_once,
    "M broadcasts": broadcasts,
    "all-gathers of two halves": in_halves,
    "all-to-all, repeated": repeated,
}
TURNS: dict[str, Way] = {  # a region a row: each is a message cut into M
    "Gloo's all-to-all, ours": lambda comm, message_B: comm.all_to_all(_rows(comm, message_B)),
    "step by step": lambda comm, message_B: step_by_step(comm, _rows(comm, message_B)),
}


def _rows(comm: HierCommunicator, message_B: Tensor) -> Tensor:
    nodes = comm.topology.num_nodes
    return message_B[: message_B.numel() // nodes * nodes].view(nodes, -1)


def message_sizes(density: float) -> list[int]:
    """Bytes, by bucket."""
    sizes, numel, limits = [], 0, list(BUCKETS)
    shapes = models.find("resnet50").shapes
    for position, shape in enumerate(reversed(shapes), 1):
        numel += shape.numel()
        if 4 * numel >= limits[0] or position == len(shapes):
            sizes.append(message_bytes(numel, -(-numel // round(1 / density)), torch.bfloat16))
            numel, limits = 0, limits[-1:]
    return sizes


# -- in each rank ------------------------------------------------------------------------------------------------------


def once(way: Way, comm: HierCommunicator, message_B: Tensor) -> float:
    """Seconds from a moment that all ranks agreed on."""
    begin = torch.tensor(time.perf_counter() + SOON_S, dtype=torch.float64)
    dist.broadcast(begin, 0)
    time.sleep(max(0.0, begin.item() - time.perf_counter()))
    arrived = way(comm, message_B)
    taken = time.perf_counter() - begin.item()
    if not torch.equal(arrived[:, 0], torch.arange(dist.get_world_size(), dtype=torch.uint8)):
        raise RuntimeError("messages came in another order than nodes have")
    return taken


def run_rank(file: Path, turns: int, only: list[str]) -> None:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    nodes = tuple((rank,) for rank in range(dist.get_world_size()))
    ways = {name: way for name, way in {**GATHERS, **TURNS}.items() if not only or any(word in name for word in only)}
    comms = {name: HierCommunicator(with_groups(nodes)) for name in ways}
    sizes = message_sizes(0.01)
    messages = [torch.full((size,), dist.get_rank(), dtype=torch.uint8) for size in sizes]
    taken: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(WARM + turns):
        for name, way in ways.items():
            taken[name].append([once(way, comms[name], message) for message in messages])
    rows = []
    for name, way in ways.items():
        received = (len(nodes) - 1) * sum(sizes) // (len(nodes) if name in TURNS else 1)
        counted = count(lambda: [way(comms[name], each) for each in messages])  # noqa: B023  called at once
        seconds = torch.tensor(taken[name][WARM:], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        step = seconds.sum(1)
        quarters = {"quarter s": step.quantile(0.25).item(), "three quarters s": step.quantile(0.75).item()}
        rows.append({"way": name, "bytes": received, "median s": step.median().item(), **quarters, **counted})
    if dist.get_rank() == 0:
        file.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def count(step: Callable[[], object]) -> dict[str, float]:
    """Bytes a step, as this node's interface and its shaped link count them; barriers between are in it too."""
    begin = received_bytes(), sent_bytes()
    for _ in range(COUNTED):
        step()
    dist.barrier()
    end = received_bytes(), sent_bytes()
    return {
        "interface received, bytes": (end[0] - begin[0]) / COUNTED,
        "link sent, bytes": (end[1] - begin[1]) / COUNTED,
    }


def sent_bytes() -> int:
    """What the shaped link let out, each frame with its headers; all ways receive as much as they send."""
    shown = subprocess.run(["tc", "-s", "-j", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True)
    return int(json.loads(shown.stdout)[0]["bytes"]) if shown.returncode == 0 else 0


# -- outside -----------------------------------------------------------------------------------------------------------


def measure(nodes: int, gbps: float | None, turns: int, only: list[str]) -> list[dict[str, Any]]:
    """Rows of one cluster; without a rate it is loopback."""
    config = LabConfig(nodes=nodes, devices=1, gbps=gbps or 1.0, network=gbps is not None)
    with tempfile.TemporaryDirectory() as folder, Cluster(config) as cluster:
        file = Path(folder) / "rows.json"
        env = {"WIRE_FILE": str(file), "OMP_NUM_THREADS": "1"}
        if cluster.run([sys.executable, __file__, "x", "--turns", str(turns), "--only", *only], env=env).exit_code != 0:
            raise SystemExit("the ranks failed; their output is above")
        rows = json.loads(file.read_text())
    return [{"nodes": nodes, "gbps": gbps, **row} for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each way: milliseconds, times bytes over rate, bytes on the link over bytes of the cost model."""
    lines = [f"{rows[0]['nodes']}x1, " + ("loopback" if rows[0]["gbps"] is None else f"{rows[0]['gbps']} Gbit/s")]
    for row in rows:
        line = f"  {row['way']:<28}{1e3 * row['median s']:8.2f} ms"
        if row["gbps"] is not None:
            line += f"  {row['median s'] / (8e-9 * row['bytes'] / row['gbps']):5.2f} x"
            line += f"   interface {row['interface received, bytes'] / row['bytes']:.3f}"
            line += f"  link {row['link sent, bytes'] / row['bytes']:.3f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--gbps", type=float, nargs="+", default=[0.1, 1.0, 10.0], help="0 for loopback")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="ways with one of these in their names")
    options = parser.parse_args()
    if "WIRE_FILE" in os.environ:
        return run_rank(Path(os.environ["WIRE_FILE"]), options.turns, options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "wire.json"
    record: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    about = {"date": str(date.today()), "commit": commit(), "processors": os.cpu_count(), "turns": options.turns}
    about["congestion control"] = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    for nodes in options.nodes:
        for gbps in options.gbps:
            with signals_as_exit():
                rows = measure(nodes, gbps or None, options.turns, options.only)
            record += [{**row, **about} for row in rows]
            file.write_text(json.dumps(record, indent=1) + "\n")
            print(table(rows), flush=True)
    return None


if __name__ == "__main__":
    main()

"""Time and memory of a node that joins, by the size of the model.

    sudo python -m benchmarks.exchange.join OUT [--millions 25 50 100] [--gbps 1]

Two nodes with two devices each, which share a model with FSDP2, are namespaces on this machine. Node 0 trains. Then
node 1 joins, and both train. All devices share the CPUs of this machine, so steps are slow; the link is limited.

Memory is the peak of the resident memory of the device's process, above its memory before the model was made. In
training, a device holds its shards of the parameters, gradients, AdamW's state, and two copies of the weights.

Writes OUT/join.json and OUT/join.md.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.exchange.fsdp import Block
from benchmarks.processes import received_bytes
from benchmarks.record import Rows, parser_of, surroundings, write
from lightning_sparse.cli import format_table
from lightning_sparse.elastic.updates import ElasticConfig, ElasticUpdates
from lightning_sparse.fsdp import mesh_of, shard
from lightning_sparse.lab import Cluster, LabConfig, exit_on_signals
from lightning_sparse.lab.network import node_address
from lightning_sparse.sharding import local_of
from lightning_sparse.topology import discover

DEVICES, WIDTH, ROWS, STEPS = 2, 1024, 8, 4
WAIT_S = 0.2
LIGHTHOUSE = f"{node_address(0)}:29510"


def main() -> None:
    if sys.argv[1] == "device":
        device(Path(sys.argv[2]), int(sys.argv[3]))
        return
    parser = parser_of(__doc__)
    parser.add_argument(
        "--millions", type=int, nargs="+", default=[25, 50, 100], help="sizes of the models in millions of parameters"
    )
    parser.add_argument("--gbps", type=float, default=1.0, help="rate of each node's link in Gbit/s")
    options = parser.parse_args()
    with exit_on_signals():
        rows = [row for millions in options.millions for row in measure(millions, options.gbps)]
    write(options.out / "join.json", {**surroundings("torchft"), "gbps": options.gbps, "rows": rows}, table(rows))


def measure(millions: int, gbps: float) -> Rows:
    """Return one row per device."""
    layers = max(1, round(1e6 * millions / block_numel()))
    with tempfile.TemporaryDirectory() as name, Cluster(LabConfig(devices=DEVICES, gbps=gbps, cpu=True)) as lab:
        command = [sys.executable, "-m", "benchmarks.exchange.join", "device", name, str(layers)]
        if lab.run(command, env={"OMP_NUM_THREADS": "1"}, output=sys.stderr).exit_code != 0:
            raise SystemExit("a device failed; its output is above")
        return [json.loads(file.read_text()) for file in sorted(Path(name).glob("*.json"))]


def table(rows: Rows) -> str:
    head = (
        "M parameters",
        "node",
        "device",
        "seconds to join",
        "MB received",
        "MB in training",
        "while joining",
        "ratio",
    )
    lines = [
        (
            row["numel"] / 1e6,
            "joins" if row["node"] else "trains",
            row["device"],
            row["seconds"],
            row["received"] and row["received"] / 1e6,
            row["training"] / 1e6,
            row["joining"] / 1e6,
            row["joining"] / row["training"],
        )
        for row in rows
    ]
    return format_table(head, lines)


# -- a device ----------------------------------------------------------------------------------------------------------


def device(folder: Path, layers: int) -> None:
    """Train as a device of node 0, or join as a device of node 1, and write the measurements."""
    node, place = int(os.environ["NODE_RANK"]), int(os.environ["LOCAL_RANK"])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 29400, DEVICES, is_master=place == 0)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=place, world_size=DEVICES)
    lighthouse = start_lighthouse() if (node, place) == (0, 0) else None
    ready, joined = folder / "ready", folder / "joined"
    while node == 1 and not ready.exists():
        time.sleep(WAIT_S)
    before = resident("VmRSS")
    module, optimizer = build(layers)
    received, begin = received_bytes(), time.perf_counter()
    config = ElasticConfig(lighthouse=f"http://{LIGHTHOUSE}", timeout=120)
    updates = ElasticUpdates(module, optimizer, config, discover(node_name="here"), name=f"node{node}")
    row: dict[str, Any] = {"node": node, "device": place, "numel": layers * block_numel()}
    row |= {"seconds": time.perf_counter() - begin, "received": received_bytes() - received}
    row["joining"] = resident("VmHWM") - before
    run = partial(train, updates, module, optimizer)
    run(lambda step: step == STEPS)
    row["training"] = peak_of(lambda: run(lambda step: step == STEPS)) - before
    if node == 0:
        ready.touch()
        row["joining"] = peak_of(lambda: run(lambda _: joined.exists())) - before
        row |= {"seconds": None, "received": None}
    joined.touch()
    updates.finish()
    updates.close()
    (folder / f"{node}{place}.json").write_text(json.dumps(row))
    dist.barrier()
    if lighthouse is not None:
        lighthouse.kill()


def block_numel() -> int:
    return sum(p.numel() for p in Block(WIDTH).parameters())


def build(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        module = nn.Sequential(*(Block(WIDTH) for _ in range(layers)))
    shard(module, mesh_of(discover(node_name="here")))
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            local_of(parameter).normal_(std=0.01)
    return module, torch.optim.AdamW(module.parameters(), 1e-4)


def train(
    updates: ElasticUpdates, module: nn.Module, optimizer: torch.optim.Optimizer, ends: Callable[[int], bool]
) -> None:
    """Train until `ends`, which gets the number of steps, holds on a device."""
    step = 0
    while not updates.any_device(ends(step))[0]:
        optimizer.zero_grad()
        output: Tensor = module(torch.randn(ROWS, WIDTH))
        torch.autograd.backward(output.square().mean())
        optimizer.step()
        updates.step()
        updates.serve()
        step += 1


def start_lighthouse() -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--min_replicas", "1"]
    command += ["--join_timeout_ms", "60000", "--bind", LIGHTHOUSE]
    lighthouse = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while lighthouse.poll() is None and not answers(LIGHTHOUSE):
        time.sleep(WAIT_S)
    return lighthouse


def answers(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def peak_of(work: Callable[[], None]) -> int:
    """Return the peak of the resident memory during `work`, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return resident("VmHWM")


def resident(name: str) -> int:
    """Return the resident memory of this process now (``VmRSS``) or at its peak (``VmHWM``), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()

"""The doctor's look at a cluster: who is where, how fast both networks are, and whether the ranks fit together.

Every function is a collective of the world and returns the same on all ranks.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_sparse.bench.doctor import Finding
from lightning_sparse.bench.plan import VALUES
from lightning_sparse.exchange import ExchangeConfig, HierCommunicator
from lightning_sparse.exchange.choice import PathChoice
from lightning_sparse.exchange.paths import PATHS
from lightning_sparse.exchange.rates import Rates
from lightning_sparse.exchange.rates.probe import probe
from lightning_sparse.kernels import kernel_report
from lightning_sparse.topology import Topology

BUCKET_NUMEL = (25 << 20) // 4
"""fp32 gradients of one of DDP's buckets."""


def examine_network(topology: Topology, device: torch.device, local: Sequence[Finding]) -> list[Finding]:
    """What only all ranks together can tell; `local` is what each found alone."""
    return [*_topology(topology, device), *_ranks(topology, device, local), *_links(topology, device)]


def _topology(topology: Topology, device: torch.device) -> Iterator[Finding]:
    about = f"{topology.describe()}, {dist.get_backend()}"
    yield Finding("ok" if topology.kind == "hierarchical" else "note", "topology", about)
    if device.type == "cpu" and torch.cuda.is_available():
        said = "more ranks than GPUs on a node, so all run on the CPU: start one rank a GPU"
        yield Finding("bad", "ranks", said)


def _ranks(topology: Topology, device: torch.device, local: Sequence[Finding]) -> Iterator[Finding]:
    """Where ranks differ that should not, and what is bad on others than rank 0."""
    report = kernel_report()
    mine: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": report.cuda if device.type == "cuda" else report.cpu,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "bad": [(each.subject, each.said) for each in local if each.mark == "bad"],
    }
    told: list[dict[str, Any]] = [{} for _ in range(topology.world_size)]
    dist.all_gather_object(told, mine)
    for name in ("python", "torch", "kernels", "device"):
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(told):
            by_value.setdefault(each[name], []).append(rank)
        if len(by_value) > 1:
            said = "; ".join(f"{value} on ranks {', '.join(map(str, ranks))}" for value, ranks in by_value.items())
            yield Finding("bad" if name == "torch" else "note", f"{name} differs", said)
    for rank, each in enumerate(told):
        if rank and each["bad"] != told[0]["bad"]:
            yield from (Finding("bad", f"rank {rank}: {subject}", said) for subject, said in each["bad"])


def _links(topology: Topology, device: torch.device) -> Iterator[Finding]:
    if topology.kind != "hierarchical":
        yield Finding("note", "links", "not measured: there is no network between nodes of equal size to look at")
        return
    rates = probe(HierCommunicator(topology), device, VALUES, BUCKET_NUMEL // topology.num_devices)
    inter, intra = _gbps(rates.inter.seconds_per_byte), _gbps(rates.intra.seconds_per_byte)
    said = f"{inter * topology.num_devices:.3g} Gbit/s a node, {1e3 * rates.inter.latency:.2g} ms a step"
    yield Finding("ok", "between nodes", said)
    if topology.num_devices > 1:
        slow = intra < 2 * inter * topology.num_devices
        said = f"{intra:.3g} Gbit/s a device, {1e3 * rates.intra.latency:.2g} ms a step"
        said += "; hardly faster than between nodes, so a hierarchy gains little" if slow else ""
        yield Finding("note" if slow else "ok", "inside a node", said)
    yield advice(topology, rates)


def advice(topology: Topology, rates: Rates) -> Finding:
    """A bucket of DDP's size by each way, and which one exchange='auto' would take at 1 %."""
    config = ExchangeConfig()
    choice = PathChoice(config, topology, BUCKET_NUMEL, lambda line: None)
    choice.rates = rates
    work = choice.work(BUCKET_NUMEL, torch.float32)
    paths = [kind.of(work, config.least_density, VALUES) for kind in PATHS if kind.automatic]
    times = ", ".join(f"{path.name} {1e3 * path.seconds(rates):.3g}" for path in paths if path is not None)
    chosen = choice.path(work, config.least_density)
    said = chosen.name if chosen.leaves != "nothing" else "dense: plain DDP does as well"
    return Finding("ok", "25 MiB bucket at 1 %", f"{times} ms, predicted; with SGD exchange='auto' will be {said}")


def _gbps(seconds_per_byte: float) -> float:
    return 8e-9 / max(seconds_per_byte, 1e-15)

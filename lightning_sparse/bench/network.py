"""Check a cluster: topology, network rates, and differences between ranks.

Every function is a collective of the world and returns the same findings on all ranks.
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
from lightning_sparse.exchange.choice import MARGIN, PathChoice
from lightning_sparse.exchange.paths import PATHS
from lightning_sparse.exchange.probe import probe
from lightning_sparse.exchange.rates import Rates
from lightning_sparse.kernels import kernel_report
from lightning_sparse.topology import Topology

BUCKET_NUMEL = (25 << 20) // 4
"""fp32 gradients in a DDP bucket of default size."""


def examine_network(topology: Topology, device: torch.device, local: Sequence[Finding]) -> list[Finding]:
    """Checks that involve all ranks. `local` holds this rank's own findings."""
    return [*_topology(topology, device), *_ranks(topology, device, local), *_links(topology, device)]


def _topology(topology: Topology, device: torch.device) -> Iterator[Finding]:
    message = f"{topology.describe()}, {dist.get_backend()}"
    yield Finding("ok" if topology.kind == "hierarchical" else "note", "topology", message)
    if device.type == "cpu" and torch.cuda.is_available():
        yield Finding("bad", "ranks", "more ranks than GPUs on a node, so all use the CPU: start one rank per GPU")


def _ranks(topology: Topology, device: torch.device, local: Sequence[Finding]) -> Iterator[Finding]:
    """Differences between ranks, and the bad findings of ranks other than 0."""
    report = kernel_report()
    mine: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": report.cuda if device.type == "cuda" else report.cpu,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "bad": [(each.subject, each.message) for each in local if each.status == "bad"],
    }
    gathered: list[dict[str, Any]] = [{} for _ in range(topology.world_size)]
    dist.all_gather_object(gathered, mine)
    for name in ("python", "torch", "kernels", "device"):
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(gathered):
            by_value.setdefault(each[name], []).append(rank)
        if len(by_value) > 1:
            message = "; ".join(f"{value} on ranks {', '.join(map(str, ranks))}" for value, ranks in by_value.items())
            yield Finding("bad" if name == "torch" else "note", f"{name} differs", message)
    for rank, each in enumerate(gathered):
        if rank and each["bad"] != gathered[0]["bad"]:
            yield from (Finding("bad", f"rank {rank}: {subject}", message) for subject, message in each["bad"])


def _links(topology: Topology, device: torch.device) -> Iterator[Finding]:
    if topology.kind != "hierarchical":
        yield Finding("note", "links", "not measured: needs several nodes of equal size")
        return
    rates = probe(HierCommunicator(topology), device, VALUES, BUCKET_NUMEL // topology.num_devices)
    inter, intra = _gbps(rates.inter.seconds_per_byte), _gbps(rates.intra.seconds_per_byte)
    message = f"{inter * topology.num_devices:.3g} Gbit/s per node, latency {1e3 * rates.inter.latency:.2g} ms"
    yield Finding("ok", "between nodes", message)
    if topology.num_devices > 1:
        slow = intra < 2 * inter * topology.num_devices
        message = f"{intra:.3g} Gbit/s per device, latency {1e3 * rates.intra.latency:.2g} ms"
        message += "; little faster than between nodes, so a hierarchy gains little" if slow else ""
        yield Finding("note" if slow else "ok", "inside a node", message)
    yield advice(topology, rates)


def advice(topology: Topology, rates: Rates) -> Finding:
    """Predicted times of a DDP-sized bucket for each path, and the choice of exchange='auto' at 1 %."""
    config = ExchangeConfig()
    choice = PathChoice(config, topology, BUCKET_NUMEL, lambda line: None)
    choice.rates = rates
    work = choice.work(BUCKET_NUMEL, torch.float32)
    paths = [kind.of(work, config.least_density, VALUES) for kind in PATHS if kind.automatic]
    times = ", ".join(f"{path.name} {1e3 * path.seconds(rates):.3g}" for path in paths if path is not None)
    chosen = choice.path(work, config.least_density)
    said = chosen.name
    if MARGIN * choice.plain(work).seconds(rates) <= chosen.seconds(rates):
        said += ": plain DDP is as fast"
    return Finding("ok", "25 MiB bucket at 1 %", f"{times} ms, predicted; with SGD exchange='auto' chooses {said}")


def _gbps(seconds_per_byte: float) -> float:
    return 8e-9 / max(seconds_per_byte, 1e-15)

"""The part `parity`: losses and final weights of each method on real ranks, compared with DDP and with the CPU.

Each training takes `STEPS` steps from equal weights on equal samples, in fp32 unless its name gives another precision.
On a GPU, ranks use NCCL. If there are fewer GPUs than ranks, ranks share GPUs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from benchmarks.exchange.fsdp import Block
from benchmarks.gpu.claims import NOT_RUN, Claims, Part, Result, verdict
from benchmarks.gpu.methods import COMPARED, DDP, EXACT, Training
from benchmarks.processes import on_clusters
from benchmarks.record import Rows
from lightning_sparse.topology import Topology

CLUSTERS = ("2x1", "2x2", "4x1")
STEPS, BATCH = 20, 8
INPUTS, WIDTH, CLASSES = 31, 193, 7
LIKE_DDP, LIKE_CPU = 2e-6, 5e-3
"""Largest relative differences of losses. A GPU rounds sums differently, so near ties it selects other entries."""


def parity(folder: Path, device: torch.device) -> Iterator[Result]:
    """Train with each method on each cluster, on the CPU and on `device`."""
    rows = Rows()
    for cluster in CLUSTERS:
        for kind in dict.fromkeys(("cpu", device.type)):
            found = on_clusters(train_all, clusters=[cluster], cpu=kind == "cpu") or []
            rows += [{"device": kind, **row} for row in found]
        yield check(rows), rows


def train_all(topology: Topology, device: torch.device, gbps: float | None) -> Rows:
    """Return the losses of each method, averaged over the ranks, and whether all ranks end with equal weights."""
    rows = Rows()
    for name, method in COMPARED.items():
        training = Training.start(method, topology, device, _classifier, _classify, _adamw)
        for step in range(STEPS):
            training.step(_samples(step, topology).to(device))
        losses_S = torch.stack(training.losses).float()
        dist.all_reduce(losses_S)
        training.finish()
        weights = [_digest(training.model)] * topology.world_size
        dist.all_gather_object(weights, weights[0])
        losses = (losses_S / topology.world_size).tolist()
        rows.append({"method": name, "losses": losses, "equal weights": len(set(weights)) == 1})
    return rows


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), *(Block(WIDTH) for _ in range(3)), nn.Linear(WIDTH, CLASSES))


def _samples(step: int, topology: Topology) -> Tensor:
    """Return this rank's inputs, equal on all kinds of devices."""
    generator = torch.Generator().manual_seed(step * topology.world_size + topology.rank)
    return torch.randn(BATCH, INPUTS, generator=generator)


def _classify(model: nn.Module, x_BI: Tensor) -> Tensor:
    label_B = (x_BI[:, :CLASSES] + 0.5 * x_BI[:, CLASSES : 2 * CLASSES]).argmax(1)
    return functional.cross_entropy(model(x_BI).float(), label_B)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _digest(model: nn.Module) -> str:
    weights = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    data = b"".join(weight.detach().cpu().numpy().tobytes() for weight in weights)
    return hashlib.sha256(data).hexdigest()


def check(rows: Rows) -> Claims:
    """Return the verdicts on the trainings so far."""
    losses = {(row["device"], row["cluster"], row["method"]): row["losses"] for row in rows}
    unequal = [f"{row['device']} {row['cluster']} {row['method']}" for row in rows if not row["equal weights"]]
    from_ddp = {key: _difference(own, losses[(*key[:2], DDP)]) for key, own in losses.items() if key[2] in EXACT}
    from_cpu = {key: _difference(own, losses[("cpu", *key[1:])]) for key, own in losses.items() if key[0] != "cpu"}
    return {
        "ranks": verdict(not unequal, f"{len(rows)} trainings; unequal: {', '.join(unequal) or 'none'}"),
        "ddp": _at_most(from_ddp, LIKE_DDP),
        "cpu": _at_most(from_cpu, LIKE_CPU) if from_cpu else (NOT_RUN, "no GPU; the trainings ran"),
    }


def _difference(first: list[float], second: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(first, second, strict=True))


def _at_most(differences: Mapping[tuple[str, str, str], float], limit: float) -> tuple[str, str]:
    worst = max(differences, key=lambda key: differences[key])
    return verdict(differences[worst] <= limit, f"{differences[worst]:.1e}, in {' '.join(worst)}")


PARITY = Part(
    parity,
    240,
    {
        "ranks": "the weights of all ranks are bit-identical",
        "ddp": f"losses with dense exchanges equal DDP losses within {LIKE_DDP:g} (relative)",
        "cpu": f"losses on the GPU equal CPU losses within {LIKE_CPU:g} (relative)",
    },
    by_default=False,
)

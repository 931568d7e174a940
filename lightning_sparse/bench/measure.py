"""Measure the inputs of a plan on this machine: a model's forward and backward, and the host costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from lightning_sparse.bench.models import Model
from lightning_sparse.bench.plan import VALUES, HostCosts
from lightning_sparse.bench.provenance import processor
from lightning_sparse.exchange.probe import kernel_costs

ADDED = 1 << 22  # elements of the test vectors


def device_here() -> torch.device:
    """The current GPU if there is one, otherwise the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def describe(device: torch.device) -> str:
    """Name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {torch.get_num_threads()} thread(s)"


def seconds(call: Callable[[], object], device: torch.device, repeats: int = 5, limit_s: float = 20.0) -> float:
    """Median time of `repeats` calls after a warm-up call. Stops early after `limit_s` seconds."""
    taken: list[float] = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
        if sum(taken) > limit_s:
            break
    return median(taken[1:] or taken)


def compute_seconds(model: Model, batch: int, device: torch.device) -> float:
    """Time forward and backward of random samples, in fp32 on a CPU and with 16-bit autocast on a GPU.

    Raises:
        ValueError: if the batch is empty.
    """
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1, the number of samples per device.")
    with device:
        network = model.build()
        samples = torch.randn(batch, *model.input_shape)
    dtype = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float16

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
            out = network(samples)
            loss = sum(part.float().mean() for part in (out if isinstance(out, tuple) else (out,)))
        network.zero_grad()
        loss.backward()

    return seconds(step, device)


def host_costs(device: torch.device) -> HostCosts:
    """Measure selection, scatter and add on this device."""
    x, y = torch.ones(ADDED, device=device), torch.ones(ADDED, device=device)
    add = seconds(lambda: x.add_(y), device) / (4 * ADDED)
    costs = kernel_costs(lambda call: seconds(call, device), device, VALUES, ADDED)
    rates = replace(costs, add=add, scatter=max(costs.scatter, 1e-12))
    return HostCosts(rates, f"measured on {describe(device)}")

"""Detect whether a launcher started this process, and join its process group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from lightning_sparse.topology import Topology, discover


def launched() -> bool:
    """Return whether torchrun, another launcher that sets RANK, or `srun` with several tasks started this process."""
    return "RANK" in os.environ or ("SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1)


def join() -> tuple[Topology, torch.device]:
    """Initialize the process group: NCCL if this rank has a GPU, otherwise Gloo. A collective.

    Raises:
        ValueError: if the launcher did not set the address of the process group.
    """
    for name, slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"), ("LOCAL_RANK", "SLURM_LOCALID")):
        if slurm in os.environ:
            os.environ.setdefault(name, os.environ[slurm])
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} is not set, so the ranks cannot connect: start with torchrun, or before "
            f"srun, export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500."
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if local < torch.cuda.device_count() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return discover(), device


def leave() -> None:
    """Wait for all ranks, then destroy the process group."""
    dist.barrier()
    dist.destroy_process_group()

"""The GPU of a rank in a lab where a node has fewer GPUs than ranks.

Only on such nodes, the lab sets `VARIABLE` to the CUDA device index of each local rank, such as ``0,0``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

VARIABLE = "LIGHTNING_SPARSE_LAB_GPUS"


def shared_gpus() -> list[int]:
    """Return the CUDA device index of each local rank; empty if the ranks of this node share no GPU."""
    return [int(index) for index in os.environ.get(VARIABLE, "").split(",") if index]


def gpu_of(local_rank: int) -> int:
    gpus = shared_gpus()
    return gpus[local_rank % len(gpus)] if gpus else local_rank


def patch_lightning(strategies: str) -> None:
    """Map the devices of one package of Lightning to the shared GPUs.

    `strategies` is the name of the package's module with strategies, such as "lightning.fabric.strategies".
    """
    # Lightning refuses ``devices=2`` on a node with one GPU, or gives cuda:1 to local rank 1.
    cuda: Any = import_module(f"{strategies.rpartition('.')[0]}.accelerators.cuda")
    accelerator, count, gpus = cuda.CUDAAccelerator, cuda.num_cuda_devices, shared_gpus()
    if accelerator.get_parallel_devices.__module__ == __name__:
        return  # patched before

    def num_cuda_devices() -> int:
        visible: int = count()
        return len(gpus) if visible > max(gpus) else visible  # the program may have hidden the GPUs

    def get_parallel_devices(devices: Sequence[int]) -> list[Any]:
        import torch

        return [torch.device("cuda", gpus[index]) for index in devices]

    # parse_devices, auto_device_count and is_available call it. `count` may be Fabric's patch, imported by the Trainer.
    cuda.num_cuda_devices = num_cuda_devices
    accelerator.get_parallel_devices = staticmethod(get_parallel_devices)

"""DALI or torchvision: which one makes the batches here, and why."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch

Backend = Literal["auto", "dali", "torch"]
BACKENDS = ("auto", "dali", "torch")


def choose_backend(wanted: Backend, device: torch.device) -> tuple[Literal["dali", "torch"], str]:
    """Which backend, and why.

    Raises:
        ValueError: when what is wanted is not installed.
    """
    dali, vision = _installed("nvidia.dali"), _installed("torchvision")
    if wanted == "dali" and not dali:
        raise ValueError(
            'backend="dali" needs DALI: `pip install nvidia-dali-cuda130`, or leave the choice to backend="auto".'
        )
    if not vision and (wanted == "torch" or not dali):
        raise ValueError(f"backend={wanted!r} needs torchvision: `pip install torchvision`.")
    if wanted != "auto":
        return wanted, "as asked for"
    if device.type == "cuda":
        return ("dali", "it works on the GPU") if dali else ("torch", "DALI, which would use the GPU, is not installed")
    if not vision:
        return "dali", "torchvision is not installed"
    return "torch", "without a GPU it resizes faster than DALI does"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False

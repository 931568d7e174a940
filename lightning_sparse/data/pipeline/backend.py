"""Chooses and makes the backend that turns images into batches: DALI or torchvision."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from lightning_sparse.data.config import is_installed
from lightning_sparse.data.pipeline.batch import Pipeline, Transform
from lightning_sparse.data.pipeline.sizes import ImageSizes
from lightning_sparse.data.sample import SampleReader

Backend = Literal["auto", "dali", "torch"]
BACKENDS = ("auto", "dali", "torch")


class MadePipeline(NamedTuple):
    """A pipeline, and a line for the log on what it is."""

    pipeline: Pipeline
    about: str


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """How images become batches.

    Args:
        sizes: height and width by epoch.
        threads: threads that make batches; None: a share of the CPU cores.

    Raises:
        ValueError: if the backend is unknown, or threads is less than 1.
    """

    sizes: ImageSizes
    transform: Transform
    backend: Backend = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is unknown: choose one of {', '.join(BACKENDS)}.")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1, or None for a share of the CPU cores.")

    def make(self, store: SampleReader, *, batch_size: int, cores: int, device: torch.device) -> MadePipeline:
        """Choose the backend and make its pipeline. cores: default of `threads`."""
        backend, reason = choose_backend(self.backend, device)
        threads = self.threads or cores
        pipeline = make_pipeline(backend, store, self.transform, batch_size=batch_size, threads=threads, device=device)
        return MadePipeline(pipeline, f"samples in memory as {store.format}; backend={backend!r}: {reason}")


def choose_backend(wanted: Backend, device: torch.device) -> tuple[Literal["dali", "torch"], str]:
    """Return the backend and the reason for it.

    Raises:
        ValueError: if the backend is not installed.
    """
    dali, vision = is_installed("nvidia.dali"), is_installed("torchvision")
    if wanted == "dali" and not dali:
        raise ValueError('backend="dali" needs DALI: `pip install nvidia-dali-cuda130`, or use backend="auto".')
    if not vision and (wanted == "torch" or not dali):
        raise ValueError(f"backend={wanted!r} needs torchvision: `pip install torchvision`.")
    if wanted != "auto":
        return wanted, "as requested"
    if device.type == "cuda":
        return ("dali", "it runs on the GPU") if dali else ("torch", "DALI, which runs on the GPU, is not installed")
    if not vision:
        return "dali", "torchvision is not installed"
    return "torch", "on a CPU it resizes faster than DALI"


def make_pipeline(
    backend: Literal["dali", "torch"],
    store: SampleReader,
    transform: Transform,
    *,
    batch_size: int,
    threads: int,
    device: torch.device,
) -> Pipeline:
    """Make the pipeline of a backend for batches on `device`. batch_size: largest number of samples in a request."""
    gpu = device.index if device.type == "cuda" else None
    if backend == "dali":
        from lightning_sparse.data.pipeline.backend_dali import DaliPipeline

        return DaliPipeline(store, transform, batch_size=batch_size, threads=threads, device=gpu)
    from lightning_sparse.data.pipeline.backend_torch import TorchPipeline

    return TorchPipeline(store, transform, threads=threads, pin=gpu is not None)

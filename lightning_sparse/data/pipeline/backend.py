"""Chooses and makes the backend that turns images into batches: DALI or torch."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from lightning_sparse.data.config import is_installed
from lightning_sparse.data.pipeline.batch import Pipeline, Transform
from lightning_sparse.data.pipeline.sizes import ImageSizes
from lightning_sparse.data.sample import SampleReader

Backend = Literal["auto", "dali", "torch"]
Chosen = Literal["dali", "torch"]
BACKENDS = get_args(Backend)


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
        """Make the pipeline of the chosen backend. cores: default of `threads`."""
        backend: Chosen = "dali" if self.backend == "dali" else "torch"
        threads = self.threads or cores
        pipeline = make_pipeline(backend, store, self.transform, batch_size=batch_size, threads=threads, device=device)
        return MadePipeline(pipeline, f"samples in memory as {store.format}")


def has_dali() -> bool:
    """Whether this process can use DALI."""
    return is_installed("nvidia.dali")


def choose_backend(
    wanted: Backend, device: torch.device, *, has_dali: bool, kept: str | None = None
) -> tuple[Chosen, str]:
    """Return the backend and the reason for it, a pure function.

    On a CPU torch is faster (`benchmarks/data_backends.py`).

    Args:
        has_dali: whether all ranks have DALI.
        kept: backend of the run that this one continues.

    Raises:
        ValueError: if DALI is wanted and not installed.
    """
    if wanted == "dali" and not has_dali:
        raise ValueError(
            'backend="dali" needs DALI on all ranks: `pip install nvidia-dali-cuda130`, or use backend="auto".'
        )
    if wanted != "auto":
        return wanted, "as requested"
    if kept == "dali" and not has_dali:
        return "torch", "DALI, which this run began with and which resizes slightly differently, is not installed"
    if kept is not None:
        return "dali" if kept == "dali" else "torch", "as in the run that this one continues"
    if device.type != "cuda":
        return "torch", "on a CPU it is faster than DALI"
    if not has_dali:
        return "torch", "DALI, which runs on the GPU, is not installed on all ranks"
    return "dali", "it runs on the GPU"


def make_pipeline(
    backend: Chosen,
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

    return TorchPipeline(store, transform, threads=threads, device=None if gpu is None else device)

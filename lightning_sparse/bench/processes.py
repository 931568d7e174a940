"""The processes that measure: the ranks of a launcher, and calls in a process of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from lightning_sparse.topology import Topology, discover


def launched() -> bool:
    """Whether torchrun, another launcher that sets RANK, or `srun` with several tasks started this process."""
    return "RANK" in os.environ or ("SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1)


def join() -> tuple[Topology, torch.device]:
    """Initialise the process group: NCCL if this rank has a GPU, otherwise Gloo. A collective.

    Raises:
        ValueError: if the launcher did not set the address of the process group.
    """
    for name, slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"), ("LOCAL_RANK", "SLURM_LOCALID")):
        if slurm in os.environ:
            os.environ.setdefault(name, os.environ[slurm])
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} is not set, so the ranks cannot connect: start with torchrun, or export before "
            f"srun (MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500)."
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


@contextmanager
def own_process() -> Iterator[Callable[..., Any]]:
    """Yield ``call(what, work, *arguments)``, which returns ``work(*arguments)`` of a process that starts afresh.

    `what` names the work in the RuntimeError that `call` raises if the process ends before.
    """
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:

        def call(what: str, work: Callable[..., Any], *arguments: object) -> Any:
            future = executor.submit(work, *arguments)
            own = set(multiprocessing.active_children()) - others
            try:
                return future.result()
            except BrokenProcessPool as error:
                executor.shutdown()  # its thread waits for the process, and until then the exit status is not known
                raise RuntimeError(f"the process of {what} {' and '.join(map(_end, own))}") from error

        yield call


def _end(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None or code >= 0:
        return f"(pid {process.pid}) ended with status {code}: what it printed above says why."
    end = f"(pid {process.pid}) was ended by {signal.Signals(-code).name}."
    if code == -signal.SIGKILL:
        end += " The kernel does that where memory is short (`dmesg | grep -i kill` tells): free some, or measure less."
    return end

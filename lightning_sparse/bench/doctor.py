"""Check this machine: versions, Lightning, optional packages, kernels, GPUs, memory and environment variables.

A finding is ``ok``; ``note``, which costs speed or a feature; or ``bad``, which breaks a run or skews measurements.
"""

import importlib
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Literal

import torch

from lightning_sparse.kernels import kernel_report

Status = Literal["ok", "note", "bad"]
OLDEST_TORCH = (2, 11)
STRATEGIES = ("mstopk_hier", "mstopk_local", "mstopk_fsdp")
FLAVOURS = {"pytorch-lightning": "pytorch_lightning.strategies", "lightning": "lightning.pytorch.strategies"}
EXTRAS = {
    "torchvision": "models and data sets of the examples",
    "nvidia-dali-cuda130": "image decoding with DALI",
    "lmdb": "the disk cache",
    "pyzmq": "samples from other nodes' memory",
    "xxhash": "cache checksums",
    "simplejpeg": "faster JPEG decoding",
}
BUILT_FOR = {
    # "operator nms does not exist": a CPU-only torch with a CUDA torchvision
    "torchvision": "install torch and torchvision from the same index",
    "simplejpeg": "install one that was built for this NumPy, or none",
}
SLOW_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": "every kernel launch blocks, so nothing overlaps; unset it unless debugging",
    "NCCL_P2P_DISABLE": "GPUs of a node communicate through the host, which slows steps 1 and 4; unset it if possible",
    "TORCH_DISTRIBUTED_DEBUG": "checks every collective, so links measure slow; unset it for training",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    status: Status
    subject: str
    message: str


def examine() -> list[Finding]:
    """All checks of a single process. Imports the installed flavours of Lightning."""
    checks: list[Callable[[], Iterator[Finding]]] = [_python, _lightning, _extras, _kernels, _gpus, _memory, _settings]
    return [finding for check in checks for finding in check()]


def report(findings: list[Finding]) -> str:
    """Format findings, one per line."""
    width = max(len(each.subject) for each in findings)
    return "\n".join(f"{each.status:<5}{each.subject:<{width + 2}}{each.message}" for each in findings)


def _python() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    oldest = ".".join(map(str, OLDEST_TORCH))
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if installed < OLDEST_TORCH:
        yield Finding("bad", "torch", f"{torch.__version__}: needs {oldest} or later: pip install -U torch")
    else:
        yield Finding("ok", "torch", f"{torch.__version__} ({built})")


def _lightning() -> Iterator[Finding]:
    found = 0
    for package, module in FLAVOURS.items():
        installed = _version(package)
        if installed is None:
            continue
        found += 1
        try:
            registry = importlib.import_module(module).StrategyRegistry
        except Exception as error:  # incompatible packages can raise anything on import
            yield Finding("bad", package, f"{installed} cannot be imported: {type(error).__name__}: {error}")
            continue
        missing = [name for name in STRATEGIES if name not in registry]
        names = ", ".join(map(repr, missing or STRATEGIES))
        message = f"{installed}, strategies {names} are {'not ' if missing else ''}registered"
        yield Finding("bad" if missing else "ok", package, message)
    if not found:
        yield Finding("bad", "lightning", "not installed: pip install pytorch-lightning (or lightning)")
    if not any(point.name == "lightning_sparse" for point in entry_points(group="torch.backends")):
        message = "not installed as a package: scripts must `import lightning_sparse` before they name the strategy"
        yield Finding("note", "lightning_sparse", message)


def _extras() -> Iterator[Finding]:
    for package, use in EXTRAS.items():
        installed = _version(package)
        if installed is None:
            yield Finding("note", package, f"not installed, needed for {use}: pip install {package}")
        else:
            yield Finding("ok", package, f"{installed}: {use}")
    for package, cure in BUILT_FOR.items():
        if _version(package) is not None:
            try:
                importlib.import_module(package)
            except Exception as error:
                yield Finding("bad", package, f"cannot be imported ({error}): {cure}")


def _kernels() -> Iterator[Finding]:
    found = kernel_report()
    reasons = f": {'; '.join(found.reasons)}" if found.reasons else ""
    for device, state in (("CPU", found.cpu), ("CUDA", found.cuda)):
        needed = device == "CPU" or torch.cuda.is_available()
        status: Status = "ok" if state == "compiled" or not needed else "note"
        yield Finding(status, f"{device} kernels", state + ("" if state == "compiled" else reasons))


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("ok", "GPU", "none: training runs on the CPU, with Gloo")
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield Finding("ok", f"GPU {index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")


def _memory() -> Iterator[Finding]:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield Finding("note", "shared memory", f"no /dev/shm on {sys.platform}: DataLoader workers and NCCL need it")
        return
    usage = shutil.disk_usage(shared)
    status: Status = "ok" if usage.free > 2**30 else "note"
    small = "" if status == "ok" else "; start the container with --shm-size: workers and NCCL need it"
    yield Finding(status, "shared memory", f"{usage.free / 2**30:.1f} GiB free in /dev/shm{small}")


def _settings() -> Iterator[Finding]:
    """Environment variables that break or slow training on several nodes."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        requested = os.environ.get(name, "").removeprefix("=")
        here = [interface for _, interface in socket.if_nameindex()]
        if requested.startswith("^") or requested == "":  # "^" excludes interfaces
            continue
        if not any(interface.startswith(each.partition(":")[0]) for interface in here for each in requested.split(",")):
            yield Finding("bad", name, f"{requested}: no such network interface; available: {', '.join(here)}")
    for name, cost in SLOW_SETTINGS.items():
        if os.environ.get(name, "0") not in ("", "0", "OFF", "INFO"):
            yield Finding("note", name, f"{os.environ[name]}: {cost}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

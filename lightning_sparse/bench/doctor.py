"""Is everything here that this library can use, and does it fit together? One screen, for a person and for a script.

Three marks: ``ok``; ``note``, which costs speed or a feature; ``bad``, which breaks a run or gives wrong advice on it.
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

Mark = Literal["ok", "note", "bad"]
OLDEST_TORCH = (2, 11)
FLAVOURS = {"pytorch-lightning": "pytorch_lightning.strategies", "lightning": "lightning.pytorch.strategies"}
EXTRAS = {
    "torchvision": "models and pictures of the examples",
    "nvidia-dali-cuda130": "decoding with DALI",
    "lmdb": "the cache on local disk",
    "pyzmq": "samples from the memory of other nodes",
    "xxhash": "checksums of the cache",
}
SLOW_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for, so nothing overlaps; unset it outside of debugging",
    "NCCL_P2P_DISABLE": "GPUs of a node talk through the host, so step 1 and 4 are slow; unset it if they need not",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked first, so measured links look slow; unset it for training",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    mark: Mark
    subject: str
    said: str


def examine() -> list[Finding]:
    """Everything that one process can find out by itself. Imports whatever Lightning is installed."""
    checks: list[Callable[[], Iterator[Finding]]] = [_python, _lightning, _extras, _kernels, _gpus, _memory, _settings]
    return [finding for check in checks for finding in check()]


def report(findings: list[Finding]) -> str:
    """The findings as aligned lines."""
    width = max(len(each.subject) for each in findings)
    return "\n".join(f"{each.mark:<5}{each.subject:<{width + 2}}{each.said}" for each in findings)


def _python() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    oldest = ".".join(map(str, OLDEST_TORCH))
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if installed < OLDEST_TORCH:
        yield Finding("bad", "torch", f"{torch.__version__}: needs {oldest} or later (pip install -U torch)")
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
            known = "mstopk_hier" in importlib.import_module(module).StrategyRegistry
        except Exception as error:  # whatever a broken pair of packages raises on import
            yield Finding("bad", package, f"{installed} cannot be imported: {type(error).__name__}: {error}")
            continue
        said = "knows strategy='mstopk_hier'" if known else "does not know strategy='mstopk_hier'"
        yield Finding("ok" if known else "bad", package, f"{installed}, {said}")
    if not found:
        yield Finding("bad", "lightning", "no PyTorch Lightning: pip install pytorch-lightning (or lightning)")
    if not any(point.name == "lightning_sparse" for point in entry_points(group="torch.backends")):
        said = "not installed as a package, so the strategy's name needs `import lightning_sparse` in the script"
        yield Finding("note", "lightning_sparse", said)


def _extras() -> Iterator[Finding]:
    for package, use in EXTRAS.items():
        installed = _version(package)
        if installed is None:
            yield Finding("note", package, f"not installed, so without {use}: pip install {package}")
        else:
            yield Finding("ok", package, f"{installed}: {use}")
    if _version("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except Exception as error:  # a CPU-only torch beside a torchvision for CUDA: "operator nms does not exist"
            said = f"cannot be imported ({error}): install torch and torchvision from the same index"
            yield Finding("bad", "torchvision", said)


def _kernels() -> Iterator[Finding]:
    found = kernel_report()
    why = "" if not found.reasons else f": {'; '.join(found.reasons)}"
    for device, state in (("CPU", found.cpu), ("CUDA", found.cuda)):
        needed = device == "CPU" or torch.cuda.is_available()
        mark: Mark = "ok" if state == "compiled" or not needed else "note"
        yield Finding(mark, f"{device} kernels", state + ("" if state == "compiled" else why))


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("ok", "GPU", "none: everything runs on the CPU, over Gloo")
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield Finding("ok", f"GPU {index}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB")


def _memory() -> Iterator[Finding]:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield Finding("note", "shared memory", f"no /dev/shm on {sys.platform}: cached samples are kept in files")
        return
    usage = shutil.disk_usage(shared)
    mark: Mark = "ok" if usage.free > 2**30 else "note"
    small = "" if mark == "ok" else "; in a container start it with --shm-size, or cached samples go to files"
    yield Finding(mark, "shared memory", f"{usage.free / 2**30:.1f} GiB free in /dev/shm{small}")


def _settings() -> Iterator[Finding]:
    """Environment variables that are known to go badly with training on several nodes; nothing where all is well."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = os.environ.get(name, "").removeprefix("=")
        here = [interface for _, interface in socket.if_nameindex()]
        if wanted.startswith("^") or wanted == "":  # "^" names those not to take
            continue
        if not any(interface.startswith(each.partition(":")[0]) for interface in here for each in wanted.split(",")):
            yield Finding("bad", name, f"{wanted}: no such network interface here ({', '.join(here)})")
    for name, cost in SLOW_SETTINGS.items():
        if os.environ.get(name, "0") not in ("", "0", "OFF", "INFO"):
            yield Finding("note", name, f"{os.environ[name]}: {cost}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

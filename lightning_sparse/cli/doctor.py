"""`lightning-sparse doctor`: check this machine or this cluster.

A check yields results: ``ok``, ``note`` (costs speed or a feature), or ``bad`` (breaks a run or skews measurements).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_sparse._autoload import CLASSES
from lightning_sparse.agree import gather
from lightning_sparse.data.cache.commands import caches
from lightning_sparse.data.cache.segment import available_memory
from lightning_sparse.data.folders import NETWORK_FILE_SYSTEMS, VERSION, file_system
from lightning_sparse.elastic.lighthouse import COMMAND, VARIABLE, read_quorum
from lightning_sparse.exchange import ExchangeConfig, HierCommunicator
from lightning_sparse.exchange.cost import MARGIN, PathChoice, probe
from lightning_sparse.exchange.paths import PATHS, Flat
from lightning_sparse.exchange.rates import Rates
from lightning_sparse.kernels import kernel_report
from lightning_sparse.lab import unavailable_reason
from lightning_sparse.lab.shared_gpus import gpu_of
from lightning_sparse.topology import Topology, discover

Status = Literal["ok", "note", "bad"]
OLDEST_TORCH = (2, 11)
MALWARE = ("2.6.2", "2.6.3")
SAFE_LIGHTNING = (2, 6, 6)
STRATEGY_NAMES = tuple(CLASSES)
LIGHTNING_PACKAGES = {"pytorch-lightning": "pytorch_lightning.strategies", "lightning": "lightning.pytorch.strategies"}
EXTRAS = {
    "torchvision": ("vision", "models and data sets of the examples"),
    "nvidia-dali-cuda130": ("dali", "image decoding with DALI"),
    "lmdb": ("data", "the disk cache"),
    "pyzmq": ("data", "samples from other nodes' memory"),
    "xxhash": ("data", "cache checksums"),
    "simplejpeg": ("data", "faster JPEG decoding"),
}
"""Optional packages: the extra that installs each one, and its use."""
IMPORT_FIXES = {
    # "operator nms does not exist": a CPU-only torch with a CUDA torchvision
    "torchvision": "install torch and torchvision from the same index",
    "simplejpeg": "install a version that was built for this NumPy, or uninstall it",
}
SLOW_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": "every kernel launch blocks, so nothing overlaps; unset it unless you debug",
    "NCCL_P2P_DISABLE": "GPUs of a node communicate through the host, which is slow; unset it if possible",
    "TORCH_DISTRIBUTED_DEBUG": "checks every collective, so links seem slow; unset it for training",
}
VALUES = torch.bfloat16  # of a message, as in the default of HierConfig
BUCKET_NUMEL = (25 << 20) // 4
"""fp32 gradients in a DDP bucket of default size."""
MIN_FREE_BYTES = 10e9
"""Free bytes below which an image data set is unlikely to fit."""
_LABELS = {"flat": "flat (DDP)", "dense": "dense (2-D)", "dense16": "dense16 (2-D, 16 bits)"}
NOT_MEASURED = "not measured: run `torchrun ... --no-python lightning-sparse doctor` (or srun) on all nodes"


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    status: Status
    subject: str
    message: str


def run_checks() -> list[CheckResult]:
    """Run all checks of a single process. Imports the installed Lightning packages."""
    checks = (check_torch, check_lightning, check_extras, check_machine, check_environment, check_lighthouse)
    return [result for check in checks for result in check()]


def report(results: list[CheckResult]) -> str:
    width = max(len(result.subject) for result in results)
    return "\n".join(f"{result.status:<5}{result.subject:<{width + 2}}{result.message}" for result in results)


def check_torch() -> Iterator[CheckResult]:
    yield CheckResult("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if installed < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield CheckResult("bad", "torch", f"{torch.__version__}: needs {oldest} or later: pip install -U torch")
    else:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
        yield CheckResult("ok", "torch", f"{torch.__version__} ({build})")


def check_lightning() -> Iterator[CheckResult]:
    packages = {package: installed for package in LIGHTNING_PACKAGES if (installed := _version(package)) is not None}
    if not packages:
        yield CheckResult("bad", "lightning", "not installed: pip install pytorch-lightning (or lightning)")
    for package, installed in packages.items():
        try:
            registry = importlib.import_module(LIGHTNING_PACKAGES[package]).StrategyRegistry
        except Exception as error:  # incompatible packages can raise anything on import
            message = f"{installed} cannot be imported: {type(error).__name__}: {error}"
            yield CheckResult("bad", package, message)
            continue
        if advisory := advisory_of(installed):
            yield CheckResult(advisory[0], package, f"{installed}: {advisory[1]}")
        missing = [name for name in STRATEGY_NAMES if name not in registry]
        names = ", ".join(map(repr, missing or STRATEGY_NAMES))
        message = f"{installed}, strategies {names} are {'not ' if missing else ''}registered"
        yield CheckResult("bad" if missing else "ok", package, message)
    if not any(point.name == "lightning_sparse" for point in entry_points(group="torch.backends")):
        message = (
            "not installed as a package: scripts must `import lightning_sparse` before they use a strategy by name"
        )
        yield CheckResult("note", "lightning_sparse", message)


def advisory_of(installed: str) -> tuple[Status, str] | None:
    """Return the known security problem of a version of Lightning, or None.

    >>> advisory_of("2.6.5"), advisory_of("2.6.6")
    (('note', 'loading a checkpoint may run its code (GHSA-qqmf-gpg7-g8gw): install 2.6.6 or later'), None)
    """
    if installed in MALWARE:
        return (
            "bad",
            "this release was malware (GHSA-w37p-236h-pfx3): remove it, and change the secrets of this machine",
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:3])
    if numbers < SAFE_LIGHTNING:
        return "note", "loading a checkpoint may run its code (GHSA-qqmf-gpg7-g8gw): install 2.6.6 or later"
    return None


def check_extras() -> Iterator[CheckResult]:
    for package, (extra, use) in EXTRAS.items():
        installed = _version(package)
        if installed is not None:
            yield CheckResult("ok", package, f"{installed}: {use}")
        elif extra != "dali" or torch.cuda.is_available():  # without a GPU, DALI is not used
            yield CheckResult("note", package, f"optional (extra {extra!r}), for {use}: pip install {package}")
    for package, fix in IMPORT_FIXES.items():
        if _version(package) is not None:
            try:
                importlib.import_module(package)
            except Exception as error:
                yield CheckResult("bad", package, f"cannot be imported ({error}): {fix}")


def check_machine() -> Iterator[CheckResult]:
    kernels, has_gpu = kernel_report(), torch.cuda.is_available()
    for device, state in (("CPU", kernels.cpu), ("CUDA", kernels.cuda)):
        if state == "compiled":
            yield CheckResult("ok", f"{device} kernels", state)
        elif device == "CUDA" and not has_gpu:
            yield CheckResult("ok", f"{device} kernels", f"{state}; not needed, because there is no GPU")
        else:
            message = f"plain torch, several times slower: {'; '.join(kernels.reasons)}. Fix: {kernels.fix}"
            yield CheckResult("note", f"{device} kernels", message)
    if not has_gpu:
        yield CheckResult("ok", "GPU", "none: training runs on the CPU, with Gloo")
    for index in range(torch.cuda.device_count() if has_gpu else 0):
        gpu = torch.cuda.get_device_properties(index)
        yield CheckResult("ok", f"GPU {index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    shared = Path("/dev/shm")
    if not shared.is_dir():
        message = f"no /dev/shm on {sys.platform}: DataLoader workers and NCCL need it"
        yield CheckResult("note", "shared memory", message)
        return
    free = shutil.disk_usage(shared).free
    is_small = free <= 2**30
    hint = "; start the container with --shm-size: workers and NCCL need it" if is_small else ""
    message = f"{free / 2**30:.1f} GiB free in /dev/shm{hint}"
    yield CheckResult("note" if is_small else "ok", "shared memory", message)


def check_environment() -> Iterator[CheckResult]:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        requested = os.environ.get(name, "").removeprefix("=")
        if requested.startswith("^") or requested == "":  # "^" excludes interfaces
            continue
        prefixes = tuple(prefix.partition(":")[0] for prefix in requested.split(","))
        interfaces = [name for _, name in socket.if_nameindex()]
        if not any(interface.startswith(prefixes) for interface in interfaces):
            message = f"{requested}: no such network interface; available: {', '.join(interfaces)}"
            yield CheckResult("bad", name, message)
    for name, cost in SLOW_SETTINGS.items():
        if os.environ.get(name, "0") not in ("", "0", "OFF", "INFO"):
            yield CheckResult("note", name, f"{os.environ[name]}: {cost}")


def check_lighthouse() -> Iterator[CheckResult]:
    address = os.environ.get(VARIABLE)
    # only `mstopk_elastic` needs a lighthouse
    if not address:
        return
    try:
        members = read_quorum(address)
    except (OSError, ValueError, HTTPException) as error:
        message = f"no lighthouse answers at {address} ({error}): start one there with `{COMMAND}`"
        yield CheckResult("bad", "lighthouse", message)
        return
    nodes = ", ".join(f"{name} ({rounds:,} rounds)" for name, rounds in members)
    yield CheckResult("ok", "lighthouse", f"{address}; nodes of its last quorum: {nodes or 'none yet'}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -- the data cache on this node ---------------------------------------------------------------------------------------


def check_cache(cache_dir: str) -> Iterator[CheckResult]:
    folder = Path(cache_dir)
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    kind = file_system(existing)
    status: Status = "bad"
    if kind in NETWORK_FILE_SYSTEMS:
        message = f"{folder} is on a network file system ({kind}), which the cache does not support: use a local disk"
    elif not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        message = f"{existing} is not a folder that this user may write to"
    else:
        free = shutil.disk_usage(existing).free
        status = "ok" if free > MIN_FREE_BYTES else "note"
        message = f"{free / 1e9:,.0f} GB free in {folder} ({kind or 'file system unknown'})"
        message += "" if folder.exists() else "; the folder will be created"
        message += "" if status == "ok" else "; this is little for an image data set, see the option disk_gb"
    yield CheckResult(status, "disk cache", message)
    for source in caches(cache_dir) if folder.is_dir() else ():
        splits = ", ".join(f"{name} {cached:,} of {listed:,} files" for name, cached, listed, _ in source.splits)
        content = splits or "empty"
        if source.version != VERSION:
            content = f"version {source.version}, unused: run lightning-sparse cache clear"
        message = f"{source.source}: {source.bytes / 1e9:,.2f} GB, {content}"
        yield CheckResult("ok" if source.version == VERSION else "note", "cached", message)
    message = f"{available_memory() / 1e9:,.1f} GB of this node's memory are available for samples"
    yield CheckResult("ok", "memory cache", message)


# -- the ranks of a launcher -------------------------------------------------------------------------------------------


def is_launched() -> bool:
    # torchrun and other launchers set RANK; `srun` starts several tasks
    return "RANK" in os.environ or ("SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1)


def join_ranks() -> tuple[Topology, torch.device]:
    """Initialize the process group: NCCL if this rank has a GPU, otherwise Gloo. A collective."""
    for name, slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"), ("LOCAL_RANK", "SLURM_LOCALID")):
        if slurm in os.environ:
            os.environ.setdefault(name, os.environ[slurm])
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} is not set, so the ranks cannot connect: start with torchrun, or before "
            f"srun, export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500."
        )
    local = gpu_of(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda", local) if local < torch.cuda.device_count() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return discover(), device


def leave_ranks() -> None:
    dist.barrier()
    dist.destroy_process_group()


def check_ranks(topology: Topology, device: torch.device, local: Sequence[CheckResult]) -> Iterator[CheckResult]:
    """Check the topology, differences between ranks, and the networks. A collective; the same results on all ranks.

    `local` has the results of this rank's own checks. Bad results of other ranks are also reported.
    """
    message = f"{topology.describe()}, {dist.get_backend()}"
    yield CheckResult("ok" if topology.kind == "hierarchical" else "note", "topology", message)
    if device.type == "cpu" and torch.cuda.is_available():
        message = "a node has more ranks than GPUs, so ranks use the CPU: start one rank per GPU"
        yield CheckResult("bad", "ranks", message)
    kernels = kernel_report()
    own: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": kernels.cuda if device.type == "cuda" else kernels.cpu,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "bad": [(result.subject, result.message) for result in local if result.status == "bad"],
    }
    gathered = gather(own)
    for name in ("python", "torch", "kernels", "device"):
        ranks_by_value: dict[str, list[str]] = {}
        for rank, properties in enumerate(gathered):
            ranks_by_value.setdefault(properties[name], []).append(str(rank))
        if len(ranks_by_value) > 1:
            message = "; ".join(f"{value} on ranks {', '.join(ranks)}" for value, ranks in ranks_by_value.items())
            yield CheckResult("bad" if name == "torch" else "note", f"{name} differs", message)
    for rank, properties in enumerate(gathered):
        if rank and properties["bad"] != gathered[0]["bad"]:
            for subject, message in properties["bad"]:
                yield CheckResult("bad", f"rank {rank}: {subject}", message)
    if topology.kind != "hierarchical":
        yield CheckResult("note", "links", "not measured: needs several nodes with the same number of devices")
        return
    rates = probe(HierCommunicator(topology), device, VALUES, BUCKET_NUMEL // topology.num_devices)
    node_gbps = _gbps(rates.inter.seconds_per_byte) * topology.num_devices
    message = f"{node_gbps:.3g} Gbit/s per node, latency {1e3 * rates.inter.latency:.2g} ms"
    yield CheckResult("ok", "between nodes", message)
    if topology.num_devices > 1:
        device_gbps = _gbps(rates.intra.seconds_per_byte)
        is_slow = device_gbps < 2 * node_gbps
        message = f"{device_gbps:.3g} Gbit/s per device, latency {1e3 * rates.intra.latency:.2g} ms"
        message += "; little faster than the link between nodes, so a hierarchy gains little" if is_slow else ""
        yield CheckResult("note" if is_slow else "ok", "inside a node", message)
    yield check_paths(topology, rates)


def check_paths(topology: Topology, rates: Rates) -> CheckResult:
    """Predict the time of a DDP-sized bucket for each path, and the choice of exchange='auto' at 1%."""
    config = ExchangeConfig()
    choice = PathChoice(config, topology, BUCKET_NUMEL, lambda line: None)
    choice.rates = rates
    work = choice.work(BUCKET_NUMEL, torch.float32)
    paths = [kind.of(work, config.density, VALUES) for kind in PATHS if kind.in_auto]
    times = ", ".join(
        f"{_LABELS.get(path.name, path.name)} {1e3 * path.seconds(rates):.3g}" for path in paths if path is not None
    )
    chosen = choice.path(work, config.density)
    hint = ": plain DDP is as fast" if MARGIN * Flat(work).seconds(rates) <= chosen.seconds(rates) else ""
    message = f"predicted: {times} ms; with SGD, exchange='auto' chooses {chosen.name}{hint}"
    return CheckResult("ok", "25 MiB bucket at 1%", message)


def _gbps(seconds_per_byte: float) -> float:
    return 8e-9 / max(seconds_per_byte, 1e-15)


# -- the command -------------------------------------------------------------------------------------------------------


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check versions, kernels, GPUs, and memory. Under torchrun or srun, also report the topology and measure the "
        "networks inside and between nodes. The exit code is 1 if a check fails."
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="also check this disk cache")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    results, rank = run_checks(), 0
    if arguments.cache_dir is not None:
        results += check_cache(arguments.cache_dir)
    if is_launched():
        topology, device = join_ranks()
        results += list(check_ranks(topology, device, results))
        rank = topology.rank
        leave_ranks()
    else:
        results.append(CheckResult("note", "network", NOT_MEASURED))
        missing = unavailable_reason()
        message = f"{missing}; or use --no-net for loopback" if missing else "can emulate clusters with slow links"
        results.append(CheckResult("note" if missing else "ok", "lab", message))
    if rank == 0:
        print(json.dumps([asdict(result) for result in results], indent=2) if arguments.json else report(results))
    return int(any(result.status == "bad" for result in results))

"""`lightning-sparse doctor`: check this machine or this cluster.

It checks versions, Lightning, optional packages, kernels, GPUs, memory, environment variables, and the data cache of
this node. On the ranks of a launcher, it also checks topology, network rates, and differences between ranks. A finding
is ``ok``, ``note`` (costs speed or a feature), or ``bad`` (breaks a run or skews measurements).
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_sparse.cli.ranks import join, launched, leave
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
from lightning_sparse.topology import Topology

Status = Literal["ok", "note", "bad"]
OLDEST_TORCH = (2, 11)
MALWARE = ("2.6.2", "2.6.3")
SAFE_LIGHTNING = (2, 6, 6)
STRATEGIES = ("mstopk_hier", "mstopk_local", "mstopk_fsdp", "mstopk_elastic")
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
MIN_FREE = 10e9
"""Free bytes below which an image data set is unlikely to fit."""
_LABELS = {"flat": "flat (DDP)", "dense": "dense (2-D)", "dense16": "dense16 (2-D, 16 bits)"}
HOW = "not measured: run `torchrun ... --no-python lightning-sparse doctor` (or srun) on all nodes"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    status: Status
    subject: str
    message: str


def examine() -> list[Finding]:
    """Run all checks of a single process. Imports the installed packages of Lightning."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python, _lightning, _extras, _kernels, _gpus, _memory, _settings, _lighthouse,
    ]  # fmt: skip
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
        if advisory := advisory_of(installed):
            yield Finding(advisory[0], package, f"{installed}: {advisory[1]}")
        missing = [name for name in STRATEGIES if name not in registry]
        names = ", ".join(map(repr, missing or STRATEGIES))
        message = f"{installed}, strategies {names} are {'not ' if missing else ''}registered"
        yield Finding("bad" if missing else "ok", package, message)
    if not found:
        yield Finding("bad", "lightning", "not installed: pip install pytorch-lightning (or lightning)")
    if not any(point.name == "lightning_sparse" for point in entry_points(group="torch.backends")):
        message = (
            "not installed as a package: scripts must `import lightning_sparse` before they use a strategy by name"
        )
        yield Finding("note", "lightning_sparse", message)


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
    missing = f"plain torch, several times slower: {'; '.join(found.reasons)}. Fix: {found.cure}"
    for device, state in (("CPU", found.cpu), ("CUDA", found.cuda)):
        if state == "compiled":
            yield Finding("ok", f"{device} kernels", state)
        elif device == "CUDA" and not torch.cuda.is_available():
            yield Finding("ok", f"{device} kernels", f"{state}; not needed, because there is no GPU")
        else:
            yield Finding("note", f"{device} kernels", missing)


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


def _lighthouse() -> Iterator[Finding]:
    """Check the lighthouse of `mstopk_elastic`, if the environment names one."""
    address = os.environ.get(VARIABLE)
    if not address:
        return
    try:
        members = read_quorum(address)
    except (OSError, ValueError, HTTPException) as error:
        yield Finding(
            "bad", "lighthouse", f"no lighthouse answers at {address} ({error}): start one there with `{COMMAND}`"
        )
        return
    nodes = ", ".join(f"{name} ({rounds:,} rounds)" for name, rounds in members)
    yield Finding("ok", "lighthouse", f"{address}; nodes of its last quorum: {nodes or 'none yet'}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -- the data cache on this node ---------------------------------------------------------------------------------------


def examine_cache(cache_dir: str) -> Iterator[Finding]:
    """Check free space on disk and in memory, and list the caches in the folder."""
    folder = Path(cache_dir)
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    kind = file_system(existing)
    if kind in NETWORK_FILE_SYSTEMS:
        said = f"{folder} is on a network file system ({kind}), which the cache does not support: use a local disk"
        yield Finding("bad", "disk cache", said)
    elif not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("bad", "disk cache", f"{existing} is not a folder that this user may write to")
    else:
        free = shutil.disk_usage(existing).free
        missing = "" if folder.exists() else "; the folder will be created"
        little = "" if free > MIN_FREE else "; this is little for an image data set, see the option disk_gb"
        said = f"{free / 1e9:,.0f} GB free in {folder} ({kind or 'file system unknown'}){missing}{little}"
        yield Finding("note" if little else "ok", "disk cache", said)
    if folder.is_dir():
        for each in caches(cache_dir):
            splits = ", ".join(f"{name} {kept:,} of {listed:,} files" for name, kept, listed, _ in each.splits)
            old = "" if each.version == VERSION else f"version {each.version}, unused: run lightning-sparse cache clear"
            said = f"{each.source}: {each.bytes / 1e9:,.2f} GB, {old or splits or 'empty'}"
            yield Finding("note" if old else "ok", "cached", said)
    said = f"{available_memory() / 1e9:,.1f} GB of this node's memory are available for samples"
    yield Finding("ok", "memory cache", said)


# -- the ranks of a launcher -------------------------------------------------------------------------------------------


def examine_network(topology: Topology, device: torch.device, local: Sequence[Finding]) -> list[Finding]:
    """Checks that involve all ranks, the same on all of them. A collective.

    `local` holds this rank's own findings.
    """
    return [*_topology(topology, device), *_ranks(topology, device, local), *_links(topology, device)]


def _topology(topology: Topology, device: torch.device) -> Iterator[Finding]:
    message = f"{topology.describe()}, {dist.get_backend()}"
    yield Finding("ok" if topology.kind == "hierarchical" else "note", "topology", message)
    if device.type == "cpu" and torch.cuda.is_available():
        yield Finding("bad", "ranks", "a node has more ranks than GPUs, so ranks use the CPU: start one rank per GPU")


def _ranks(topology: Topology, device: torch.device, local: Sequence[Finding]) -> Iterator[Finding]:
    """Differences between ranks, and the bad findings of ranks other than 0."""
    report = kernel_report()
    mine: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": report.cuda if device.type == "cuda" else report.cpu,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "bad": [(each.subject, each.message) for each in local if each.status == "bad"],
    }
    gathered: list[dict[str, Any]] = [{} for _ in range(topology.world_size)]
    dist.all_gather_object(gathered, mine)
    for name in ("python", "torch", "kernels", "device"):
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(gathered):
            by_value.setdefault(each[name], []).append(rank)
        if len(by_value) > 1:
            message = "; ".join(f"{value} on ranks {', '.join(map(str, ranks))}" for value, ranks in by_value.items())
            yield Finding("bad" if name == "torch" else "note", f"{name} differs", message)
    for rank, each in enumerate(gathered):
        if rank and each["bad"] != gathered[0]["bad"]:
            yield from (Finding("bad", f"rank {rank}: {subject}", message) for subject, message in each["bad"])


def _links(topology: Topology, device: torch.device) -> Iterator[Finding]:
    if topology.kind != "hierarchical":
        yield Finding("note", "links", "not measured: needs several nodes with the same number of devices")
        return
    rates = probe(HierCommunicator(topology), device, VALUES, BUCKET_NUMEL // topology.num_devices)
    inter, intra = _gbps(rates.inter.seconds_per_byte), _gbps(rates.intra.seconds_per_byte)
    message = f"{inter * topology.num_devices:.3g} Gbit/s per node, latency {1e3 * rates.inter.latency:.2g} ms"
    yield Finding("ok", "between nodes", message)
    if topology.num_devices > 1:
        slow = intra < 2 * inter * topology.num_devices
        message = f"{intra:.3g} Gbit/s per device, latency {1e3 * rates.intra.latency:.2g} ms"
        message += "; little faster than the link between nodes, so a hierarchy gains little" if slow else ""
        yield Finding("note" if slow else "ok", "inside a node", message)
    yield advice(topology, rates)


def advice(topology: Topology, rates: Rates) -> Finding:
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
    said = chosen.name
    if MARGIN * Flat(work).seconds(rates) <= chosen.seconds(rates):
        said += ": plain DDP is as fast"
    return Finding("ok", "25 MiB bucket at 1%", f"predicted: {times} ms; with SGD, exchange='auto' chooses {said}")


def _gbps(seconds_per_byte: float) -> float:
    return 8e-9 / max(seconds_per_byte, 1e-15)


# -- the command -------------------------------------------------------------------------------------------------------


def declare(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = (
        "Check versions, kernels, GPUs, and memory. Under torchrun or srun, also report the topology and measure the "
        "networks inside and between nodes. The exit code is 1 if a check fails."
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="also check this disk cache")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    findings, rank = examine(), 0
    if arguments.cache_dir is not None:
        findings += examine_cache(arguments.cache_dir)
    if launched():
        topology, device = join()
        findings += examine_network(topology, device, findings)
        rank = topology.rank
        leave()
    else:
        missing = unavailable_reason()
        findings.append(Finding("note", "network", HOW))
        message = f"{missing}; or use --no-net for loopback" if missing else "can emulate clusters with slow links"
        findings.append(Finding("note" if missing else "ok", "lab", message))
    if rank == 0:
        print(json.dumps([asdict(each) for each in findings], indent=2) if arguments.json else report(findings))
    return int(any(each.status == "bad" for each in findings))

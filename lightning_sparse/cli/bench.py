"""`lightning-sparse bench kernels | exchange | pto | data`; the benchmarks are in `lightning_sparse.bench`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lightning_sparse.bench import data, exchange, kernels, models, pto
from lightning_sparse.bench.processes import join, launched, leave
from lightning_sparse.bench.report import commit, surroundings
from lightning_sparse.cli.lab import add_cluster
from lightning_sparse.lab import Cluster, LabConfig, signals_as_exit, unavailable_reason

Rows = list[dict[str, Any]]


def declare(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    command = _add(benchmarks, "kernels", "time the kernels against reading and copying memory", _kernels)
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if there is one")
    command.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads on the CPU (default 1)")
    command = _add(benchmarks, "exchange", "time gradient synchronisation for each exchange", _exchange)
    _add_ranks(command, nodes=2, devices=1)
    command.add_argument("--model", default="resnet50", metavar="NAME", help="default: %(default)s")
    command = _add(benchmarks, "pto", "time the optimizer step, replicated and sharded across ranks", _pto)
    _add_ranks(command, nodes=1, devices=2)
    command.add_argument("--models", nargs="+", default=["resnet50", "Transformer"], metavar="NAME")
    command.add_argument("--optimizers", nargs="+", default=["SGD", "AdamW", "Muon"], choices=("SGD", "AdamW", "Muon"))
    command = _add(benchmarks, "data", "measure images per CPU-second for each tier of the data cache", _data)
    command.add_argument(
        "--pictures", type=Path, metavar="DIR", help="a folder with train/<class>/*; default: generated"
    )
    command.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda decodes with DALI (default cpu)"
    )


def _add(benchmarks: Any, name: str, summary: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benchmarks.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + "."
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; takes less than two minutes")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="default: %(default)s")
    parser.set_defaults(run=run)
    return parser


def _add_ranks(parser: argparse.ArgumentParser, *, nodes: int, devices: int) -> None:
    parser.epilog = (
        "Under torchrun or srun, runs on their ranks: torchrun ... -m lightning_sparse.cli bench "
        f"{parser.prog.split()[-1]}. Otherwise emulates a cluster with network namespaces on this machine."
    )
    add_cluster(parser, nodes=nodes, devices=devices)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # rank 0 writes its rows there


def _kernels(arguments: argparse.Namespace) -> int:
    _prepare(arguments)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads)
    cases = tqdm(kernels.QUICK if arguments.quick else kernels.FULL, unit="case", disable=None)
    repeats, seconds = (11, 1.0) if arguments.quick else (21, 5.0)
    rows = kernels.measure(cases, device, repeats=repeats, seconds=seconds)
    print(kernels.table(rows))
    return _write(arguments, {**kernels.about(), "device": device}, rows)


def _exchange(arguments: argparse.Namespace) -> int:
    _prepare(arguments)
    shapes = exchange.QUICK if arguments.quick else models.find(arguments.model).shapes
    seconds = 3.0 if arguments.quick else 40.0
    gbps = None if arguments.rows is None else arguments.gbps

    def measure(topology: Any, device: torch.device) -> Rows:
        return exchange.measure(exchange.build(topology, shapes, device), seconds, gbps=gbps)

    found = _on_ranks(arguments, measure)
    if found is None:
        return 0
    rows, cluster = found
    print(f"{cluster}\n{exchange.table(rows)}")
    what = "1 M gradients" if arguments.quick else f"gradients of {arguments.model}"
    return _write(arguments, {"cluster": cluster, "gradients": what}, rows)


def _pto(arguments: argparse.Namespace) -> int:
    _prepare(arguments)
    cases = [(m, o) for m in arguments.models for o in arguments.optimizers if o != "Muon" or m == "Transformer"]
    limits = {"repeats": 15, "seconds": 20.0}
    if arguments.quick:
        cases, limits = [("resnet18", name) for name in ("SGD", "AdamW")], {"repeats": 5, "seconds": 2.0}

    def measure(topology: Any, device: torch.device) -> Rows:
        bar = tqdm(cases, unit="case", disable=None if topology.rank == 0 else True)
        return pto.measure_cases(bar, pto.OPTIMIZERS, pto.ways(topology), topology, device, **limits)

    found = _on_ranks(arguments, measure)
    if found is None:
        return 0
    rows, cluster = found
    pto.compare(rows)
    print(f"{cluster}\n{pto.table(rows)}")
    return _write(arguments, {"cluster": cluster}, rows)


def _data(arguments: argparse.Namespace) -> int:
    _prepare(arguments)
    if arguments.pictures is not None and not (arguments.pictures / "train").is_dir():
        raise ValueError(f"--pictures {arguments.pictures} has no folder train/. Pass an image folder.")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rows = data.measure(
            arguments.pictures or data.generated(Path(folder), 64 if arguments.quick else 96),
            device=torch.cuda.current_device() if arguments.device == "cuda" else None,
            rounds=1 if arguments.quick else data.ROUNDS,
            apart=not arguments.quick,
            images=192 if arguments.quick else 640,
            progress=lambda names: tqdm(names, unit="row", disable=None),
        )
    print(data.table(rows))
    what = "crops of 375 x 500 of scikit-learn's photographs" if arguments.pictures is None else "an image folder"
    return _write(arguments, {"pictures": what}, rows)


def _on_ranks(arguments: argparse.Namespace, measure: Callable[[Any, torch.device], Rows]) -> tuple[Rows, str] | None:
    """(rows, description of the cluster) on the process that reports; None on all others."""
    if not launched():
        return _emulated(arguments)
    topology, device = join()
    rows = measure(topology, device)
    leave()
    if topology.rank == 0 and arguments.rows is None:
        return rows, topology.describe()
    if topology.rank == 0:
        arguments.rows.write_text(json.dumps(rows))
    return None


def _emulated(arguments: argparse.Namespace) -> tuple[Rows, str]:
    """Run the same command on an emulated cluster on this machine."""
    reason = unavailable_reason()
    config = LabConfig(nodes=arguments.nodes, devices=arguments.devices, gbps=arguments.gbps, network=reason is None)
    cluster = f"{config.nodes} x {config.devices} processes on one machine, "
    if reason is None:
        cluster += f"links of {config.gbps:g} Gbit/s between network namespaces"
    else:
        cluster += "over loopback, whose speed says nothing about a network"
        print(f"note: cannot limit link rates ({reason}); using loopback", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, signals_as_exit(), Cluster(config) as emulated:
        answer = Path(folder) / "rows.json"
        words = [sys.executable, "-m", "lightning_sparse.cli", *arguments.words, "--rows", str(answer)]
        run = emulated.run(words, output=sys.stderr)
        if run.exit_code != 0 or not answer.exists():
            raise RuntimeError(f"the ranks ended with exit code {run.exit_code}; their output is above")
        return json.loads(answer.read_text()), cluster


def _prepare(arguments: argparse.Namespace) -> None:
    """Fail before the measurement rather than after it."""
    if getattr(arguments, "device", None) == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU. Omit --device to use the CPU.")
    arguments.out.mkdir(parents=True, exist_ok=True)


def _write(arguments: argparse.Namespace, about: dict[str, Any], rows: Rows) -> int:
    """Write the record of a benchmark."""
    file = arguments.out / f"{arguments.benchmark}.json"
    command = " ".join(["lightning-sparse", *arguments.words])
    record = {**surroundings(command), "commit": commit(), **about, "rows": rows}
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwrote {file}")
    return 0

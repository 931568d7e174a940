"""`lightning-sparse bench kernels | exchange | pto | data`: what is timed is in `lightning_sparse.bench`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_sparse.cli.common import Subcommands

Rows = list[dict[str, Any]]


def add(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser("bench", help="time the library on this machine, or on your cluster")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    kernels = _add(benchmarks, "kernels", "selection and compression, next to reading and copying memory", _kernels)
    kernels.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU where there is one")
    kernels.add_argument("--threads", type=int, default=1, metavar="N", help="of torch, on the CPU (default 1)")
    exchange = _add(
        benchmarks, "exchange", "how long a step waits for gradients, by the way they are reduced", _exchange
    )
    _add_cluster(exchange)
    pto = _add(benchmarks, "pto", "the optimizer step: plain, and shared between ranks", _pto)
    _add_cluster(pto, nodes=1, devices=2)
    pto.add_argument("--models", nargs="+", default=["resnet50", "Transformer"], metavar="NAME")
    pto.add_argument("--optimizers", nargs="+", default=["SGD", "AdamW", "Muon"], choices=("SGD", "AdamW", "Muon"))
    data = _add(benchmarks, "data", "images per CPU-second of each tier of the data cache", _data)
    data.add_argument("--pictures", type=Path, metavar="DIR", help="train/<class>/*; default: made from scikit-learn's")
    data.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: through DALI (default cpu)")
    exchange.add_argument("--model", default="resnet50", metavar="NAME", help="whose gradients (default %(default)s)")


def _add(
    benchmarks: Subcommands, name: str, said: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser = benchmarks.add_parser(name, help=said, description=said[0].upper() + said[1:] + ".")
    parser.add_argument("--quick", action="store_true", help="small, and over in less than two minutes")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--plot", action="store_true", help="draw a picture too; needs matplotlib")
    parser.set_defaults(run=run)
    return parser


def _add_cluster(parser: argparse.ArgumentParser, *, nodes: int = 2, devices: int = 1) -> None:
    parser.epilog = (
        "Started by torchrun or srun, it runs on those ranks: torchrun ... -m lightning_sparse.cli bench "
        f"{parser.prog.split()[-1]}. Else it plays a cluster of network namespaces on this machine."
    )
    parser.add_argument("--nodes", type=int, default=nodes, metavar="M", help="to play (default %(default)s)")
    parser.add_argument("--devices", type=int, default=devices, metavar="L", help="of a node (default %(default)s)")
    parser.add_argument("--gbps", type=float, default=1.0, metavar="R", help="of a node's link (default 1)")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # a rank's answer to the process that plays


def _kernels(arguments: argparse.Namespace) -> int:
    import torch
    from tqdm import tqdm

    from lightning_sparse.bench import kernels

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here. Leave it out for the CPU.")
    _ready_to_plot(arguments)
    torch.set_num_threads(arguments.threads)
    cases = tqdm(kernels.QUICK if arguments.quick else kernels.FULL, unit="case", disable=None)
    rows = kernels.measure(
        cases, device, repeats=11 if arguments.quick else 21, seconds=1.0 if arguments.quick else 5.0
    )
    print(kernels.table(rows))
    return _write(arguments, {**kernels.about(), "device": device}, rows, kernels.plot)


def _exchange(arguments: argparse.Namespace) -> int:
    from lightning_sparse.bench import exchange, models
    from lightning_sparse.bench.ranks import launched

    _ready_to_plot(arguments)
    shapes = exchange.QUICK if arguments.quick else models.find(arguments.model).shapes

    def ranks(seconds: float) -> tuple[Rows, str]:
        from lightning_sparse.bench.ranks import join, leave

        topology, device = join()
        gbps = None if arguments.rows is None else arguments.gbps
        rows = exchange.measure(exchange.build(topology, shapes, device), seconds, gbps=gbps)
        leave()
        return rows if topology.rank == 0 else [], topology.describe()

    found = _on_ranks(arguments, launched(), lambda: ranks(3.0 if arguments.quick else 40.0))
    if found is None:
        return 0
    rows, cluster = found
    print(f"{cluster}\n{exchange.table(rows)}")
    what = "1 M gradients" if arguments.quick else f"gradients of {arguments.model}"
    return _write(
        arguments,
        {"cluster": cluster, "gradients": what},
        rows,
        lambda rows, file: exchange.plot(rows, f"{what}, {cluster}", file),
    )


def _pto(arguments: argparse.Namespace) -> int:
    _ready_to_plot(arguments)
    from lightning_sparse.bench import pto
    from lightning_sparse.bench.ranks import launched

    cases = [(m, o) for m in arguments.models for o in arguments.optimizers if o != "Muon" or m == "Transformer"]
    limits = {"repeats": 15, "seconds": 20.0}
    if arguments.quick:
        cases, limits = [("resnet18", name) for name in ("SGD", "AdamW")], {"repeats": 5, "seconds": 2.0}

    def ranks() -> tuple[Rows, str]:
        from tqdm import tqdm

        from lightning_sparse.bench.ranks import join, leave

        topology, device = join()
        bar = tqdm(cases, unit="case", disable=None if topology.rank == 0 else True)
        makers = pto.ways(topology)
        rows = [
            row for case in bar for row in pto.measure_cases([case], pto.OPTIMIZERS, makers, topology, device, **limits)
        ]
        leave()
        return rows if topology.rank == 0 else [], topology.describe()

    found = _on_ranks(arguments, launched(), ranks)
    if found is None:
        return 0
    rows, cluster = found
    pto.compare(rows)
    print(f"{cluster}\n{pto.table(rows)}")
    return _write(arguments, {"cluster": cluster}, rows, pto.plot)


def _data(arguments: argparse.Namespace) -> int:
    import torch
    from tqdm import tqdm

    from lightning_sparse.bench import data

    _ready_to_plot(arguments)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here. Leave it out for the CPU.")
    if arguments.pictures is not None and not (arguments.pictures / "train").is_dir():
        raise ValueError(f"--pictures {arguments.pictures}: no folder train/ in it. Give an image folder.")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rows = data.measure(
            arguments.pictures or data.generated(Path(folder), 64 if arguments.quick else 96),
            device=torch.cuda.current_device() if arguments.device == "cuda" else None,
            rounds=1 if arguments.quick else data.ROUNDS,
            images=192 if arguments.quick else 640,
            progress=lambda names: tqdm(names, unit="row", disable=None),
        )
    print(data.table(rows))
    what = "crops of 375 x 500 of scikit-learn's photographs" if arguments.pictures is None else "an image folder"
    return _write(arguments, {"pictures": what}, rows, data.plot)


def _on_ranks(
    arguments: argparse.Namespace, launched: bool, measure: Callable[[], tuple[Rows, str]]
) -> tuple[Rows, str] | None:
    """(rows, what they were measured on) for the process that reports them; None for all others."""
    if not launched:
        return _played(arguments)
    rows, cluster = measure()
    if not rows:
        return None
    if arguments.rows is None:
        return rows, cluster
    arguments.rows.write_text(json.dumps(rows))
    return None


def _played(arguments: argparse.Namespace) -> tuple[Rows, str]:
    """Run the same command as a cluster inside this machine."""
    from lightning_sparse.lab import Cluster, LabConfig, signals_as_exit, why_not

    reason = why_not()
    config = LabConfig(nodes=arguments.nodes, devices=arguments.devices, gbps=arguments.gbps, network=reason is None)
    cluster = f"{config.nodes} x {config.devices} processes on one machine, "
    if reason is None:
        cluster += f"links of {config.gbps:g} Gbit/s between network namespaces"
    else:
        cluster += "over loopback, where bytes cost nothing: it says nothing of a network"
        print(f"note: links cannot be shaped here ({reason}); the ranks talk over loopback", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, signals_as_exit(), Cluster(config) as played:
        answer = Path(folder) / "rows.json"
        words = [sys.executable, "-m", "lightning_sparse.cli", *arguments.words, "--rows", str(answer)]
        ran = played.run(words, output=sys.stderr)
        if ran.exit_code != 0 or not answer.exists():
            raise RuntimeError(f"the ranks ended with exit code {ran.exit_code}; what they said is above")
        return json.loads(answer.read_text()), cluster


def _ready_to_plot(arguments: argparse.Namespace) -> None:
    """Say that matplotlib is missing before minutes are spent, not after."""
    if arguments.plot:
        from lightning_sparse.bench.extras import need

        need("matplotlib", "--plot")


def _write(arguments: argparse.Namespace, about: dict[str, Any], rows: Rows, plot: Callable[[Rows, Path], None]) -> int:
    """The record of a benchmark, and its picture."""
    from lightning_sparse.bench.provenance import commit, surroundings

    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"{arguments.benchmark}.json"
    command = " ".join(["lightning-sparse", *arguments.words])
    record = {**surroundings(command), "commit": commit(), **about, "rows": rows}
    file.write_text(json.dumps(record, indent=1) + "\n")
    written = [str(file)]
    if arguments.plot:
        plot(rows, file.with_suffix(".svg"))
        written.append(str(file.with_suffix(".svg")))
    print(f"\nwrote {' and '.join(written)}")
    return 0

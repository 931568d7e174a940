"""`lightning-sparse plan`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_sparse.bench.extras import format_table
from lightning_sparse.cli.common import Subcommands

if TYPE_CHECKING:
    from lightning_sparse.bench.plan import Row, Scenario


def add(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "plan",
        help="predict step time and scaling on a cluster, and recommend an exchange",
        description="Predict the step time, scaling efficiency and inter-node traffic of DDP, of 2-D dense, sparse and "
        "regional reduction, and of exchanging updates. Runs nothing unless --measure is given.",
        epilog="Example: lightning-sparse plan --model resnet50 --nodes 16 --devices 8 --inter-gbps 25 "
        "--intra-gbps 1200 --compute-ms 107",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="NAME", help="a torchvision or timm model")
    what.add_argument("--parameters", type=float, metavar="N", help="number of gradients, for example 25.6e6")
    parser.add_argument("--nodes", type=int, required=True, metavar="M")
    parser.add_argument("--devices", type=int, required=True, metavar="L", help="devices per node")
    parser.add_argument("--inter-gbps", type=float, required=True, metavar="R", help="Gbit/s of a node's link each way")
    parser.add_argument("--intra-gbps", type=float, required=True, metavar="R", help="Gbit/s of a device in its node")
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001], help="default %(default)s")
    parser.add_argument("--bytes-per-gradient", type=int, default=4, choices=(2, 4), help="default: 4 (also under AMP)")
    parser.add_argument("--compute-ms", type=float, metavar="T", help="forward and backward time of one device's batch")
    parser.add_argument("--measure", action="store_true", help="measure compute and selection on this machine's device")
    parser.add_argument("--batch", type=int, default=32, metavar="B", help="for --measure (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot step time over nodes; .svg, .png or .pdf")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from lightning_sparse.bench import plan

    scenario, notes = _scenario(arguments)
    rows = plan.rows(scenario, plan.node_counts(arguments.nodes), arguments.density)
    here = [row for row in rows if row.nodes == arguments.nodes]
    shown = [row for row in rows if not row.selects or row.density == arguments.density[0]]
    compared = [row for row in shown if row.nodes == arguments.nodes]
    advice = plan.recommend(compared, scenario.compute_s)
    if arguments.nodes > 1:
        advice += "\n" + plan.recommend_for_adam(compared)
    if arguments.plot is not None:
        from lightning_sparse.bench.plan_plot import draw

        what = arguments.model or f"{scenario.numel:,} gradients"
        compute = "" if scenario.compute_s is None else f", {1e3 * scenario.compute_s:.4g} ms of compute"
        title = f"{what}{compute}, {arguments.devices} devices per node, {arguments.inter_gbps:g} Gbit/s between nodes"
        draw(shown, title, arguments.plot)
        print(f"wrote {arguments.plot}", file=sys.stderr)
    if arguments.json:
        result = {"scenario": asdict(scenario), "assumptions": notes, "recommendation": advice}
        print(json.dumps({**result, "rows": [asdict(row) for row in rows]}, indent=2))
        return 0
    print("\n".join(notes))
    print(f"\n{arguments.nodes} nodes, per step:\n{_by_path(here)}")
    timed = scenario.compute_s is not None
    what = "step in ms without and with perfect overlap" if timed else "synchronisation in ms"
    print(f"\nby nodes, {what}:\n{_by_nodes(shown)}")
    print(f"\n{advice}")
    return 0


def _scenario(arguments: argparse.Namespace) -> tuple[Scenario, list[str]]:
    """The scenario and its assumptions."""
    from lightning_sparse.bench import measure, models, plan

    model = None if arguments.model is None else models.find(arguments.model)
    host, compute_s, note = plan.V100, None, "compute time unknown: synchronisation only"
    if arguments.compute_ms is not None:
        compute_s, note = 1e-3 * arguments.compute_ms, f"forward and backward {arguments.compute_ms:g} ms (given)"
    if arguments.measure:
        device = measure.device_here()
        print(f"measuring on {measure.describe(device)} ...", file=sys.stderr)
        host = measure.host_costs(device)
        if compute_s is None and model is not None:
            compute_s = measure.compute_seconds(model, arguments.batch, device)
            note = f"forward and backward {1e3 * compute_s:.4g} ms, measured on {measure.describe(device)}, "
            note += f"batch {arguments.batch}"
            if device.type == "cpu":
                note += "; for nodes with GPUs, pass --compute-ms instead"
    if compute_s is None:
        note += "; scaling efficiency needs --compute-ms" + (" or --measure" if model is not None else "")
    scenario = plan.Scenario(
        numel=int(arguments.parameters) if model is None else model.numel,
        devices=arguments.devices,
        inter_gbps=arguments.inter_gbps,
        intra_gbps=arguments.intra_gbps,
        itemsize=arguments.bytes_per_gradient,
        compute_s=compute_s,
        host=host,
    )
    return scenario, [*plan.assumptions(scenario), note]


def _by_path(rows: list[Row]) -> str:
    head = ["", "sync ms", "MB into a node", "applied %"]
    if rows[0].step_s is not None:
        head += ["step ms", "overlapped ms", "efficiency %", "overlapped %"]
    cells = []
    for row in rows:
        seconds, shares = (row.step_s, row.overlapped_step_s), (row.efficiency, row.overlapped_efficiency)
        numbers = [1e3 * row.sync_s, 1e-6 * row.node_bytes, 100 * row.effective_density]
        numbers += [1e3 * each for each in seconds if each is not None]
        numbers += [100 * each for each in shares if each is not None]
        cells.append([row.name, *(f"{number:.4g}" for number in numbers)])
    return format_table(head, cells)


def _by_nodes(rows: list[Row]) -> str:
    names = list(dict.fromkeys(row.name for row in rows))
    found = {(row.nodes, row.name): row for row in rows}
    counts = list(dict.fromkeys(row.nodes for row in rows))
    cells = [[f"{count}", *(_cell(found[count, name]) for name in names)] for count in counts]
    return format_table(["nodes", *names], cells)


def _cell(row: Row) -> str:
    if row.step_s is None or row.overlapped_step_s is None:
        return f"{1e3 * row.sync_s:.1f}"
    return f"{1e3 * row.step_s:.1f} / {1e3 * row.overlapped_step_s:.1f}"

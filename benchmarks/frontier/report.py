"""The table and the three plots of the frontier, from the finished runs.

    python -m benchmarks.frontier.report OUT

Each row is a method at its best setting of all trials, the mean over its seeds; differences to dense training are
computed per seed. Seconds are modeled, not measured. A step of GPT-2's smallest model (124 M parameters, `COMPUTE`
seconds) receives as many bits per parameter as the small model did. The communication of every method overlaps with the
whole step, which favors methods that wait, such as DiLoCo. PowerSGD is left out, because it sends less for wider
matrices.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.convergence.report import half_width_95
from benchmarks.convergence.text import CONTEXT
from benchmarks.frontier import runs
from benchmarks.frontier.runs import ALL, Finished
from benchmarks.plots import GRAY, color, figure
from benchmarks.record import surroundings, write

PARAMETERS, COMPUTE = 124e6, 0.25
GBPS = (0.1, 1.0, 10.0)
REAL = Path(__file__).parents[1] / "results" / "updates-slow-links-2026-11-24.json"
"""The same trainings on real processes."""
DILOCO_PUBLISHED = {35e6: 2.0, 2.4e9: 0.3}
"""Per cent above dense with M = 4, H = 30, by parameters (Charles et al. 2025, arXiv 2503.09799)."""


def summarize(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per kind of training and method, in the order of `ALL`."""
    rows = []
    for kind in dict.fromkeys(map(_kind, records)):
        here = [each for each in records if _kind(each) == kind]
        dense = _best([each for each in here if each["row"].startswith("dense")])
        rows += [_row(each, here, dense) for each in ALL if any(one["row"] == each for one in here)]
    return rows


def _kind(record: dict[str, Any]) -> tuple[str, int, int, str]:
    """Return the properties that rows must share to be compared: size, workers, steps, and optimizer."""
    optimizer = "Muon" if ALL[record["row"]].muon else "AdamW"
    return record["size"], record["workers"], record["steps"] or runs.SIZES[record["size"]].steps, optimizer


def _best(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the runs of the setting with the lowest loss of seed 0, by seed."""
    trials = [each for each in records if each["seed"] == 0]
    if not trials:
        return {}
    best = min(trials, key=lambda each: each["val_bits"])
    return {each["seed"]: each for each in records if (each["lr"], each["options"]) == (best["lr"], best["options"])}


def _row(name: str, records: list[dict[str, Any]], dense: dict[int, dict[str, Any]]) -> dict[str, Any]:
    mine = [each for each in records if each["row"] == name]
    by_seed = _best(mine)
    first = by_seed[0]
    differences = [run["val_bits"] - dense[seed]["val_bits"] for seed, run in by_seed.items() if seed in dense]
    trials = [each for each in mine if each["seed"] == 0]
    return {
        "row": name,
        "size": first["size"],
        "parameters": first["parameters"],
        "workers": first["workers"],
        "steps": first["steps"],
        "characters": first["characters"],
        "seeds": sorted(by_seed),
        "lr": first["lr"],
        "options": first["options"],
        "val_bits": fmean(run["val_bits"] for run in by_seed.values()),
        "difference": fmean(differences) if differences else None,
        "half_width": half_width_95(differences),
        "per_cent": 100 * fmean(differences) / fmean(run["val_bits"] for run in dense.values())
        if differences
        else None,
        "bits_per_parameter": first["bits_per_parameter"],
        "received_bits": first["received_bits"],
        "trials": {_setting(each): round(each["val_bits"], 3) for each in trials},
        "planned_trials": len(ALL[name].trials),
        "seconds": fmean(each["seconds"] for each in mine),
    }


def _setting(record: dict[str, Any]) -> str:
    outer = [f"{name} {value}" for name, value in record["options"].items() if name in ("outer_lr", "momentum")]
    return ", ".join([f"lr {record['lr']}", *outer])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table, the lowest loss first."""
    lines = [
        "| method | bits sent per parameter and step | bits received per parameter and step | bits per character "
        "| above dense | above dense, % | seeds | trials | best setting |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda each: float(each["val_bits"])):
        above, per_cent = "-", "-"
        if row["difference"] is not None and not row["row"].startswith("dense"):
            half = row["half_width"]
            above = f"{row['difference']:+.3f}" + (f" ± {half:.3f}" if half is not None else "")
            per_cent = f"{row['per_cent']:+.1f}"
        lines.append(
            f"| {row['row']} | {row['bits_per_parameter']:.3g} | {row['received_bits']:.3g} | {row['val_bits']:.3f} "
            f"| {above} | {per_cent} | {len(row['seeds'])} | {len(row['trials'])} | {_setting(row)} |"
        )
    return "\n".join(lines)


def trials(rows: Sequence[dict[str, Any]]) -> str:
    """Return every tried setting, and its loss with seed 0."""
    lines = ["| method | trials: bits per character, seed 0 |", "|---|---|"]
    for row in rows:
        tried = "; ".join(f"{setting}: {bits:.3f}" for setting, bits in row["trials"].items())
        lines.append(f"| {row['row']} | {tried} |")
    return "\n".join(lines)


def section(rows: Sequence[dict[str, Any]]) -> str:
    """Return the heading, the table and the trials of rows of one kind."""
    size, workers, steps, optimizer = _kind(rows[0])
    batch, text, parameters = max(runs.SIZES[size].batch, workers), rows[0]["characters"], rows[0]["parameters"]
    read = steps * batch * CONTEXT
    heading = (
        f"## {parameters:,} parameters, {optimizer}, {workers} workers, {steps:,} steps of {batch} windows: a text of "
        f"{text:,} characters, read {read / text:.1f} times; {read / parameters:.2g} characters per parameter"
    )
    return "\n".join([heading, "", table(rows), "", trials(rows)])


def agreement(records: Sequence[dict[str, Any]]) -> str:
    """Return simulated losses and losses of four processes, with equal model, text, windows, learning rate and seed."""
    real = {
        (each["config"], each["seed"]): each["history"][-1]["val_bits"] for each in json.loads(REAL.read_text())["runs"]
    }
    lines = ["| method, lr 0.004, seed 0 | simulated | four processes | difference |", "|---|---|---|---|"]
    for record in records:
        key = (record["row"], record["seed"])
        if key in real and record["lr"] == 0.004 and _is_usual(record):
            bits = record["val_bits"]
            lines.append(f"| {key[0]} | {bits:.3f} | {real[key]:.3f} | {bits - real[key]:+.3f} |")
    return "\n".join(lines)


def _is_usual(record: dict[str, Any]) -> bool:
    return (record["size"], record["workers"]) == ("0.1M", 4) and not record["steps"]


# --- plots


def seconds(row: dict[str, Any], gbps: float) -> float:
    """Return the modeled seconds of the whole training."""
    receives = row["received_bits"] * PARAMETERS / (gbps * 1e9)
    return runs.SIZES[str(row["size"])].steps * max(COMPUTE, float(receives))


def plot(record: dict[str, Any], file: Path) -> None:
    """Draw loss against bits, for the smallest size; also ``-seconds`` and, with several sizes, ``-size``."""
    file = file.with_stem(file.stem.removesuffix("-seconds").removesuffix("-size"))
    usual = [row for row in record["rows"] if row["workers"] == 4 and not row["steps"]]
    rows = [row for row in usual if not ALL[row["row"]].muon]
    small = [row for row in rows if row["size"] == "0.1M"]
    with figure(file, height=5.5) as (axes,):
        _points(axes, small, lambda row: row["bits_per_parameter"])
        axes.set(xlabel="bits sent per worker, parameter and step", xscale="log", ylabel="bits per character")
    alike = [row for row in small if not row["row"].startswith("PowerSGD")]
    with figure(file.with_stem(f"{file.stem}-seconds"), height=5, columns=len(GBPS), sharey=True) as each:
        for axes, gbps in zip(each, GBPS, strict=True):
            _points(axes, alike, lambda row, gbps=gbps: seconds(row, gbps) / 3600)
            axes.set(xlabel=f"modeled hours at {gbps:g} Gbit/s", xscale="log", xlim=(0.2, 150))
        each[0].set(ylabel="bits per character")
    if len({row["size"] for row in rows}) > 1:
        with figure(file.with_stem(f"{file.stem}-size")) as (axes,):
            _gaps(axes, rows)


def _points(axes: Any, rows: Sequence[dict[str, Any]], x_of: Any) -> None:
    for index, row in enumerate(rows):
        if not row["received_bits"]:
            axes.axhline(row["val_bits"], color=GRAY, linestyle=":", label=row["row"])
        else:
            marker = "o" if row["row"].startswith("updates") else "s"
            axes.plot(x_of(row), row["val_bits"], marker, color=color(index), label=row["row"], alpha=0.8)
    axes.grid()


def _gaps(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    names = [row["row"] for row in rows if row["size"] != "0.1M" and row["row"] != "dense"]
    for index, name in enumerate(dict.fromkeys(names)):
        line = [
            (row["parameters"], row["per_cent"]) for row in rows if row["row"] == name and row["difference"] is not None
        ]
        axes.plot(*zip(*sorted(line), strict=True), "o-", color=color(index), label=name)
    published = sorted(DILOCO_PUBLISHED.items())
    axes.plot(*zip(*published, strict=True), "s--", color=GRAY, label="DiLoCo, published")
    axes.set(xlabel="parameters", xscale="log", ylabel="loss above dense training, %")
    axes.grid()


def write_report(out: Path) -> None:
    """Write results.json, .md and the plots."""
    records = Finished(out / "runs.jsonl").records
    rows = summarize(records)
    about = surroundings()
    about["commit"] = ", ".join(sorted({record["commit"] for record in records}))
    parts = [f"- {key}: {value}" for key, value in about.items()]
    for kind in dict.fromkeys(map(_kind, rows)):
        parts += ["", section([row for row in rows if _kind(row) == kind])]
    if any(_is_usual(record) for record in records):
        parts += ["", "## Comparison with real processes", "", agreement(records)]
    drawn = plot if any(_is_usual(record) for record in records) else None
    write(out / "results.json", {**about, "rows": rows, "runs": records}, "\n".join(parts), drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that benchmarks.frontier.runs wrote to")
    write_report(parser.parse_args().out)


if __name__ == "__main__":
    main()

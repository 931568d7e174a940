"""From the records of convergence.py to a table and a plot. Only `write_report` touches the disk."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lightning_sparse.bench.provenance import surroundings

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def half_width_95(values: Sequence[float]) -> float | None:
    """Half of the 95 % t-interval of the mean; None for fewer than two values, which have none."""
    if len(values) < 2:
        return None
    quantile = T_95[min(len(values) - 1, len(T_95)) - 1]
    return quantile * stdev(values) / math.sqrt(len(values))


def summarise(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a configuration. Accuracies are those of the last epoch, never the best one."""
    last = {(record["config"], record["seed"]): record["history"][-1] for record in records}
    rows = []
    for config in dict.fromkeys(record["config"] for record in records):
        seeds = [seed for name, seed in last if name == config]
        ends = [last[config, seed] for seed in seeds]
        differences = [
            last[config, seed]["val_accuracy"] - last["dense", seed]["val_accuracy"]
            for seed in seeds
            if ("dense", seed) in last
        ]
        rows.append(
            {
                "config": config,
                "seeds": seeds,
                "val_accuracy": fmean(end["val_accuracy"] for end in ends),
                "difference": fmean(differences) if differences else None,
                "difference_half_width": half_width_95(differences),
                "differences": differences,
                "train_loss": fmean(end["train_loss"] for end in ends),
                "bytes_per_node_per_step": fmean(end["bytes_per_node"] / end["step"] for end in ends),
                "seconds": fmean(record["seconds"] for record in records if record["config"] == config),
            }
        )
    return rows


def mean_curve(records: Sequence[dict[str, Any]], config: str, key: str) -> list[float]:
    """The mean over seeds of `key`, epoch by epoch."""
    histories = [record["history"] for record in records if record["config"] == config]
    return [fmean(row[key] for row in rows) for rows in zip(*histories, strict=True)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| configuration | seeds | val % | difference to dense (95 %) | train loss | KB a node and step | s a run |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        difference = "-"
        if row["difference"] is not None and row["config"] != "dense":
            half_width = row["difference_half_width"]
            difference = f"{row['difference']:+.1f}" + (f" ± {half_width:.1f}" if half_width is not None else "")
        lines.append(
            f"| {row['config']} | {len(row['seeds'])} | {row['val_accuracy']:.1f} | {difference} "
            f"| {row['train_loss']:.3f} | {row['bytes_per_node_per_step'] / 1e3:.2f} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def plot(records: Sequence[dict[str, Any]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (against_steps, against_bytes) = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for config in dict.fromkeys(record["config"] for record in records):
        accuracy = mean_curve(records, config, "val_accuracy")
        megabytes = [received / 1e6 for received in mean_curve(records, config, "bytes_per_node")]
        style = {"linestyle": "--" if "no-feedback" in config else "-", "label": config}
        against_steps.plot(mean_curve(records, config, "step"), accuracy, **style)
        against_bytes.plot(megabytes, accuracy, **style)
    against_steps.set(xlabel="steps", ylabel="validation accuracy, %")
    against_bytes.set(xlabel="MB that a node has received", xscale="log")
    against_steps.legend(frameon=False, fontsize="small", loc="lower right", ncols=2)
    for axes in (against_steps, against_bytes):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def write_report(records: Sequence[dict[str, Any]], out: Path, command: str) -> str:
    """Write results.json, results.md and accuracy.png; returns the table."""
    rows, about = summarise(records), surroundings(command)
    about["commit"] = ", ".join(sorted({record["commit"] for record in records}))
    settings, parameters = records[0]["settings"], records[0]["parameters"]
    (out / "results.json").write_text(
        json.dumps(
            {"about": about, "settings": settings, "parameters": parameters, "rows": rows, "runs": records}, indent=1
        )
    )
    steps = records[0]["history"][-1]["step"]
    head = [
        "# Convergence",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
        f"- {parameters:,} parameters, {steps:,} steps, "
        + ", ".join(f"{key} {value}" for key, value in settings.items()),
        "",
    ]
    tail = [
        "",
        "Accuracy after the last epoch. The difference is taken seed by seed; ± is half of the 95 % t-interval of its",
        "mean. Bytes are what the devices of a node together receive from the other node; for dense, the 2-D exchange.",
        "",
    ]
    (out / "results.md").write_text("\n".join([*head, table(rows), *tail]))
    plot(records, out / "accuracy.png")
    return table(rows)

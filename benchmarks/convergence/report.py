"""Tables and plots from the records of the convergence benchmarks. Only `write_report` writes to disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.plots import GRAY, color, figure
from benchmarks.record import surroundings, write

# Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The metric of a task: a number in every line of a run's history, under `key`."""

    key: str
    name: str  # also of the plot's file
    label: str  # in tables and plots
    digits: int
    higher_is_better: bool

    def best(self, values: Mapping[str, float]) -> str:
        """Return the name with the best value; NaN is the worst."""
        known = {name: value for name, value in values.items() if not math.isnan(value)}
        if not known:
            raise ValueError(f"{self.name} is not a number for any of {', '.join(values)}; nothing can be chosen")
        return (max if self.higher_is_better else min)(known, key=known.__getitem__)

    def shown(self, row: Mapping[str, Any]) -> str:
        return f"{self.label} {row[self.key]:.{self.digits}f}"


def half_width_95(values: Sequence[float]) -> float | None:
    """Return half of the 95% t-interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    quantile = T_95[min(len(values) - 1, len(T_95)) - 1]
    return quantile * stdev(values) / math.sqrt(len(values))


def summarize(records: Sequence[dict[str, Any]], metric: Metric) -> list[dict[str, Any]]:
    """Return one row per configuration, with the metrics of the last epoch, not of the best one."""
    last = {(record["config"], record["seed"]): record["history"][-1] for record in records}
    rows = []
    for config in dict.fromkeys(record["config"] for record in records):
        seeds = [seed for name, seed in last if name == config]
        ends = [last[config, seed] for seed in seeds]
        differences = [
            last[config, seed][metric.key] - last["dense", seed][metric.key]
            for seed in seeds
            if ("dense", seed) in last
        ]
        rows.append(
            {
                "config": config,
                "seeds": seeds,
                metric.key: fmean(end[metric.key] for end in ends),
                "difference": fmean(differences) if differences else None,
                "difference_half_width": half_width_95(differences),
                "differences": differences,
                "train_loss": fmean(end["train_loss"] for end in ends),
                "bytes_per_node_per_step": fmean(end["bytes_per_node"] / end["step"] for end in ends),
                "seconds": fmean(record["seconds"] for record in records if record["config"] == config),
            }
        )
    return rows


def against_alone(records: Sequence[dict[str, Any]], metric: Metric) -> dict[str, tuple[float, float | None]]:
    """Return the gain of each configuration over the single-node baseline of its cluster (above zero is better), per
    seed, and half of the 95% interval. Configurations without a baseline are left out."""

    def cluster(record: dict[str, Any]) -> Any:
        return (record["arguments"] or {}).get("nodes")

    def is_alone(record: dict[str, Any]) -> bool:
        return bool((record["arguments"] or {}).get("alone"))

    last = {
        (cluster(record), record["seed"]): record["history"][-1][metric.key] for record in records if is_alone(record)
    }
    sign = 1 if metric.higher_is_better else -1
    gains: dict[str, list[float]] = {}
    for record in records:
        alone = last.get((cluster(record), record["seed"]))
        if alone is not None and not is_alone(record):
            gains.setdefault(record["config"], []).append(sign * (record["history"][-1][metric.key] - alone))
    return {config: (fmean(values), half_width_95(values)) for config, values in gains.items()}


def verdict(records: Sequence[dict[str, Any]], metric: Metric) -> list[str]:
    """Return lines that name methods worse than no network."""
    gains = against_alone(records, metric)
    if not gains:
        return []

    def by(config: str) -> str:
        gain, half = gains[config]
        return f"{config}: by {abs(gain):.{metric.digits}f}" + ("" if half is None else f" ± {half:.{metric.digits}f}")

    lost = [f"- {by(config)}" for config, (gain, _) in gains.items() if gain < 0]
    if lost:
        return [
            "**Worse than the single-node baseline**, which needs no network, over the seeds that both have:",
            "",
            *lost,
            "",
        ]
    least = min(gains, key=lambda config: gains[config][0])
    return [
        f"Every row is better than the single-node baseline, which needs no network. The closest row is {by(least)}.",
        "",
    ]


def mean_curve(records: Sequence[dict[str, Any]], config: str, key: str) -> list[float]:
    """Return the mean over seeds of `key` per epoch."""
    histories = [record["history"] for record in records if record["config"] == config]
    return [fmean(row[key] for row in rows) for rows in zip(*histories, strict=True)]


def table(rows: Sequence[dict[str, Any]], metric: Metric) -> str:
    digits = metric.digits
    lines = [
        f"| configuration | seeds | {metric.label} | difference to dense (95% interval) | training loss "
        "| KB received per node and step | seconds per run |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        difference = "-"
        if row["difference"] is not None and row["config"] != "dense":
            half_width = row["difference_half_width"]
            difference = f"{row['difference']:+.{digits}f}"
            difference += f" ± {half_width:.{digits}f}" if half_width is not None else ""
        lines.append(
            f"| {row['config']} | {len(row['seeds'])} | {row[metric.key]:.{digits}f} | {difference} "
            f"| {row['train_loss']:.3f} | {row['bytes_per_node_per_step'] / 1e3:.2f} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def plot(records: Sequence[dict[str, Any]], metric: Metric, file: Path) -> None:
    with figure(file, height=6, columns=2, sharey=True) as (against_steps, against_bytes):
        alone = cycle((":", "-."))
        for index, config in enumerate(dict.fromkeys(record["config"] for record in records)):
            curve = mean_curve(records, config, metric.key)
            megabytes = [received / 1e6 for received in mean_curve(records, config, "bytes_per_node")]
            if not any(megabytes):  # single-node baseline: methods must end below it
                style = {"linestyle": next(alone), "color": GRAY}
                against_bytes.axhline(curve[-1], **style)
            else:
                style = {"linestyle": "--" if "no-feedback" in config else "-", "color": color(index)}
                against_bytes.plot(megabytes, curve, **style)
            against_steps.plot(mean_curve(records, config, "step"), curve, label=config, **style)
        against_steps.set(xlabel="steps", ylabel=metric.label)
        against_bytes.set(xlabel="MB received per node", xscale="log")
        for axes in (against_steps, against_bytes):
            axes.grid()


def write_report(records: Sequence[dict[str, Any]], out: Path, metric: Metric) -> str:
    """Write results.json, results.md and a plot; return the table."""
    rows, about = summarize(records, metric), surroundings()
    about["commit"] = ", ".join(sorted({record["commit"] for record in records}))
    settings, parameters = records[0]["settings"], records[0]["parameters"]
    steps, better = records[0]["history"][-1]["step"], "higher" if metric.higher_is_better else "lower"
    lines = [
        *(f"- {key}: {value}" for key, value in about.items()),
        f"- {parameters:,} parameters, {steps:,} steps, "
        + ", ".join(f"{key} {value}" for key, value in settings.items()),
        "",
        table(rows, metric),
        "",
        f"{metric.name.capitalize()} after the last epoch; {better} is better. Differences are computed per seed, and",
        "± is half of the 95% t-interval of their mean. The bytes are all that the devices of a node receive from",
        "other nodes; for dense, with the 2-D exchange.",
        "",
        *verdict(records, metric),
    ]
    record = {**about, "settings": settings, "parameters": parameters, "rows": rows, "runs": records}
    write(out / "results.json", record, "\n".join(lines), lambda record, file: plot(record["runs"], metric, file))
    return table(rows, metric)

"""The part `loss` of the GPU session: losses of larger models with four simulated nodes, built on ../frontier.

Eight methods, each with three learning rates, train a character Transformer on the source of Python's library. All
first trials run before all second trials, so a stopped part compares methods with equal numbers of trials. Each
finished run adds a line to runs.jsonl. The part does not repeat it.

The learning rates of a method are multiples of its best rate with 0.8 M parameters (`BEST`). 20M is four times as wide,
which requires lower rates. It has eight times the batch, which requires higher rates. So the first trial uses half of
the best rate. The other trials use twice and half of the first rate. Outer learning rates and momentum keep their best
values.

Both sizes read fewer characters per parameter than the sizes of ../frontier, and their runs have fewer exchanges. With
3% every 30 steps, a node sends each entry twice on average with 20M, once with 124M, and 16 times with 0.8 M
parameters. The heading of the table states how often training reads the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence.text import corpus_of, read_library
from benchmarks.frontier.report import section, summarize
from benchmarks.frontier.runs import ROWS, Finished, Options, Run, work_through
from benchmarks.gpu.claims import NOT_RUN, Claims, Part, verdict

CLAIMS = {
    "1%": "with updates 1%, the loss is at most 3% above dense, and below the single-node baseline",
    "3%_10": "with updates 3% every 10, the loss is at most 5% above dense, and below the single-node baseline",
    "10%_30": "with updates 10% every 30, the loss is at most 5% above dense, and below the single-node baseline",
    "SparseLoCo": "at equal bits, the loss with updates 3% every 30 is no higher than with SparseLoCo",
    "DiLoCo": "at equal bits, the loss with updates 1% is no higher than with 4-bit DiLoCo",
}
Losses = Mapping[str, Sequence[float]]
"""The losses of each method's finished trials, in the order of its trials."""

DENSE, ALONE = "dense", "one node alone"
BEST: dict[str, tuple[float, Options]] = {
    DENSE: (0.002, {}),
    "updates 1%": (0.002, {}),
    ALONE: (0.001, {}),
    "SparseLoCo 3% every 30": (0.001, {"outer_lr": 1.5}),
    "updates 3% every 30": (0.002, {"outer_lr": 1.5}),
    "DiLoCo every 30, 4 bits": (0.001, {"outer_lr": 1.0, "momentum": 0.7}),
    "updates 3% every 10": (0.002, {"outer_lr": 1.5}),
    "updates 10% every 30": (0.002, {}),
}
"""The best learning rate and outer settings of each method with 0.8 M parameters, in results/frontier-2026-11-26.md.
The last two methods were tuned with 0.1 M parameters, at 0.003 and 0.004. Their rates are lower here, because the best
rate of dense training halved from 0.1 M to 0.8 M parameters."""
FACTORS = {"20M": (0.5, 1.0, 0.25), "124M": (0.25, 0.5, 0.125)}
"""The learning rates of a size, as multiples of `BEST`. 124M is 1.6 times as wide as 20M."""
TRY: dict[str, Any] = {"size": "0.1M", "steps": 60}
"""Settings on a CPU, where one trial per method only tests the part."""


def loss(size: str, folder: Path, device: torch.device) -> Iterator[tuple[Claims, Losses]]:
    """Run all trials of a size. After each trial, write the table to loss-SIZE.md, and yield the claims and losses so
    far."""
    torch.set_float32_matmul_precision("high")
    is_cuda, file = device.type == "cuda", folder / f"loss-{size}.md"
    trials = trials_of(FACTORS[size], {"size": size}) if is_cuda else trials_of(FACTORS[size][:1], TRY)
    runs, finished, corpus = in_order(trials), Finished(folder / "runs.jsonl"), corpus_of(read_library(whole=is_cuda))
    for count in range(1, len(runs) + 1):
        work_through(runs[:count], finished, corpus, device)
        losses = losses_of(trials, finished)
        file.write_text(section(summarize([each for run in runs if (each := finished.get(run))])) + "\n")
        yield claims_of(losses), losses
    print(file.read_text())


def trials_of(factors: Sequence[float], where: Mapping[str, Any]) -> dict[str, list[Run]]:
    """Return the runs of each method, one per factor."""
    return {
        row: [Run(row, factor * lr, _options(row), 0, **where) for factor in factors] for row, (lr, _) in BEST.items()
    }


def _options(row: str) -> Options:
    """Return the options of a row, such as its density, with the outer settings of `BEST`."""
    _, options = ROWS[row].trials[0]
    return {**options, **BEST[row][1]}


def in_order(trials: Mapping[str, Sequence[Run]]) -> list[Run]:
    """Return the first trial of every method, then all second trials, and so on."""
    return [run for each in zip(*trials.values(), strict=True) for run in each]


def losses_of(trials: Mapping[str, Sequence[Run]], finished: Finished) -> Losses:
    """Return the losses of the finished trials of each method."""
    records = {row: [finished.get(run) for run in runs] for row, runs in trials.items()}
    return {row: [each["val_bits"] for each in of if each is not None] for row, of in records.items()}


def claims_of(losses: Losses) -> Claims:
    """Return the verdicts. Each claim compares the same number of trials of all its methods."""
    return {
        "1%": _is_near_dense(losses, "updates 1%", 0.03),
        "3%_10": _is_near_dense(losses, "updates 3% every 10", 0.05),
        "10%_30": _is_near_dense(losses, "updates 10% every 30", 0.05),
        "SparseLoCo": _is_no_worse(losses, "updates 3% every 30", "SparseLoCo 3% every 30"),
        "DiLoCo": _is_no_worse(losses, "updates 1%", "DiLoCo every 30, 4 bits"),
    }


def _is_near_dense(losses: Losses, row: str, most: float) -> tuple[str, str]:
    trials = min(len(losses[each]) for each in (row, DENSE, ALONE))
    if not trials:
        return NOT_RUN, _missing(losses, row, DENSE, ALONE)
    ours, dense, alone = (min(losses[each][:trials]) for each in (row, DENSE, ALONE))
    gap, gap_alone = ours / dense - 1, alone / dense - 1
    number = f"{gap:+.1%}, single-node baseline {gap_alone:+.1%}, {_best_of(trials)}"
    return verdict(math.isfinite(dense) and gap <= most and ours < alone, number)


def _is_no_worse(losses: Losses, row: str, other: str) -> tuple[str, str]:
    trials = min(len(losses[each]) for each in (row, other))
    if not trials:
        return NOT_RUN, _missing(losses, row, other)
    ours, theirs = (min(losses[each][:trials]) for each in (row, other))
    return verdict(ours <= theirs, f"{ours:.3f} and {theirs:.3f} bits per character, {_best_of(trials)}")


def _missing(losses: Losses, *rows: str) -> str:
    return f"no finished run of {', '.join(row for row in rows if not losses[row])}"


def _best_of(trials: int) -> str:
    return f"best of {trials}" if trials > 1 else "one trial"


def _part(size: str) -> Part:
    return Part(partial(loss, size), 290, {name: f"{size}: {text}" for name, text in CLAIMS.items()}, by_default=False)


LOSS, LOSS_124M = _part("20M"), _part("124M")

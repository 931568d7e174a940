"""Loss against bits: training methods for slow links, equally tuned, with M workers simulated in one process.

    python -m benchmarks.frontier.runs OUT --quick                 six rows at known settings, six minutes on one core
    python -m benchmarks.frontier.runs OUT                         all rows and trials; again after an interruption
    python -m benchmarks.frontier.runs OUT --size 0.4M --carry 2   a larger model at the two best of the size below
    python -m benchmarks.frontier.runs OUT --workers 16 --lr 0.004 --rows dense "updates 1%" "updates regional 8%"
    python -m benchmarks.frontier.report OUT                       tables and plots of the finished runs

The task is that of convergence/text.py: a character Transformer with AdamW on the source of Python's library, with
equal windows for equal seeds, and bits per character of 65,536 held-out characters. Training uses 20 characters per
parameter in many small steps: 4,600 steps of 8 windows for 116,576 parameters, which read 2 million characters about
once. Larger models read the whole library, 29 million characters. Sizes from 2M on are for a GPU, and read fewer
characters per parameter. The part "loss" of the GPU session trains 20M and 124M (gpu/loss.py).

Every method has at least five trials, on seed 0: the learning rates of `LRS`, or as many settings of learning rate,
outer learning rate and momentum. Methods that send few entries every ten or more steps have five of each. The best
setting is run on the other seeds. All trials are in the results.

Each finished run is a line of OUT/runs.jsonl and is not run again. Processes with different ``--rows`` may share OUT.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.convergence.text import (
    CONTEXT,
    CharacterTransformer,
    Corpus,
    corpus_of,
    described,
    read_library,
    scale,
    start_of_windows,
)
from benchmarks.frontier import ways
from benchmarks.frontier.models import Models, Muon
from benchmarks.record import commit

EPOCH = 40
"""Steps whose windows are drawn together."""
WARMUP = 40
WEIGHT_DECAY = 0.01
LRS = (0.001, 0.002, 0.004, 0.006, 0.008)
Options = dict[str, Any]
Settings = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Size:
    """A model and the length of its training.

    Args:
        width, layers, heads: of the Transformer.
        steps: number of steps of ``batch`` windows, for all workers together.
    """

    width: int
    layers: int
    heads: int
    steps: int
    batch: int = 8
    whole: bool = False
    """Reads the whole library."""


SIZES = {
    "0.1M": Size(64, 2, 4, 4600),
    "0.4M": Size(128, 2, 4, 8400, 16, whole=True),
    "0.8M": Size(128, 4, 4, 16000, 16, whole=True),
    "2M": Size(192, 4, 6, 4000, 64, whole=True),
    "6M": Size(256, 8, 8, 3000, 128, whole=True),
    "20M": Size(512, 6, 8, 2000, 128, whole=True),
    "124M": Size(832, 15, 13, 1000, 128, whole=True),
}
"""20M reads 16 million characters in 2,000 steps, less than one character per parameter. 124M has about as many
parameters as the smallest GPT-2, with more layers in place of the embedding of 50,257 tokens."""


@dataclass(frozen=True)
class Row:
    """A row of the table: a method and the settings of its trials."""

    way: Callable[..., ways.Way]
    options: tuple[Options, ...] = ({},)
    lrs: tuple[float, ...] = LRS
    muon: bool = False

    @property
    def trials(self) -> list[tuple[float, Options]]:
        """Return every learning rate with the only options, or each of the options, which contain the learning rate."""
        if len(self.options) == 1:
            return [(lr, self.options[0]) for lr in self.lrs]
        return [(each["lr"], {k: v for k, v in each.items() if k != "lr"}) for each in self.options]


def _updates(**options: Any) -> Row:
    return Row(ways.Updates, (options,))


def _every(way: Callable[..., ways.Way], lrs: tuple[float, ...], outer: Settings, **options: Any) -> Row:
    """Return learning rates with an outer learning rate of 1, and as many settings of both."""
    plain = ({"lr": lr, **options} for lr in lrs)
    return Row(way, (*plain, *({"lr": lr, "outer_lr": outer_lr, **options} for lr, outer_lr in outer)))


def _outer(settings: tuple[tuple[float, float, float], ...], muon: bool = False, **options: Any) -> Row:
    named = ({"lr": lr, "outer_lr": outer, "momentum": momentum, **options} for lr, outer, momentum in settings)
    return Row(ways.Outer, tuple(named), muon=muon)


DILOCO = ((0.0007, 1.0, 0.8), (0.001, 1.0, 0.7), (0.0014, 1.0, 0.7), (0.002, 1.0, 0.6), (0.003, 1.0, 0.5))
MULOCO = ((0.002, 1.0, 0.7), (0.002, 1.0, 0.8), (0.004, 1.0, 0.6), (0.004, 1.0, 0.7), (0.008, 1.0, 0.6))
MUON_LRS = (0.002, 0.004, 0.008, 0.012, 0.016)
SPARSE_LRS = (0.0005, 0.001, 0.002, 0.004, 0.006)  # for methods whose best rate in first trials was the lowest of LRS
OUTER = ((0.001, 2.0), (0.0014, 1.5), (0.002, 1.5), (0.002, 2.0), (0.003, 1.5))
SPARSE_OUTER = ((0.0005, 2.0), (0.0007, 1.5), (0.001, 1.5), (0.002, 0.7), (0.003, 0.7))
ROWS: dict[str, Row] = {
    "dense": Row(ways.Dense),
    "one node alone": Row(ways.Alone, lrs=SPARSE_LRS),
    "updates 1%": _updates(density=0.01),
    "updates 3% every 30": _every(ways.Updates, LRS, OUTER, density=0.03, sync_every=30),
    "DiLoCo every 30": _outer(DILOCO, every=30),
    "SparseLoCo 3% every 30": _every(ways.SparseOuter, SPARSE_LRS, SPARSE_OUTER, every=30, density=0.03),
    "updates 0.1%": _updates(density=0.001),
    "updates 3% every 10": _every(ways.Updates, LRS, OUTER, density=0.03, sync_every=10),
    "updates 10% every 30": _every(ways.Updates, LRS, OUTER, density=0.1, sync_every=30),
    "updates 3%": _updates(density=0.03),
    "updates, everything": _updates(exchange="dense"),
    "averages every 30": Row(ways.Outer, ({"every": 30},)),
    "DeMo 1%": Row(ways.DeMo, ({"density": 0.01},), SPARSE_LRS),
    "PowerSGD r1": Row(ways.PowerSGD, ({"rank": 1, "start": WARMUP},)),
    "PowerSGD r4": Row(ways.PowerSGD, ({"rank": 4, "start": WARMUP},)),
    "SparseLoCo 10% every 30": _every(ways.SparseOuter, SPARSE_LRS, SPARSE_OUTER, every=30, density=0.1),
    "DiLoCo every 30, 4 bits": _outer(DILOCO, every=30, bits=4),
    "DiLoCo every 10, 4 bits": _outer(DILOCO, every=10, bits=4),
    "Streaming DiLoCo every 30, 4 bits": _outer(DILOCO, every=30, parts=4, bits=4),
    "updates regional 1%": _updates(exchange="regional", density=0.01),
    "dense, Muon": Row(ways.Dense, lrs=MUON_LRS, muon=True),
    "updates 1%, Muon": Row(ways.Updates, ({"density": 0.01},), MUON_LRS, muon=True),
    "DiLoCo every 30, 4 bits, Muon": _outer(MULOCO, muon=True, every=30, bits=4),
    "one node alone, Muon": Row(ways.Alone, lrs=LRS, muon=True),
}
MANY: dict[str, Row] = {
    "updates 0.25%": _updates(density=0.0025),
    **{f"updates regional {share}%": _updates(exchange="regional", density=share / 100) for share in (2, 4, 8)},
}
"""To compare at equal received bytes with more than four workers."""
ALL = {**ROWS, **MANY}


@dataclass(frozen=True)
class Run:
    """One training."""

    row: str
    lr: float
    options: Options
    seed: int
    size: str = "0.1M"
    workers: int = 4
    steps: int = 0
    """0: the steps that go with the size."""

    @property
    def batch(self) -> int:
        """Windows per step: the batch that goes with the size, or one per worker if that is more."""
        return max(SIZES[self.size].batch, self.workers)

    @property
    def key(self) -> str:
        """A key that is equal for equal runs."""
        return json.dumps(asdict(self), sort_keys=True)


def windows(corpus: Corpus, seed: int, steps: int, batch: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the inputs and targets of each worker, [M, B, L] each.

    Worker m has the windows of rank m in convergence/text.py.
    """
    for step in range(steps):
        if step % EPOCH == 0:
            starts = start_of_windows(corpus, seed, step // EPOCH, (EPOCH, batch), CONTEXT).to(corpus.train_N.device)
        start_BM = starts[step % EPOCH].view(-1, workers)
        x_NL, y_NL = corpus.windows(start_BM.T.reshape(-1), CONTEXT)
        yield x_NL.view(workers, -1, CONTEXT), y_NL.view(workers, -1, CONTEXT)


def train(run: Run, corpus: Corpus, device: torch.device) -> dict[str, Any]:
    """Train, and return the run with its loss and bits."""
    size, row, corpus = SIZES[run.size], ALL[run.row], corpus.to(device)
    steps = run.steps or size.steps
    torch.manual_seed(run.seed)
    models = Models(CharacterTransformer(corpus.num_symbols, size.width, size.layers, size.heads), run.workers, device)
    way = row.way(models, **run.options)
    optimizer: torch.optim.AdamW
    if row.muon:
        optimizer = Muon(models, run.lr, WEIGHT_DECAY)
    else:
        optimizer = torch.optim.AdamW([models.flat_MN], run.lr, weight_decay=WEIGHT_DECAY, fused=True)
    models.flat_MN.grad = models.grad_MN
    nats, began = torch.zeros((), device=device), time.monotonic()
    batches = windows(corpus, run.seed, steps, run.batch, run.workers)
    bar = tqdm(batches, f"{run.row}, lr {run.lr}, seed {run.seed}", steps, leave=False, disable=None)
    for step, (x_MBL, y_MBL) in enumerate(bar):
        lr = optimizer.param_groups[0]["lr"] = run.lr * scale(step, WARMUP, steps)
        nats.mul_(0.99).add_(models.backward(x_MBL, y_MBL), alpha=0.01)
        way.before_step()
        if not way.steps_itself:
            optimizer.step()
        with torch.no_grad():
            way.after_step(step + 1, lr)
    way.close()
    held_out = corpus.val_windows(CONTEXT)
    bits = [models.bits(row_N, *held_out) for row_N in way.results()]
    val_bits = sum(bits) / len(bits)
    return {
        **asdict(run),
        "val_bits": math.inf if math.isnan(val_bits) else val_bits,  # a run that diverged ranks last
        "train_nats": nats.item() / (1 - 0.99**steps),
        "bits_per_parameter": way.bits / models.numel / steps,
        "received_bits": way.bits * way.received_times / models.numel / steps,
        "parameters": models.numel,
        "characters": len(corpus.train_N),
        "seconds": time.monotonic() - began,
    }


# --- which runs


class Finished:
    """The finished runs, one line of a file each."""

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self._by_key = {_run_of(record).key: record for record in self.records}

    def get(self, run: Run) -> dict[str, Any] | None:
        """Return the record of a run."""
        return self._by_key.get(run.key)

    def add(self, run: Run, record: dict[str, Any]) -> None:
        """Append the record of a run."""
        self.records.append(record)
        self._by_key[run.key] = record
        with self.file.open("a") as out:
            out.write(json.dumps(record) + "\n")


def _run_of(record: dict[str, Any]) -> Run:
    return Run(**{name: record[name] for name in Run.__dataclass_fields__})


def ranked(row: str, finished: Finished, **where: Any) -> list[tuple[float, Options]]:
    """Return the settings of a row's finished trials, the lowest loss first."""
    records = [finished.get(run) for run in tuning(row, **where)]
    done = sorted((each for each in records if each is not None), key=lambda each: float(each["val_bits"]))
    return [(each["lr"], each["options"]) for each in done]


def tuning(row: str, **where: Any) -> list[Run]:
    """Return all trials of a row."""
    return [Run(row, lr, options, 0, **where) for lr, options in ALL[row].trials]


def repeats(row: str, finished: Finished, seeds: Iterable[int], **where: Any) -> list[Run]:
    """Return runs of the best setting of a row with more seeds; empty until all trials have finished."""
    settings = ranked(row, finished, **where)
    if len(settings) < len(ALL[row].trials):
        return []
    return [Run(row, *settings[0], seed, **where) for seed in seeds]


def work_through(runs: list[Run], finished: Finished, corpus: Corpus, device: torch.device) -> None:
    """Run all unfinished runs. Raise ValueError for runs on another text."""
    for run in runs:
        record = finished.get(run)
        if record is not None and record.get("characters") != len(corpus.train_N):
            raise ValueError(f"{finished.file} has a run of {run.row!r} on another text: give another folder")
    open_runs, source = [run for run in runs if finished.get(run) is None], commit()
    for index, run in enumerate(open_runs):
        record = {**train(run, corpus, device), "commit": source}
        finished.add(run, record)
        print(
            f"[{index + 1}/{len(open_runs)}] {run.row}, lr {run.lr}, {run.options}, seed {run.seed}, {run.size}: "
            f"{record['val_bits']:.3f} bits per character, {record['bits_per_parameter']:.3g} bits per parameter and "
            f"step, {record['seconds']:.0f} s",
            flush=True,
        )


QUICK = (
    Run("dense", 0.004, {}, 0),
    Run("updates 1%", 0.004, ROWS["updates 1%"].options[0], 0),
    Run("updates 3% every 30", *ROWS["updates 3% every 30"].trials[9], 0),
    Run("DiLoCo every 30", *ROWS["DiLoCo every 30"].trials[2], 0),
    Run("SparseLoCo 3% every 30", *ROWS["SparseLoCo 3% every 30"].trials[7], 0),
    Run("one node alone", 0.001, {}, 0),
)
"""At settings that were best, or within noise of it, among all trials."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="six rows at known settings, one seed")
    parser.add_argument(
        "--rows", nargs="+", default=list(ROWS), choices=list(ALL), metavar="ROW", help="methods to train"
    )
    parser.add_argument("--size", default="0.1M", choices=list(SIZES), help="size of the model (%(default)s)")
    parser.add_argument(
        "--carry", type=int, metavar="N", help="only the N best methods of the next smaller size, with seed 0"
    )
    parser.add_argument("--lr", type=float, help="use this learning rate without trials, with seed 0")
    parser.add_argument("--steps", type=int, default=0, help="number of steps; default: depends on the size")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[1, 2], help="more seeds for the best settings, in addition to 0"
    )
    parser.add_argument("--workers", type=int, default=4, help="number of simulated workers (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text, device = read_library(SIZES[options.size].whole), torch.device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    finished, corpus = Finished(options.out / "runs.jsonl"), corpus_of(text)
    print(described(text), file=sys.stderr)
    where = {"size": options.size, "workers": options.workers, "steps": options.steps}
    if options.quick:
        work_through(list(QUICK), finished, corpus, device)
        return
    for row in options.rows:
        if options.lr is not None:
            if len(ALL[row].options) > 1:
                parser.error(f"--lr: the settings of {row!r} have learning rates of their own")
            runs = [Run(row, options.lr, settings, 0, **where) for settings in ALL[row].options]
            work_through(runs, finished, corpus, device)
            continue
        if options.carry:
            smaller = list(SIZES)[: list(SIZES).index(options.size)]
            best = ranked(row, finished, size=smaller[-1])[: options.carry] if smaller else []
            if not best:
                parser.error(f"--carry: no trial of {row!r} of the size below has finished in {options.out}")
            runs = [Run(row, *setting, 0, **where) for setting in best]
            work_through(runs, finished, corpus, device)
            continue
        work_through(tuning(row, **where), finished, corpus, device)
        work_through(repeats(row, finished, options.seeds, **where), finished, corpus, device)


if __name__ == "__main__":
    main()

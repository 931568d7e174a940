"""The loss of the language example under each of its YAML files, on two nodes of two ranks.

    python -m benchmarks.convergence.language OUT [--seeds 0 1 2] [--steps 600] [--ways DDP ...]

Each run is `examples/language_model.py` itself under torchrun: four ranks of this machine that are called two nodes;
for "one node alone" two ranks under DDP, with their half of the batch. The text is Python's own library, a twentieth
of it held out. What counts is the last validation, in bits per byte, of the shared weights. Seeds are paired: they
set the first weights and the order of the windows. Links are not slow: this is about losses.

A finished run is one file in OUT/runs and is not run again. Writes OUT/language.json and OUT/language.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from benchmarks.record import Rows, commit, parser_of, surroundings, write
from lightning_sparse.cli.report import format_table
from lightning_sparse.data.tokens import prepare

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FSDP = ["--trainer.strategy.class_path=lightning_sparse.flavours.pytorch_lightning.MSTopKFSDPStrategy"]
GRADIENTS = [*FSDP, "--trainer.strategy.init_args.send=gradients"]
ALONE = "one node alone"
WAYS: dict[str, tuple[str, list[str]]] = {
    "DDP": ("ddp", []),
    "mstopk_fsdp, gradients dense16": ("fsdp", [*GRADIENTS, "--trainer.strategy.init_args.exchange=dense16"]),
    "mstopk_local": ("local", []),
    "mstopk_fsdp": ("fsdp", []),
    ALONE: ("ddp", []),
    "mstopk_fsdp, gradients 1 %": ("fsdp", [*GRADIENTS, "--trainer.strategy.init_args.exchange=sparse"]),
}


def run(way: str, seed: int, tokens: Path, options: argparse.Namespace) -> float:
    """Bits per byte of the last validation."""
    config, more = WAYS[way]
    ranks = 2 if way == ALONE else 4
    with tempfile.TemporaryDirectory() as folder:
        begin = f'LIGHTNING_SPARSE_NODE=node$((LOCAL_RANK / 2)) exec {sys.executable} {EXAMPLES}/language_model.py "$@"'
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words += ["--no-python", "bash", "-c", begin, "x", "fit", f"--config={EXAMPLES}/language/{config}.yaml", *more]
        words += [f"--data.train={tokens}", f"--data.batch_size={options.batch}", f"--data.context={options.context}"]
        words += [f"--seed_everything={seed}", f"--trainer.devices={ranks}", "--trainer.accelerator=cpu"]
        words += [f"--trainer.max_steps={options.steps}", f"--trainer.val_check_interval={options.steps}"]
        words += ["--trainer.check_val_every_n_epoch=null", "--trainer.max_epochs=-1", "--trainer.callbacks=null"]
        words += ["--trainer.enable_progress_bar=false", "--trainer.logger=CSVLogger"]
        words += [f"--trainer.logger.save_dir={folder}", *options.example]
        ran = subprocess.run(
            words, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        if ran.returncode != 0:
            raise SystemExit(ran.stdout[-3000:] + ran.stderr[-3000:])
        (log,) = Path(folder).rglob("metrics.csv")
        with log.open() as rows:
            return [float(row["val_bits"]) for row in csv.DictReader(rows) if row.get("val_bits")][-1]


def report(records: Rows) -> str:
    """Means over seeds, and differences to DDP and to one node alone seed by seed."""
    bits = {(each["way"], each["seed"]): each["bits per byte"] for each in records}
    lines = []
    for way in WAYS:
        seeds = sorted(seed for name, seed in bits if name == way)
        if seeds:
            less = [
                ", ".join(f"{bits[way, s] - bits[other, s]:+.3f}" for s in seeds if (other, s) in bits)
                for other in ("DDP", ALONE)
            ]
            lines.append((way, len(seeds), f"{fmean(bits[way, s] for s in seeds):.3f}", *less))
    return format_table(("", "seeds", "bits per byte", "less DDP, by seed", f"less {ALONE}"), lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=4, help="windows of a rank and step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--example", nargs="+", default=[], metavar="NAME=VALUE", help="options of the example, too")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY")
    options = parser.parse_args()
    options.example = [f"--{each}" for each in options.example]
    runs = options.out / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    tokens = (options.out / "tokens.bin").resolve()
    if not tokens.exists():
        prepare(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), tokens)
    records = Rows()
    bar = tqdm([(way, seed) for seed in options.seeds for way in options.ways], unit="run")
    for way, seed in bar:
        bar.set_description(f"{way}, seed {seed}")
        file = runs / f"{way}-seed{seed}-{options.steps}x{options.batch}x{options.context}.json"
        if not file.exists():
            record = {"way": way, "seed": seed, "bits per byte": run(way, seed, tokens, options), "commit": commit()}
            file.write_text(json.dumps(record))
        records.append(json.loads(file.read_text()))
    common = {**surroundings(), "commit": ", ".join(sorted({each["commit"] for each in records}))}
    common |= {"steps": options.steps, "batch": options.batch, "context": options.context}
    write(options.out / "language.json", {**common, "runs": records}, report(records))


if __name__ == "__main__":
    main()

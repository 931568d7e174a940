"""Metrics that ``self.log(..., sync_dist=True)`` averages over ranks equal the metrics of one device.

``EVALUATION_INPUTS`` sets the number of random data sets per cluster, ``EVALUATION_SEED`` the first seed.
"""

from __future__ import annotations

import itertools
import os
import random
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_sparse.data.datamodule import _ExactMeans
from tests.data.fits import PACKAGES, lightning_of, ours, trainer
from tests.helpers.data import counted, numbered_folder
from tests.helpers.distributed import RunRanks

CONTEXT = 2
INPUTS = int(os.environ.get("EVALUATION_INPUTS", "8"))
SEED = int(os.environ.get("EVALUATION_SEED", "0"))
AT_ONCE = 20  # process groups of all Trainers live until the ranks return
pytestmark = pytest.mark.timeout(7200 if "EVALUATION_INPUTS" in os.environ else 600)


class Case(NamedTuple):
    seed: int
    samples: int
    batch_size: int
    strategy: str


def model_of(package: str, seed: int) -> Any:
    """Return a model that logs a random value for each sample, chosen by the sample's number."""
    values = torch.from_numpy(np.random.default_rng(seed).random(300, np.float32))

    class Model(lightning_of(package).LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            first = batch[0]
            of_samples = first[:, 0] // CONTEXT if first.ndim == 2 else first[:, 0, 3, 3].round().long()
            self.log("mean", values[of_samples].mean(), sync_dist=True)
            self.log("right", torch.ones(len(first)).mean(), sync_dist=True, batch_size=len(first))
            self.log("most", values[of_samples].max(), sync_dist=True, reduce_fx="max")
            self.log("sum", values[of_samples].sum(), sync_dist=True, reduce_fx="sum")

    return Model()


def evaluate(package: str, case: Case, data: Any) -> dict[str, float]:
    t = trainer(package, strategy=case.strategy if int(os.environ["WORLD_SIZE"]) > 1 else "auto")
    (metrics,) = t.validate(model_of(package, case.seed), data, verbose=False)
    return dict(metrics)


def of_tokens(cases: list[Case], folder: str) -> list[dict[str, float]]:
    warnings.simplefilter("ignore")
    found = []
    for case in cases:
        val = Path(folder) / f"{case.samples}.bin"
        data = ours(PACKAGES[0]).TokenDataModule(val, val=val, context=CONTEXT, batch_size=case.batch_size)
        found.append(evaluate(PACKAGES[0], case, data))
    return found


def of_images(cases: list[Case], folder: str) -> list[dict[str, float]]:
    warnings.simplefilter("ignore")
    found = []
    for case in cases:
        root = Path(folder) / str(case.samples)
        cache = root / f"cache{os.environ['WORLD_SIZE']}-{os.environ['GROUP_RANK']}"
        options = {"image_size": 16, "mean": (0, 0, 0), "std": (1 / 255,) * 3, "memory_gb": 0.05, "threads": 1}
        for package in PACKAGES:
            made = ours(package).CachedImageDataModule(root, cache, batch_size=case.batch_size, **options)
            found.append(evaluate(package, case, made))
    return found


def check(found: list[dict[str, float]], expected: list[dict[str, float]], cases: list[Case], ranks: int) -> None:
    for one, other, case in zip(found, expected, cases, strict=True):
        assert one["right"] == other["right"] == 1, case
        times = ranks if case.samples < ranks else 1  # each rank sees all samples
        assert one == pytest.approx({**other, "sum": times * other["sum"]}, rel=2e-6), case


@pytest.mark.parametrize(("nodes", "devices"), [(1, 3), (2, 2)])
def test_evaluation_random_token_sets_equal_one_device(
    ranks: RunRanks, tmp_path: Path, nodes: int, devices: int
) -> None:
    rng = random.Random(f"{SEED} {nodes} {devices}")
    cases = [
        Case(number, rng.randint(1, rng.choice([9, 99])), rng.randint(1, 9), strategy)
        for number, strategy in zip(range(INPUTS), itertools.cycle(["ddp", "mstopk_hier", "mstopk_local"]))
    ]
    for samples in {each.samples for each in cases}:
        counted(tmp_path / f"{samples}.bin", samples * CONTEXT + 1)
    for first in range(0, INPUTS, AT_ONCE):
        some = cases[first : first + AT_ONCE]
        expected = ranks(of_tokens, some, str(tmp_path), nodes=1, devices=1)[0]
        for found in ranks(of_tokens, some, str(tmp_path), nodes=nodes, devices=devices):
            check(found, expected, some, nodes * devices)


def test_evaluation_image_sets_of_uneven_size_equal_one_device(ranks: RunRanks, tmp_path: Path) -> None:
    cases = [Case(0, 37, 4, "ddp"), Case(1, 9, 4, "mstopk_local"), Case(2, 5, 1, "ddp"), Case(3, 1, 3, "ddp")]
    for case in cases:
        numbered_folder(tmp_path / str(case.samples), train=8, val=case.samples, classes=1)
    expected = ranks(of_images, cases, str(tmp_path), nodes=1, devices=1)[0]
    for found in ranks(of_images, cases, str(tmp_path), nodes=1, devices=2):
        check(found, expected, [each for each in cases for _ in PACKAGES], 2)


def test_exact_means_other_reductions_keep_the_type() -> None:
    reduce = _ExactMeans(lambda tensor, group, reduce_op: (tensor, group, reduce_op))
    for reduce_op in ("sum", None, torch.distributed.ReduceOp.MAX):
        tensor, *rest = reduce(torch.tensor(3), "group", reduce_op)
        assert (tensor.dtype, rest) == (torch.int64, ["group", reduce_op])
    assert reduce(torch.tensor(3))[0].dtype == torch.float32
    assert reduce(torch.tensor(3.0))[0].dtype == torch.float32
    assert reduce("no tensor")[0] == "no tensor"

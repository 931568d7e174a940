"""Samples of any kind in a Trainer: decoded and transformed by the user's functions, and resumed exactly."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sparse.data.config import CorruptSampleError, DataError
from tests.data.fits import PACKAGES, left_behind, lightning_of, ours, saver, trainer
from tests.helpers.data import write
from tests.helpers.distributed import run_ranks

BATCH, TRAIN = 3, 24
PACKAGE = PACKAGES[0]
Seen = dict[tuple[int, int], list[float]]  # (epoch, index) -> sample


def decode(data: bytes) -> torch.Tensor:
    """Return the number in the data, and a random number from each generator."""
    return torch.tensor([float(data), random.random(), np.random.rand(), torch.rand(()).item()])


def transform(sample: torch.Tensor) -> torch.Tensor:
    return torch.cat([sample, torch.rand(1)])


def untransformed(sample: torch.Tensor) -> torch.Tensor:
    return torch.cat([sample, torch.zeros(1)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return numbered(tmp_path)


def numbered(root: Path) -> Path:
    """Create files that contain their place in the listing."""
    for split, count in (("train", TRAIN), ("val", 6), ("test", 4)):
        for number in range(count):
            name = "odd" if number * 2 >= count else "even"
            write(root / "source" / split / name / f"{number:02}.txt", str(number))
    return root


def data_of(root: Path, **more: Any) -> Any:
    cache = root / f"cache{os.environ.get('NODE_RANK', '0')}"
    given = {"batch_size": BATCH, "transform": transform, "eval_transform": untransformed, "workers": 1, **more}
    given = {"decode": decode, "with_indices": True, "memory_gb": 0.01, **given}
    return ours(PACKAGE).CachedDataModule(str(root / "source"), str(cache), **given)


def model_of() -> Any:
    class Model(lightning_of(PACKAGE).LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(5, 1)
            self.seen: Seen = {}
            self.val: Seen = {}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            samples, labels, indices = batch
            assert labels.tolist() == [int(2 * index >= TRAIN) for index in indices.tolist()]
            self.note(self.seen, samples, indices)
            return self.net(samples).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.note(self.val, batch[0], batch[2])

        test_step = validation_step

        def note(self, seen: Seen, samples: torch.Tensor, indices: torch.Tensor) -> None:
            assert samples[:, 0].tolist() == indices.tolist()
            seen.update({(self.current_epoch, i): s for i, s in zip(indices.tolist(), samples.tolist(), strict=True)})

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    return Model()


def runs(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method("fork", force=True)  # for workers, as in a script; ranks come from a fork server
    root = Path(folder)
    out: dict[str, Any] = {}
    for workers in (2, 0):
        model, data = model_of(), data_of(root, workers=workers)
        callback = saver(PACKAGE, root, f"{workers}-{{step}}", every_n_train_steps=2)
        trainer(PACKAGE, callbacks=[callback], enable_checkpointing=True).fit(model, data)
        out[str(workers)] = (model.seen, model.val)
    resumed = model_of()
    trainer(PACKAGE).fit(resumed, data_of(root), ckpt_path=root / "2-step=6.ckpt")
    tested = model_of()
    trainer(PACKAGE).test(tested, data_of(root))
    return {**out, "resumed": resumed.seen, "tested": tested.val, "left": left_behind()}


def merged(parts: list[Seen]) -> Seen:
    return {key: value for part in parts for key, value in part.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(
        runs, str(numbered(tmp_path_factory.mktemp("samples"))), nodes=2, devices=1, timeout=280, init=False
    )


@pytest.mark.slow
def test_sample_depends_on_seed_epoch_and_index_only(results: list[dict[str, Any]], folder: Path) -> None:
    """It does not depend on workers or ranks: one process without workers makes equal samples."""
    with_workers, without = (merged([each[workers][0] for each in results]) for workers in ("2", "0"))
    assert with_workers.keys() == {(epoch, index) for epoch in range(2) for index in range(TRAIN)}
    assert with_workers == without == alone(folder)
    assert len({tuple(sample[1:]) for sample in with_workers.values()}) == 2 * TRAIN, "random numbers differ"
    assert len({number for sample in with_workers.values() for number in sample[1:]}) == 2 * TRAIN * 4
    val = merged([each["2"][1] for each in results])
    assert val.keys() == {(epoch, index) for epoch in range(2) for index in range(6)}
    assert all(sample[4] == 0 for sample in val.values()), "validation must not use the training transform"
    assert all(val[0, index] == val[1, index] for index in range(6))


def alone(folder: Path) -> Seen:
    data, seen = data_of(folder, workers=0, batch_size=2), {}
    data.setup("fit")
    loader = data.train_dataloader()
    for epoch in range(2):
        loader.set_epoch(epoch)
        torch.manual_seed(5)
        expected = torch.rand(3).tolist()
        torch.manual_seed(5)
        drawn = []
        for samples, _, indices in loader:
            drawn += torch.rand(1).tolist()
            seen.update({(epoch, i): s for i, s in zip(indices.tolist(), samples.tolist(), strict=True)})
        assert drawn[:3] == expected, "the random numbers of the training changed"
    data.teardown("fit")
    return seen


@pytest.mark.slow
def test_resumed_run_makes_the_same_samples(results: list[dict[str, Any]]) -> None:
    for each in results:
        whole = each["2"][0]
        left = list(whole)[6 * BATCH :]
        assert len(left) == 2 * TRAIN // 2 - 6 * BATCH
        assert list(each["resumed"]) == left
        assert each["resumed"] == {key: whole[key] for key in left}


@pytest.mark.slow
def test_testing_uses_its_own_split(results: list[dict[str, Any]]) -> None:
    assert merged([each["tested"] for each in results]).keys() == {(0, index) for index in range(4)}


@pytest.mark.slow
def test_training_leaves_no_threads_processes_or_segments(results: list[dict[str, Any]]) -> None:
    assert [each["left"] for each in results] == [[], []]


def epoch_of(data: Any) -> list[Any]:
    data.setup("fit")
    try:
        return list(data.train_dataloader())
    finally:
        data.teardown("fit")


def test_lists_name_samples_and_several_labels(folder: Path) -> None:
    (folder / "train.csv").write_text(
        "path,kind,score\n" + "".join(f"val/even/0{i}.txt,{'ab'[i % 2]},{i}.5\n" for i in range(3))
    )
    data = data_of(folder, lists={"train": str(folder / "train.csv")}, batch_size=3)
    assert (data.num_classes, data.class_names) == (2, ("a", "b"))
    ((samples, labels, indices),) = epoch_of(data)
    assert samples[:, 0].tolist() == indices.tolist()
    assert labels.dtype == torch.float32
    assert labels.tolist() == [[index % 2, index + 0.5] for index in indices.tolist()]


def test_samples_without_classes_and_with_custom_batches(folder: Path) -> None:
    shutil.rmtree(folder / "source" / "val")
    for path in (folder / "source" / "train").rglob("*.txt"):
        path.rename(folder / "source" / "train" / path.name)
    for name in ("even", "odd"):
        (folder / "source" / "train" / name).rmdir()
    batches = epoch_of(data_of(folder, with_indices=False, collate=lambda samples: [each[0] for each in samples]))
    assert sorted(float(each) for batch in batches for each in batch) == list(range(TRAIN))
    raw = data_of(folder, decode=bytes, transform=None, with_indices=False)
    assert sorted(each for batch in epoch_of(raw) for each in batch) == sorted(str(n).encode() for n in range(TRAIN))


def test_file_that_cannot_be_decoded_is_named_or_replaced(folder: Path) -> None:
    (folder / "source" / "train" / "even" / "05.txt").write_text("five")
    (folder / "source" / "train" / "odd" / "20.txt").write_text("")
    with pytest.raises(
        CorruptSampleError, match=r"train/(even/05|odd/20)\.txt cannot be used: decode raised ValueError"
    ):
        epoch_of(data_of(folder))
    batches = epoch_of(data_of(folder, on_corrupt="skip"))
    numbers = [number for batch in batches for number in batch[0][:, 0].tolist()]
    assert len(numbers) == TRAIN
    assert set(numbers) == set(range(TRAIN)) - {5, 20}

    def never(data: bytes) -> Any:
        raise KeyError("never")

    with pytest.raises(DataError, match="decode raised KeyError"):
        epoch_of(data_of(folder, decode=never, on_corrupt="skip"))


def test_corrupt_samples_are_counted_once_and_replaced_by_different_samples(folder: Path) -> None:
    """This also holds if half of the samples are corrupt and adjacent."""
    corrupt = set(range(TRAIN // 4, TRAIN * 3 // 4))
    for number in corrupt:
        (found,) = (folder / "source" / "train").glob(f"*/{number:02}.txt")
        found.write_text("no number")
    data = data_of(folder, on_corrupt="skip")
    data.setup("fit")
    numbers = [number for batch in data.train_dataloader() for number in batch[0][:, 0].tolist()]
    counts = data._session.train.store.node_counters()
    data.teardown("fit")
    assert len(numbers) == TRAIN
    assert not corrupt & set(numbers)
    assert counts.replaced == len(corrupt)
    most = Counter(numbers).most_common(1)[0][1]
    assert most <= len(corrupt) // 2, "several samples replace the corrupt ones"


def test_splits_with_other_labels_are_refused_except_test_without_labels(folder: Path) -> None:
    texts = {"train": "path,a\ntrain/even/00.txt,x\n", "val": "path\nval/even/00.txt\n"}
    texts["test"] = "path\ntest/even/01.txt\n"
    for name, text in texts.items():
        (folder / f"{name}.csv").write_text(text)
    lists = {name: str(folder / f"{name}.csv") for name in texts}
    with pytest.raises(ValueError, match=r"samples of val have 0 label\(s\), but samples of train have 1"):
        data_of(folder, lists=lists).setup("fit")
    data = data_of(folder, lists=lists)
    data.setup("test")
    ((samples, indices),) = list(data.test_dataloader())
    data.teardown("test")
    assert (samples[:, 0].tolist(), indices.tolist()) == ([1.0], [0])
    lists["train"] = lists["val"]
    images = ours(PACKAGE).CachedImageDataModule(str(folder / "source"), str(folder / "cache"), lists=lists)
    with pytest.raises(ValueError, match="the images of train have no labels"):
        images.setup("fit")

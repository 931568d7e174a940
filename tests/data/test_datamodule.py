"""The DataModule in a Trainer with both Lightning packages: one process, 2 x 2 ranks over Gloo, resumed elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.data.config import SHUFFLES
from tests.data.fits import (
    BATCH,
    PACKAGES,
    TRAIN,
    VAL,
    Metrics,
    Results,
    data,
    expected,
    fitted,
    flat,
    left_behind,
    lightning_of,
    module,
    ours,
    saver,
    segments,
    share_of_own,
    trainer,
)
from tests.helpers.data import numbered_folder
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import Lines
from tests.helpers.scenarios import Scenarios, returned

pytestmark = pytest.mark.timeout(600)  # the scenarios take a third of it on two busy cores
SCENARIOS = Scenarios()
scenario = SCENARIOS.add


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbered_folder(tmp_path_factory.mktemp("numbered"), TRAIN, VAL)


@pytest.fixture(scope="module", params=[PACKAGES[0], pytest.param(PACKAGES[1], marks=pytest.mark.slow)])
def package(request: pytest.FixtureRequest) -> str:
    return str(request.param)


one_package = pytest.mark.parametrize("package", PACKAGES[:1], indirect=True)


@pytest.fixture(scope="module")
def folder(pictures: Path, tmp_path_factory: pytest.TempPathFactory, package: str) -> Path:
    """Return a folder with the images, and the caches and checkpoints of one Lightning package."""
    root = tmp_path_factory.mktemp(package)
    shutil.copytree(pictures, root / "source")
    shutil.copytree(pictures / "train", root / "only_train" / "train")
    return root


@pytest.fixture(scope="module")
def segments_before(package: str) -> set[str]:
    return segments()


@pytest.fixture(scope="module")
def results(package: str, folder: Path, segments_before: set[str], request: pytest.FixtureRequest) -> Results:
    """Return the results of all scenarios by rank. With the second Lightning package, slow scenarios are left out."""
    names = list(SCENARIOS.wanted(request) if package == PACKAGES[0] else SCENARIOS.quick)
    return run_ranks(run_scenarios, package, str(folder), names, timeout=550, init=False)


def run_scenarios(package: str, folder: str, names: list[str]) -> dict[str, Any]:
    os.chdir(folder)
    warnings.simplefilter("ignore")
    logging.getLogger(lightning_of(package).__name__).setLevel(logging.ERROR)
    return returned({name: SCENARIOS[name] for name in names}, package, Path(folder))


# -- epochs ------------------------------------------------------------------------------------------------------------


@scenario
def epochs(package: str, folder: Path) -> dict[str, Any]:
    lines = Lines()
    out: dict[str, Any] = {}
    runs = [("ddp", "ddp", "global"), ("sparse", "mstopk_hier", "global"), ("local", "ddp", "local")]
    for name, strategy, shuffle in runs:
        recorder = Metrics(package)
        model, t = fitted(
            package, folder, {"shuffle": shuffle}, strategy=strategy, logger=recorder, num_sanity_val_steps=2
        )
        out[name] = {
            "train": model.train_seen, "val": model.val_seen, "rows": recorder.rows, "len": t.num_training_batches,
            "shapes": model.shapes,
        }  # fmt: skip
    logging.getLogger("lightning_sparse").removeHandler(lines)
    return {**out, "lines": lines.lines, "left": left_behind()}


@pytest.mark.parametrize("name", ["ddp", "sparse", "local"])
def test_datamodule_batches_equal_the_sampler_plan_on_each_rank(results: Results, name: str) -> None:
    shuffle = name if name in SHUFFLES else "global"
    for rank, each in enumerate(results):
        seen = each["epochs"][name]
        assert seen["len"] == 6
        assert seen["shapes"] == {(BATCH, 3, 16, 16)}
        for epoch in range(2):
            mine = [step[rank // 2][rank % 2] for step in expected(shuffle, epoch)]
            assert [samples for at, _, samples in seen["train"] if at == epoch] == mine
    for epoch in range(2):
        all_seen = flat([[s for at, _, s in each["epochs"][name]["train"] if at == epoch] for each in results])
        assert sorted(all_seen) == list(range(TRAIN)), "a sample is lost or repeated"
        all_val = flat([[s for at, s in each["epochs"][name]["val"] if at == epoch] for each in results])
        assert set(all_val) == set(range(VAL))
        assert len(all_val) <= VAL + 3
        assert len({len([1 for at, _ in each["epochs"][name]["val"] if at == epoch]) for each in results}) == 1


def test_bytes_by_tier_reach_the_logger_and_the_summary(results: Results, folder: Path) -> None:
    total = sum(path.stat().st_size for path in (folder / "source" / "train").rglob("*.png"))
    first, second = results[0]["epochs"]["ddp"]["rows"]
    assert [first["step"], second["step"]] == [6, 12]
    assert total <= first["data/storage_bytes"] <= 1.05 * total, "storage is read once"
    assert second["data/storage_bytes"] == 0
    assert second["data/memory_hits"] == pytest.approx(share_of_own("global", 1))
    later = results[0]["epochs"]["sparse"]["rows"]
    assert [row["data/storage_bytes"] for row in later] == [0, 0], "a later run starts from local disk"
    assert later[0]["data/disk_bytes"] > 0
    assert results[0]["epochs"]["local"]["rows"][1]["data/memory_hits"] == 1
    assert all(each["epochs"]["ddp"]["rows"] == [] for each in results[1:])


def test_rank_zero_logs_the_backend_and_samples_by_tier(results: Results) -> None:
    text = "\n".join(results[0]["epochs"]["lines"])
    assert [line for line in results[0]["epochs"]["lines"] if line.startswith("backend=")] == [
        "backend='torch': on a CPU it is faster than DALI"
    ] * 3
    assert "120 samples, global batch 20, shuffle='global': 6 steps per epoch, with 0 samples" in text
    assert text.count("samples by tier and epoch, all nodes") == 3
    assert text.count("in memory: 120 samples, ") == 3
    assert text.count("on local disks: 120 samples, ") == 3, "the first run included; both nodes share the cache"
    for each in results[1:]:
        assert [line for line in each["epochs"]["lines"] if "backend" in line or "samples by tier" in line] == []


def test_training_leaves_no_threads_processes_or_segments(results: Results, segments_before: set[str]) -> None:
    for each in results:
        left = {name: found["left"] for name, found in each.items() if "left" in found}
        assert {"epochs", "exceptions"} <= set(left)
        assert not any(left.values()), left
    assert segments() <= segments_before


# -- features of the Trainer -------------------------------------------------------------------------------------------


@SCENARIOS.slow
def features(package: str, folder: Path) -> dict[str, Any]:
    limited, _ = fitted(package, folder, limit_train_batches=4, limit_val_batches=1)
    overfit, _ = fitted(package, folder, overfit_batches=2, limit_val_batches=0)
    reloaded, _ = fitted(package, folder, reload_dataloaders_every_n_epochs=1, max_epochs=3)
    often, _ = fitted(package, folder, val_check_interval=2, max_epochs=1)
    growing, _ = fitted(package, folder, {"image_size": {0: 8, 1: 16}}, limit_val_batches=0)

    model, t, again = module(package), trainer(package, max_epochs=1), data(package, folder)
    t.fit(model, again)
    t.fit_loop.max_epochs = 3
    t.fit(model, again)
    t.validate(model, again)
    tested = module(package)
    trainer(package).test(tested, data(package, folder))
    return {
        "limited": (limited.train_seen, limited.val_seen),
        "overfit": overfit.train_seen,
        "reloaded": reloaded.train_seen,
        "often": often.val_seen,
        "growing": sorted(growing.shapes),
        "again": model.train_seen,
        "tested": tested.val_seen,
        "left": left_behind(),
    }


@pytest.mark.slow
@one_package
def test_trainer_limits_overfitting_reloading_and_a_second_fit(results: Results) -> None:
    for rank, each in enumerate(results):
        seen = each["features"]
        mine = [[step[rank // 2][rank % 2] for step in expected("global", epoch)] for epoch in range(3)]
        assert [s for _, _, s in seen["limited"][0]] == mine[0][:4] + mine[1][:4]
        assert len(seen["limited"][1]) == 2
        assert [s for _, _, s in seen["overfit"]] == mine[0][:2] * 2
        assert [s for _, _, s in seen["reloaded"]] == mine[0] + mine[1] + mine[2]
        assert len(seen["often"]) == 3 * 2
        assert seen["growing"] == [(BATCH, 3, 8, 8), (BATCH, 3, 16, 16)]
        assert [(epoch, s) for epoch, _, s in seen["again"]] == [(e, s) for e in range(3) for s in mine[e]]
        assert len(seen["tested"]) == 2


@scenario
def exceptions(package: str, folder: Path) -> dict[str, Any]:
    model = module(package)
    model.raises_at = 3
    dm = data(package, folder)
    with pytest.raises(KeyError, match="in training"):
        trainer(package).fit(model, dm)
    cache = folder / f"other{os.environ['NODE_RANK']}"
    other = ours(package).CachedImageDataModule(str(folder / "only_train"), str(cache), batch_size=5, image_size=16)
    with pytest.raises(ValueError, match=r"has no folder val/.*val_fraction=0.05"):
        trainer(package).fit(module(package), other)
    return {"session": dm._session, "left": left_behind()}


def test_exception_closes_the_data_session(results: Results) -> None:
    for each in results:
        assert each["exceptions"]["session"] is None


# -- resuming ----------------------------------------------------------------------------------------------------------


def resumed_at(step: int, package: str, folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for shuffle in SHUFFLES:
        path = folder / f"{shuffle}-step={step}.ckpt"
        resumed, t = fitted(package, folder, {"shuffle": shuffle}, max_epochs=3, ckpt_path=path)
        out[shuffle] = resumed.train_seen
        out[f"{shuffle} end"] = (t.global_step, len([1 for at, _ in resumed.val_seen if at == 2]))
    return out


@scenario
def stopped_in_an_epoch(package: str, folder: Path) -> dict[str, Any]:
    """Stop after 9 steps, the third step of the second epoch."""
    for shuffle in SHUFFLES:
        callback = saver(package, folder, f"{shuffle}-{{step}}", every_n_train_steps=3)
        options = {"max_steps": 9, "callbacks": [callback], "enable_checkpointing": True}
        fitted(package, folder, {"shuffle": shuffle}, **options)
    return resumed_at(9, package, folder)


@SCENARIOS.slow
def stopped_after_an_epoch(package: str, folder: Path) -> dict[str, Any]:
    """Resume from a checkpoint at the end of the first epoch."""
    return resumed_at(6, package, folder)


@SCENARIOS.slow
def resuming(package: str, folder: Path) -> dict[str, Any]:
    """Resume from checkpoints at the end of an epoch, before and after its validation."""
    out: dict[str, Any] = {}
    callback = saver(package, folder, "validated-{epoch}", every_n_epochs=1, save_on_train_epoch_end=False)
    fitted(package, folder, max_epochs=2, callbacks=[callback], enable_checkpointing=True)
    callback = saver(package, folder, "ended-{epoch}", every_n_epochs=1, save_on_train_epoch_end=True)
    fitted(package, folder, max_epochs=2, callbacks=[callback], enable_checkpointing=True)
    for name in ("validated", "ended"):
        resumed, _ = fitted(package, folder, max_epochs=3, ckpt_path=folder / f"{name}-epoch=0.ckpt")
        out[name] = resumed.train_seen
    return out


def sees_the_rest(results: Results, shuffle: str, stopped: str, step: int) -> None:
    for rank, each in enumerate(results):
        mine = [[step[rank // 2][rank % 2] for step in expected(shuffle, epoch)] for epoch in range(3)]
        seen = [(epoch, batch, samples) for epoch in range(3) for batch, samples in enumerate(mine[epoch])]
        assert each[stopped][shuffle] == seen[step:]
        assert each[stopped][f"{shuffle} end"] == (18, 2)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_run_resumed_within_an_epoch_gets_the_remaining_batches(results: Results, shuffle: str) -> None:
    sees_the_rest(results, shuffle, "stopped_in_an_epoch", 9)


@pytest.mark.slow
@one_package
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_run_resumed_after_an_epoch_gets_the_remaining_batches(results: Results, shuffle: str) -> None:
    sees_the_rest(results, shuffle, "stopped_after_an_epoch", 6)


@pytest.mark.slow
@one_package
def test_run_resumed_between_epochs_starts_the_next_epoch(results: Results) -> None:
    for rank, each in enumerate(results):
        mine = [[step[rank // 2][rank % 2] for step in expected("global", epoch)] for epoch in range(3)]
        for name in ("validated", "ended"):
            assert [samples for _, _, samples in each["resuming"][name]] == mine[1] + mine[2]


def elsewhere(package: str, folder: str) -> dict[str, Any]:
    """Resume a checkpoint of 2 x 2 ranks on one node of two devices."""
    os.chdir(folder)
    warnings.simplefilter("ignore")
    out: dict[str, Any] = {}
    for shuffle, batch in [("global", 2 * BATCH), ("global", BATCH), ("local", BATCH)]:
        path = Path(folder) / f"{shuffle}-step=9.ckpt"
        options = {"shuffle": shuffle, "batch_size": batch}
        resumed, t = fitted(package, Path(folder), options, max_epochs=3, ckpt_path=path)
        out[f"{shuffle} {batch}"] = (resumed.train_seen, t.num_training_batches, len(resumed.val_seen))
    return out


@pytest.fixture(scope="module")
def moved(package: str, folder: Path, results: Results) -> Results:
    assert results
    return run_ranks(elsewhere, package, str(folder), nodes=1, devices=2, timeout=280, init=False)


@pytest.mark.parametrize(("shuffle", "batch"), [("global", 10), ("global", 5), ("local", 5)])
@pytest.mark.slow
def test_run_resumed_on_fewer_nodes_gets_each_remaining_sample_once(moved: Results, shuffle: str, batch: int) -> None:
    seen = [each[f"{shuffle} {batch}"][0] for each in moved]
    length = TRAIN // (2 * batch)
    whole = expected(shuffle, 1)
    rest = [[samples for epoch, _, samples in rank if epoch == 1] for rank in seen]
    left = Counter(flat(whole[3:]))
    assert len(rest[0]) == len(rest[1]) == len(left) // (2 * batch)
    assert Counter(flat(rest)) == left, "each sample not yet seen, once"
    if (shuffle, batch) == ("global", 10):
        steps = list(zip(*rest, strict=True))
        assert [sorted(flat(step)) for step in steps] == [sorted(flat(step)) for step in whole[3:]]
    following = [[samples for epoch, _, samples in rank if epoch == 2] for rank in seen]
    assert sorted(flat(following)) == list(range(TRAIN)), "the next epoch is complete"
    for each in moved:
        _, batches, validations = each[f"{shuffle} {batch}"]
        assert batches == length
        assert validations == 2 * -(-VAL // (2 * batch)), "validated after the resumed epoch and the one that followed"


# -- a single process --------------------------------------------------------------------------------------------------


BACKENDS = [
    "torch",
    pytest.param(
        "dali", marks=pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="DALI is not installed")
    ),
]


def alone(package: str, folder: str, backend: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    options = {"backend": backend}
    model, _ = fitted(package, Path(folder), options, max_epochs=2)
    split, _ = fitted(package, Path(folder), {**options, "val_fraction": 0.25}, max_epochs=1)
    return {"train": model.train_seen, "val": model.val_seen, "split": (split.train_seen, split.val_seen)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_datamodule_in_a_single_process_needs_no_group(package: str, folder: Path, backend: str) -> None:
    (seen,) = run_ranks(alone, package, str(folder), backend, nodes=1, devices=1, timeout=200, init=False)
    for epoch in range(2):
        mine = [step[0][0] for step in expected("global", epoch, 1, 1)]
        assert [samples for at, _, samples in seen["train"] if at == epoch] == mine
    assert sorted(flat([s for at, s in seen["val"] if at == 1])) == list(range(VAL))
    train, val = (flat([each[-1] for each in part]) for part in seen["split"])
    assert len(set(val)) == len(val) == 30
    assert set(train) == set(range(TRAIN)) - set(val)


@one_package
@pytest.mark.parametrize("backend", BACKENDS)
def test_new_batch_size_applies_to_the_next_loader(package: str, folder: Path, backend: str) -> None:
    """A search for the batch size sets it between fits."""
    given = data(package, folder, backend=backend, val_fraction=0.25)
    given.setup("fit")
    sizes = []
    for size in (3, 7, 5):
        given.batch_size = size
        loaders = (given.train_dataloader(), given.val_dataloader())
        sizes.append([len(next(iter(loader))[1]) for loader in loaders])
    given.teardown("fit")
    assert sizes == [[3, 3], [7, 7], [5, 5]]
    with pytest.raises(ValueError, match="batch_size=0 "):
        given.batch_size = 0


def test_subclass_may_set_the_batch_size_first(tmp_path: Path) -> None:
    class Early(ours(PACKAGES[0]).CachedImageDataModule):  # type: ignore[misc, name-defined]
        def __init__(self, batch_size: int) -> None:
            self.batch_size = batch_size
            super().__init__(str(tmp_path / "source"), str(tmp_path / "cache"), batch_size)

    assert Early(7).batch_size == 7


def to_the_other(package: str) -> str:
    warnings.simplefilter("ignore")
    other = next(each for each in PACKAGES if each != package)
    trainer = lightning_of(other).Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(TypeError) as caught:
        trainer.fit(module(other), ours(package).CachedImageDataModule("/nfs", "/local"))
    return str(caught.value)


def test_trainer_of_the_other_lightning_package_names_the_right_import(package: str) -> None:
    """Lightning's error ends with the description of the object, which contains our hint."""
    (said,) = run_ranks(to_the_other, package, nodes=1, devices=1, init=False)
    assert "there use lightning_sparse.flavours." in said

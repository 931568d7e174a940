"""The ImageNet example, from its command line to the last validation batch, on the photographs of scikit-learn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "imagenet_resnet50.py"

pytest.importorskip("pytorch_lightning", reason="the example is written for pytorch_lightning")
pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
pytest.importorskip("torchvision", reason="the model and the transforms come from it")


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/<class>/*.png, 8 crops of each of the two photographs, one of them gray."""
    image = pytest.importorskip("PIL.Image")
    datasets = pytest.importorskip("sklearn.datasets")
    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    photographs = datasets.load_sample_images()
    for label, photograph in zip(["china", "flower"], photographs.images, strict=True):
        folder = root / "train" / label
        folder.mkdir(parents=True)
        for number in range(8):
            top, left = random.integers(0, 300, 2)
            picture = image.fromarray(photograph[top : top + 120, left : left + 120 + number])
            (picture.convert("L") if number == 0 else picture).save(folder / f"{number}.png")
    return root


def run_example(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def small(root: Path, *more: str) -> list[str]:
    yaml = EXAMPLE.with_suffix(".yaml")
    trainer = {"accelerator": "cpu", "devices": "2", "precision": "32-true", "fast_dev_run": "2"}
    data = {"root": str(root), "image_size": "32", "batch_size": "2", "workers": "0"}
    overrides = [f"--trainer.{key}={value}" for key, value in trainer.items()]
    overrides += [f"--data.{key}={value}" for key, value in data.items()]
    return ["fit", f"--config={yaml}", *overrides, *more]


def test_trains_and_validates_on_two_ranks(image_folder: Path, tmp_path: Path) -> None:
    done = run_example(*small(image_folder, "--data.val_fraction=0.25", "--trainer.strategy=ddp"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "`Trainer.fit` stopped: `max_steps=2` reached" in done.stdout + done.stderr
    assert "val_top1" in done.stdout


def test_a_folder_without_val_is_told_the_way_out(image_folder: Path, tmp_path: Path) -> None:
    done = run_example(*small(image_folder, "--trainer.strategy=ddp"), cwd=tmp_path)
    assert done.returncode != 0
    assert "--data.val_fraction" in done.stderr

"""The ImageNet example, from its command line to the last validation batch, on the photographs of scikit-learn."""

from __future__ import annotations

import os
import re
import socket
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
    """train/<class>/*.png, 12 crops of each of the two photographs, one of them gray."""
    image = pytest.importorskip("PIL.Image")
    datasets = pytest.importorskip("sklearn.datasets")
    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    photographs = datasets.load_sample_images()
    for label, photograph in zip(["china", "flower"], photographs.images, strict=True):
        folder = root / "train" / label
        folder.mkdir(parents=True)
        for number in range(12):
            top, left = random.integers(0, 300, 2)
            picture = image.fromarray(photograph[top : top + 120, left : left + 120 + number])
            (picture.convert("L") if number == 0 else picture).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process that takes this source tree for an installed distribution: the entry point names the strategy."""
    metadata = tmp_path_factory.mktemp("site") / "lightning_sparse-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-sparse\nVersion: 0\n")
    entry_point = "lightning_sparse = lightning_sparse._autoload:autoload"
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{entry_point}\n")
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    path = os.pathsep.join([str(metadata.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def command(root: Path, *more: str) -> list[str]:
    trainer = {"accelerator": "cpu", "devices": "1", "precision": "32-true", "fast_dev_run": "4"}
    data = {"source": str(root), "cache_dir": "cache", "image_size": "32", "batch_size": "2", "threads": "1"}
    overrides = [f"--trainer.{key}={value}" for key, value in trainer.items()]
    overrides += [f"--data.{key}={value}" for key, value in data.items()]
    return [sys.executable, str(EXAMPLE), "fit", f"--config={EXAMPLE.with_suffix('.yaml')}", *overrides, *more]


def test_trains_and_validates_on_two_nodes(image_folder: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """Four steps: two with dense communication, until the bucket layout is settled, and two sparse ones."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
    arguments = command(image_folder, "--data.val_fraction=0.25", "--trainer.num_nodes=2")
    nodes = [
        subprocess.Popen(
            arguments,
            cwd=tmp_path,
            env={**environment, **rendezvous, "NODE_RANK": str(node)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(output[-3000:] for output in outputs)
    assert "`Trainer.fit` stopped: `max_steps=4` reached" in outputs[0]
    assert "val_top1" in outputs[0]
    assert re.search(r"round 3: \d+ group\(s\) of parameters, [1-9]\d* sparse", outputs[0]), outputs[0][-3000:]


def test_a_folder_without_val_is_told_the_way_out(
    image_folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        command(image_folder), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode != 0
    assert "--data.val_fraction" in done.stderr

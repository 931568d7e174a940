"""The ImageNet example trains on photographs of scikit-learn, and its batch file handles signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lightning_sparse.lab.cluster import free_port
from tests.helpers.installed import with_metadata

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "imagenet_resnet50.py"
RECIPES = ROOT / "examples" / "imagenet"

pytest.importorskip("pytorch_lightning", reason="the example is written for pytorch_lightning")
pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
pytest.importorskip("torchvision", reason="the model and the transforms come from it")


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create train/<class>/*.png: 12 crops per class of the two photographs. One photograph is gray."""
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
    """Return the environment of a process in which the entry point registers the strategy."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    path = os.pathsep.join([str(with_metadata(tmp_path_factory.mktemp("site"))), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def command(recipe: str, root: Path, *more: str) -> list[str]:
    trainer = {"accelerator": "cpu", "devices": "1", "precision": "32-true", "max_epochs": "2"}
    trainer |= {"limit_train_batches": "3", "limit_val_batches": "1", "enable_model_summary": "false"}
    data = {
        "source": str(root),
        "cache_dir": "cache",
        "image_size": "{0: 32, 1: 48}",
        "batch_size": "2",
        "threads": "1",
    }
    overrides = [f"--trainer.{key}={value}" for key, value in trainer.items()]
    overrides += [f"--data.{key}={value}" for key, value in data.items()]
    start = [sys.executable, str(EXAMPLE), "fit", f"--config={RECIPES / recipe}.yaml", "--model.arch=resnet18"]
    return [*start, *overrides, *more]


@pytest.mark.slow
def test_recipe_trains_on_two_nodes(image_folder: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """Two epochs with different image sizes: dense rounds until the buckets are fixed, then sparse rounds."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    more = ("--data.val_fraction=0.25", "--trainer.num_nodes=2", "--ckpt_path=last")
    nodes = [
        subprocess.Popen(
            command("cluster", image_folder, *more),
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
    for said in (
        "`Trainer.fit` stopped: `max_epochs=2` reached",
        "val_top1",
        "2 ranks share the step of Lars",
        "traffic of one device with other nodes, in 6 steps",
        "samples by tier and epoch",
    ):
        assert said in outputs[0], outputs[0][-3000:]
    assert re.search(r"round 3: \d+ group\(s\) of parameters, [1-9]\d* (sparse|flat|dense)", outputs[0]), outputs[0][
        -3000:
    ]
    assert "exchanged" not in outputs[1], "only rank 0 prints"
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_recipes_differ_only_in_cluster_options() -> None:
    yaml = pytest.importorskip("yaml")
    one, many = (yaml.safe_load((RECIPES / f"{name}.yaml").read_text()) for name in ("one_node", "cluster"))
    assert one["data"] == many["data"]
    assert one["trainer"].keys() == many["trainer"].keys()
    assert many["trainer"]["strategy"] == "mstopk_hier"


def test_batch_file_returns_the_exit_status_of_training(tmp_path: Path) -> None:
    """srun ends before the shell waits for it. The error names a missing SOURCE."""
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 4\n")
    (tmp_path / "srun").chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "SLURM_NTASKS_PER_NODE": "8"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(RECIPES / "train.sbatch")]
    done = subprocess.run(command, env={**environment, "SOURCE": "/mnt/pictures"}, check=False, timeout=60)
    assert done.returncode == 4
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert told.returncode != 0
    assert "sbatch --export=ALL,SOURCE=DIR" in told.stderr


@pytest.mark.parametrize("requeue", ["sleep 2", "exit 1"])
def test_batch_file_starts_ranks_and_requeues_itself(tmp_path: Path, requeue: str) -> None:
    """Stand-ins for srun and scontrol record their arguments. scontrol ends later than srun, or fails."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text('#!/bin/sh\necho "$@" > srun.txt\nsleep 1\nexit 3\n')
    (programs / "scontrol").write_text('#!/bin/sh\necho "$@" > scontrol.txt\n' + requeue)
    for program in programs.iterdir():
        program.chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "SLURM_NTASKS_PER_NODE": "8"}
    environment = {**os.environ, **slurm, "SOURCE": "/mnt/pictures", "PATH": f"{programs}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", str(RECIPES / "train.sbatch"), "--data.batch_size=32"], env=environment)
    deadline = time.monotonic() + 30
    while not (tmp_path / "srun.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 3, "the exit code of the training; the signal must not end it"
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"
    words = (tmp_path / "srun.txt").read_text()
    assert "--trainer.num_nodes=4 --trainer.devices=8 --data.source=/mnt/pictures" in words
    assert words.rstrip().endswith("--ckpt_path=last --data.batch_size=32")

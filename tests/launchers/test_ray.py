"""Ray Train: two nodes of Ray on this machine train the same weights as torchrun.

Ray numbers nodes by address, so 127.0.0.2 is the second node.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparse.checkpoint import side_files as saves
from tests.helpers.distributed import run_ranks
from tests.launchers.fits import JOBS, TIMEOUT_S, Job, fit

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install 'ray[train]'"),
]
JOB = {job.name: job for job in JOBS}
BOTH = {4: ((0, 1), (2, 3)), 2: ((0,), (1,))}


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the ranks and the last checkpoint, by job."""
    folder = tmp_path_factory.mktemp("ray")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "output").open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "tests.launchers.fits", str(folder)],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=1000,
        )
    assert done.returncode == 0, (folder / "output").read_text()[-6000:]
    return {job.name: torch.load(folder / f"{job.name}.pt") for job in JOBS}


def on_torchrun(job: Job, resume: str | None) -> list[dict[str, Any]]:
    nodes, devices = 2, job.workers // 2
    return run_ranks(fit_on_torchrun, job, resume, nodes, devices, nodes=nodes, devices=devices, init=False)


def fit_on_torchrun(job: Job, resume: str | None, nodes: int, devices: int) -> dict[str, Any]:
    from lightning_sparse.flavours import lightning

    return fit(job, lightning, resume, num_nodes=nodes, devices=devices)


@pytest.mark.parametrize("name", list(JOB))
def test_ray_fit_ends_with_the_weights_of_torchrun(on_ray: dict[str, Any], name: str) -> None:
    """Runs resume on the same number of workers and on half of them, from the checkpoint that Ray assembled."""
    job, found = JOB[name], on_ray[name]["ranks"]
    resume = f"{on_ray[job.resume]['checkpoint']}/checkpoint.ckpt" if job.resume else None
    expected = on_torchrun(job, resume)
    assert [each["nodes"] for each in found] == [BOTH[job.workers]] * job.workers
    assert [each["steps"] for each in found] == [each["steps"] for each in expected]
    assert all(torch.equal(each["weights"], expected[0]["weights"]) for each in found)


def test_ray_checkpoint_has_the_residuals_of_all_workers(on_ray: dict[str, Any]) -> None:
    """Each worker has saved its side files into its own folder."""
    path = f"{on_ray['begun']['checkpoint']}/checkpoint.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    sides = [saves.load(checkpoint, path, rank)[0].side for rank in range(4)]
    assert all(sides)
    resumed = torch.load(f"{on_ray['resumed']['checkpoint']}/checkpoint.ckpt", weights_only=False)
    assert resumed["lightning_sparse"][0]["save_id"].endswith("-12")  # rounds continue


def test_ray_save_does_not_wait_for_the_process_group(on_ray: dict[str, Any]) -> None:
    saves = [seconds for job in on_ray.values() for rank in job["ranks"] for seconds in rank["saves"]]
    assert len(saves) == sum(job.workers for job in JOBS)
    assert max(saves) < TIMEOUT_S / 2


def test_ray_example_trains_on_images(tmp_path: Path) -> None:
    """The data cache of two nodes reads each image once."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), "--emulate", "--epochs", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "2 node(s) x 2 device(s): reduces inside each node, then between nodes" in done.stdout + done.stderr
    assert "in memory: 1,438 samples" in done.stdout + done.stderr
    assert "validation accuracy: 0." in done.stdout

"""A fit that is equal under Ray Train and torchrun, and a program that runs such fits on a Ray cluster.

python -m tests.launchers.fits FOLDER    # runs all `JOBS` in order and writes FOLDER/<name>.pt
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.fsdp.runs import whole
from tests.strategy.trainers import plain_module


@dataclass(frozen=True)
class Job:
    """A fit.

    Args:
        name: The name of its results.
        strategy: The class in `lightning_sparse.flavours.lightning`. Ray's class has the prefix "Ray".
        workers: With 2 workers, each node has one device. With 4 workers, it has two.
        epochs: The number of epochs of `STEPS` steps.
        resume: The name of the job whose last checkpoint it loads.
    """

    name: str
    strategy: str
    workers: int
    epochs: int
    resume: str = ""


STEPS = 6
JOBS = (
    Job("begun", "MSTopKHierStrategy", workers=4, epochs=1),
    Job("resumed", "MSTopKHierStrategy", workers=4, epochs=2, resume="begun"),
    Job("on two", "MSTopKHierStrategy", workers=2, epochs=2, resume="begun"),
    Job("local", "MSTopKLocalStrategy", workers=4, epochs=1),
    Job("sharded", "MSTopKFSDPStrategy", workers=4, epochs=1),
    Job("sharded resumed", "MSTopKFSDPStrategy", workers=4, epochs=2, resume="sharded"),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "MSTopKHierStrategy": {"bucket_cap_mb": 0.002, "warmup_epochs": 0},
    "MSTopKLocalStrategy": {"bucket_cap_mb": 0.002},
    "MSTopKFSDPStrategy": {},
}
TIMEOUT_S = 300  # timeout of the process group, which a save must not wait for


class Seconds:
    """A mixin that measures each save of a callback that saves at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.saves: list[float] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        begun = time.monotonic()
        super().on_train_epoch_end(trainer, module)  # type: ignore[misc]
        self.saves.append(time.monotonic() - begun)


def fit(
    job: Job,
    strategies: Any,
    resume: str | None,
    prepare: Callable[[Any], Any] = lambda trainer: trainer,
    **options: Any,
) -> dict[str, Any]:
    """Train on every rank.

    Args:
        strategies: Our module for the launcher.
        resume: The checkpoint to start from.
        prepare: The launcher's function that prepares a Trainer.
        options: Options of the Trainer.
    """
    import lightning.pytorch as pl

    name = job.strategy if hasattr(strategies, job.strategy) else f"Ray{job.strategy}"
    given = {"density": 0.05, "exchange": "sparse", **OPTIONS[job.strategy]}
    strategy = getattr(strategies, name)(**given)
    module = plain_module("lightning", by_step=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=job.epochs,
        limit_train_batches=STEPS,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    prepare(trainer).fit(module, ckpt_path=resume)
    saves = [seconds for callback in trainer.callbacks for seconds in getattr(callback, "saves", [])]
    nodes = strategy._topology.nodes
    return {"weights": whole(module), "nodes": nodes, "saves": saves, "steps": trainer.global_step}


# ---------------------------------------------------------------------------------------------------- on Ray's workers


def worker(config: dict[str, Any]) -> None:
    from ray.train import get_context
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    from lightning_sparse.flavours import ray as strategies

    class Report(Seconds, RayTrainReportCallback): ...

    torch.set_num_threads(1)
    options = {"devices": "auto", "plugins": [RayLightningEnvironment()], "callbacks": [Report()]}
    job = config["job"]
    prepare = {} if job.strategy == "MSTopKFSDPStrategy" else {"prepare": prepare_trainer}
    result = fit(job, strategies, config["resume"], **prepare, **options)
    torch.save(result, f"{config['out']}.rank{get_context().get_world_rank()}")


def run_on_ray(job: Job, folder: Path, resume: str | None) -> str:
    """Run a job and return the folder of its last checkpoint."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        worker,
        train_loop_config={"job": job, "resume": resume, "out": str(folder / job.name)},
        torch_config=TorchConfig(backend="gloo", timeout_s=TIMEOUT_S),
        scaling_config=ScalingConfig(num_workers=job.workers, placement_strategy="SPREAD"),
        run_config=RunConfig(name=job.name, storage_path=str(folder / "storage")),
    )
    checkpoint = trainer.fit().checkpoint
    assert checkpoint is not None
    return str(checkpoint.path)


def main(folder: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
    ray.init(address=cluster.address)
    checkpoints: dict[str, str] = {}
    try:
        for job in JOBS:
            resume = f"{checkpoints[job.resume]}/checkpoint.ckpt" if job.resume else None
            checkpoints[job.name] = run_on_ray(job, folder, resume)
            ranks = [torch.load(f"{folder / job.name}.rank{rank}") for rank in range(job.workers)]
            torch.save({"ranks": ranks, "checkpoint": checkpoints[job.name]}, folder / f"{job.name}.pt")
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

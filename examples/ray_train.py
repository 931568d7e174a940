"""Train on images with Ray Train, with the strategy and the data cache in each worker.

    python examples/ray_train.py --emulate                      # two Ray nodes on this machine, two processes each
    python examples/ray_train.py --source /mnt/nfs/imagenet --nodes 4 --devices 8 --gpu    # on a running cluster

On a real cluster, `--source` is network storage, `--cache-dir` is a local disk of each machine, and `--storage` is a
folder for the checkpoints that all machines can reach. Without `--source`, the script writes the handwritten digits of
scikit-learn as image files and trains on them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl  # the package that Ray prefers
import ray
import torch
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, get_checkpoint, get_context
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sparse.flavours.lightning import CachedImageDataModule, CommStatsCallback
from lightning_sparse.flavours.ray import RayMSTopKHierStrategy


class Classifier(pl.LightningModule):
    def __init__(self, num_classes: int, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential()
        for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
            self.layers.extend([nn.Conv2d(inputs, outputs, 3, 2, 1), nn.GroupNorm(8, outputs), nn.ReLU()])
        self.layers.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes)])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images_BCHW, labels_B = batch
        return F.cross_entropy(self.layers(images_BCHW), labels_B)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images_BCHW, labels_B = batch
        accuracy = (self.layers(images_BCHW).argmax(1) == labels_B).float().mean()
        self.log("val_accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.learning_rate, momentum=0.9)


def train(config: dict[str, Any]) -> None:
    """Train on every worker."""
    pl.seed_everything(1, verbose=False)
    cache_dir = config["cache_dir"]
    if config["emulate"]:  # nodes on one machine would otherwise share a disk
        cache_dir = f"{cache_dir}/node{get_context().get_node_rank()}"
    data = CachedImageDataModule(config["source"], cache_dir, batch_size=16, image_size=config["size"], flip=0.0)
    trainer = pl.Trainer(
        accelerator="auto",
        devices="auto",
        strategy=RayMSTopKHierStrategy(density=0.01, warmup_epochs=1),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback(), CommStatsCallback()],
        max_epochs=config["epochs"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = get_checkpoint()  # after a failure Ray starts the workers again
    resume = None if last is None else str(Path(last.to_directory(), RayTrainReportCallback.CHECKPOINT_NAME))
    num_classes = sum(each.is_dir() for each in Path(config["source"], "train").iterdir())
    prepare_trainer(trainer).fit(Classifier(num_classes), data, ckpt_path=resume)


def emulated() -> Cluster:
    """Start two Ray nodes with two CPUs each on this machine. Ray distinguishes nodes by address."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
    return cluster


def digits(folder: Path) -> Path:
    from digits import write_digits

    folder.parent.mkdir(parents=True, exist_ok=True)
    write_digits(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="image folder: train/<class>/*, val/<class>/*")
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("runs/ray-cache"), help="cache folder on a local disk of each node"
    )
    parser.add_argument(
        "--storage", type=Path, default=Path("runs/ray"), help="folder for checkpoints that all nodes share"
    )
    parser.add_argument("--size", type=int, default=24, help="edge of the images in a batch, in pixels")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="number of devices per node")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--emulate", action="store_true", help="start two nodes on this machine")
    args = parser.parse_args()
    source = (args.source or digits(Path("runs/digits"))).resolve()
    cluster = emulated() if args.emulate else None
    ray.init(address="auto" if cluster is None else cluster.address)
    trainer = TorchTrainer(
        train,
        train_loop_config={
            **{"source": str(source), "cache_dir": str(args.cache_dir.resolve()), "size": args.size},
            **{"epochs": args.epochs, "emulate": args.emulate},
        },
        torch_config=TorchConfig(backend="nccl" if args.gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=args.nodes * args.devices,
            use_gpu=args.gpu,
            placement_strategy="SPREAD",  # nodes of equal size; the default, PACK, fills one after the other
        ),
        run_config=RunConfig(
            storage_path=str(args.storage.resolve()),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    assert result.metrics is not None
    print(f"validation accuracy: {result.metrics['val_accuracy']:.3f}; the last checkpoint: {result.checkpoint}")
    ray.shutdown()  # before the nodes end, because Ray would report a failure
    if cluster is not None:
        cluster.shutdown()


if __name__ == "__main__":
    main()

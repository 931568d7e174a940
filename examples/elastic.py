"""Train a small model on nodes that join and leave during the run.

pip install 'torchft>=0.2'
torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000                 # on one machine
TORCHFT_LIGHTHOUSE=http://HOST:29510 python examples/elastic.py --name a    # on each node, at any time

python examples/elastic.py --demo    # three nodes on this machine, one of which is killed and joins again

With --fsdp, each node has two devices, which shard the model with FSDP2.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse.flavours.pytorch_lightning import MSTopKElasticFSDPStrategy, MSTopKElasticStrategy

# Lightning 2.6 uses a check that torch 2.15 deprecates.
warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)")


class Student(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Report(pl.Callback):
    """Prints the round, the loss and a hash of the global weights. Nodes of one round print the same hash."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        time.sleep(0.02)  # slows the toy down, so that you can watch it
        strategy: Any = trainer.strategy
        number = strategy.elastic.version.number
        if number % 5:
            return
        with strategy.global_weights():
            weights = torch.cat([whole(p).detach().flatten() for p in module.parameters()])
        if not trainer.is_global_zero:
            return
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:8]
        nodes = strategy.elastic.gauges()["nodes"]
        loss = float(outputs["loss"])
        print(f"[{self.name}] round {number}, {nodes} node(s): loss {loss:.4f}, hash of weights {digest}", flush=True)


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def train(name: str, fsdp: bool) -> None:
    """Train as one node until the process is terminated. Then send pending updates, and leave."""
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    x = torch.randn(8192, 32)
    data = TensorDataset(x, torch.tanh(x @ torch.randn(32, 8)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 if fsdp else 1,
        strategy=(MSTopKElasticFSDPStrategy if fsdp else MSTopKElasticStrategy)(node_name=name, timeout=10),
        max_epochs=-1,
        callbacks=[Report(name)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Student(), DataLoader(data, batch_size=64, shuffle=True))


def kill(node: subprocess.Popen[str]) -> None:
    """Kill all devices of a node."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


def demo(rounds: int, fsdp: bool) -> int:
    """Run a lighthouse and three nodes. Kill node c, start it again, and end all nodes, `rounds` apart."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    light = ["torchft_lighthouse", "--min_replicas", "1", "--join_timeout_ms", "5000", "--heartbeat_timeout_ms", "3000"]
    lighthouse = subprocess.Popen([*light, "--bind", f"127.0.0.1:{port}"], stderr=subprocess.DEVNULL)
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}

    def start(name: str) -> subprocess.Popen[str]:
        output = subprocess.PIPE if name == "a" else None
        command = [sys.executable, __file__, "--name", name, *(["--fsdp"] if fsdp else [])]
        return subprocess.Popen(command, env=environment, stdout=output, text=True, start_new_session=True)

    nodes = {name: start(name) for name in "abc"}
    try:
        due, waits_for = 0, [3, 2, 3]  # nodes
        for line in nodes["a"].stdout or ():
            print(line, end="", flush=True)
            found = re.match(r"\[a\] round (\d+), (\d)", line)
            number, count = map(int, found.groups()) if found else (0, 0)
            if not waits_for or count != waits_for[0]:
                continue
            due = due or number + rounds
            if number < due:
                continue
            due, _ = 0, waits_for.pop(0)
            if len(waits_for) == 2:
                print("killing node c", flush=True)
                kill(nodes["c"])
            elif len(waits_for) == 1:
                print("starting node c again", flush=True)
                nodes["c"] = start("c")
            else:
                print("ending all nodes", flush=True)
                for node in nodes.values():
                    node.terminate()
        status = max(node.wait() for node in nodes.values())
        print("Done. Compare the hashes: all nodes print the same hash in the same round, so their weights are equal.")
        return status
    finally:
        lighthouse.kill()
        for node in nodes.values():
            kill(node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="number of rounds between two events of the demo")
    parser.add_argument("--name", help="name of this node in the log")
    parser.add_argument("--demo", action="store_true", help="start a lighthouse and three nodes here")
    parser.add_argument("--fsdp", action="store_true", help="shard the model over two devices per node")
    args = parser.parse_args()
    if args.demo:
        sys.exit(demo(args.rounds, args.fsdp))
    train(args.name or socket.gethostname(), args.fsdp)


if __name__ == "__main__":
    main()

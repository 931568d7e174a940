"""Train a small model on nodes that join and leave during the run.

pip install 'torchft>=0.2'
RUST_LOG=warn torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000    # on one machine
TORCHFT_LIGHTHOUSE=http://HOST:29510 python examples/elastic.py --name a    # on each node, at any time

python examples/elastic.py --demo    # three nodes on this machine, one of which is killed and joins again

With --fsdp, each node has two devices, which shard the model with FSDP2.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
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
# A node that joins draws other samples than before. For each sample once per epoch, see "Data" in docs/elastic.md.
warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")


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
    """Prints the round, the loss of this node's batch and a hash of the global weights, which all nodes share."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        time.sleep(0.02)  # slows the toy down, so that you can watch it
        strategy: Any = trainer.strategy
        number = strategy.elastic.version.number
        if number % 10:
            return
        with strategy.global_weights():
            weights = torch.cat([whole(p).detach().flatten() for p in module.parameters()])
        if not trainer.is_global_zero:
            return
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:8]
        nodes = strategy.elastic.gauges()["nodes"]
        print(f"round {number}, {nodes} nodes: loss {outputs['loss']:.4f}, hash of global weights {digest}", flush=True)


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def train(name: str, fsdp: bool) -> None:
    """Train as one node until the process is terminated. Then send pending updates, and leave."""
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # no tips
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    x = torch.randn(8192, 32)
    data = TensorDataset(x, torch.tanh(x @ torch.randn(32, 8)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 if fsdp else 1,
        strategy=(MSTopKElasticFSDPStrategy if fsdp else MSTopKElasticStrategy)(node_name=name, timeout=10),
        max_epochs=-1,
        callbacks=[Report()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Student(), DataLoader(data, batch_size=64, shuffle=True))


class Nodes:
    """The nodes of the demo. Prints each line of a node behind its name, and compares the hashes of the weights."""

    def __init__(self, lighthouse: str, options: list[str]) -> None:
        self.hashes: dict[str, list[str]] = {}  # by round
        self.rounds: queue.Queue[tuple[int, int]] = queue.Queue()  # number and nodes, as node a reports them
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._threads: list[threading.Thread] = []
        quiet = {"RUST_LOG": "warn", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torchft's and torch's logs
        self._environment = {**os.environ, **quiet, "TORCHFT_LIGHTHOUSE": lighthouse}
        self._options = options

    def start(self, name: str) -> None:
        command = [sys.executable, __file__, "--name", name, *self._options]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        node = subprocess.Popen(command, env=self._environment, start_new_session=True, **pipes)
        self._processes[name] = node
        self._threads.append(threading.Thread(target=self._show, args=(name, node), daemon=True))
        self._threads[-1].start()

    def _show(self, name: str, node: subprocess.Popen[str]) -> None:
        for line in node.stdout or ():
            print(f"[{name}] {line}", end="", flush=True)
            if report := re.match(r"round (\d+), (\d) nodes: .* weights (\w+)", line):
                self.hashes.setdefault(report[1], []).append(report[3])
                if name == "a":
                    self.rounds.put((int(report[1]), int(report[2])))

    def wait_for(self, count: int, rounds: int) -> None:
        """Wait until `count` nodes have trained for some rounds."""
        number = due = nodes = 0
        while not due or nodes != count or number < due:
            for name, node in self._processes.items():
                if node.poll() is not None:
                    sys.exit(f"node {name} ended with code {node.returncode}")
            with contextlib.suppress(queue.Empty):
                number, nodes = self.rounds.get(timeout=1)
                due = due or (number + rounds if nodes == count else 0)

    def kill(self, name: str) -> None:
        """Kill all devices of a node."""
        node = self._processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()

    def end(self) -> dict[str, int]:
        """Send SIGTERM to all nodes, and return their exit codes."""
        for node in self._processes.values():
            node.terminate()
        codes = {name: node.wait() for name, node in self._processes.items()}
        for thread in self._threads:
            thread.join()
        return codes

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)


def demo(rounds: int, fsdp: bool) -> int:
    """Run a lighthouse and three nodes. Kill node c, start it again, and end all nodes, `rounds` apart."""
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=3000)
    port = lighthouse.address().rpartition(":")[2]
    nodes = Nodes(f"http://127.0.0.1:{port}", ["--fsdp"] if fsdp else [])
    try:
        print("--- starting nodes a, b and c", flush=True)
        for name in "abc":
            nodes.start(name)
        nodes.wait_for(3, rounds)
        print("--- killing node c: the others wait for it once, and continue", flush=True)
        nodes.kill("c")
        nodes.wait_for(2, rounds)
        print("--- starting node c again: it loads the weights of another node when it joins", flush=True)
        nodes.start("c")
        nodes.wait_for(3, rounds)
        print("--- sending SIGTERM to all nodes", flush=True)
        codes = nodes.end()
    finally:
        nodes.close()
        lighthouse.shutdown()
    shared = [hashes for hashes in nodes.hashes.values() if len(hashes) > 1]
    equal = sum(len(set(hashes)) == 1 for hashes in shared)
    print(f"--- exit codes: {codes}; the weights of the nodes were equal in {equal} of {len(shared)} rounds")
    return 1 if equal < len(shared) or any(codes.values()) else 0


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

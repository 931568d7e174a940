"""One device of the benchmark of elastic nodes: ``python -m benchmarks.exchange.elastic_node WORK``.

WORK is a `Node` as JSON. Several devices of a node shard the model with FSDP2. The node trains the task of
convergence/text.py, prints a line of JSON after each step, and writes its global weights to the folder every 40 steps
and at the end. On SIGTERM it sends its pending updates and leaves.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.convergence import text
from benchmarks.convergence.runs import Run
from lightning_sparse.elastic.rounds import Round, RoundProtocol
from lightning_sparse.elastic.state import ElasticUpdateState
from lightning_sparse.elastic.updates import ElasticConfig, ElasticUpdates
from lightning_sparse.fsdp import mesh_of, shard
from lightning_sparse.topology import discover

NODES = 3
KEPT_EVERY = 40  # steps


@dataclass(frozen=True, kw_only=True)
class Node:
    """The task of a node.

    Args:
        place: index of its share of each batch.
        folder: folder of the corpus and of the weights.
        pause: seconds between two steps, to simulate a larger model.
        device, devices: of this process, and of the node.
        port: of the store that the node's devices share.
    """

    place: int
    lighthouse: str
    folder: str
    seed: int
    steps: int
    pause: float
    device: int = 0
    devices: int = 1
    port: int = 0

    def to_json(self) -> str:
        """Return it for the command line."""
        return json.dumps(asdict(self))


class TrackedVersion:
    """The token and number of this process's global weights; empty until they are known."""

    def __init__(self) -> None:
        self.token, self.number = "", 0
        add, take_over = ElasticUpdateState._add_round, RoundProtocol.set_version

        def added(state: ElasticUpdateState, found: Round, target_S: Tensor) -> None:
            add(state, found, target_S)
            if target_S is state.global_S:
                self.token, self.number = found.token, found.number

        def taken_over(rounds: RoundProtocol, token: str, number: int, history: Sequence[str]) -> Any:
            self.token, self.number = token, number
            return take_over(rounds, token, number, history)

        ElasticUpdateState._add_round = added  # type: ignore[assignment, method-assign]
        RoundProtocol.set_version = taken_over  # type: ignore[assignment, method-assign]


def learner_of(
    corpus: text.Corpus, seed: int, steps: int, rank: int = 0, devices: int = 1, mesh: DeviceMesh | None = None
) -> text.TextLearner:
    """Return the model and its optimizer, equal in all rows, sharded over a mesh."""
    epochs = -(-steps // text.TextSettings.steps_per_epoch)
    settings = text.TextSettings(lr=0.008, text="", epochs=epochs, nodes=NODES, devices=devices)
    torch.manual_seed(seed)
    learner = text.TextLearner(Run("elastic", None, seed, settings), corpus, rank)
    if mesh is not None:
        shard(learner.model, mesh)
        decay = settings.weight_decay
        learner.optimizer = torch.optim.AdamW(learner.model.parameters(), settings.lr, weight_decay=decay, foreach=True)
    return learner


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict without shards. A collective of the mesh."""
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in model.state_dict().items()
    }


def main() -> None:
    node = Node(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    folder = Path(node.folder)
    store = dist.TCPStore("127.0.0.1", node.port, node.devices, is_master=node.device == 0)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=node.device, world_size=node.devices)
    corpus, topology = torch.load(folder / "corpus.pt", weights_only=False), discover(node_name="here")
    rank, mesh = node.place * node.devices + node.device, mesh_of(topology) if node.devices > 1 else None
    learner = learner_of(corpus, node.seed, node.steps, rank, node.devices, mesh)
    version = TrackedVersion()
    config = ElasticConfig(lighthouse=node.lighthouse, density=0.01)
    updates = ElasticUpdates(learner.model, learner.optimizer, config, topology, name=f"node{node.place}")
    step = 0 if updates.progress is None else int(updates.progress["step"])
    received_signals = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: received_signals.append(number))
    say = tell if node.device == 0 else lambda **_: None
    say(begins=step)
    while step < node.steps and not updates.any_device(bool(received_signals))[0]:
        set_rate(learner, step, node.steps)
        time.sleep(node.pause)
        begin = time.perf_counter()
        learner.optimizer.zero_grad()
        loss = learner.loss(learner.model, step)
        loss.backward()  # type: ignore[no-untyped-call]
        learner.optimizer.step()
        updates.step()
        step += 1
        updates.serve(partial(dict, step=step))
        seconds = time.perf_counter() - begin
        if step % KEPT_EVERY == 0 and step < node.steps:
            with updates.global_weights():
                save(learner.model, folder / f"{step}.pt")
        digest = hashlib.sha1(updates.optimizers[0].state.global_S.numpy().tobytes()).hexdigest()[:12]
        weights: dict[str, Any] = {"token": version.token, "digest": digest} if version.token else {}
        say(step=step, number=version.number, seconds=seconds, loss=loss.item(), **weights, **updates.gauges())
    updates.finish()
    if step == node.steps:
        save(learner.model, folder / f"{step}.pt")
        say(ends=step, received=updates.exchange.stats.bytes_between_nodes, **updates.gauges())
    updates.close()


def set_rate(learner: text.TextLearner, step: int, steps: int) -> None:
    for group in learner.optimizer.param_groups:
        group["lr"] = learner.settings.lr * text.scale(step, learner.settings.lr_warmup_steps, steps)


def save(model: nn.Module, file: Path) -> None:
    """Save the weights on the first device. A collective of the node."""
    state = whole_state(model)
    if dist.get_rank() == 0:
        torch.save(state, file)


def tell(**line: Any) -> None:
    """Print a line for the benchmark."""
    print(json.dumps({"time": time.time(), **line}), flush=True)


if __name__ == "__main__":
    main()

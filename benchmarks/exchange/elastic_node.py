"""One node of the benchmark of elastic nodes: ``python -m benchmarks.exchange.elastic_node WORK``.

WORK is a `Node` as JSON. The node trains the task of convergence/text.py, prints a line of JSON after each step, and
writes its global weights to the folder every 40 steps and at the end. On SIGTERM it sends its pending updates and
leaves.
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
from torch import Tensor

from benchmarks.convergence import text
from benchmarks.convergence.runs import Run
from lightning_sparse.elastic.rounds import Round, RoundProtocol
from lightning_sparse.elastic.state import ElasticUpdateState
from lightning_sparse.elastic.updates import ElasticConfig, ElasticUpdates
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
    """

    place: int
    lighthouse: str
    folder: str
    seed: int
    steps: int
    pause: float

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


def learner_of(corpus: text.Corpus, seed: int, steps: int, place: int = 0) -> text.TextLearner:
    """Return the model and its optimizer, equal in all rows."""
    epochs = -(-steps // text.TextSettings.steps_per_epoch)
    settings = text.TextSettings(lr=0.008, text="", epochs=epochs, nodes=NODES, devices=1)
    torch.manual_seed(seed)
    return text.TextLearner(Run("elastic", None, seed, settings), corpus, place)


def main() -> None:
    node = Node(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    folder = Path(node.folder)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    corpus = torch.load(folder / "corpus.pt", weights_only=False)
    learner = learner_of(corpus, node.seed, node.steps, node.place)
    version = TrackedVersion()
    config = ElasticConfig(lighthouse=node.lighthouse, density=0.01)
    updates = ElasticUpdates(learner.model, learner.optimizer, config, discover(), name=f"node{node.place}")
    step = 0 if updates.progress is None else int(updates.progress["step"])
    received_signals = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: received_signals.append(number))
    tell(begins=step)
    while step < node.steps and not received_signals:
        for group in learner.optimizer.param_groups:
            group["lr"] = 0.008 * text.scale(step, learner.settings.lr_warmup_steps, node.steps)
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
                torch.save(learner.model.state_dict(), folder / f"{step}.pt")
        digest = hashlib.sha1(updates.optimizers[0].state.global_S.numpy().tobytes()).hexdigest()[:12]
        weights: dict[str, Any] = {"token": version.token, "digest": digest} if version.token else {}
        tell(step=step, number=version.number, seconds=seconds, loss=loss.item(), **weights, **updates.gauges())
    updates.finish()
    if step == node.steps:
        torch.save(learner.model.state_dict(), folder / f"{step}.pt")
        tell(ends=step, received=updates.exchange.stats.bytes_between_nodes, **updates.gauges())
    updates.end()


def tell(**line: Any) -> None:
    """Print a line for the benchmark."""
    print(json.dumps({"time": time.time(), **line}), flush=True)


if __name__ == "__main__":
    main()

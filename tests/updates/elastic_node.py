"""An elastic node in a process that tests kill. It trains a toy and prints a line of JSON after each step.

Options are options of `ElasticConfig`, and:

steps           of the run
pause           seconds between steps
sleeps          a step and the seconds that the node sleeps after it
seed            of the weights
version         of the weights, as in a checkpoint
width, numel    of the hidden layer, and of the model, which a parameter fills up
validate_every  steps
breaks_at       steps after which a weight is NaN
sample_always   send a sample with each message
dtype           of the parameters
device, devices of this process, and of its node; the devices shard the model with FSDP2
port            of the node's store
data            seed of the batches; by default it differs between nodes
release         a file; the first step waits until it exists
unfreezes_at    step until which the last layer is frozen; None for ever
optimizers      number of optimizers: the second trains the last layer with SGD, and steps every second time
"""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse.elastic.rounds import Outcome, Round, RoundProtocol
from lightning_sparse.elastic.updates import ElasticConfig, ElasticUpdates, Version
from lightning_sparse.fsdp import mesh_of, shard
from lightning_sparse.sharding import local_of
from lightning_sparse.topology import discover
from lightning_sparse.updates.agreement import UpdateCorrelation
from lightning_sparse.updates.state import SparseUpdateState


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Sent:
    """The sum of the messages that this node sent in rounds that count.

    A stopped node may learn only later, from the history of a peer, that a round counts.
    """

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.rounds: Any = None
        self.tokens: set[str] = set()  # of these rounds
        count, reconcile = RoundProtocol._count, RoundProtocol.reconcile

        def counted(rounds: RoundProtocol, found: Round, held: Tensor | None, outcome: Outcome) -> None:
            if held is not None:
                self.add(found.token, held)
            count(rounds, found, held, outcome)

        def reconciled(rounds: RoundProtocol) -> Any:
            for each in rounds._ledger:
                if each.token in rounds.history:
                    self.add(each.token, each.tensor)
            return reconcile(rounds)

        RoundProtocol._count, RoundProtocol.reconcile = counted, reconciled  # type: ignore[method-assign]

    def add(self, token: str, held: Tensor) -> None:
        if token not in self.tokens:
            self.tokens.add(token)
            sent = self.dense(held)
            self.total = padded(self.total, sent) + sent

    def dense(self, held: Tensor) -> Tensor:
        if held.dtype != torch.uint8:
            return held.double()
        parts = []
        for state, part in zip(self.rounds.states, self.rounds._split(held), strict=True):
            parts.append(torch.zeros(state.slices.numel))
            state._path.add(part[: state.message_bytes].view(1, -1), parts[-1], 1.0)
        return torch.cat(parts).double()


def main(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    steps, pause, seed = options.pop("steps", 100_000), options.pop("pause", 0.02), options.pop("seed", 0)
    dtype = options.pop("dtype", "float32")
    sleeps = dict([options.pop("sleeps", (0, 0.0))])
    data_seed, release = options.pop("data", None), options.pop("release", "")
    version, breaks_at = options.pop("version", None), options.pop("breaks_at", [])
    width, validate_every = options.pop("width", 64), options.pop("validate_every", 0)
    if options.pop("sample_always", False):
        UpdateCorrelation.should_sample = staticmethod(lambda exchanges: exchanges > 0)  # type: ignore[method-assign]
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    device, devices, port = options.pop("device", 0), options.pop("devices", 1), options.pop("port", 0)
    store = dist.TCPStore("127.0.0.1", port, devices, is_master=device == 0)
    dist.init_process_group("gloo", store=store, rank=device, world_size=devices)
    model, teacher = toy(seed, width), toy(-1)
    if numel := options.pop("numel", 0):
        model.register_parameter("rest", nn.Parameter(torch.zeros(numel - flat(model).numel())))
    model, teacher = (each.to(getattr(torch, dtype)) for each in (model, teacher))
    topology = discover(node_name="here")
    if devices > 1:
        shard(model, mesh_of(topology))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    if options.pop("optimizers", 1) == 2:
        last = list(model[2].parameters())  # type: ignore[index]
        optimizers = [torch.optim.AdamW(model[0].parameters(), lr=1e-2), torch.optim.SGD(last, lr=0.1, momentum=0.9)]  # type: ignore[index]
    unfreezes_at = options.pop("unfreezes_at", -1)
    if unfreezes_at != -1:
        model[2].requires_grad_(False)  # type: ignore[index, operator]
        optimizers = [torch.optim.AdamW(model[0].parameters(), lr=1e-2)]  # type: ignore[index, operator]
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: leaving.append(1))
    sent = Sent()
    config = ElasticConfig(lighthouse=lighthouse, **options)
    loaded = None if version is None else Version(*version)
    updates = ElasticUpdates(model, optimizers, config, topology, name=name, version=loaded)
    rounds = sent.rounds = updates._rounds
    if data_seed is None:
        data_seed = int.from_bytes(hashlib.sha1(updates.peers.name.encode()).digest()[:4])
    data = torch.Generator().manual_seed(data_seed)

    def weights() -> Tensor:
        return torch.cat([state.slices.read() for state in rounds.states]).double()

    def global_weights() -> Tensor:
        return torch.cat([state.read_global() for state in rounds.states])

    made = torch.zeros_like(weights())

    def report(**more: Any) -> None:
        token, number, *_ = updates.version
        shown = global_weights()
        digest = hashlib.sha1(shown.numpy().tobytes()).hexdigest()[:12]
        kept = pending(updates, sent)
        off = (padded(made, kept) - padded(sent.total, kept) - kept).abs().max().item()
        left = torch.cat([state.pending_S for state in rounds.states]).abs().max().item()
        told = {"token": token, "number": number, "digest": digest, "off": off, "left": left}
        told["finite"] = bool(shown.isfinite().all())
        told["received"] = updates.exchange.stats.bytes_between_nodes
        print(json.dumps({**more, **told, **updates.gauges(), **used()}), flush=True)

    step = 0 if updates.progress is None else updates.progress["step"]
    print(json.dumps({"begins": step}), flush=True)
    while release and updates._from_first(lambda: not Path(release).exists()):
        updates.watch()
        time.sleep(0.2)
        updates._stop_watching()
        updates.serve(partial(dict, step=step))
    while step < steps and not updates._from_first(lambda: bool(leaving)):
        if step == unfreezes_at:
            model[2].requires_grad_(True)  # type: ignore[index, operator]
            optimizers[0].add_param_group({"params": list(model[2].parameters()), "lr": 1e-3})  # type: ignore[index, operator]
        model.zero_grad()
        loss_of(model, teacher, data).backward()
        step += 1
        for optimizer in optimizers[: 1 + step % 2] if len(optimizers) > 1 else optimizers:
            updates.before_step(optimizer)
            before = weights()
            optimizer.step()
            made = padded(made, before) + before - weights()
            if step in breaks_at:
                local_of(next(model.parameters())).data[0, 0] = float("nan")
            updates.step(optimizer)
        updates.serve(partial(dict, step=step))
        time.sleep(sleeps.get(step, pause))
        report(step=step)
        if validate_every and step % validate_every == 0:
            with updates.global_weights():
                updates.watch()
                time.sleep(0.3)
    updates.finish()
    rest = torch.cat([SparseUpdateState.read_global(state) for state in rounds.states]) - pending(updates, sent)
    with updates.global_weights():
        shown = torch.cat([state.slices.read() for state in rounds.states])
        own = updates.shown_version.token != updates.peers.token
    report(ends=step, own=own, shown_off=(shown - rest).abs().max().item())
    updates.close()


def loss_of(model: nn.Module, teacher: nn.Module, data: torch.Generator) -> Tensor:
    x = torch.randn(32, 16, generator=data).to(next(teacher.parameters()).dtype)
    return nn.functional.mse_loss(model(x), teacher(x).detach())


def used() -> dict[str, float]:
    """Descriptors, threads and MB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = len(list(Path("/proc/self/task").iterdir()))
    return {"files": len(list(Path("/proc/self/fd").iterdir())), "threads": threads, "MB": pages * 4096 / 1e6}


def toy(seed: int, width: int = 64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 4))


def padded(sums: Tensor | float, like: Tensor) -> Tensor:
    """Add zeros for parameters that were unfrozen since."""
    sums = torch.as_tensor(sums).view(-1)
    return torch.cat([sums, torch.zeros(len(like) - len(sums), dtype=sums.dtype)]) if len(sums) < len(like) else sums


def pending(updates: ElasticUpdates, sent: Sent) -> Tensor:
    """Return the sum of pending updates, of steps that wait for a round, and of messages in rounds that may or may not
    count."""
    rounds, peers = updates._rounds, updates.peers
    total = torch.cat([state.pending_S for state in rounds.states]).double()
    for place, state in enumerate(rounds.states):
        if any(each is state for each in rounds._requested):
            sizes = [each.slices.numel for each in rounds.states]
            written = state.slices.between(state.local_S, state.global_S, state.local_fraction)
            change = written - state.slices.read()
            torch.split(total, sizes)[place].add_(change.double())
    held = [] if peers._unsettled is None else [peers._unsettled[1]]
    held += [each.tensor for each in peers._ledger if not each.is_pending and each.token not in sent.tokens]
    for message in held:
        if message is not None:
            total += sent.dense(message)
    return total


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))

"""Checkpoints of loops without Lightning in folders of torch.distributed.checkpoint: exact on the same cluster, nothing
lost on another, damage found."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.engine import Engine
from lightning_sparse.exchange import ExchangeConfig
from lightning_sparse.fsdp import ShardedGradients, mesh_of, shard
from lightning_sparse.gradients import HierConfig
from lightning_sparse.strategy import resume
from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.fsdp.runs import Blocks
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import raised
from tests.strategy.kills import damaged_copies
from tests.strategy.models import loss_of, mlp, node_residual, wrap

Loop = tuple[nn.Module, torch.optim.Optimizer, Engine]
KINDS: dict[str, dict[str, Any]] = {
    "updates": {},
    "updates, whole steps": {"shard_optimizer": False, "sync_every": 3, "step_ahead": 0.5, "delay": 1},
    "updates of shards": {},
    "dense16 updates": {"exchange": "dense16"},
    "gradients": {},
    "gradients of shards": {},
}
STEPS = 5  # of which some come after the buckets of DDP are settled


def begin(kind: str, seed: int) -> Loop:
    """A model whose ranks begin alike, its optimizer and its engine."""
    topology, options = discover(), KINDS[kind]
    model = Blocks(seed) if "shards" in kind else mlp(seed)
    if "shards" in kind:
        model = shard(model, mesh_of(topology))
    if kind == "gradients of shards":
        engine: Engine = ShardedGradients(model, ExchangeConfig(density=0.05, exchange="sparse"), topology)
    elif kind == "gradients":
        model, engine = wrap(model, HierConfig(density=0.05, exchange="sparse", warmup_steps=0), topology)
    linear = "gradients" in kind
    sgd, adam = torch.optim.SGD, torch.optim.AdamW
    optimizer = sgd(model.parameters(), lr=0.05) if linear else adam(model.parameters(), lr=0.01)
    if not linear:
        engine = LocalUpdates(model, optimizer, UpdatesConfig(density=0.05, **options), topology)
        if "shards" not in kind:
            model = DistributedDataParallel(model, process_group=topology.intra)
    return model, optimizer, engine


def train(loop: Loop, first: int, last: int) -> None:
    model, optimizer, engine = loop
    for step in range(first, last):
        optimizer.zero_grad()
        if engine.kind == "gradients":
            engine.before_backward()
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        engine.step()


def weights_of(model: nn.Module) -> Tensor:
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([each.detach().flatten() for each in found])


def save(loop: Loop, folder: str, how: str) -> Any:
    model, _, engine = loop
    with engine.global_weights():
        state = {"model": model.state_dict(), "engine": engine}
        if how == "async_save":  # its collectives run beside those of the training
            return dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        dcp.save(state, checkpoint_id=folder)
    return None


def load(loop: Loop, folder: str) -> None:
    model, _, engine = loop
    weights = model.state_dict()
    dcp.load({"model": weights}, checkpoint_id=folder)
    model.load_state_dict(weights)
    resume(engine, folder, "engine")


def whole_and_resumed(folder: str, kinds: list[str], how: str) -> list[tuple[Tensor, Tensor]]:
    """For each kind a run that goes on after its save, and one that goes on from it."""
    ends = []
    for kind in kinds:
        loop = begin(kind, 0)
        train(loop, 0, STEPS)
        future = save(loop, f"{folder}/{kind}", how)
        train(loop, STEPS, 2 * STEPS)  # while it is written
        if future is not None:
            future.result()
        other = begin(kind, 1)
        train(other, 0, 1)  # and has state of its own, which it is to forget
        load(other, f"{folder}/{kind}")
        train(other, STEPS, 2 * STEPS)
        ends.append((weights_of(loop[0]), weights_of(other[0])))
        for each in (loop, other):
            each[2].end()
    return ends


@pytest.mark.parametrize("how", ["save", pytest.param("async_save", marks=pytest.mark.slow)])
def test_a_resumed_loop_is_bit_identical(how: str, tmp_path: Path) -> None:
    kinds = list(KINDS)
    for ends in run_ranks(whole_and_resumed, str(tmp_path), kinds, how, nodes=2, devices=2, timeout=100):
        for kind, (whole, resumed) in zip(kinds, ends, strict=True):
            assert torch.equal(whole, resumed), kind


def resumed_with_other_groups(folder: str) -> str:
    loop = begin("updates", 0)
    train(loop, 0, STEPS)
    save(loop, folder, "save")
    optimizer = loop[1]
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    return raised(load, loop, folder)


def test_a_loop_with_other_groups_than_were_saved_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(resumed_with_other_groups, str(tmp_path / "saved"), nodes=2, timeout=100):
        assert "optimizer 0 was saved with 1 parameter group(s), and has 2 now" in said


def pending_of(loop: Loop) -> Tensor:
    """The mean over nodes of what is not sent; of DDP's gradients the sum."""
    model, _, engine = loop
    if engine.kind == "gradients":
        engine.commit_round()
        mine = node_residual(engine.parameters.module, engine)
        dist.all_reduce(mine)
        return mine / engine.topology.num_devices
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    starts, at = {}, 0
    for name, p in engine.module.named_parameters():
        starts[name], at = at, at + p.numel()
    state = engine.state()
    for name, begin_, end, residual in state.pieces.get("residual", ()):
        flat[starts[name] + begin_ : starts[name] + end] += residual
    for one in getattr(engine, "optimizers", ()):
        for place, pending in zip(
            one.state.slices.named(engine.names), one.state.slices.of(one.state.pending_S), strict=True
        ):
            name, begin_, end = place
            flat[starts[name] + begin_ : starts[name] + end] += pending
    dist.all_reduce(flat)
    return flat / engine.topology.num_nodes


def saved_once(folder: str, kinds: list[str]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for kind in kinds:
        loop = begin(kind, 0)
        train(loop, 0, STEPS)
        save(loop, f"{folder}/{kind}", "save")
        with loop[2].global_weights():
            weights = weights_of(loop[0])
        found.append((weights, pending_of(loop)))
    return found


def resumed_elsewhere(folder: str, kinds: list[str]) -> list[tuple[Tensor, Tensor, Any]]:
    found = []
    for kind in kinds:
        loop = begin(kind, 1)
        train(loop, 0, 1)
        load(loop, f"{folder}/{kind}")
        with loop[2].global_weights():
            weights = weights_of(loop[0])
        pending = pending_of(loop)
        train(loop, STEPS, STEPS + 1)
        steps = {int(each["step"]) for each in loop[1].state.values() if "step" in each}
        found.append((weights, pending, steps))
    return found


@pytest.mark.parametrize(
    ("nodes", "devices"),
    [
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
    ],
)
def test_another_cluster_loses_nothing(nodes: int, devices: int, tmp_path: Path) -> None:
    kinds = list(KINDS)
    before = run_ranks(saved_once, str(tmp_path), kinds, nodes=2, devices=2, timeout=100)[0]
    after = run_ranks(resumed_elsewhere, str(tmp_path), kinds, nodes=nodes, devices=devices, timeout=100)
    for found in after:
        for kind, (weights, pending), (now, waiting, steps) in zip(kinds, before, found, strict=True):
            assert torch.equal(weights, now), kind
            assert pending.count_nonzero() > 0, kind
            torch.testing.assert_close(waiting, pending, rtol=1e-5, atol=1e-7, msg=kind)
            assert steps <= {STEPS + 1}, "optimizers go on with the state of the first node"


def damaged(folder: str, kind: str) -> list[str]:
    """What becomes of each of 20 damaged bytes: an error, or what the undamaged folder gives."""
    loop, found = begin(kind, 0), []
    train(loop, 0, STEPS)
    save(loop, f"{folder}/saved", "save")
    expected = weights_of(loop[0])
    for copy in damaged_copies(Path(folder) / "saved", Path(folder), kind):
        try:
            load(loop, str(copy))
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("same" if torch.equal(weights_of(loop[0]), expected) else "wrong weights")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["updates", "updates of shards"])
def test_a_damaged_byte_is_an_error_or_harmless(kind: str, tmp_path: Path) -> None:
    several = run_ranks(damaged, str(tmp_path), kind, nodes=2, devices=2, timeout=150)
    for found in zip(*several, strict=True):
        assert len({each == "same" for each in found}) == 1, found
        assert "wrong weights" not in found
    assert sum(each != "same" for each in several[0]) > 5

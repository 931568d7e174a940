"""Invariants of updates on real ranks: nodes share one model, no update is lost, and limit cases equal DDP."""

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.exchange.paths import Flat
from lightning_sparse.sharding import Part
from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from lightning_sparse.updates.slices import Slices
from tests.helpers.distributed import RunRanks
from tests.strategy.models import flat_parameters, loss_of, mlp
from tests.updates.runs import adamw, mean_over_nodes, sgd, shared_of, start, steps

CLUSTERS = [(2, 2), (3, 1), pytest.param(4, 1, marks=pytest.mark.slow)]
OPTIONS: list[dict[str, Any]] = [
    {"density": 0.02},
    {"density": 0.05, "step_ahead": 0.3, "value_dtype": "bfloat16"},
    {"density": 0.1, "sync_every": 3, "outer_lr": 1.5},
    {"density": 0.1, "sync_every": 3, "delay": 3, "step_ahead": 0.4},
    {"density": 0.1, "sync_every": 3, "delay": 2, "exchange": "regional", "step_ahead": 0.4},
    {"density": 0.05, "value_dtype": "bfloat16", "exchange": "regional"},
    {"density": 0.1, "outer_lr": 0.7, "delay": 0, "step_ahead": 0.4},
    {"density": 0.05, "exchange": "regional", "outer_lr": 1.5},
    {"exchange": "dense16", "sync_every": 3},
    {"exchange": "dense", "sync_every": 3, "outer_lr": 1.5},
]


def fifty_one_steps(options: dict[str, Any], sharded: bool) -> tuple[Tensor, float, float]:
    """Return the global weights, the error in the balance of updates, and the size of pending updates."""
    ddp, optimizer, updates = start(adamw, shard_optimizer=sharded, **options)
    model = updates.module
    begin = flat_parameters(model).double().clone()
    told = torch.zeros_like(begin)
    for step in range(51):  # divisible by sync_every
        before = flat_parameters(model).double().clone()
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 13, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())))
        loss.square().mean().backward()
        optimizer.step()
        whole(updates)
        told += before - flat_parameters(model).double()
        updates.step()
    shared = shared_of(updates)  # no message is in flight here
    pending = whole_pending(updates)
    arrived = mean_over_nodes(told) - mean_over_nodes(pending)
    balance = begin - shared - options.get("outer_lr", 1.0) * arrived
    return shared, float(balance.abs().max()), float(pending.abs().max())


def whole(updates: Any) -> None:
    """Gather the slices, because a device steps only its own slice in a sharded step."""
    for node in updates.optimizers:
        if not node.division.is_replicated:
            node.gather()


def whole_pending(updates: Any) -> Tensor:
    """Return this node's pending updates in the order of the model's parameters. A collective inside the node."""
    (node,) = updates.optimizers
    total = torch.zeros(sum(p.numel() for p in node.parameters))
    at, places = 0, {}
    for parameter in node.parameters:
        places[id(parameter)] = at
        at += parameter.numel()
    for (parameter, part), piece in node.state.slices.by_piece(node.state.pending_S).items():
        total[places[parameter] + part.begin : places[parameter] + part.end] = piece
    if updates.topology.num_devices > 1:
        dist.all_reduce(total, group=updates.topology.intra)
    return total


@pytest.mark.parametrize(("nodes", "devices"), CLUSTERS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nodes_share_one_model_and_lose_no_update(
    ranks: RunRanks, nodes: int, devices: int, options: dict[str, Any]
) -> None:
    results = ranks(fifty_one_steps, options, True, nodes=nodes, devices=devices)
    for shared, balance, _ in results:
        assert torch.equal(shared, results[0][0])
        assert balance < 2e-5
    if options.get("exchange", "sparse") != "dense":
        assert any(pending > 0 for _, _, pending in results)


def off_between_exchanges(options: dict[str, Any]) -> list[float]:
    """Return the distance of the parameters from the expected weights after each step with no message in flight."""
    ddp, optimizer, updates = start(adamw, density=0.05, step_ahead=0.4, **options)
    (node,) = updates.optimizers
    off = []
    for step in range(20):
        steps(ddp, optimizer, updates, step, step + 1)
        if step > 4 and (step + 1) % updates.config.sync_every >= updates.config.delay:
            state = node.state
            expected_S = state.global_S - 0.4 * state.pending_S
            off.append(float((state.slices.read() - expected_S).abs().max()))
            assert state.pending_S.abs().max() > 1e-3
    return off


@pytest.mark.parametrize(
    "options",
    [
        {"sync_every": 4, "delay": 0},
        {"sync_every": 4},
        {"sync_every": 4, "delay": 3},
        {"sync_every": 4, "exchange": "regional"},
    ],
    ids=str,
)
@pytest.mark.parametrize("sharded", [True, False])
def test_model_keeps_its_share_of_pending_updates_between_exchanges(
    ranks: RunRanks, options: dict[str, Any], sharded: bool
) -> None:
    for off in ranks(off_between_exchanges, {**options, "shard_optimizer": sharded}, nodes=2, devices=2):
        assert len(off) >= 4
        assert max(off) < 1e-6


def slices_that_differ(options: dict[str, Any]) -> list[Tensor]:
    """Train two models: a device has no slice, or a device's slice is not trained and measures another step_ahead."""
    ends = []
    for model in (nn.Linear(1, 1, bias=False), nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))):
        ddp, optimizer, updates = start(sgd, model, shard_optimizer=False, **options)
        for step in range(10):
            optimizer.zero_grad()
            features = next(model.parameters()).shape[1]
            ddp(torch.randn(4, features, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            if isinstance(model, nn.Sequential):
                for p in model[1].parameters():
                    p.grad = torch.zeros_like(p)
            optimizer.step()
            updates.step()
        ends.append(shared_of(updates))
    return ends


@pytest.mark.parametrize("options", [{"sync_every": 3, "step_ahead": 0.5}, {"sync_every": 3}], ids=str)
def test_devices_of_a_node_with_different_slices_gather_together(ranks: RunRanks, options: dict[str, Any]) -> None:
    results = ranks(slices_that_differ, options, nodes=3, devices=2, timeout=60)
    for ends in results:
        assert all(map(torch.equal, ends, results[0]))


def looked_at(options: dict[str, Any], looks: bool) -> tuple[Tensor, Tensor, Tensor]:
    ddp, optimizer, updates = start(adamw, **options)
    for step in range(12):
        steps(ddp, optimizer, updates, step, step + 1)
        if looks and step % 3:
            shared_of(updates)
            updates.state()
            updates.pending_norm()
    return shared_of(updates), flat_parameters(updates.module), whole_pending(updates)


def looked_at_or_not(options: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    return [looked_at(options, looks) for looks in (True, False)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reading_weights_between_steps_changes_nothing(ranks: RunRanks, options: dict[str, Any]) -> None:
    """Weights shown or saved between steps include received messages, which the state adds at the next exchange."""
    for looked, alone in ranks(looked_at_or_not, options, nodes=2, devices=2):
        assert all(map(torch.equal, looked, alone))


def whole_or_sharded() -> tuple[Tensor, Tensor]:
    return fifty_one_steps({"density": 0.05}, True)[0], fifty_one_steps({"density": 0.05}, False)[0]


def test_sharded_step_equals_whole_step(ranks: RunRanks) -> None:
    for sharded, whole_step in ranks(whole_or_sharded, nodes=2, devices=2):
        assert torch.equal(sharded, whole_step)


def as_sgd_with_a_larger_rate(exchange: str) -> tuple[Tensor, Tensor]:
    """If everything is sent in every step, an outer learning rate scales the optimizer's learning rate."""
    ends = []
    for lr, outer_lr in ((0.05, 2.0), (0.1, 1.0)):
        options = {"exchange": exchange, "density": 1.0, "value_dtype": "float32", "delay": 0, "outer_lr": outer_lr}
        ddp, optimizer, updates = start(lambda model, lr=lr: torch.optim.SGD(model.parameters(), lr), **options)
        steps(ddp, optimizer, updates, 0, 20)
        ends.append(shared_of(updates))
    return ends[0], ends[1]


@pytest.mark.parametrize("exchange", ["sparse", "dense"])
def test_outer_learning_rate_multiplies_received_updates(ranks: RunRanks, exchange: str) -> None:
    for outer, inner in ranks(as_sgd_with_a_larger_rate, exchange, nodes=2, devices=1):
        torch.testing.assert_close(outer, inner, rtol=1e-5, atol=1e-5)


def on_one_node() -> tuple[Tensor, Tensor]:
    topology = discover()
    ddp, optimizer, updates = start(adamw, mlp())
    steps(ddp, optimizer, updates, 0, 20)
    updates.finish()
    model = mlp()
    reference, plain = DistributedDataParallel(model), adamw(model)
    for step in range(20):
        plain.zero_grad()
        loss_of(reference, step, topology.rank).backward()
        plain.step()
    return flat_parameters(updates.module), flat_parameters(model)


def test_updates_on_one_node_equal_ddp(ranks: RunRanks) -> None:
    for ours, ddp in ranks(on_one_node, nodes=1, devices=2):
        assert torch.equal(ours, ddp)


def finished(outer_lr: float) -> tuple[Tensor, Tensor, float]:
    ddp, optimizer, updates = start(adamw, density=0.02, outer_lr=outer_lr)
    steps(ddp, optimizer, updates, 0, 10)
    expected = shared_of(updates).double() - mean_over_nodes(whole_pending(updates))
    updates.finish()
    return flat_parameters(updates.module).clone(), expected, float(updates.pending_norm())


@pytest.mark.parametrize("outer_lr", [1.0, 1.5])
def test_finish_sends_pending_updates(ranks: RunRanks, outer_lr: float) -> None:
    results = ranks(finished, outer_lr, nodes=2, devices=2)
    for weights, expected, pending in results:
        assert torch.equal(weights, results[0][0])
        torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-6)
        assert pending == 0


def two_optimizers_finish(exchange: str) -> Tensor:
    """Return the results of 20 runs. While the first optimizer is flushed, the second must not exchange."""
    ends = []
    for _ in range(20):
        model = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
        first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in model)
        updates = LocalUpdates(model, [first, second], UpdatesConfig(exchange=exchange), discover())  # type: ignore[arg-type]
        for step in range(3):
            for optimizer in (first, second):
                optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, 50, generator=generator)).square().mean().backward()
            for optimizer in (first, second):
                optimizer.step()
                updates.step(optimizer)
        updates.finish()
        updates.close()
        ends.append(flat_parameters(model).clone())
    return torch.stack(ends)


@pytest.mark.parametrize("exchange", ["sparse", "dense", "dense16"])
def test_two_optimizers_finish_with_equal_weights_on_all_nodes(ranks: RunRanks, exchange: str) -> None:
    one, other = ranks(two_optimizers_finish, exchange, nodes=2, devices=1, timeout=30)
    assert torch.equal(one, other)


def tiny_steps(step_ahead: float) -> tuple[Tensor, Tensor]:
    """Return the change of weights of about 1 in 50 steps of two units in the last place, and the expected change."""
    ddp, optimizer, updates = start(sgd, nn.Linear(100, 1, bias=False), density=0.1, step_ahead=step_ahead)
    weight = updates.module.weight
    with torch.no_grad():
        weight.fill_(0.75)
    updates.restart()
    for _ in range(50):
        weight.grad = torch.full_like(weight, 1.2e-6)
        optimizer.step()
        updates.step()
    updates.finish()
    return 0.75 - weight.detach(), torch.full_like(weight.detach(), 50 * 2 * 2**-24)


@pytest.mark.parametrize("step_ahead", [1, 0.1])
def test_updates_near_the_last_place_of_a_weight_are_kept(ranks: RunRanks, step_ahead: float) -> None:
    for went, told in ranks(tiny_steps, step_ahead, nodes=2, devices=1):
        torch.testing.assert_close(went, told, rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ahead", [1, 0.7, 0.3, 0.001])
def test_slices_without_a_step_are_unchanged(ahead: float, dtype: torch.dtype) -> None:
    """Writing the model and accumulating its change divide a tensor in different ways."""
    sizes = [1, 13, 70_001, 200_003]
    slices = Slices([torch.empty(n, dtype=dtype) for n in sizes], [Part(owner=0, begin=0, end=n) for n in sizes])
    global_S, pending_S = torch.randn(2, slices.numel, generator=torch.Generator().manual_seed(0))
    local_S = global_S - 0.01 * pending_S
    before_S = local_S.clone()
    slices.lerp_into(local_S, global_S, ahead)
    slices.accumulate_delta(local_S, global_S, ahead)
    assert torch.equal(local_S, before_S)


@pytest.mark.parametrize("change", ["other memory", "bfloat16", "swapped"])
def test_slices_follow_parameters_that_move(change: str) -> None:
    weight, flat_S = nn.Parameter(torch.zeros(4, 6)), torch.arange(24.0)
    slices = Slices([weight], [Part(0, 0, 24)])
    slices.write(flat_S + 1)
    if change == "other memory":
        weight.data = torch.zeros(4, 6)
    elif change == "bfloat16":
        weight.data = weight.data.bfloat16()
    else:
        torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(4, 6)))
    slices.write(flat_S)
    assert torch.equal(weight.detach().flatten().float(), flat_S)
    assert torch.equal(slices.read(), flat_S)
    weight.data = torch.zeros(4, 12)[:, ::2]
    with pytest.raises(ValueError, match="has gaps or overlaps"):
        slices.read()


@pytest.mark.parametrize("odd", ["float64", "misaligned"])
def test_slices_of_float64_or_misaligned_parameters_work(odd: str) -> None:
    weight = torch.ones(6, dtype=torch.float64)
    if odd == "misaligned":  # like a tensor of a memory-mapped file
        weight = torch.frombuffer(bytearray(25), dtype=torch.float32, offset=1)
        assert weight.data_ptr() % 4, "the tensor must be misaligned"
    slices, global_S, local_S = Slices([weight], [Part(0, 0, 6)]), torch.zeros(6), torch.full((6,), 2.0)
    slices.lerp_into(local_S, global_S, 0.5)
    assert weight.eq(1).all()
    weight += 1
    slices.accumulate_delta(local_S, global_S, 0.5)
    assert local_S.eq(3).all()


@pytest.mark.parametrize("ahead", [1.0, 0.5])
def test_backward_through_overwritten_weights_is_an_error(ahead: float) -> None:
    """Backward through overwritten weights must raise an autograd error, not return a wrong gradient."""
    weight = nn.Parameter(torch.ones(4))
    loss = weight.square().sum()
    Slices([weight], [Part(0, 0, 4)]).lerp_into(torch.zeros(4), torch.ones(4), ahead)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def gone_back(options: dict[str, Any]) -> list[Tensor]:
    """Return weights after 8 steps, of a run and of a run that went back from step 6 to step 3."""
    ends = []
    for went_back in (False, True):
        ddp, optimizer, updates = start(adamw, density=0.05, **options)
        steps(ddp, optimizer, updates, 0, 3)
        saved = deepcopy(((updates.metadata(), updates.state()), optimizer.state_dict()))
        if went_back:
            steps(ddp, optimizer, updates, 3, 6)
            updates.load(*saved[0])
            optimizer.load_state_dict(saved[1])
        steps(ddp, optimizer, updates, 3, 8)
        ends += [shared_of(updates), flat_parameters(updates.module).clone()]
    return ends


@pytest.mark.parametrize(
    "options", [{}, {"step_ahead": 0.5}, {"exchange": "dense16"}, {"exchange": "regional"}], ids=str
)
def test_run_returns_to_a_checkpoint_during_an_exchange(ranks: RunRanks, options: dict[str, Any]) -> None:
    for ends in ranks(gone_back, options, nodes=2, devices=1):
        assert all(map(torch.equal, ends[:2], ends[2:]))


def with_other_options(saved_with: dict[str, Any], resumed_with: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    """Return the global weights of a run and of a run that resumes it, and the difference in pending updates."""
    ddp, optimizer, updates = start(adamw, **saved_with)
    steps(ddp, optimizer, updates, 0, 7)
    content = (updates.metadata(), updates.state())
    _, _, resumed = start(adamw, **resumed_with)
    assert resumed.fits(*content)
    resumed.load(*content)
    off = whole_pending(resumed) - whole_pending(updates)
    return shared_of(updates), shared_of(resumed), float(off.abs().max())


@pytest.mark.parametrize(
    "change",
    [{"density": 0.1}, {"value_dtype": "bfloat16"}, {"step_ahead": 0.5}, {"outer_lr": 1.5}, {"exchange": "dense16"}],
    ids=str,
)
def test_state_is_resumed_under_other_options(ranks: RunRanks, change: dict[str, Any]) -> None:
    results = ranks(both_ways, {"density": 0.02}, change, nodes=2, devices=2)
    for shared, resumed, off in (case for both in results for case in both):
        assert torch.equal(shared, resumed)
        assert off < 1e-6


def both_ways(options: dict[str, Any], change: dict[str, Any]) -> list[tuple[Tensor, Tensor, float]]:
    changed = {**options, **change}
    return [with_other_options(options, changed), with_other_options(changed, options)]


def traffic(sync_every: int) -> tuple[float, float, str]:
    """Return the bytes per step counted for plain DDP, the bytes of an all-reduce, and the line at the start."""
    ddp, optimizer, updates = start(sgd, mlp(), sync_every=sync_every)
    steps(ddp, optimizer, updates, 0, 7)
    updates.finish()
    exchange = updates.exchange
    numel = sum(parameter.numel() for parameter in updates.module.parameters())
    dense = Flat(exchange.choice.work(numel, torch.float32)).bytes()
    return exchange.stats.dense_equivalent_bytes / 7, dense, exchange.volume(0.01, sync_every)


@pytest.mark.parametrize("sync_every", [1, 3])
def test_traffic_is_compared_with_ddp_per_step(ranks: RunRanks, sync_every: int) -> None:
    for counted, dense, _ in ranks(traffic, sync_every, nodes=2, devices=1):
        assert counted == pytest.approx(dense)


def test_volume_with_rare_exchanges_is_per_step(ranks: RunRanks) -> None:
    often, rarely = (ranks(traffic, sync_every, nodes=2, devices=1)[0][2] for sync_every in (1, 3))
    (one, one_ddp), (other, other_ddp) = (re.findall(r"[\d.]+ [kM]?B", line) for line in (often, rarely))
    assert bytes_of(other) == pytest.approx(bytes_of(one) / 3, rel=0.01)
    assert one_ddp == other_ddp


def bytes_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1.0, "kB": 1e3, "MB": 1e6}[unit]

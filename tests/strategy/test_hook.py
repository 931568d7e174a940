"""Gradient reduction on real Gloo ranks: equality with DDP, equal bits on all ranks, message sizes.

Every test runs the function below it on P ranks and compares the results.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.exchange.lanes import Runner
from lightning_sparse.exchange.paths import num_selected
from lightning_sparse.kernels import message_bytes
from lightning_sparse.strategy import HierConfig
from lightning_sparse.topology import discover, with_groups
from tests.helpers.distributed import RunRanks, run_ranks
from tests.helpers.lines import Lines, raised
from tests.strategy.models import (
    PLAIN,
    backward,
    flat_grads,
    flat_parameters,
    loss_of,
    mlp,
    node_residual,
    sum_over_nodes,
    train,
    wrap,
)

# -- the documented loop -----------------------------------------------------------------------------------------------


def test_documented_loop_protects_residuals_and_detects_adam() -> None:
    page = (Path(__file__).parents[2] / "docs" / "loops.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^## PyTorch, gradients\n\n```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    results = run_ranks(documented_loop, code)
    for weights, before, after, _, hooks_left in results:
        assert torch.equal(weights, results[0][0]), "all ranks end with equal weights"
        assert before.count_nonzero() > 0
        assert torch.equal(before, after), "a gradient that was not stepped changed the residual"
        assert not hooks_left, "end() removes the hooks"
    assert results[0][3], "a warning names AdamW"


class Losses(nn.Module):
    """Returns the loss of a step, after calling `look`."""

    def __init__(self, look: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.model, self.look = mlp(), look

    def forward(self, step: int) -> Tensor:
        self.look(self)
        return loss_of(self.model, step, dist.get_rank())


def documented_loop(code: str) -> tuple[Tensor, Tensor, Tensor, bool, bool]:
    names: dict[str, Any] = {}
    exec(code, names)
    states: list[Any] = []
    norms: list[Tensor] = []
    config = HierConfig(density=0.02, exchange="sparse")
    names["HierConfig"] = lambda **_: config
    make = names["HierState"]
    names["HierState"] = lambda *args: states.append(make(*args)) or states[-1]
    calls, sgd = iter(range(9)), torch.optim.SGD
    model = Losses(lambda model: norms.append(node_residual(model, states[-1])))  # after the last step
    optimizer = sgd(model.parameters(), lr=0.1, momentum=0.9)  # makes torch wrap step()
    step = sgd.step

    def skips_one(self: torch.optim.Optimizer) -> None:
        if next(calls) != 6:
            step(self)

    skips_one.hooked = True  # torch must not wrap it, because a skipped step calls no hook
    sgd.step = skips_one
    names["train"](model, optimizer, range(9))
    sgd.step = step
    lines, other = Lines(), Losses(lambda _: None)
    names["train"](other, torch.optim.AdamW(other.parameters(), lr=1e-3), range(2))
    warned = any("AdamW" in line for line in lines.lines)
    return flat_parameters(model), norms[6], norms[7], warned, bool(states[0]._steps._hooks)


# -- cases that equal DDP exactly --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "exchange"),
    [([[0, 1, 2]], "auto"), ([[0]], "auto"), ([[0], [1], [2]], "dense"), ([[0, 2], [1]], "auto")],
)
def test_identity_equals_ddp_exactly(ranks: RunRanks, placement: list[list[int]], exchange: str) -> None:
    """Includes nodes of unequal size."""
    for ours, ddp in ranks(identity_equals_ddp, exchange, placement=placement):
        assert torch.equal(ours, ddp)


def identity_equals_ddp(exchange: str) -> tuple[Tensor, Tensor]:
    ours, plain = mlp(), mlp()
    wrapped, _ = wrap(ours, HierConfig(exchange=exchange), **PLAIN)
    return train(ours, wrapped, 6), train(plain, DistributedDataParallel(plain, **PLAIN), 6)


def test_single_node_reduces_only_buckets(ranks: RunRanks) -> None:
    assert ranks(collectives_of_one_node, nodes=1, devices=2) == [[torch.float32] * 3] * 2


def collectives_of_one_node() -> list[torch.dtype]:
    ddp, state = wrap(mlp(), HierConfig(), find_unused_parameters=True)
    reduced, all_reduce = [], state.exchange.communicator.flat_all_reduce

    def note(tensor: Tensor, **options: Any) -> None:
        reduced.append(tensor.dtype)
        all_reduce(tensor, **options)

    state.exchange.communicator.flat_all_reduce = note  # type: ignore[method-assign]
    backward(ddp, range(3))
    return reduced


@pytest.mark.parametrize(
    ("nodes", "devices", "exchange"), [(2, 2, "sparse"), (2, 2, "dense"), (3, 1, "regional"), (1, 3, "sparse")]
)
def test_density_one_equals_ddp(ranks: RunRanks, nodes: int, devices: int, exchange: str) -> None:
    for ours, ddp, sent in ranks(density_one, exchange, nodes=nodes, devices=devices):
        torch.testing.assert_close(ours, ddp, rtol=1e-6, atol=1e-6)
        assert sent == 1.0


def density_one(exchange: str) -> tuple[Tensor, Tensor, float]:
    ours, plain = mlp(), mlp()
    config = HierConfig(density=1.0, exchange=exchange, value_dtype="float32")
    wrapped, state = wrap(ours, config, **PLAIN)
    return (
        train(ours, wrapped, 12),
        train(plain, DistributedDataParallel(plain, **PLAIN), 12),
        state.exchange.stats.density,
    )


@pytest.mark.parametrize("nodes", [((2, 0), (1, 3)), ((3, 1), (2, 0))])
def test_devices_in_any_order_reduce_the_same_shards(ranks: RunRanks, nodes: tuple[tuple[int, ...], ...]) -> None:
    for ours, plain, place, member in ranks(odd_order, nodes, nodes=2, devices=2):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
        assert place == member


def odd_order(nodes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor, int, int]:
    topology, model, copied = with_groups(nodes), mlp(), mlp()
    ddp, _ = wrap(model, HierConfig(exchange="dense"), topology)
    ours, plain = train(model, ddp, 3), train(copied, DistributedDataParallel(copied), 3)
    return ours, plain, topology.device_index, dist.get_rank(topology.intra)


# -- ranks agree bit for bit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "value_dtype"),
    [
        ([[0, 1], [2, 3]], "float32"),
        ([[0, 2], [1, 3]], "bfloat16"),
        ([[2], [0], [1]], "2bit"),
        ([[0, 1, 2]], "bfloat16"),
    ],
)
def test_ranks_are_bit_identical(ranks: RunRanks, placement: list[list[int]], value_dtype: str) -> None:
    histories = ranks(gradients_of_rounds, value_dtype, placement=placement)
    for other in histories[1:]:
        assert all(torch.equal(a, b) for a, b in zip(histories[0], other, strict=True))


def gradients_of_rounds(value_dtype: str) -> list[Tensor]:
    model = mlp()
    ddp, state = wrap(
        model, HierConfig(density=0.05, exchange="sparse", value_dtype=value_dtype, warmup_epochs=0), **PLAIN
    )
    history = []
    for step in range(8):
        model.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        history.append(flat_grads(model).clone())
    if state.topology.kind == "hierarchical":
        assert 0.04 < state.exchange.stats.density < 0.12, state.exchange.stats
        assert 0 < torch.count_nonzero(history[-1]) < 0.4 * history[-1].numel()
    return history


def test_overlap_gives_equal_bits(ranks: RunRanks) -> None:
    for at_once, overlapped, inline in ranks(with_and_without_overlap, nodes=2, devices=2):
        assert torch.equal(at_once, overlapped)
        assert inline == [True, False]


def with_and_without_overlap() -> tuple[Tensor, Tensor, list[bool]]:
    trained, inline = [], []
    for overlap in (False, True):
        model = mlp()
        config = HierConfig(density=0.05, exchange="sparse", warmup_epochs=0, overlap=overlap)
        ddp, state = wrap(model, config, **PLAIN)
        trained.append(train(model, ddp, 8))
        inline.append(type(state.exchange.runner) is Runner)
    return trained[0], trained[1], inline


@pytest.mark.parametrize("exchange", ["dense", "auto"])
def test_two_wrapped_modules_in_one_backward_equal_ddp(ranks: RunRanks, exchange: str) -> None:
    """Their buckets are ready at the same time. With one thread per module, ranks could reduce in different orders.

    The second module measures the network while the first module uses it.
    """
    assert ranks(two_modules, exchange, nodes=2, devices=1) == [0, 0]


def two_modules(exchange: str) -> int:
    torch.manual_seed(0)
    modules = [nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]) for _ in range(2)]
    topology = discover()
    ours = [
        wrap(
            copy.deepcopy(each),
            HierConfig(density=1.0, exchange=exchange, value_dtype="float32"),
            topology,
            bucket_cap_mb=0.02,
        )[0]
        for each in modules
    ]
    plain = [DistributedDataParallel(each) for each in modules]
    wrong = 0
    for step in range(40):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        grads = []
        for pair in (ours, plain):
            for each in pair:
                each.zero_grad()
            sum(each(x).square().mean() for each in pair).backward()
            grads.append(torch.cat([flat_grads(each) for each in pair]))
        wrong += not torch.allclose(*grads, rtol=1e-4, atol=1e-6)
    return wrong


# -- message sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (3, 1)])
def test_messages_have_the_predicted_size(ranks: RunRanks, nodes: int, devices: int) -> None:
    everyone = ranks(message_sizes, nodes=nodes, devices=devices)
    assert all(sizes == everyone[0] for sizes in everyone)
    sent, expected = everyone[0]
    assert sent == expected
    assert sent


def message_sizes() -> tuple[list[int], list[int]]:
    model = mlp()
    config = HierConfig(density=0.05, exchange="sparse", warmup_epochs=0)
    ddp, state = wrap(model, config, **PLAIN)
    sent: list[int] = []
    exchange = state.exchange.communicator.exchange
    state.exchange.communicator.exchange = lambda message: (sent.append(message.numel()), exchange(message))[1]  # type: ignore
    for step in range(4):
        loss_of(ddp, step, dist.get_rank()).backward()
        if step < 3:
            assert not sent, "rounds are dense until the layout has repeated"
    shards = [group.shard_numel(state.topology.num_devices) for group in state.layout.settled]
    return sent, [message_bytes(s, num_selected(0.05, s), torch.bfloat16) for s in shards]


# -- bucket sizes not divisible by the number of devices ---------------------------------------------------------------


class Awkward(nn.Module):
    """Has a bucket of one element (fewer than devices) and a bucket that none of the tested device counts divides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 997))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum() * self.scale


@pytest.mark.parametrize(("nodes", "devices"), [(2, 3), (2, 2)])
def test_buckets_not_divisible_by_devices_lose_nothing(ranks: RunRanks, nodes: int, devices: int) -> None:
    for given, accounted, groups in ranks(awkward_buckets, nodes=nodes, devices=devices):
        assert groups == {1, 997}
        torch.testing.assert_close(given, accounted, rtol=1e-5, atol=1e-5)


def awkward_buckets() -> tuple[Tensor, Tensor, set[int]]:
    model = Awkward()
    ddp, state = wrap(model, HierConfig(density=0.01, exchange="sparse", value_dtype="float32"), bucket_cap_mb=4e-6)
    given = torch.zeros(998, dtype=torch.float64)
    applied = given.clone()
    for step in range(7):
        x = torch.randn(997, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model.zero_grad()
        with ddp.no_sync():
            ddp(x).backward()
        given += flat_grads(model)
        model.zero_grad()
        ddp(x).backward()
        applied += flat_grads(model)
    dist.all_reduce(given)
    state.commit_round()
    accounted = applied + sum_over_nodes(node_residual(model, state), state)
    return given / dist.get_world_size(), accounted, {group.numel for group in state.layout.settled}


def test_topology_of_another_world_is_refused(ranks: RunRanks) -> None:
    for said in ranks(raised, with_groups, ((0, 1), (2,)), nodes=2, devices=1):
        assert "have 3 ranks, but the world has 2" in said

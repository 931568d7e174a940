"""No gradient is lost, and discarded gradients leave the residual unchanged, on real Gloo ranks.

Every test runs the function below it on P ranks and compares the results.
"""

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_sparse.gradients.groups import ParamGroup
from lightning_sparse.gradients.residual import ResidualStore
from lightning_sparse.gradients.tracking import MANY_STEPS, Parameters, StepTracker
from lightning_sparse.strategy import HierConfig
from tests.helpers.distributed import RunRanks, run_ranks
from tests.strategy.models import (
    PLAIN,
    conserved,
    flat_grads,
    flat_parameters,
    loop,
    loss_of,
    mean_gradient,
    mlp,
    node_residual,
    sum_over_nodes,
    watched,
    wrap,
)

SHAPES = [(2, 2), (3, 1), (1, 3)]


# -- no gradient is lost -----------------------------------------------------------------------------------------------


CONSERVED: list[tuple[dict[str, Any], tuple[int, int]]] = [
    *(({"exchange": "sparse"}, shape) for shape in SHAPES),
    ({"exchange": "sparse", "value_dtype": "float32", "exclude": ("*.bias", "4.*")}, (2, 2)),
    ({"exchange": "sparse", "value_dtype": "2bit"}, (2, 2)),
    ({"exchange": "regional"}, (3, 1)),
    ({"exchange": "regional", "value_dtype": "2bit"}, (3, 1)),
    ({"exchange": "regional", "value_dtype": "float32"}, (3, 2)),
    *(({"exchange": "dense16"}, shape) for shape in ((2, 2), (3, 1))),
]
SLOW: list[tuple[dict[str, Any], tuple[int, int]]] = [
    ({"exchange": "regional", "value_dtype": "2bit"}, (5, 1)),
    ({"exchange": "dense16"}, (5, 1)),
]


@pytest.mark.parametrize(
    ("options", "shape"), [*CONSERVED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_rebuilt_buckets_conserve_gradients_and_keep_ranks_bit_identical(
    ranks: RunRanks, options: dict[str, Any], shape: tuple[int, int]
) -> None:
    everyone, exchange = ranks(conserve, options, nodes=shape[0], devices=shape[1], timeout=120), options["exchange"]
    for given, applied, waiting, paths in everyone:
        torch.testing.assert_close(given, applied + waiting, rtol=1e-5, atol=2e-6 if exchange == "dense16" else 2e-5)
        assert torch.equal(applied, everyone[0][1])
        if shape[0] == 1:
            continue
        assert paths == {"dense", exchange}, "rounds are dense until the layout is settled"
        if exchange == "dense16":
            assert 1e-5 < waiting.abs().max() < 1e-2, "the error of one rounding"
        else:
            assert waiting.abs().max() > 1e-3, "the test would pass without error feedback"


def test_dense16_region_owner_keeps_the_rounding_error_in_any_rank_order(ranks: RunRanks) -> None:
    for given, applied, waiting, _ in ranks(conserve, {"exchange": "dense16"}, placement=[[2], [0], [1]]):
        torch.testing.assert_close(given, applied + waiting, rtol=1e-6, atol=2e-6)


def conserve(options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, set[str]]:
    """Run 50 rounds of sparse exchanges, or 20 of other exchanges, with four wrappers."""
    config = HierConfig(
        **{"density": 0.05 if options["exchange"] == "regional" else 0.03, "warmup_epochs": 0, **options}
    )
    rounds, rewrap = (50, 13) if options["exchange"] == "sparse" else (20, 5)
    *found, state = conserved(config, itertools.cycle([0.002, 25.0, 0.004]), rounds=rounds, rewrap=rewrap)
    return (*found, set(state.exchange.stats.paths))


@pytest.mark.parametrize(
    ("life", "nodes", "devices"),
    [("several backwards", 2, 2), ("several backwards", 3, 1), ("added groups", 2, 1), ("masked and clipped", 2, 2)],
)
def test_plain_pytorch_loop_loses_no_gradient(ranks: RunRanks, life: str, nodes: int, devices: int) -> None:
    """Several backward passes per step, parameters that join the optimizer, gradients that the user zeroes or changes.

    Each backward pass is a round. Entries that the user sets to zero count as used.
    """
    for given, applied, waiting in ranks(live, life, nodes=nodes, devices=devices):
        torch.testing.assert_close(given, applied + waiting, rtol=1e-5, atol=2e-5)


def live(life: str) -> tuple[Tensor, Tensor, Tensor]:
    ddp, state, optimizer = watched(density=0.03, parameters=2 if life == "added groups" else None)
    if life == "added groups":
        optimizer.add_param_group({"params": list(ddp.parameters())[2:]})
    given = torch.zeros_like(flat_parameters(ddp)).double()
    applied = given.clone()
    passes = 2 if life == "several backwards" else 1
    for step in range(15):
        optimizer.zero_grad()
        for each in range(passes * step, passes * (step + 1)):
            given += mean_gradient(ddp, each)
            state.before_backward()
            loss_of(ddp, each, dist.get_rank()).backward()
        applied += flat_grads(ddp)
        if life == "masked and clipped":
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
            nn.utils.clip_grad_value_(ddp.parameters(), 0.001)
            ddp.module[0].weight.grad[0] = 0.0
        optimizer.step()
    optimizer.zero_grad()
    state.commit_round()
    return given, applied, sum_over_nodes(node_residual(ddp.module, state), state)


def test_dense_round_sends_the_whole_residual(ranks: RunRanks) -> None:
    for residual_before, residual_after, applied, expected in ranks(dense_flush, nodes=2, devices=2):
        assert residual_before.abs().max() > 0
        assert torch.count_nonzero(residual_after) == 0
        torch.testing.assert_close(applied, expected, rtol=1e-5, atol=1e-6)


def dense_flush() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    model = mlp()
    ddp, state = wrap(model, HierConfig(density=0.05, exchange="sparse"), **PLAIN)
    for step in range(6):
        model.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
    state.commit_round()
    before = sum_over_nodes(node_residual(model, state), state)
    expected = mean_gradient(ddp, 6) + before
    model.zero_grad()
    state.config = state.exchange.choice.config = HierConfig(exchange="dense")
    loss_of(ddp, 6, dist.get_rank()).backward()
    state.commit_round()
    applied = flat_grads(model).double()
    return before, node_residual(model, state), applied, expected


def test_entries_selected_by_several_nodes_are_summed(ranks: RunRanks) -> None:
    """All ranks have one gradient, so all nodes select the same entries. The mean is that gradient, not 1/M of it."""
    for applied, gradient in ranks(duplicates, nodes=3, devices=1):
        sent = applied != 0
        assert 0 < sent.sum() < sent.numel()
        torch.testing.assert_close(applied[sent], gradient[sent], rtol=1e-5, atol=1e-7)


def duplicates() -> tuple[Tensor, Tensor]:
    model = mlp()
    config = HierConfig(density=0.05, exchange="sparse", value_dtype="float32", warmup_epochs=0)
    ddp, _ = wrap(model, config, bucket_cap_mb=25.0)
    for _ in range(4):
        model.zero_grad()
        loss_of(ddp, 0, rank=0).backward()  # the layout settles in dense rounds, so there is no residual yet
    return flat_grads(model), local_gradient()


def local_gradient() -> Tensor:
    model = mlp()
    loss_of(model, 0, rank=0).backward()
    return flat_grads(model)


# -- discarded gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("exchange", "set_to_none"), [("sparse", True), ("sparse", False), ("dense16", True)])
def test_discarded_gradient_of_several_rounds_leaves_residual_unchanged(
    ranks: RunRanks, exchange: str, set_to_none: bool
) -> None:
    for before, after in ranks(throw_away, exchange, set_to_none, nodes=2, devices=2):
        assert before.abs().max() > 0
        assert torch.equal(before, after)


def throw_away(exchange: str, set_to_none: bool) -> tuple[Tensor, Tensor]:
    ddp, state, optimizer = watched(density=0.05, exchange=exchange)
    loop(ddp, state, optimizer, range(6))
    state.before_backward()
    before = node_residual(ddp.module, state)
    for step in (6, 7, 8):
        state.before_backward()
        loss_of(ddp, step, dist.get_rank()).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    state.before_backward()
    return before, node_residual(ddp.module, state)


@pytest.mark.parametrize(("nodes", "devices"), [(2, 1), (2, 2)])
def test_gradient_dropped_before_the_step_leaves_residual_unchanged(ranks: RunRanks, nodes: int, devices: int) -> None:
    for before, after, others_moved in ranks(drop_some, nodes=nodes, devices=devices):
        assert before.abs().max() > 0
        assert torch.equal(before, after)
        assert others_moved


def drop_some() -> tuple[Tensor, Tensor, bool]:
    """Freeze the last layer as some loops do: drop its gradients and step the others."""
    ddp, state, optimizer = watched(density=0.05)
    last = sum(p.numel() for p in ddp.module[4].parameters())
    for step in range(10):
        optimizer.zero_grad()
        state.before_backward()
        if step == 5:
            before = node_residual(ddp.module, state)
        loss_of(ddp, step, dist.get_rank()).backward()
        if step >= 5:
            for parameter in ddp.module[4].parameters():
                parameter.grad = None
        optimizer.step()
    state.commit_round()
    after = node_residual(ddp.module, state)
    return before[-last:], after[-last:], not torch.equal(before[:-last], after[:-last])


# -- optimizers with unusual steps -------------------------------------------------------------------------------------

Stepper = tuple[list[torch.optim.Optimizer], Callable[[], Any]]
"""The watched optimizers, and the function that steps them."""


class Outer(torch.optim.Optimizer):
    """Delegates the step to another optimizer, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.05)


def nesterov(model: nn.Module) -> Stepper:
    """An optimizer that writes to the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True)
    return [optimizer], optimizer.step


def inner(model: nn.Module) -> Stepper:
    optimizer = Outer(model.parameters())
    return [optimizer], optimizer.inner.step


def unknown(model: nn.Module) -> Stepper:
    return [], torch.optim.SGD(model.parameters(), lr=0.05).step


class Overriding(torch.optim.SGD):
    """Calls the step that it overrides for some of its parameters only, as a sharded step does."""

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        kept, first.grad = first.grad, None
        super().step(closure)
        first.grad = kept


def overriding(model: nn.Module) -> Stepper:
    torch.optim.SGD(model.parameters(), lr=0.05)  # torch now hooks SGD.step, too
    optimizer = Overriding(model.parameters(), lr=0.05)
    return [optimizer], optimizer.step


def closure(model: nn.Module) -> Stepper:
    """The optimizer calls a closure, and gradients exist only after that call."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return [optimizer], lambda: optimizer.step(lambda: 0.0)


STEPPERS = [nesterov, inner, unknown, overriding, closure]


@pytest.fixture(scope="module")
def lost() -> list[dict[str, float]]:
    return run_ranks(what_is_lost, nodes=2, devices=1)


@pytest.mark.parametrize("name", [stepper.__name__ for stepper in STEPPERS])
def test_optimizer_with_unusual_step_loses_no_gradient(lost: list[dict[str, float]], name: str) -> None:
    assert all(each[name] < 1e-6 for each in lost), lost


def what_is_lost() -> dict[str, float]:
    return {stepper.__name__: lost_with(stepper) for stepper in STEPPERS}


def lost_with(stepper: Callable[[nn.Module], Stepper]) -> float:
    """Return the largest entry of the mean gradients minus applied gradients and residuals."""
    model = mlp()
    watched, step = stepper(model)
    config = HierConfig(density=0.05, exchange="sparse", warmup_epochs=0)
    ddp, state = wrap(model, config, bucket_cap_mb=0.002)
    state.watch(watched)
    first = next(model.parameters())
    balance = torch.zeros_like(flat_parameters(model)).double()
    for number in range(8):
        given = mean_gradient(ddp, number)
        model.zero_grad()
        state.before_backward()
        loss_of(ddp, number, dist.get_rank()).backward()
        change = given - flat_grads(model)
        if watched and number >= 4:  # the gradient is dropped, so the parameter does not move
            first.grad = None
            change[: first.numel()] = 0
        balance += change
        step()
    state.commit_round()
    return float((balance - sum_over_nodes(node_residual(model, state), state)).abs().max())


def test_step_tracker_without_rounds_stays_small_and_is_collected() -> None:
    """torch's step hooks must not keep the tracker alive, either."""
    model = mlp()
    parameters = Parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch = StepTracker(parameters, lambda: set(parameters.numels))
    watch.watch([optimizer])
    for _ in range(3 * MANY_STEPS):
        model(torch.randn(4, 13)).sum().backward()
        optimizer.step()
    assert len(watch._steps) <= MANY_STEPS
    assert watch.stepped() == set(parameters.numels)
    reference = weakref.ref(watch)
    del watch
    gc.collect()
    assert reference() is None


def test_step_tracker_may_be_deleted_during_a_step() -> None:
    """The garbage collector may delete it at any time, also while torch iterates over the hooks."""
    model = mlp()
    held = [StepTracker(Parameters(model), set)]
    held[0].watch([optimizer := torch.optim.SGD(model.parameters(), lr=0.05)])
    before = flat_parameters(model).clone()

    def let_go(*_: Any) -> None:
        held.clear()
        gc.collect()

    others = [register_optimizer_step_pre_hook(each) for each in (let_go, lambda *_: None)]
    for _ in range(2):
        model(torch.randn(4, 13)).sum().backward()
        optimizer.step()
    for each in others:
        each.remove()
    assert not torch.equal(before, flat_parameters(model))


def test_parameter_at_a_reused_address_is_not_mistaken_for_the_old_one() -> None:
    model = mlp()
    parameters, stranger = Parameters(model), nn.Parameter(torch.zeros(3))
    name, first = next(iter(model.named_parameters()))
    assert parameters.name_of(first) == name
    parameters.names[id(stranger)] = name  # as if Python had reused the memory address
    assert parameters.name_of(stranger) == ""
    assert not parameters.are_stepped_by(torch.optim.SGD([stranger], lr=0.1))


# -- 16-bit mixed precision with a loss scaler: an inf on one rank changes nothing -------------------------------------

BAD_STEPS = (5, 6, 9)


@pytest.mark.parametrize(
    ("nodes", "devices", "exchange", "fused"),
    [(2, 2, "sparse", False), (3, 1, "sparse", True), (2, 2, "dense16", False)],
)
def test_skipped_step_changes_nothing(ranks: RunRanks, nodes: int, devices: int, exchange: str, fused: bool) -> None:
    everyone = ranks(skip_steps, exchange, fused, nodes=nodes, devices=devices)
    for each in everyone:
        assert each["skipped"] == list(BAD_STEPS)
        assert each["unchanged"] == [True] * len(BAD_STEPS), "parameters, optimizer state or residual changed"
        assert each["scale"] == everyone[0]["scale"]
        assert torch.equal(each["weights"], everyone[0]["weights"])
        torch.testing.assert_close(each["given"], each["accounted"], rtol=1e-4, atol=2e-5)


def skip_steps(exchange: Any, fused: bool) -> dict[str, Any]:
    """Train an fp32 model with a scaler. The inf occurs on one rank, in the bucket that is reduced last."""
    model = mlp()
    config = HierConfig(density=0.05, exchange=exchange, warmup_epochs=0, value_dtype="float32")
    ddp, state = wrap(model, config, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    state.watch([optimizer], scaler)
    skipped, unchanged = [], []
    given = torch.zeros_like(flat_parameters(model)).double()
    applied = given.clone()
    for step in range(12):
        bad = step in BAD_STEPS
        mean = mean_gradient(ddp, step)
        optimizer.zero_grad()
        state.before_backward()
        before, scale = snapshot(model, optimizer, state), scaler.get_scale()
        loss = loss_of(ddp, step, dist.get_rank())
        if bad and dist.get_rank() == 1:
            loss = loss + float("inf") * model[0].weight.flatten()[7]
        scaler.scale(loss).backward()
        grads = flat_grads(model).double() / scale
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped.append(step)
        if bad:
            optimizer.zero_grad()
            state.before_backward()
            unchanged.append(
                all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer, state), strict=True))
            )
        else:
            given += mean
            applied += grads
    state.commit_round()
    accounted = applied + sum_over_nodes(node_residual(model, state), state)
    return {
        "skipped": skipped, "unchanged": unchanged, "scale": scaler.get_scale(), "weights": flat_parameters(model),
        "given": given, "accounted": accounted,
    }  # fmt: skip


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Any) -> list[Tensor]:
    momenta = [each["momentum_buffer"].clone() for each in optimizer.state.values() if "momentum_buffer" in each]
    return [flat_parameters(model), node_residual(model, state), *momenta]


@pytest.mark.parametrize(("outcome", "begins", "ends"), [("discarded", 1, 1), ("used", 10, 10), ("waiting", 10, 1)])
def test_undecided_residual_stays_undecided_in_new_groups(outcome: str, begins: int, ends: int) -> None:
    """Buckets are rebuilt before an optimizer has stepped the gradient, which may still be discarded."""
    store, cpu = ResidualStore(0, 1), torch.device("cpu")
    both, first, second = ParamGroup(("x", "y"), (3, 4)), ParamGroup(("x",), (3,)), ParamGroup(("y",), (4,))
    x, y = torch.arange(3.0), torch.arange(3.0, 7.0)
    store.propose(both, torch.arange(7.0))
    store.commit(set())
    store.propose(both, 10 * torch.arange(7.0))
    store.commit(set(), {"x", "y"})
    store.regroup(first, lambda shard: shard, cpu)
    held = store.latest(first)
    assert held is not None
    assert torch.equal(held, 10 * x)
    names = {"x", "y"}
    store.commit(names if outcome == "discarded" else set(), names if outcome == "waiting" else set())
    store.regroup(second, lambda shard: shard, cpu)
    for group, values in ((first, x), (second, y)):
        held = store.latest(group)
        assert held is not None
        assert torch.equal(held, begins * values)
    store.commit(names)
    assert torch.equal(store.committed[first], ends * x)
    assert torch.equal(store.committed[second], ends * y)
    assert [store.undecided_names(), store.by_name] == [set(), {}]

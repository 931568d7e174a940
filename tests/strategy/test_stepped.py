"""Whose residual counts, with optimizers that step in ways of their own."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_sparse.gradients.tracking import MANY_STEPS, Parameters, StepTracker
from lightning_sparse.strategy import HierConfig
from tests.helpers.distributed import run_ranks
from tests.strategy.models import (
    flat_grads,
    flat_parameters,
    loss_of,
    mean_gradient,
    mlp,
    node_residual,
    sum_over_nodes,
    wrap,
)

Stepper = tuple[list[torch.optim.Optimizer], Callable[[], Any]]
"""The optimizers that are watched, and what a step calls."""


class Outer(torch.optim.Optimizer):
    """Leaves the step to another optimizer inside it, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.05)


def nesterov(model: nn.Module) -> Stepper:
    """Writes to the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True)
    return [optimizer], optimizer.step


def inner(model: nn.Module) -> Stepper:
    optimizer = Outer(model.parameters())
    return [optimizer], optimizer.inner.step


def unknown(model: nn.Module) -> Stepper:
    return [], torch.optim.SGD(model.parameters(), lr=0.05).step


class Overriding(torch.optim.SGD):
    """Calls the step that it overrides, and not for all that it was given, as a sharded step does."""

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        kept, first.grad = first.grad, None
        super().step(closure)
        first.grad = kept


def overriding(model: nn.Module) -> Stepper:
    torch.optim.SGD(model.parameters(), lr=0.05)  # from now on SGD's own step tells, too
    optimizer = Overriding(model.parameters(), lr=0.05)
    return [optimizer], optimizer.step


def closure(model: nn.Module) -> Stepper:
    """The gradients are there only once the optimizer has called it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return [optimizer], lambda: optimizer.step(lambda: 0.0)


STEPPERS = [nesterov, inner, unknown, overriding, closure]


@pytest.fixture(scope="module")
def lost() -> list[dict[str, float]]:
    return run_ranks(what_is_lost, nodes=2, devices=1)


@pytest.mark.parametrize("name", [stepper.__name__ for stepper in STEPPERS])
def test_nothing_is_lost(lost: list[dict[str, float]], name: str) -> None:
    assert all(each[name] < 1e-6 for each in lost), lost


def what_is_lost() -> dict[str, float]:
    return {stepper.__name__: lost_with(stepper) for stepper in STEPPERS}


def lost_with(stepper: Callable[[nn.Module], Stepper]) -> float:
    """The largest entry of the mean gradients minus what was applied and what waits."""
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
        if watched and number >= 4:  # held still: that gradient is thrown away
            first.grad = None
            change[: first.numel()] = 0
        balance += change
        step()
    state.settle()
    return float((balance - sum_over_nodes(node_residual(model, state), state)).abs().max())


def test_a_model_that_is_trained_on_without_rounds_gathers_nothing() -> None:
    """And what torch keeps to tell of steps does not keep the watch."""
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


def test_a_watch_may_go_in_the_middle_of_a_step() -> None:
    """As the garbage collector has it: torch walks through all hooks then."""
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


def test_who_lives_where_a_parameter_lived_is_not_taken_for_it() -> None:
    model = mlp()
    parameters, stranger = Parameters(model), nn.Parameter(torch.zeros(3))
    name, first = next(iter(model.named_parameters()))
    assert parameters.name_of(first) == name
    parameters.names[id(stranger)] = name  # as if it had been given that place in memory
    assert parameters.name_of(stranger) == ""
    assert not parameters.are_stepped_by(torch.optim.SGD([stranger], lr=0.1))

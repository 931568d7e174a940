"""Optimizers outside torch: only optimizers whose steps undo received updates are refused."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.updates.probe import STEPS
from tests.helpers.distributed import RunRanks, run_ranks
from tests.helpers.lines import Lines
from tests.strategy.models import flat_parameters
from tests.strategy.trainers import ddp, fitted, plain_module
from tests.updates.runs import start
from tests.updates.test_trainer import adamw_module, local

Make = Callable[[nn.Module], Optimizer]


class Toy(nn.Module):
    """A model with parameters that are initially zero or one, and parameters of one element."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(16, 9), nn.LayerNorm(9), nn.Linear(9, 4)
        nn.init.zeros_(self.last.bias)
        self.scale, self.gate = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))
        self.a, self.b = nn.Parameter(0.1 * torch.randn(16, 2)), nn.Parameter(torch.zeros(2, 4))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x).tanh())
        return self.scale * self.last(hidden) + self.gate * x[:, :4] + x @ self.a @ self.b


class Own(torch.optim.SGD):
    """SGD under another name."""


class Masters(Optimizer):
    """Steps copies of the weights: in an attribute, in its state, or all in one flat tensor."""

    def __init__(self, parameters: Any, place: str, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.all = [p for group in self.param_groups for p in group["params"]]
        self.flat = torch.cat([p.detach().float().flatten() for p in self.all])
        self.masters = list(torch.split(self.flat, [p.numel() for p in self.all]))
        if place != "a flat tensor":
            self.masters, self.flat = [each.clone() for each in self.masters], torch.empty(0)
        if place == "its state":
            for p, master in zip(self.all, self.masters, strict=True):
                self.state[p]["master"] = master
            self.masters = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, master in zip(self.all, self.masters or [self.state[p]["master"] for p in self.all], strict=True):
            master.sub_(p.grad.flatten().float(), alpha=self.param_groups[0]["lr"])  # type: ignore[union-attr]
            p.copy_(master.view_as(p))


class ZeroState(Optimizer):
    """Has a state that is zero for ten steps, and a step counter: both can equal parameters that are zero or one."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state.update(step=torch.tensor(0.0), hessian=torch.zeros_like(p), difference=torch.zeros_like(p))
            state["step"] += 1
            if state["step"] % 10 == 0:
                state["hessian"].lerp_(p.grad.square(), 0.1)
            p.sub_(p.grad, alpha=0.1)


class PullsBack(torch.optim.SGD):
    """Moves the weights in each step towards weights that only its own gradients change.

    Schedule-free optimizers with a warm-up do so: completely in step 1, by 80% in step 2, by less in each later step.
    """

    steps, total = 0, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.total += self.steps**2
        for p in self.param_groups[0]["params"]:
            fast = self.state[p].setdefault("z", p.detach().clone())
            fast.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            p.lerp_(fast, self.steps**2 / self.total)


class Lookahead(torch.optim.SGD):
    """Moves the weights halfway back to slow weights in every sixth step, which keeps half of all updates."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.steps += 1
        if self.steps % 6:
            return
        for p in self.param_groups[0]["params"]:
            slow = self.state[p].setdefault("slow_buffer", p.detach().clone())
            p.copy_(slow.lerp_(p, 0.5))


class Clips(torch.optim.SGD):
    """Clips weights to bounds, as optimizers of binary weights do. Half of the weights are at a bound."""

    BOUND = 0.05

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            p.clamp_(-self.BOUND, self.BOUND)


class NeverInitialized(Optimizer):
    """Wraps another optimizer and never calls ``Optimizer.__init__``, as Lookahead in torch_optimizer does."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@torch.no_grad()
def at_bounds(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.copy_(Clips.BOUND * p.sign())
    return model


MAKE: dict[str, Callable[..., Make]] = {
    "own": lambda: lambda model: Own(model.parameters(), lr=0.1),
    "masters": lambda place: lambda model: Masters(model.parameters(), place),
    "zero state": lambda: lambda model: ZeroState(model.parameters()),
    "pulls back": lambda: lambda model: PullsBack(model.parameters(), lr=0.1),
    "lookahead": lambda: lambda model: Lookahead(model.parameters(), lr=0.1),
    "clips": lambda: lambda model: Clips(at_bounds(model).parameters(), lr=0.1),
    "never initialized": lambda: lambda model: NeverInitialized(torch.optim.SGD(model.parameters(), lr=0.1)),
    "plain": lambda: lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


def trained(make: Make, dtype: torch.dtype = torch.float32, count: int = STEPS + 6, **options: Any) -> dict[str, Any]:
    """Train on 2 nodes. Return the error, the warnings, the losses and the weights."""
    lines, losses, model = Lines(), [], Toy(dtype)
    wrapped, optimizer, updates = start(make, model, **{"density": 0.1, **options})
    said = ""
    for step in range(count):
        chance = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(32, 16, generator=chance)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(x.to(dtype)).float(), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        try:
            updates.step()
        except ValueError as error:
            said = str(error)
            break
    if not said:
        updates.finish()
    updates.close()
    warnings = [each for each in lines.lines if "pulls the weights back" in each]
    return {"said": said, "warnings": warnings, "losses": losses, "weights": flat_parameters(model).float()}


def of_kind(kind: str, arguments: tuple[Any, ...], dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    logging.disable(logging.NOTSET)
    return trained(MAKE[kind](*arguments), dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["an attribute", "its state", "a flat tensor"])
def test_optimizer_with_master_weights_is_refused(ranks: RunRanks, place: str, dtype: torch.dtype) -> None:
    for found in ranks(of_kind, "masters", (place,), dtype, {}, nodes=2, devices=1):
        assert "Masters undoes received updates" in found["said"]
        assert "master_weights=False" in found["said"]


@pytest.mark.parametrize("options", [{"exchange": "dense"}, {"sync_every": 5, "density": 1.0, "delay": 0}])
def test_optimizer_with_master_weights_is_refused_with_every_exchange(ranks: RunRanks, options: dict[str, Any]) -> None:
    for found in ranks(of_kind, "masters", ("an attribute",), torch.float32, options, nodes=2, devices=1):
        assert "Masters undoes received updates" in found["said"]


@pytest.mark.parametrize("kind", ["own", "zero state", "lookahead", "never initialized"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_that_steps_the_parameters_is_not_refused(ranks: RunRanks, kind: str, dtype: torch.dtype) -> None:
    found = ranks(of_kind, kind, (), dtype, {}, nodes=2, devices=2)
    for each in found:
        assert (each["said"], each["warnings"]) == ("", [])
        assert sum(each["losses"][-5:]) < sum(each["losses"][:5])
        assert torch.equal(each["weights"], found[0]["weights"])


def test_optimizer_outside_torch_equals_the_torch_optimizer(ranks: RunRanks) -> None:
    exact = {"density": 1.0, "value_dtype": "float32", "delay": 0}
    own = ranks(of_kind, "own", (), torch.float32, exact, nodes=2, devices=2)
    plain = ranks(of_kind, "plain", (), torch.float32, exact, nodes=2, devices=2)
    for one, other in zip(own, plain, strict=True):
        assert torch.equal(one["weights"], own[0]["weights"])
        assert (one["weights"] - other["weights"]).norm() < 1e-5 * other["weights"].norm()


def test_optimizer_that_clips_weights_is_not_refused(ranks: RunRanks) -> None:
    for found in ranks(of_kind, "clips", (), torch.float32, {}, nodes=2, devices=1):
        assert (found["said"], found["warnings"]) == ("", [])


def test_optimizer_that_pulls_weights_back_warns_once(ranks: RunRanks) -> None:
    found = ranks(of_kind, "pulls back", (), torch.float32, {}, nodes=2, devices=1)
    assert [each["said"] for each in found] == ["", ""]
    assert len(found[0]["warnings"]) == 1


def no_step() -> list[str]:
    logging.disable(logging.NOTSET)
    lines = Lines()
    _, _, updates = start(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    updates.finish()
    updates.close()
    return [*lines.lines]


def test_loop_logs_its_exchange_and_warns_without_a_step(ranks: RunRanks) -> None:
    first, second = ranks(no_step, nodes=2, devices=1)
    assert sum("nodes exchange the largest 1% of the updates after each step" in each for each in first) == 1
    assert sum("no optimizer step was made" in each for each in first) == 1
    assert second == []


def one_node() -> list[str]:
    logging.disable(logging.NOTSET)
    lines = Lines()
    start(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    return [*lines.lines]


def test_loop_on_one_node_logs_that_nothing_is_exchanged(ranks: RunRanks) -> None:
    first, second = ranks(one_node, nodes=1, devices=2)
    assert sum("one node, nothing to exchange" in each for each in first) == 1
    assert second == []


class Sam(Optimizer):
    """Steps in its own methods, which call ``step()`` of another optimizer, as SAM does.

    The change between the steps is equal on all nodes, so the result must equal DDP.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.detach().clone()
            p.add_(0.01)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.zero_grad()


def fits_of(
    optimizer: Callable[[Any], Optimizer], training_step: Callable[..., Any], strategies: list[Any], manual: bool
) -> list[Tensor]:
    """Return the weights after a fit with each strategy."""
    ends = []
    for strategy in strategies:
        module = plain_module("pytorch_lightning")
        module.automatic_optimization = not manual
        module.configure_optimizers = lambda module=module: optimizer(module.parameters())
        module.training_step = partial(training_step, module)
        fitted("pytorch_lightning", strategy, module, devices=1, max_steps=-1, max_epochs=1, limit_train_batches=9)
        ends.append(flat_parameters(module))
    return ends


def all_sent_and_ddp() -> list[Any]:
    return [local("pytorch_lightning", density=1.0, value_dtype="float32", delay=0), ddp("pytorch_lightning")]


def stepped_by_its_own_methods() -> list[Tensor]:
    def training_step(module: Any, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.optimizers()
        batch = batch + module.global_rank
        module.manual_backward(module.net(batch).square().mean())
        optimizer.first_step()
        module.manual_backward(module.net(batch).square().mean())
        optimizer.second_step()

    return fits_of(Sam, training_step, all_sent_and_ddp(), manual=True)


def stepped_past_lightning() -> list[Tensor]:
    def training_step(module: Any, batch: Tensor, batch_idx: int) -> None:
        optimizer = module.optimizers().optimizer
        optimizer.zero_grad()
        module.manual_backward(module.net(batch + module.global_rank).square().mean())
        optimizer.step()

    return fits_of(partial(torch.optim.SGD, lr=0.1), training_step, all_sent_and_ddp(), manual=True)


def stepped_with_a_closure() -> list[Tensor]:
    def training_step(module: Any, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = module.net(batch + module.global_rank).square().mean()
        return loss

    return fits_of(partial(Own, lr=0.1), training_step, all_sent_and_ddp(), manual=False)


@pytest.mark.parametrize("fits", [stepped_by_its_own_methods, stepped_past_lightning, stepped_with_a_closure])
def test_unusual_step_calls_give_the_result_of_ddp(fits: Callable[[], list[Tensor]]) -> None:
    for found, expected in run_ranks(fits, nodes=2, devices=1, timeout=100, init=False):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def with_and_without_saves() -> tuple[Tensor, Tensor]:
    """Return the weights of a fit with saves within training steps, and of the same fit without a save."""
    ends = []
    for saves in (True, False):
        torch.manual_seed(0)
        module = adamw_module("pytorch_lightning")
        module.configure_optimizers = lambda module=module: Own(module.parameters(), lr=0.1)
        step = module.training_step

        def training_step(
            batch: Tensor, batch_idx: int, saves: bool = saves, on: Any = module, step: Any = step
        ) -> Any:
            if saves and batch_idx % 2:
                on.trainer.strategy.lightning_module_state_dict()
            return step(batch, batch_idx)

        module.training_step = training_step
        fitted("pytorch_lightning", local("pytorch_lightning"), module, devices=1)
        ends.append(flat_parameters(module))
    return ends[0], ends[1]


def test_save_within_a_step_does_not_change_the_training() -> None:
    for with_saves, without in run_ranks(with_and_without_saves, nodes=2, devices=1, timeout=100, init=False):
        assert torch.equal(with_saves, without)

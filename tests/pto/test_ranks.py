"""The sharded step on 1, 3 and 4 ranks without Lightning equals the plain step bit for bit.

Every rank also runs the plain step, and compares parameters and consolidated state.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from timm.optim import Lamb, Lars
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop

from lightning_sparse.exchange.communicator import CommunicationError, HierCommunicator
from lightning_sparse.pto import ShardedStep, communicator_of
from lightning_sparse.pto import step as timing
from lightning_sparse.topology import discover
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.lines import raised
from tests.helpers.scenarios import Scenarios
from tests.pto.steps import STEPS, compare, groups, parameters, results_of, same, set_gradients, train, whole_state
from tests.strategy.kills import die

SCENARIOS = Scenarios()
scenario = SCENARIOS.add
results = results_of(SCENARIOS)


# -- every tested optimizer --------------------------------------------------------------------------------------------

FUSED = (SGD, Adam, AdamW, Adagrad)
OPTIONS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (Adam, {"lr": 0.01, "amsgrad": True}),
    (AdamW, {"lr": 0.01, "maximize": True}),
    (Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    (RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    (NAdam, {"lr": 0.01, "decoupled_weight_decay": True}),
]


@scenario
def in_place(communicator: HierCommunicator) -> bool:
    """Check that large parts are broadcast without a copy."""
    runs = []
    for shared in (True, False):
        params = [*parameters(), nn.Parameter(torch.randn(1001, 503, generator=torch.Generator().manual_seed(1)))]
        optimizer = AdamW(params, lr=0.01)
        step = ShardedStep(optimizer, communicator) if shared else None
        train(params, optimizer, last=5)
        runs.append((params, whole_state(optimizer) if step else optimizer.state_dict()))
    return same(*map(list, runs))


def test_large_parts_are_sent_in_place(results: list[dict[str, Any]]) -> None:
    assert all(each["in_place"] for each in results)


LAYERWISE: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Lars, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (Lamb, {"lr": 0.01, "weight_decay": 0.01, "max_grad_norm": None}),
    (Muon, {"lr": 0.01}),
]


def elementwise() -> dict[str, tuple[type[Optimizer], dict[str, Any]]]:
    found = {}
    for number, (cls, options) in enumerate(OPTIONS):
        ways = [{"foreach": False}, {"foreach": True}][number % 2 :][:1] + [{"fused": True}] * (cls in FUSED)
        for way in ways:
            name = f"{cls.__name__}{' momentum' * ('momentum' in options)} {next(iter(way.items()))}"
            found[name] = cls, {**options, **way}
    return found


@scenario
def variants(communicator: HierCommunicator) -> dict[str, str]:
    """Return the differences of each variant."""
    found = {name: compare(cls, options, communicator) for name, (cls, options) in elementwise().items()}
    whole = {cls.__name__: compare(cls, options, communicator, whole=True) for cls, options in LAYERWISE}
    return {**found, **whole}


@scenario
def node(_: HierCommunicator) -> dict[str, str]:
    """Return the differences of some variants, sharded inside each node."""
    communicator = communicator_of(discover(), "node")
    return {
        name: compare(*each, communicator) for name, each in elementwise().items() if name.startswith(("SGD", "AdamW"))
    }


def test_sharded_step_equals_the_plain_step_for_all_optimizers(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert len(each["variants"]) == 7 + 5 + 3
        assert set(each["variants"].values()) == {""}, each["variants"]
        assert set(each["node"].values()) == {""}, each["node"]


# -- events of a run ---------------------------------------------------------------------------------------------------


@scenario
def late_group(communicator: HierCommunicator) -> dict[str, Any]:
    """Call add_param_group() after some steps, as fine-tuning does when it unfreezes a backbone."""
    out = []
    for sharded in (True, False):
        params = parameters()
        optimizer = AdamW(params[3:], lr=0.01)
        step = ShardedStep(optimizer, communicator) if sharded else None
        train(params[3:], optimizer, last=5)
        parts = step and list(step.parts)
        optimizer.add_param_group({"params": params[:3]})
        train([*params[3:], *params[:3]], optimizer, first=5)
        out.append((params, whole_state(optimizer) if step else optimizer.state_dict()))
        assert not step or step.parts[: len(params) - 3] == parts
    return {"equal": same(*[[list(params), state] for params, state in out])}


@scenario
def groups_that_return(communicator: HierCommunicator) -> bool:
    """Remove two groups after some steps, and add them again later, each with other loads of the ranks."""
    out = []
    for sharded in (True, False):
        params = parameters()
        optimizer = AdamW([{"params": params[index::3]} for index in range(3)], lr=0.01)
        step = ShardedStep(optimizer, communicator) if sharded else None
        train(params, optimizer, last=5)
        away = [optimizer.param_groups.pop() for _ in range(2)]
        for first, present in ((5, [0]), (9, [0, 2]), (13, [0, 2, 1])):
            train([p for index in present for p in params[index::3]], optimizer, first, first + 4)
            if away:
                optimizer.add_param_group(away.pop(0))
        out.append((params, whole_state(optimizer) if step else optimizer.state_dict()))
    return same(*[[list(params), state] for params, state in out])


@scenario
def closures(communicator: HierCommunicator) -> dict[str, Any]:
    """Check that the closure runs once per step with gradients enabled, and that the step returns its result."""
    params = parameters(odd=False)
    optimizer = SGD(params, lr=0.1)
    ShardedStep(optimizer, communicator)
    called = []

    def closure() -> Tensor:
        called.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = torch.stack([p.square().sum() for p in params]).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [float(optimizer.step(closure).detach()) for _ in range(3)]
        losses.append(float(optimizer.step(closure=closure).detach()))
    expected, plain = parameters(odd=False), []
    reference = SGD(expected, lr=0.1)
    for _ in range(4):
        reference.zero_grad()
        loss = torch.stack([p.square().sum() for p in expected]).sum()
        loss.backward()
        reference.step()
        plain.append(float(loss.detach()))
    return {"called": called, "equal": same(params, expected), "losses": losses == plain}


@scenario
def onlookers(communicator: HierCommunicator) -> dict[str, Any]:
    """Check that hooks see all gradients, and post hooks all new parameters, also if they are registered later."""
    params, expected = parameters(odd=False), parameters(odd=False)
    optimizer, reference = SGD(params, lr=0.1), SGD(expected, lr=0.1)
    seen = []

    def look(*_: Any) -> None:
        seen.append(same(params, expected) and all(p.grad is not None for p in params))

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(params, 0.1)

    optimizer.register_step_post_hook(look)
    ShardedStep(optimizer, communicator)
    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(look)
    for step in (0, 2):
        set_gradients(expected, step)
        nn.utils.clip_grad_norm_(expected, 0.1)
        reference.step()
        set_gradients(params, step)
        optimizer.step()
    return {"seen": seen}


@scenario
def state_without_asking(communicator: HierCommunicator) -> dict[str, Any]:
    params = parameters()
    optimizer = Adam(params)
    ShardedStep(optimizer, communicator)
    said = []
    train(params, optimizer, last=2)
    for _ in range(2):
        said.append(raised(optimizer.state_dict))
        optimizer.consolidate_state_dict(to=communicator.topology.world_size - 1)  # type: ignore[attr-defined]
    return {"said": said}


@scenario
def state_that_cannot_be_sent(communicator: HierCommunicator) -> str:
    params = parameters(odd=False)
    optimizer = Adam(params)
    ShardedStep(optimizer, communicator)
    train(params, optimizer, last=2)
    if dist.get_rank() == communicator.topology.world_size - 1:
        next(iter(optimizer.state.values()))["function"] = lambda: None
    try:
        optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
    except (ValueError, RuntimeError) as error:
        return type(error).__name__
    return ""


@scenario
def different_ranks(communicator: HierCommunicator) -> str:
    """Step with gradients that differ between ranks."""
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    ShardedStep(optimizer, communicator, names={id(params[4]): "head.weight"})
    set_gradients(params, 0)
    if dist.get_rank() == 0:
        params[4].grad.view(-1)[3] += 1e-3  # type: ignore[union-attr]
    return raised(optimizer.step)


@scenario
def a_step_that_raises(communicator: HierCommunicator) -> dict[str, Any]:
    """Check that a step that raises on every rank gives the gradients back, and that later steps raise, too."""
    params = parameters(odd=False)
    optimizer = SGD(params, lr=0.1, momentum=0.9)
    ShardedStep(optimizer, communicator)
    train(params, optimizer, last=2)
    optimizer.param_groups[0]["lr"] = "none"
    said = []
    for attempt in (optimizer.step, optimizer.step, optimizer.consolidate_state_dict):  # type: ignore[attr-defined]
        set_gradients(params, 2)
        said.append(raised(attempt))
    return {"said": said}


@scenario
def a_closure_that_raises(communicator: HierCommunicator) -> dict[str, Any]:
    """Check that a closure that raises changes nothing, and that the run continues."""
    params, expected = parameters(odd=False), parameters(odd=False)
    optimizer, reference = SGD(params, lr=0.1), SGD(expected, lr=0.1)
    ShardedStep(optimizer, communicator)
    set_gradients(params, 0)

    def closure() -> float:
        raise KeyError("a bad sample")

    said = raised(optimizer.step, closure)
    whole = all(p.grad is not None for p in params)
    train(params, optimizer)
    train(expected, reference)
    return {"said": said, "whole": whole, "equal": same(params, expected)}


def test_events_of_a_run_leave_the_plain_result(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert each["late_group"]["equal"]
        assert each["groups_that_return"]
        assert each["closures"] == {"called": [True] * 4, "equal": True, "losses": True}
        assert each["onlookers"]["seen"] == [True] * 4
        assert each["a_closure_that_raises"] == {"said": "'a bad sample'", "whole": True, "equal": True}
        first, *later = each["a_step_that_raises"]["said"]
        assert "before the parameters were gathered" not in first
        assert all("before the parameters were gathered" in said for said in later)
        assert len(later) == 2
    *others, last = [each["state_without_asking"]["said"] for each in results]
    assert all("Call optimizer.consolidate_state_dict(to=rank) on all ranks" in said for say in others for said in say)
    assert (bool(last[0]), last[1]) == (True, "")


def test_state_that_cannot_be_pickled_is_an_error_on_both_ranks(results: list[dict[str, Any]]) -> None:
    said = [each["state_that_cannot_be_sent"] for each in results]
    if len(said) > 1:
        assert (said[0], said[-1]) == ("RuntimeError", "ValueError")
        assert not any(said[1:-1])


def test_gradients_that_differ_between_ranks_are_refused(results: list[dict[str, Any]]) -> None:
    for each in results:
        said = "" if len(results) == 1 else "parameter head.weight: its gradient differs between ranks"
        assert said in each["different_ranks"]
        assert bool(said) == bool(each["different_ranks"])


# -- "auto" ------------------------------------------------------------------------------------------------------------


@scenario
def auto(communicator: HierCommunicator) -> dict[str, Any]:
    """Check that both choices give the weights and the checkpoints of the plain run in every phase."""
    found = {}
    for way in ("plain", "shared"):
        ours, theirs = parameters(), parameters()
        optimizer, plain = AdamW(groups(ours), lr=0.01), AdamW(groups(theirs), lr=0.01)
        sharded = ShardedStep(optimizer, communicator, auto=True)
        states = []
        with Clock(communicator, gather=0.0 if way == "shared" else 1e9) as clock:
            clock.add_to_steps_of(optimizer)
            for first in range(0, STEPS, 5):
                train(ours, optimizer, first, first + 5)
                train(theirs, plain, first, first + 5)
                held = whole_state(optimizer) if sharded.active else optimizer.state_dict()
                states.append(same(held, plain.state_dict()))
                optimizer.load_state_dict(held)
        found[way] = (sharded.sharing == (way == "shared"), same(ours, theirs), *states)
    return found


class Clock:
    """A clock that advances only in the step and in the gather."""

    def __init__(self, communicator: HierCommunicator, gather: float) -> None:
        self.now, self.seconds = 0.0, gather
        self._gather, self._communicator = communicator.gather, communicator

    def __enter__(self) -> "Clock":
        self._read, timing._now = timing._now, lambda _: self.now
        self._communicator.gather = self.late  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        timing._now = self._read
        self._communicator.gather = self._gather  # type: ignore[method-assign]

    def add_to_steps_of(self, optimizer: Any) -> None:
        """Let steps take time in proportion to the stepped elements."""
        begin = optimizer._init_group  # the step calls it for each group, after all hooks

        def timed(group: dict[str, Any], *args: Any) -> Any:
            self.now += sum(p.numel() for p in group["params"] if p.grad is not None)
            return begin(group, *args)

        optimizer._init_group = timed

    def late(self, share: Tensor) -> Tensor:
        self.now += self.seconds
        return self._gather(share)


def test_auto_keeps_the_faster_choice(results: list[dict[str, Any]]) -> None:
    for each in results:
        for way, (chosen, *equal) in each["auto"].items():
            assert all(equal), (way, equal)
            assert chosen or len(results) == 1, way


# -- optimizers that a user trusts -------------------------------------------------------------------------------------


class Own(SGD):
    """Overrides step(), and calls torch's step. torch wraps both with hooks."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.fails:
            raise KeyError("after the inner step")
        return loss


class Twice(SGD):
    """Evaluates its closure again at other parameters."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.enable_grad():
            closure()
        super().step()
        return loss


@scenario
def named(communicator: HierCommunicator) -> dict[str, Any]:
    """Check that, after an exception, a later step does not count as a nested step."""
    SGD(parameters())  # torch wraps the step of a class when it creates the first instance
    out: dict[str, Any] = {"equal": compare(Own, {"lr": 0.1, "momentum": 0.9}, communicator, whole=True, trusted=True)}
    params = parameters(odd=False)
    optimizer = Own(params, lr=0.1)
    sharded = ShardedStep(optimizer, communicator, trusted=True)
    train(params, optimizer, last=2)
    out["steps"] = sharded.steps
    optimizer.fails = True
    set_gradients(params, 2)
    return {**out, "said": [raised(optimizer.step) for _ in range(2)]}


@scenario
def a_second_evaluation(communicator: HierCommunicator) -> str:
    params = parameters(odd=False)
    optimizer = Twice(params, lr=0.1)
    ShardedStep(optimizer, communicator, trusted=True)
    return raised(optimizer.step, lambda: set_gradients(params, 0))


def test_trusted_optimizer_is_sharded_by_whole_parameters_and_steps_once(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert (each["named"]["equal"], each["named"]["steps"]) == ("", 2)
        first, second = each["named"]["said"]
        assert "after the inner step" in first
        assert "before the parameters were gathered" in second
        assert "Twice evaluates its closure more than once per step" in each["a_second_evaluation"]


# -- dead ranks --------------------------------------------------------------------------------------------------------


def test_rank_killed_before_the_gather_fails_the_other_ranks() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(die_in_the_gather, nodes=1, devices=3, timeout=40, grace_s=30)
    assert list(failed.value.killed) == [1]
    assert sorted(failed.value.raised) == [0, 2]
    assert "while step 2 gathered the parameters" in "".join(failed.value.raised.values())


def die_in_the_gather() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    step = ShardedStep(optimizer, communicator_of(discover(), "world"))
    train(params, optimizer, last=2)
    if dist.get_rank() == 1:
        step.communicator.gather = die  # type: ignore
    set_gradients(params, 2)
    try:
        optimizer.step()
    except CommunicationError:
        for attempt in (optimizer.step, optimizer.consolidate_state_dict):  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="ranks have different parameters"):
                attempt()
        raise


# -- nodes of unequal size ---------------------------------------------------------------------------------------------


def test_nodes_of_unequal_size_shard_inside_each_node() -> None:
    for rank, each in enumerate(run_ranks(unequal_nodes, placement=[[2, 0], [1]])):
        assert each["wrong"] == ""
        assert each["owned"] == (1.0 if rank == 1 else pytest.approx(0.5, abs=0.1))


def unequal_nodes() -> dict[str, Any]:
    communicator = communicator_of(discover(), "node")
    wrong = compare(AdamW, {"lr": 0.01}, communicator)
    params = parameters()
    step = ShardedStep(SGD(params, lr=0.1), communicator)
    owned = sum(part.end - part.begin for part in step.local_parts if part is not None)
    return {"wrong": wrong, "owned": owned / sum(p.numel() for p in params)}

"""Sharing that is tried first, on 1, 2, 3 and 4 real ranks: with "auto", and for optimizers nobody has tested."""

import logging
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.pto import ShardedStep, choice
from tests.helpers.lines import Lines
from tests.helpers.scenarios import Scenarios
from tests.pto.steps import (
    STEPS,
    groups,
    parameters,
    results_of,
    same,
    set_gradients,
    train,
    whole_state,
)

SCENARIOS = Scenarios()
scenario = SCENARIOS.add
results = results_of(SCENARIOS)


# -- "auto" ------------------------------------------------------------------------------------------------------------


@scenario
def auto(communicator: HierCommunicator) -> dict[str, Any]:
    """Either way chosen, for a tested optimizer and for one that is tried beside a copy: the bits of the plain run, and
    checkpoints from every phase."""
    found = {}
    for cls in (AdamW, Stranger):
        for way in ("plain", "shared"):
            ours, theirs = parameters(), parameters()
            optimizer, plain = cls(groups(ours), lr=0.01), cls(groups(theirs), lr=0.01)
            step = ShardedStep(optimizer, communicator, auto=True)
            states = []
            with Clock(communicator, gather=0.0 if way == "shared" else 1e9) as clock:
                optimizer.register_step_pre_hook(clock.step)  # after the other, so that its time is the step's
                for first in range(0, STEPS, 5):
                    train(ours, optimizer, first, first + 5)
                    train(theirs, plain, first, first + 5)
                    held = whole_state(optimizer) if step.active else optimizer.state_dict()
                    states.append(same(held, plain.state_dict()))
                    optimizer.load_state_dict(held)
            found[cls.__name__, way] = (step.sharing == (way == "shared"), same(ours, theirs), *states)
    return found


class Stranger(AdamW):
    """Of a class that nobody has tested."""


class Clock:
    """A clock that only the step and the gather move."""

    def __init__(self, communicator: HierCommunicator, gather: float) -> None:
        self.now, self.seconds = 0.0, gather
        self._gather, self._communicator = communicator.gather, communicator

    def __enter__(self) -> "Clock":
        self._read, choice._now = choice._now, lambda _: self.now
        self._communicator.gather = self.late  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        choice._now = self._read
        self._communicator.gather = self._gather  # type: ignore[method-assign]

    def step(self, optimizer: Optimizer, *_: Any) -> None:
        """In proportion to what is stepped."""
        self.now += sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.grad is not None)

    def late(self, share: Tensor) -> Tensor:
        self.now += self.seconds
        return self._gather(share)


def test_auto_keeps_what_is_faster(results: list[dict[str, Any]]) -> None:
    for each in results:
        for (name, way), (chosen, *equal) in each["auto"].items():
            assert all(equal), (name, way, equal)
            assert chosen or len(results) == 1, (name, way)


# -- optimizers nobody has tested --------------------------------------------------------------------------------------


class Own(SGD):
    """A subclass that changes nothing, with an attribute of its own."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.first = self.param_groups[0]["params"][0]


class GlobalNorm(SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm() if grads else 1.0
        for grad in grads:
            grad /= norm
        super().step()
        return loss


class Late(SGD):
    """Independent in its first step; from then on its rate is an estimate over all parameters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.estimate = 0.0
        self.last = self.param_groups[-1]["params"][-1]

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            assert any(self.last is p for p in group["params"])
            group["lr"] = 0.1 + 0.01 * self.estimate
            self.estimate += sum(float(p.grad.sum()) for p in group["params"] if p.grad is not None)
        super().step()
        return loss


class Twice(SGD):
    """Evaluates its closure again at other parameters."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.enable_grad():
            closure()
        super().step()
        return loss


class NoCopy(SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.lock = (item for item in "cannot be copied")


@scenario
def untested(communicator: HierCommunicator) -> dict[str, Any]:
    out = {}
    for cls in (Own, GlobalNorm, Late, Twice, NoCopy):
        lines = Lines()
        ours, theirs = parameters(odd=False), parameters(odd=False)
        sharded, plain = cls(ours, lr=0.1, momentum=0.9), cls(theirs, lr=0.1, momentum=0.9)
        step = ShardedStep(sharded, communicator)
        for number in range(STEPS):
            for params, optimizer in ((ours, sharded), (theirs, plain)):

                def closure(params: Any = params, number: int = number) -> float:
                    set_gradients(params, number + int(params[0].sum().abs()))
                    return 1.0

                optimizer.step(closure)
        logging.getLogger("lightning_sparse").removeHandler(lines)
        state = whole_state(sharded) if step.active else sharded.state_dict()
        equal = same(ours, theirs) and same(state, plain.state_dict())
        out[cls.__name__] = {"equal": equal, "active": step.active, "lines": lines.lines}
    return out


def test_untested_optimizers_are_tried_beside_the_plain_step(results: list[dict[str, Any]]) -> None:
    alone = len(results) == 1
    for rank, each in enumerate(results):
        assert all(found["equal"] for found in each["untested"].values()), each["untested"]
        active = {name for name, found in each["untested"].items() if found["active"]}
        assert active == ({"Own", "GlobalNorm", "Late"} if alone else {"Own"})
        warned = [found["lines"] for found in each["untested"].values() if not found["active"]]
        assert all(len(lines) == (rank == 0) for lines in warned)
    said = {name: " ".join(found["lines"]) for name, found in results[0]["untested"].items()}
    assert "PTO is off for Twice; every rank runs the full step: it evaluates its closure more" in said["Twice"]
    assert "cannot be tried on a copy (TypeError" in said["NoCopy"]
    if not alone:
        assert "sharing its step changes the result" in said["GlobalNorm"]
        assert "sharing its step changes the result" in said["Late"]

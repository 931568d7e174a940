"""Momentum correction in one process: what it may be used with, and what the optimizer and its checkpoint see of it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.gradients.groups import ParamGroup
from lightning_sparse.strategy import HierConfig, HierState
from lightning_sparse.topology import Topology
from tests.strategy.models import flat_parameters, mlp


def hierarchical_state(model: nn.Module) -> HierState:
    return HierState(model, HierConfig(momentum_correction=True, overlap=False), Topology(((0,), (1,)), 0))


def test_a_new_optimizer_begins_without_momentum() -> None:
    model = mlp()
    state = hierarchical_state(model)
    assert state.momentum is not None
    group = ParamGroup(("0.weight",), (13 * 37,))
    for kept in (True, False):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state.watch([optimizer])
        state.momentum.store.stage(group, torch.ones(13 * 37))
        state.momentum.store.settle(frozenset())
        state.detach()
        state.watch([optimizer] if kept else [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
        assert (group in state.momentum.store.current) == kept


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (lambda p: [torch.optim.AdamW(p)], "with AdamW: the correction is that of torch.optim.SGD"),
        (lambda p: [torch.optim.SGD(p, lr=0.1)], r"SGD\(momentum=0\): nothing is to correct"),
        (lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1)], "dampening"),
        (lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9)] * 2, "with 2 optimizers; it needs one"),
    ],
)
def test_what_cannot_be_corrected_is_refused(optimizers: Any, message: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=message):
        hierarchical_state(model).watch(optimizers(list(model.parameters())))


def test_parameters_that_are_reduced_whole_are_refused() -> None:
    with pytest.raises(ValueError, match=r"64 bits or complex ones \(weight, bias\)"):
        hierarchical_state(nn.Linear(2, 2).double())


def test_an_optimizer_nobody_named_is_asked_for() -> None:
    state = hierarchical_state(mlp())
    assert state.momentum is not None
    with pytest.raises(ValueError, match=r"call state.watch\(\[optimizer\]\)"):
        state.before_backward()


def test_the_optimizer_has_its_momentum_but_for_the_step() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    state = hierarchical_state(model)
    state.watch([optimizer])
    seen: list[Any] = []

    def closure() -> Tensor:
        seen.append((optimizer.param_groups[0]["momentum"], optimizer.state_dict()["param_groups"][0]["momentum"]))
        if len(seen) == 2:
            raise RuntimeError("closure")
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        return torch.zeros(())

    given = {name: optimizer.param_groups[0][name] for name in ("momentum", "weight_decay", "nesterov")}
    before = flat_parameters(model)
    optimizer.step(closure)
    torch.testing.assert_close(flat_parameters(model), before - 0.1)
    assert not any(
        "momentum_buffer" in each and each["momentum_buffer"] is not None for each in optimizer.state.values()
    )
    assert {name: optimizer.param_groups[0][name] for name in given} == given
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(closure)
    assert seen == [(0.0, 0.9)] * 2
    assert optimizer.state_dict()["param_groups"][0]["momentum"] == 0.9
    state.detach()
    assert {name: optimizer.param_groups[0][name] for name in given} == given


def test_one_node_leaves_momentum_to_the_optimizer() -> None:
    state = HierState(mlp(), HierConfig(momentum_correction=True, overlap=False), Topology(((0, 1),), 0))
    assert state.momentum is None


def test_momentum_of_a_run_without_correction_is_not_dropped_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    empty = optimizer.state_dict()
    optimizer.step()
    saved, resumed = optimizer.state_dict(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hierarchical_state(model).watch([resumed])
    resumed.load_state_dict(empty)
    assert "brings momentum along" not in caplog.text
    resumed.load_state_dict(saved)
    assert "brings momentum along" in caplog.text

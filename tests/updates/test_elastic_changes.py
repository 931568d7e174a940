"""A joining node and parameters that nodes add or unfreeze, without other processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.optim import AdamW

pytest.importorskip("torchft", reason="needs torchft")

from lightning_sparse.elastic.updates import ElasticUpdates


def updates_of(module: nn.Module, *held: nn.Module) -> Any:
    """Return updates of a node whose optimizers have the parameters of these modules."""
    updates: Any = ElasticUpdates.__new__(ElasticUpdates)
    updates.module, updates._names = module, {}
    updates.optimizers = [SimpleNamespace(optimizer=AdamW(each.parameters()), must_follow=False) for each in held]
    updates.steps, updates._waits_since = 4, -1
    return updates


def test_node_serves_no_snapshot_between_an_unfreeze_and_the_step_that_follows_it() -> None:
    updates = updates_of(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    second = updates.optimizers[1]
    for _ in range(2):
        assert not updates._must_step_first()
        second.must_follow = True
        assert updates._must_step_first()
        assert updates._must_step_first(), "such as with accumulated batches"
        updates.steps += 1
        assert not updates._must_step_first(), "an optimizer that never steps delays no joining node for longer"
        second.must_follow = False


def test_node_joins_only_with_the_parameters_and_the_order_of_optimizers_of_the_others() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    updates = updates_of(module, module[0], module[1])

    def adopt(*groups: list[list[str]]) -> None:
        updates._check_adopted([{"groups": each} for each in groups], dict(module.named_parameters()))

    first, second, third = ([f"{place}.weight", f"{place}.bias"] for place in range(3))
    adopt([first], [second, third])
    adopt([first[:1], first[1:]], [])
    with pytest.raises(RuntimeError, match=r"AdamW 0 of this node has 0.weight, but .* optimizer 1 has it.*same order"):
        adopt([second], [first])
    with pytest.raises(RuntimeError, match=r"train 1 parameters that .* not have, such as 3.weight.*no node can join"):
        adopt([first, ["3.weight"]], [second])

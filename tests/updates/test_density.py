"""density="auto" for updates, on real ranks: agreed, by what hides behind the next step, and kept by a resumed run."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse.exchange.rates.timing import DECISIONS, ROUNDS
from lightning_sparse.updates.checkpoint import fits, restore_own, side_content
from tests.helpers.distributed import RunRanks
from tests.updates.runs import adamw, shared_of, start, steps

SLOW, FAST = 1e-5, 1e3  # Gbit/s


@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (3, 1)])
def test_density_follows_the_link_and_is_the_same_on_all_ranks(ranks: RunRanks, nodes: int, devices: int) -> None:
    for found in ranks(decide, nodes=nodes, devices=devices):
        assert found == [(0.01, 0.01), (0.01, 1.0), (0.01, 1.0)]


def decide() -> list[tuple[float, float]]:
    """Before the decision and after it, of a slow link, a fast one, and one that is used every other step."""
    found = []
    for gbps, every in ((SLOW, 1), (FAST, 1), (FAST, 2)):
        ddp, optimizer, updates = start(adamw, density="auto", inter_gbps=gbps, sync_every=every)
        choice = updates.exchange.choice
        steps(ddp, optimizer, updates, 0, DECISIONS[0] * every)
        before = choice.density
        steps(ddp, optimizer, updates, DECISIONS[0] * every, (DECISIONS[0] + 1) * every)
        found.append((before, choice.density))
    return found


@pytest.mark.parametrize("exchange", ["sparse", "regional"])
def test_a_resumed_run_is_bit_identical(ranks: RunRanks, exchange: str) -> None:
    for whole, resumed, densities in ranks(resume, exchange, nodes=2, devices=2):
        assert torch.equal(whole, resumed)
        assert densities == (1.0, 1.0)


def resume(exchange: Any) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """Saved after the decision: what is under way was written at another density than a new run begins with."""
    options: dict[str, Any] = {"density": "auto", "inter_gbps": FAST, "exchange": exchange, "shard_optimizer": False}
    ddp, optimizer, updates = start(adamw, **options)
    steps(ddp, optimizer, updates, 0, DECISIONS[0] + 1)
    content, state = side_content(updates), deepcopy(optimizer.state_dict())
    more = DECISIONS[0] + 1 + ROUNDS // 2
    again_ddp, again_optimizer, again = start(adamw, **options)
    again_optimizer.load_state_dict(state)
    assert fits(again, content)
    restore_own(again, content)
    for each in ((ddp, optimizer, updates), (again_ddp, again_optimizer, again)):
        steps(*each, DECISIONS[0] + 1, more)
    return shared_of(updates), shared_of(again), (updates.exchange.choice.density, again.exchange.choice.density)

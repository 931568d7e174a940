"""The measured correlation of pending updates between nodes, and the `step_ahead` that follows from it."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.exchange.lanes import AsyncHostTensor
from lightning_sparse.updates import UpdatesConfig
from lightning_sparse.updates.agreement import INTERVAL, SAMPLE_SIZE, UpdateCorrelation
from tests.helpers.distributed import RunRanks
from tests.strategy.models import flat_parameters
from tests.updates.runs import adamw, shared_of, start, steps


def measured(pending_MN: Tensor) -> float | None:
    """Measure the correlation of whole tensors, in place of samples."""
    agreement = UpdateCorrelation(pending_MN.shape[1])
    return agreement.measure(AsyncHostTensor(pending_MN.contiguous().view(torch.uint8)))


def test_correlation_of_equal_orthogonal_and_opposite_updates() -> None:
    one = torch.randn(1, 4000)
    assert measured(one.expand(4, -1)) == 1
    assert measured(torch.eye(4)) == 0.25
    assert measured(torch.cat([one, -one])) == 0.5, "never below 1 / M"


@pytest.mark.parametrize("strange", [0.0, float("nan"), float("inf")])
def test_correlation_of_zero_or_non_finite_updates_is_none(strange: float) -> None:
    assert measured(torch.full((2, 8), strange)) is None


def test_correlation_does_not_depend_on_the_order_of_sums() -> None:
    """16 orthogonal updates have a correlation of 1 / 16, which is midway between two rounded values."""
    pending = torch.zeros(16, SAMPLE_SIZE)
    pending[torch.arange(SAMPLE_SIZE) % 16, torch.arange(SAMPLE_SIZE)] = torch.randn(SAMPLE_SIZE)
    orders = [torch.randperm(SAMPLE_SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(50)]
    assert len({measured(pending[:, order]) for order in orders}) == 1


@given(st.integers(2, 9), st.floats(0, 4), st.integers(0, 10**6))
def test_correlation_gives_the_best_estimate_of_the_mean(nodes: int, common: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pending = torch.randn(nodes, 300, generator=generator) + common * torch.randn(1, 300, generator=generator)
    found = measured(pending)
    assert found is not None

    def error(ahead: float) -> float:
        return float((pending.mean(0) - ahead * pending).double().square().sum())

    assert error(found) <= min(error(found - 0.001), error(found + 0.001)) * 1.00001 or found == 1 / nodes


@given(st.integers(1, 3 * SAMPLE_SIZE), st.integers(1, 4 * INTERVAL))
def test_samples_cover_the_whole_slice(numel: int, exchanges: int) -> None:
    values = torch.arange(numel, dtype=torch.float32)
    places = UpdateCorrelation(numel).sample(exchanges, torch.zeros(numel), values).view(torch.float32)
    assert min(numel, SAMPLE_SIZE // 2) <= len(places) <= SAMPLE_SIZE
    assert places[0] < numel / len(places) + 1
    assert places[-1] > numel - 2 * numel / len(places) - 2


def follows(alike: bool) -> tuple[float, Tensor]:
    ddp, optimizer, updates = start(adamw, density=0.02)
    for step in range(40):
        optimizer.zero_grad()
        seed = step if alike else 10 * step + dist.get_rank()
        ddp(torch.randn(8, 13, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        updates.step()
    return updates.step_ahead, shared_of(updates)


def test_step_ahead_is_not_measured_on_two_nodes_or_where_given() -> None:
    """On two nodes the estimate helped only if nodes train alone between exchanges."""
    config = UpdatesConfig()
    assert UpdatesConfig(sync_every=2).measures_ahead(2)
    assert not config.measures_ahead(2)
    assert config.ahead(2) == 1
    assert config.measures_ahead(3)
    assert not UpdatesConfig(step_ahead=0.5).measures_ahead(3)
    assert not UpdatesConfig(exchange="regional").measures_ahead(3)


def alike_and_not() -> list[tuple[float, Tensor]]:
    return [follows(True), follows(False)]


def test_step_ahead_follows_the_correlation_of_nodes(ranks: RunRanks) -> None:
    results = ranks(alike_and_not, nodes=3, devices=1)
    for (alike, _), (different, shared) in results:
        assert alike == pytest.approx(1, abs=0.01)
        assert 1 / 3 <= different < 0.9
        assert different == results[0][1][0]
        assert torch.equal(shared, results[0][1][1])


def resumed_after(done: int, options: dict[str, Any]) -> list[Tensor]:
    """Return the weights of a run and of a resumed run after some more steps."""
    ddp, optimizer, updates = start(adamw, density=0.05, **options)
    steps(ddp, optimizer, updates, 0, done)
    content = (updates.metadata(), updates.state())
    state = deepcopy(optimizer.state_dict())
    again, optimizer_again, resumed = start(adamw, density=0.05, **options)
    resumed.load(*content)
    optimizer_again.load_state_dict(state)
    ends = []
    for run in ((ddp, optimizer, updates), (again, optimizer_again, resumed)):
        steps(*run, done, done + 5)
        ends += [shared_of(run[2]), flat_parameters(run[2].module).clone(), torch.tensor(run[2].step_ahead)]
    return ends


def resumed_at_each_step(options: dict[str, Any]) -> list[list[Tensor]]:
    return [resumed_after(done, options) for done in range(1, 10)]


@pytest.mark.parametrize("options", [{}, pytest.param({"sync_every": 3, "delay": 2}, marks=pytest.mark.slow)], ids=str)
def test_resumed_run_keeps_measurements_under_way(ranks: RunRanks, options: dict[str, Any]) -> None:
    for runs in ranks(resumed_at_each_step, options, nodes=3, devices=1):
        for ends in runs:
            assert all(map(torch.equal, ends[:3], ends[3:]))

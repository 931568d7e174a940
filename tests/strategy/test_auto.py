"""exchange="auto" on real ranks: measurements are agreed, decisions are kept, and changing paths loses nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_sparse.exchange import choice
from lightning_sparse.exchange.rates import Link, Rates
from lightning_sparse.gradients import HierConfig
from lightning_sparse.topology import discover
from tests.helpers.distributed import RunRanks, run_ranks
from tests.helpers.lines import Lines
from tests.strategy.models import (
    flat_grads,
    flat_parameters,
    go_on,
    loss_of,
    mean_gradient,
    mlp,
    node_residual,
    save,
    sum_over_nodes,
    wrap,
)

SHAPES = [(2, 2), (3, 1)]
SLOW = Rates(Link(0.0, 1e-3), Link(0.0, 1e-9))
SELECTION_IS_SLOW = Rates(Link(0.0, 1e-6), Link(0.0, 0.0), select=1.0, cast=1.0)
ONE_NETWORK = Rates(Link(0.0, 1e-6), Link(0.0, 1e-6), select=1.0, cast=1.0)
ROUNDING_IS_FAST = Rates(Link(0.0, 1e-6), Link(0.0, 0.0), select=1.0)


@pytest.mark.parametrize(("nodes", "devices"), SHAPES)
def test_all_ranks_measure_the_same_and_say_it_once(ranks: RunRanks, nodes: int, devices: int) -> None:
    everyone = ranks(measure, nodes=nodes, devices=devices)
    numbers, _ = everyone[0]
    assert all(each == numbers for each, _ in everyone)
    assert all(number >= 0 for number in numbers)
    assert numbers[1] > 0, "bytes between nodes take time"
    assert [sum("measured: " in line for line in lines) for _, lines in everyone] == [1] + [0] * (nodes * devices - 1)


def measure() -> tuple[list[float], list[str]]:
    lines = Lines().lines
    model = mlp()
    ddp, ours = wrap(model, HierConfig())
    for step in range(4):
        loss_of(ddp, step, dist.get_rank()).backward()
    assert ours.exchange.choice.rates is not None
    return ours.exchange.choice.rates.to_list(), lines


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_measurement_minds_no_defaults_and_draws_no_random_number(dtype: torch.dtype) -> None:
    """Lightning sets the default dtype for a whole training step, with its backward in manual optimization."""
    assert run_ranks(measure_under, dtype, nodes=2, devices=2) == [True] * 4


def measure_under(dtype: torch.dtype) -> bool:
    model = mlp()
    ddp, ours = wrap(model, HierConfig())
    loss = loss_of(ddp, 0, dist.get_rank())
    before = torch.get_rng_state()
    torch.set_default_dtype(dtype)
    loss.backward()
    assert ours.exchange.choice.rates is not None
    return torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("nodes", "devices"), SHAPES)
def test_changing_paths_loses_nothing_and_keeps_ranks_equal(ranks: RunRanks, nodes: int, devices: int) -> None:
    everyone = ranks(change_paths, nodes=nodes, devices=devices)
    for each in everyone:
        torch.testing.assert_close(each["given"], each["applied"] + each["waiting"], rtol=1e-5, atol=2e-5)
        assert torch.equal(each["applied"], everyone[0]["applied"])
        assert set(each["paths"]) == {"sparse", "flat", "dense", "dense16"} - ({"flat"} if devices == 1 else set())
        assert each["left by dense"] == 0.0


def change_paths() -> dict[str, Any]:
    model = mlp()
    ddp, ours = wrap(model, HierConfig(density=0.03, warmup_epochs=0), bucket_cap_mb=0.002)
    given = torch.zeros_like(flat_parameters(model)).double()
    applied, paths, left = given.clone(), [], 0.0
    for step in range(30):
        ours.exchange.choice.rates = (SLOW, SELECTION_IS_SLOW, SLOW, ONE_NETWORK, ROUNDING_IS_FAST)[step // 3 % 5]
        local = mean_gradient(ddp, step)
        model.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        given += local
        applied += flat_grads(model)
        group = ours.layout.settled[0] if ours.layout.settled else None
        if group is not None and step > 4:
            path = ours.path(group).name
            paths.append(path)
            if path in ("flat", "dense"):
                ours.settle()
                left += float(ours.residual_norm())
    ours.settle()
    waiting = sum_over_nodes(node_residual(model, ours), ours)
    return {"given": given, "applied": applied, "waiting": waiting, "paths": paths, "left by dense": left}


def test_a_resumed_run_decides_by_what_the_saved_one_measured(tmp_path: Path) -> None:
    for saved, resumed, probed in run_ranks(resume, str(tmp_path), nodes=2, devices=1):
        assert saved == resumed
        assert probed == 1


def resume(folder: str) -> tuple[list[float], list[float], int]:
    path, probed, real = f"{folder}/saved.ckpt", [], choice.probe
    choice.probe = lambda *arguments: probed.append(1) or real(*arguments)  # type: ignore[assignment, func-returns-value]
    rates = []
    for resuming in (False, True):
        model = mlp()
        ddp, ours = wrap(model, HierConfig(), discover())
        if resuming:
            assert go_on(ours, path) == []
        for step in range(3):
            loss_of(ddp, step, dist.get_rank()).backward()
        assert ours.exchange.choice.rates is not None
        rates.append(ours.exchange.choice.rates.to_list())
        save(ours, path)
    return rates[0], rates[1], len(probed)

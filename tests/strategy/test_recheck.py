"""Rates that rounds contradict are measured again, on all ranks in the same round, and decided by from then on."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_sparse.strategy import HierConfig, choices, recheck, state
from lightning_sparse.strategy.cost import Link, Rates
from lightning_sparse.strategy.stopwatch import Stopwatch
from tests.helpers.distributed import run_ranks
from tests.strategy.models import flat_grads, loss_of, mlp, wrap

CHECK = recheck.CHECKS[0]
NEVER_SO_SLOW = Rates(Link(10.0, 1e-3), Link(0.0, 0.0))  # a second for 1,000 bytes: sparse


def test_times_contradict_in_both_directions() -> None:
    assert recheck.differ(2.0, 1.0, 2.0)
    assert recheck.differ(1.0, 2.0, 2.0)
    assert not recheck.differ(1.0, 1.9, 2.0)
    assert recheck.differ(0.0, 1e-9, 2.0)


def test_it_looks_before_the_agreed_rounds_and_only_after_timing_some() -> None:
    watch, due = recheck.Recheck(), Stopwatch()
    looked = []
    for index in range(CHECK - recheck.ROUNDS - 3, 600):
        if watch.is_due(index, due):
            watch.measured(due, lambda seconds: seconds)
            looked.append(index)
    assert looked == [64, 512]
    resumed = recheck.Recheck()
    assert not any(resumed.is_due(index, due) for index in range(CHECK - 3, 500)), "what it timed is not eight rounds"


@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (3, 1)])
def test_wrong_rates_are_found_out_by_all_ranks_at_once(nodes: int, devices: int) -> None:
    everyone = run_ranks(start_with, NEVER_SO_SLOW, nodes=nodes, devices=devices)
    for each in everyone:
        assert each == everyone[0] | {"lines": each["lines"]}
        assert each["paths"][: CHECK - 4] == ["sparse"] * (CHECK - 4)
        assert each["probes"] == 1
        assert each["rates"] != NEVER_SO_SLOW.to_list()
    (line,) = everyone[0]["lines"]
    assert f"round {CHECK}: " in line
    assert "by that it is decided from now on" in line
    assert all(each["lines"] == [] for each in everyone[1:])


def test_rates_that_hold_are_kept() -> None:
    for each in run_ranks(start_with, None, nodes=2, devices=1):
        assert each["probes"] == 1, "the first round's"


def test_rates_that_were_given_are_not_doubted() -> None:
    for each in run_ranks(start_with, NEVER_SO_SLOW, 1e-6, nodes=2, devices=1):
        assert each["probes"] == 0
        assert each["rates"] == NEVER_SO_SLOW.to_list()


def start_with(rates: Rates | None, gbps: float | None = None) -> dict[str, Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    state.log.addHandler(handler)
    state.log.setLevel(logging.INFO)
    probes, real = [], choices.probe
    choices.probe = lambda *arguments: probes.append(1) or real(*arguments)  # type: ignore[assignment, func-returns-value]
    if rates is None:
        choices.CONTRADICTS = 1e9  # type: ignore[assignment]  # this machine's noise is not the subject
    model = mlp()
    ddp, ours = wrap(model, HierConfig(warmup_epochs=0, density=0.05, inter_gbps=gbps))
    ours.choices.rates = rates
    paths = []
    for step in range(CHECK + 3):
        loss_of(ddp, step, dist.get_rank()).backward()
        if step >= 4:
            paths.append(ours._choose(ours.layout.settled[0], torch.float32).path)
        total = flat_grads(model).double().sum()
        equal = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
        dist.all_gather(equal, total)
        assert all(each == equal[0] for each in equal)
    assert ours.choices.rates is not None
    told = [line for line in lines if "measured again" in line]
    return {"paths": paths, "probes": len(probes), "rates": ours.choices.rates.to_list(), "lines": told}

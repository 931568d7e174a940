"""Rates that rounds contradict are measured again, on all ranks in the same round, and decided by from then on."""

import io
import json
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_sparse.exchange import CommunicationError, choice
from lightning_sparse.exchange.rates import Link, Rates, differ, timing
from lightning_sparse.exchange.rates.timing import DECISIONS, Stopwatch
from lightning_sparse.gradients import HierConfig
from lightning_sparse.lab import Cluster, LabConfig
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import Lines
from tests.strategy.models import flat_grads, loss_of, mlp, wrap

CHECK = timing.CHECKS[0]
SOON = DECISIONS[0] + timing.ROUNDS
NEVER_SO_SLOW = Rates(Link(10.0, 1e-3), Link(0.0, 0.0))  # a second for 1,000 bytes: sparse


def test_times_contradict_in_both_directions() -> None:
    assert differ(2.0, 1.0, 2.0)
    assert differ(1.0, 2.0, 2.0)
    assert not differ(1.0, 1.9, 2.0)
    assert differ(0.0, 1e-9, 2.0)


def test_it_looks_before_the_agreed_rounds_and_only_after_timing_some() -> None:
    watch, due = timing.Recheck(), Stopwatch()
    looked = []
    for index in range(CHECK - timing.ROUNDS - 3, 600):
        if watch.is_due(index, due):
            watch.measured(due, lambda seconds: seconds)
            looked.append(index)
    assert looked == [64, 512]
    resumed = timing.Recheck()
    assert not any(resumed.is_due(index, due) for index in range(CHECK - 3, 500)), "what it timed is not eight rounds"


@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_wrong_rates_are_found_out_by_all_ranks_at_once(nodes: int, devices: int) -> None:
    everyone = run_ranks(start_with, NEVER_SO_SLOW, nodes=nodes, devices=devices)
    for each in everyone:
        assert each == everyone[0] | {"lines": each["lines"]}
        assert each["paths"][: CHECK - 4] == ["sparse"] * (CHECK - 4)
        assert each["probes"] == 1
        assert each["rates"] != NEVER_SO_SLOW.to_list()
    (line,) = everyone[0]["lines"]
    assert f"round {CHECK}: " in line
    assert "paths are chosen by the new rates" in line
    assert all(each["lines"] == [] for each in everyone[1:])


def test_rates_that_hold_are_kept() -> None:
    for each in run_ranks(start_with, None, nodes=2, devices=1):
        assert each["probes"] == 1, "the first round's"


def test_rates_that_were_given_are_not_doubted() -> None:
    for each in run_ranks(start_with, NEVER_SO_SLOW, 1e-6, nodes=2, devices=1):
        assert each["probes"] == 0
        assert each["rates"] == NEVER_SO_SLOW.to_list()


def start_with(rates: Rates | None, gbps: float | None = None) -> dict[str, Any]:
    lines = Lines().lines
    probes, real = [], choice.probe
    choice.probe = lambda *arguments: probes.append(1) or real(*arguments)  # type: ignore[assignment, func-returns-value]
    if rates is None:
        choice.CONTRADICTS = 1e9  # type: ignore[assignment]  # this machine's noise is not the subject
    model = mlp()
    ddp, ours = wrap(model, HierConfig(warmup_epochs=0, density=0.05, inter_gbps=gbps))
    ours.exchange.choice.rates = rates
    paths = []
    for step in range(CHECK + 3):
        loss_of(ddp, step, dist.get_rank()).backward()
        if step >= 4:
            paths.append(ours.path(ours.layout.settled[0]).name)
        total = flat_grads(model).double().sum()
        equal = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
        dist.all_gather(equal, total)
        assert all(each == equal[0] for each in equal)
    assert ours.exchange.choice.rates is not None
    told = [line for line in lines if "measured again" in line]
    return {"paths": paths, "probes": len(probes), "rates": ours.exchange.choice.rates.to_list(), "lines": told}


def test_a_transport_that_nobody_times_contradicts_nothing() -> None:
    assert run_ranks(untimed, nodes=2, devices=1) == [0, 0]


def untimed() -> int:
    timing.CHECKS = (SOON,)  # type: ignore[assignment]
    probes: list[int] = []
    choice.probe = lambda *_: probes.append(1)  # type: ignore[assignment, func-returns-value, return-value]
    ddp, ours = wrap(mlp(), HierConfig(warmup_epochs=0))
    ours.exchange.communicator._timed = lambda _: nullcontext()  # type: ignore[method-assign]
    ours.exchange.choice.rates = NEVER_SO_SLOW
    for step in range(SOON + 1):
        loss_of(ddp, step, dist.get_rank()).backward()
    return len(probes)


def test_what_hides_behind_backward_is_asked_anew() -> None:
    densities = run_ranks(density_after_a_look, nodes=2, devices=2)
    assert densities[0][0] == 0.01, "by rates at which nothing hides"
    assert densities[0][1] > 0.01
    assert all(each == densities[0] for each in densities)


def density_after_a_look() -> tuple[float, float]:
    timing.CHECKS = (SOON,)  # type: ignore[assignment]
    model = mlp()
    ddp, ours = wrap(model, HierConfig(density="auto", exchange="sparse", warmup_epochs=0), bucket_cap_mb=0.001)
    ours.exchange.choice.rates = NEVER_SO_SLOW
    before = 0.0
    for step in range(SOON + 1):
        if step == SOON - timing.ROUNDS:
            model[0].weight.register_hook(lambda _: time.sleep(0.1))  # of the last group
        before = ours.exchange.choice.density
        loss_of(ddp, step, dist.get_rank()).backward()
    return before, ours.exchange.choice.density


def test_a_rank_that_fails_meanwhile_is_told_of_by_the_round() -> None:
    told, _ = run_ranks(fail_in_the_look, nodes=2, devices=1)
    assert f"rank 0: all-reduce over all ranks (ranks 0, 1) failed in round {SOON}" in told


def fail_in_the_look() -> str:
    timing.CHECKS = (SOON,)  # type: ignore[assignment]
    ddp, ours = wrap(mlp(), HierConfig(warmup_epochs=0))
    ours.exchange.choice.rates = NEVER_SO_SLOW
    for step in range(SOON + 1):
        if step == SOON and dist.get_rank() == 1:
            return "gone"
        try:
            loss_of(ddp, step, dist.get_rank()).backward()
        except CommunicationError as error:
            return str(error)
    return "nothing was raised"


SCRIPT = """
import json
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from lightning_sparse.exchange.rates import timing
from lightning_sparse.strategy import HierConfig
from tests.strategy.models import wrap

dist.init_process_group("gloo")
model = nn.Linear(400, 500)
ddp, state = wrap(model, HierConfig(warmup_epochs=0, density=0.05))
folder, before = Path("FOLDER"), None
timing.CHECKS = tuple(range(32, 4000, 16))
for step in range(4000):
    ddp(torch.randn(4, 400)).square().mean().backward()
    if step == 8:
        before = state.exchange.choice.rates.to_list()
        dist.barrier()
        (folder / f"ready{dist.get_rank()}").touch()
    if before is not None and state.exchange.choice.rates.inter.seconds_per_byte > 5 * before[1]:
        break
path = state.path(state.layout.settled[0]).name
answer = {"before": before, "after": state.exchange.choice.rates.to_list(), "path": path}
(folder / f"answer{dist.get_rank()}").write_text(json.dumps(answer))
"""


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(120)
def test_a_link_that_gets_slow_is_noticed(tmp_path: Path) -> None:
    script, output = tmp_path / "train.py", io.StringIO()
    script.write_text(SCRIPT.replace("FOLDER", str(tmp_path)))
    root = str(Path(__file__).resolve().parents[2])
    noticed = threading.Event()
    with Cluster(LabConfig(nodes=2, gbps=10.0)) as cluster:

        def slow_down() -> None:
            while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
                time.sleep(0.02)
            for gbps in (0.1, 0.03, 0.01, 0.003):  # until it is seen: a busy machine is slow itself
                cluster.reshape(gbps)
                if noticed.wait(15):
                    return

        threading.Thread(target=slow_down, daemon=True).start()
        result = cluster.run([sys.executable, str(script)], env={"PYTHONPATH": root}, output=output, timeout=90)
        noticed.set()
    assert result.exit_code == 0, output.getvalue()
    answers = [json.loads((tmp_path / f"answer{rank}").read_text()) for rank in range(2)]
    assert answers[0] == answers[1]
    before, after = (Rates.from_list(answers[0][when]).inter.seconds_per_byte for when in ("before", "after"))
    assert after > 5 * before
    assert answers[0]["path"] == "sparse"

"""density="auto" on real ranks: agreed, by what hides behind backward, kept in checkpoints, and nothing is lost."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_sparse.exchange.host import DECISIONS, ROUNDS
from lightning_sparse.strategy import HierConfig
from lightning_sparse.topology import discover
from tests.helpers.distributed import RunRanks
from tests.strategy.models import conserved, flat_grads, go_on, loss_of, mlp, save, wrap

SHAPES = [(2, 2), (3, 1)]
SMALL_BUCKETS = 0.001  # MB; several groups, so that all but the last can hide
SLOW, FAST = 1e-5, 1e3  # Gbit/s


@pytest.mark.parametrize(("nodes", "devices"), SHAPES)
def test_density_follows_the_link_and_is_the_same_on_all_ranks(ranks: RunRanks, nodes: int, devices: int) -> None:
    everyone = ranks(decide, nodes=nodes, devices=devices)
    assert all(each == everyone[0] for each in everyone)
    (slow, slow_counts), (fast, fast_counts), (single, _) = everyone[0]
    assert slow == 0.01
    assert fast == 1.0
    assert fast_counts[-1] == slow_counts[-1], "nothing hides the last group"
    assert all(more > fewer for more, fewer in zip(fast_counts[:-1], slow_counts[:-1], strict=True))
    assert single == 0.01, "one group: nothing hides it"


def decide() -> list[tuple[float, list[int]]]:
    out = []
    for gbps, cap in ((SLOW, SMALL_BUCKETS), (FAST, SMALL_BUCKETS), (FAST, 25)):
        config = HierConfig(density="auto", exchange="sparse", inter_gbps=gbps, warmup_epochs=0)
        model = mlp()
        ddp, ours = wrap(model, config, bucket_cap_mb=cap)
        for step in range(DECISIONS[0] + 2):
            loss_of(ddp, step, dist.get_rank()).backward()
            before = ours.exchange.choice.density
            assert step >= DECISIONS[0] or before == 0.01
        out.append((ours.exchange.choice.density, [ours.path(group).sent for group in ours.layout.settled]))
    return out


def test_a_slow_rank_gives_all_of_them_time(ranks: RunRanks) -> None:
    """The slowest rank's window counts, for exchanges wait for it."""
    densities = ranks(one_is_slow, nodes=2, devices=1)
    assert densities[0] == densities[1] > 0.1


def one_is_slow() -> float:
    model = mlp()
    config = HierConfig(density="auto", exchange="sparse", inter_gbps=1e-3, warmup_epochs=0)
    ddp, ours = wrap(model, config, bucket_cap_mb=SMALL_BUCKETS)
    if dist.get_rank() == 1:
        model[0].weight.register_hook(lambda _: time.sleep(0.02))  # of the last group; 2.5 kB at 1 Mbit/s
    for step in range(DECISIONS[0] + 1):
        loss_of(ddp, step, dist.get_rank()).backward()
    return ours.exchange.choice.density


@pytest.mark.parametrize("exchange", ["auto", "sparse", "regional"])
def test_nothing_is_lost_when_it_changes(ranks: RunRanks, exchange: str) -> None:
    for given, applied, waiting, density in ranks(through_a_change, exchange, nodes=2, devices=2):
        torch.testing.assert_close(given, applied + waiting, rtol=1e-5, atol=2e-5)
        assert density == 1.0


def through_a_change(exchange: Any) -> tuple[Any, ...]:
    config = HierConfig(density="auto", exchange=exchange, inter_gbps=FAST, warmup_epochs=0)
    given, applied, waiting, state = conserved(config, [SMALL_BUCKETS], rounds=DECISIONS[0] + 4, rewrap=100)
    return given, applied, waiting, state.exchange.choice.density


def test_a_resumed_run_goes_on_with_the_saved_density(ranks: RunRanks, tmp_path: Path) -> None:
    for whole, resumed in ranks(resume, str(tmp_path), nodes=2, devices=2):
        assert torch.equal(whole, resumed)


def resume(folder: str) -> tuple[Any, Any]:
    path = f"{folder}/saved.ckpt"
    config = HierConfig(density="auto", exchange="sparse", inter_gbps=FAST, warmup_epochs=0, value_dtype="float32")
    model, topology = mlp(), discover()
    ddp, ours = wrap(model, config, topology, bucket_cap_mb=SMALL_BUCKETS)
    for step in range(DECISIONS[0] + 2):
        loss_of(ddp, step, dist.get_rank()).backward()
    save(ours, path)
    ddp.zero_grad()
    loss_of(ddp, 99, dist.get_rank()).backward()
    whole = flat_grads(model)

    model = mlp()
    ddp, again = wrap(model, config, topology, bucket_cap_mb=SMALL_BUCKETS)
    assert go_on(again, path) == []
    loss_of(ddp, 99, dist.get_rank()).backward()
    return whole, flat_grads(model)


@pytest.mark.parametrize("rounds", [DECISIONS[0], DECISIONS[1] - 3])
def test_a_resume_just_before_a_decision_goes_by_no_window_of_its_own(
    ranks: RunRanks, tmp_path: Path, rounds: int
) -> None:
    """The first rounds after it say nothing yet: the saved density stays until enough were measured."""
    for saved, after in ranks(resume_before_a_decision, str(tmp_path), rounds, nodes=2, devices=1):
        assert after[: ROUNDS - 3] == [saved] * (ROUNDS - 3)
        assert after[-1] == 1.0, "and then it is decided"


def resume_before_a_decision(folder: str, rounds: int) -> tuple[float, list[float]]:
    path = f"{folder}/saved.ckpt"
    config = HierConfig(density="auto", exchange="sparse", inter_gbps=FAST, warmup_epochs=0)
    topology = discover()
    ddp, ours = wrap(mlp(), config, topology, bucket_cap_mb=SMALL_BUCKETS)
    for step in range(rounds):
        loss_of(ddp, step, dist.get_rank()).backward()
    manifest = save(ours, path)
    ddp, again = wrap(mlp(), config, topology, bucket_cap_mb=SMALL_BUCKETS)
    go_on(again, path)
    densities = []
    for step in range(ROUNDS + 2):
        loss_of(ddp, step, dist.get_rank()).backward()
        densities.append(again.exchange.choice.density)
    return manifest["density"], densities


def test_on_another_topology_it_is_decided_again(ranks: RunRanks, tmp_path: Path) -> None:
    """However late the run is: the saved density was another cluster's."""
    path = str(tmp_path / "saved.ckpt")
    ranks(save_late, path, nodes=2, devices=1)
    for round_index, density in ranks(resume_late, path, nodes=3, devices=1):
        assert round_index > DECISIONS[-1]
        assert density == 1.0


def save_late(path: str) -> None:
    config = HierConfig(density="auto", exchange="sparse", inter_gbps=FAST, warmup_epochs=0)
    ddp, ours = wrap(mlp(), config, bucket_cap_mb=SMALL_BUCKETS)
    for step in range(4):
        loss_of(ddp, step, dist.get_rank()).backward()
    ours.round = ours.exchange.choice.window.decided = DECISIONS[-1] + 1
    save(ours, path)


def resume_late(path: str) -> tuple[int, float]:
    config = HierConfig(density="auto", exchange="sparse", inter_gbps=FAST, warmup_epochs=0)
    ddp, ours = wrap(mlp(), config, bucket_cap_mb=SMALL_BUCKETS)
    go_on(ours, path)
    for step in range(ROUNDS + 2):
        loss_of(ddp, step, dist.get_rank()).backward()
    return ours.round, ours.exchange.choice.density

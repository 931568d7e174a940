"""density="auto" for updates, on real ranks: agreed, by what hides behind the next step, and kept by a resumed run."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.exchange.host import DECISIONS, ROUNDS
from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.helpers.distributed import RunRanks, run_ranks
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
    content, state = (updates.manifest(), updates.state()), deepcopy(optimizer.state_dict())
    more = DECISIONS[0] + 1 + ROUNDS // 2
    again_ddp, again_optimizer, again = start(adamw, **options)
    again_optimizer.load_state_dict(state)
    assert again.fits(*content)
    again.load(*content)
    for each in ((ddp, optimizer, updates), (again_ddp, again_optimizer, again)):
        steps(*each, DECISIONS[0] + 1, more)
    return shared_of(updates), shared_of(again), (updates.exchange.choice.density, again.exchange.choice.density)


def unequal_slices() -> tuple[int, float]:
    """Elements of this device, and the density, after it was decided."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600, bias=False), nn.Linear(600, 8, bias=False))
    ddp, optimizer, updates = start(muon, model, density="auto")
    for _ in range(DECISIONS[0] + 2):
        optimizer.zero_grad()
        ddp(torch.randn(2, 600)).square().mean().backward()
        optimizer.step()
        updates.step()
    updates.finish()
    return updates.optimizers[0].state.slices.numel, updates.exchange.choice.density


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(model.parameters(), lr=0.01, ns_steps=1)  # stepped in whole matrices


@pytest.mark.slow
def test_devices_with_unequal_slices_decide_alike() -> None:
    results = run_ranks(unequal_slices, nodes=2, devices=2)
    assert {numel for numel, _ in results} == {600 * 600, 600 * 8}
    assert len({density for _, density in results}) == 1


def resume_in_turn() -> tuple[Tensor, Tensor]:
    """Two optimizers, one of them stepped now and then: its messages under way are older than the decision."""

    def begin() -> tuple[nn.Module, list[torch.optim.Optimizer], LocalUpdates]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in model]
        config = UpdatesConfig(density="auto", inter_gbps=FAST, shard_optimizer=False)
        return model, optimizers, LocalUpdates(model, optimizers, config, discover())

    def go_on(run: tuple[nn.Module, list[torch.optim.Optimizer], LocalUpdates], begin: int, end: int) -> None:
        model, optimizers, updates = run
        for step in range(begin, end):
            model.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + updates.topology.node_index)
            model(torch.randn(4, 40, generator=generator)).square().mean().backward()
            for optimizer in optimizers if step % 9 == 0 else optimizers[:1]:
                optimizer.step()
                updates.step(optimizer)

    whole = begin()
    go_on(whole, 0, DECISIONS[0])
    assert whole[2].exchange.choice.density == 1.0
    content, states = (whole[2].manifest(), whole[2].state()), [deepcopy(each.state_dict()) for each in whole[1]]
    resumed = begin()
    for optimizer, state in zip(resumed[1], states, strict=True):
        optimizer.load_state_dict(state)
    resumed[2].load(*content)
    for each in (whole, resumed):
        go_on(each, DECISIONS[0], DECISIONS[0] + ROUNDS // 2)
    return shared_of(whole[2]), shared_of(resumed[2])


def test_a_resumed_run_reads_messages_of_another_density(ranks: RunRanks) -> None:
    for whole, resumed in ranks(resume_in_turn, nodes=2, devices=1):
        assert torch.equal(whole, resumed)


def without_optimizers() -> int:
    updates = LocalUpdates(nn.Linear(2, 2), [], UpdatesConfig(density="auto"), discover())
    updates.step()
    updates.finish()
    return updates.steps


def test_a_loop_without_an_optimizer(ranks: RunRanks) -> None:
    assert ranks(without_optimizers, nodes=2, devices=1) == [1, 1]

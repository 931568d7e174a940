"""Parameters that only some ranks or no ranks use in a round: no gradient is lost or counted twice."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse.gradients import HierConfig, HierState
from tests.helpers.distributed import RunRanks
from tests.strategy.models import node_residual, sum_over_nodes, wrap

EXPERTS, ROUNDS = 3, 24


class Experts(nn.Module):
    """Each rank uses one expert per round. In every fourth round no rank uses the last expert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(11, 5)
        self.experts = nn.ModuleList(nn.Linear(7, 11) for _ in range(EXPERTS))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.frozen(self.head(torch.tanh(self.experts[expert](x))))


def used(step: int, rank: int) -> int:
    expert = (step + rank) % EXPERTS
    return 0 if expert == EXPERTS - 1 and step % 4 == 3 else expert


def loss_of(ddp: nn.Module, step: int, rank: int) -> Tensor:
    torch.manual_seed(100 * step + rank)
    return ddp(torch.randn(4, 7), used(step, rank)).square().mean()


def grads(model: nn.Module) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def rounds(zero: bool, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, bool, Tensor]:
    model = Experts()
    config = HierConfig(density=0.05, value_dtype="float32", **options)
    ddp, state = wrap(model, config, find_unused_parameters=True, bucket_cap_mb=0.0005)
    given = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    applied, untouched = given.clone(), True
    for step in range(ROUNDS):
        model.zero_grad(set_to_none=not zero)
        with ddp.no_sync():
            loss_of(ddp, step, dist.get_rank()).backward()
        local = grads(model).double()
        dist.all_reduce(local)
        given += local / dist.get_world_size()
        model.zero_grad(set_to_none=not zero)
        before = residual_of(state, model)
        loss_of(ddp, step, dist.get_rank()).backward()
        applied += grads(model)
        idle = [e for e in range(EXPERTS) if all(used(step, rank) != e for rank in range(dist.get_world_size()))]
        after = residual_of(state, model)
        for expert in idle:
            for (name, p), old, new in zip(model.named_parameters(), before, after, strict=True):
                if name.startswith(f"experts.{expert}."):
                    untouched &= torch.equal(old, new) and (p.grad is None or not p.grad.any())
    untouched &= all(p.grad is None for p in model.frozen.parameters())
    return given, applied, sum_over_nodes(node_residual(model, state), state), untouched, applied.float()


def residual_of(state: HierState, model: nn.Module) -> list[Tensor]:
    state.commit_round()
    flat = node_residual(model, state)
    return list(flat.split([p.numel() for p in model.parameters()]))


@pytest.mark.parametrize(
    ("options", "zero", "shape"),
    [
        ({"exchange": "sparse"}, False, (2, 2)),
        ({"exchange": "sparse", "exclude": "vectors"}, True, (3, 1)),
        ({"exchange": "dense"}, True, (2, 2)),
        ({"exchange": "regional"}, False, (3, 1)),
        ({"exchange": "dense16"}, True, (2, 2)),
    ],
    ids=str,
)
def test_unused_parameters_lose_nothing_and_keep_their_residuals(
    ranks: RunRanks, options: dict[str, Any], zero: bool, shape: tuple[int, int]
) -> None:
    """One all-reduce per round shares which parameters no rank used."""
    results = ranks(rounds, zero, options, nodes=shape[0], devices=shape[1])
    for given, applied, residual, untouched, _ in results:
        torch.testing.assert_close(given, applied + residual, rtol=1e-5, atol=2e-5)
        assert untouched
    assert all(torch.equal(each[4], results[0][4]) for each in results)


def agreements() -> tuple[int, int]:
    ddp, state = wrap(Experts(), HierConfig(exchange="sparse"), find_unused_parameters=True, bucket_cap_mb=0.0005)
    comm, calls = state.exchange.communicator, []
    plain = comm.flat_all_reduce
    comm.flat_all_reduce = lambda *a, **k: calls.append(1) or plain(*a, **k)  # type: ignore[func-returns-value, method-assign]
    for step in range(6):
        loss_of(ddp, step, dist.get_rank()).backward()
    return len(calls), len(state.layout.settled)


def test_ranks_agree_once_per_round_for_all_buckets(ranks: RunRanks) -> None:
    for calls, groups in ranks(agreements, nodes=2, devices=1):
        assert groups > 1
        assert calls == 6


def kept_gradient(view: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Use an expert on all ranks in one round and on no rank in the next, without zeroing its gradient in between."""
    model = Experts()
    config = HierConfig(density=0.05, value_dtype="float32", exchange="sparse")
    ddp, state = wrap(model, config, find_unused_parameters=True, gradient_as_bucket_view=view, bucket_cap_mb=0.0005)

    def of_the_expert(flat: list[Tensor]) -> Tensor:
        places = [i for i, (name, _) in enumerate(model.named_parameters()) if name.startswith("experts.2.")]
        return torch.cat([flat[i].flatten() for i in places]).clone()

    found = []
    for step, expert in enumerate([2] * 8 + [0]):
        if expert == 2:
            model.zero_grad()
        torch.manual_seed(100 * step + dist.get_rank())
        ddp(torch.randn(4, 7), expert).square().mean().backward()
        if step >= 7:
            found += [of_the_expert([p.grad if p.grad is not None else p * 0 for p in model.parameters()])]
            found += [of_the_expert(residual_of(state, model))]
    return found[0], found[1], found[2], found[3]


@pytest.mark.parametrize("view", [True, False])
def test_gradient_kept_for_another_round_counts_once(ranks: RunRanks, view: bool) -> None:
    for gradient, residual, gradient_later, residual_later in ranks(kept_gradient, view, nodes=2, devices=2):
        assert gradient.any()
        assert residual.any()
        assert torch.equal(gradient, gradient_later)
        assert torch.equal(residual, residual_later)

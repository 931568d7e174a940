"""``exchange="auto"`` on real ranks: ranks agree on the measured rates, and a resumed run keeps them.

Changing paths loses nothing. Adaptive optimizers get dense gradients.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_sparse.exchange import cost as choice
from lightning_sparse.exchange.rates import Link, Rates
from lightning_sparse.gradients import HierConfig
from lightning_sparse.optimizers import gradient_scaling_of, sparse_gradient_objection
from lightning_sparse.topology import discover
from tests.helpers.distributed import RunRanks, run_ranks
from tests.helpers.lines import Lines
from tests.strategy.models import (
    backward,
    flat_grads,
    flat_parameters,
    go_on,
    loop,
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


def test_all_ranks_measure_equal_rates_and_log_them_once(ranks: RunRanks) -> None:
    everyone = ranks(measure, nodes=2, devices=2)
    numbers, _ = everyone[0]
    assert all(each == numbers for each, _ in everyone)
    assert all(number >= 0 for number in numbers)
    assert numbers[1] > 0, "bytes between nodes take time"
    assert [sum("measured: " in line for line in lines) for _, lines in everyone] == [1, 0, 0, 0]


def measure() -> tuple[list[float], list[str]]:
    lines = Lines().lines
    model = mlp()
    ddp, ours = wrap(model, HierConfig())
    backward(ddp, range(4))
    assert ours.exchange.choice.rates is not None
    return ours.exchange.choice.rates.to_list(), lines


def test_measurement_ignores_the_default_dtype_and_draws_no_random_number() -> None:
    """Lightning sets the default dtype during a training step, including the backward pass in manual optimization."""
    assert run_ranks(measure_under, torch.bfloat16, nodes=2, devices=2) == [True] * 4


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
def test_path_changes_lose_nothing_and_keep_ranks_equal(ranks: RunRanks, nodes: int, devices: int) -> None:
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
                ours.commit_round()
                left += float(ours.residual_norm())
    ours.commit_round()
    waiting = sum_over_nodes(node_residual(model, ours), ours)
    return {"given": given, "applied": applied, "waiting": waiting, "paths": paths, "left by dense": left}


def test_resumed_run_uses_the_saved_rates(tmp_path: Path) -> None:
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
        backward(ddp, range(3))
        assert ours.exchange.choice.rates is not None
        rates.append(ours.exchange.choice.rates.to_list())
        save(ours, path)
    return rates[0], rates[1], len(probed)


# -- optimizers that do not tolerate sparse gradients ------------------------------------------------------------------


def optimizer(name: str, *bases: type[Optimizer]) -> Optimizer:
    parameters = [nn.Parameter(torch.zeros(2))]
    return type(name, bases or (Optimizer,), {})(parameters, {} if not bases else 0.1)


@pytest.mark.parametrize("name", [each for each in dir(torch.optim) if isinstance(getattr(torch.optim, each), type)])
def test_torch_optimizer_is_classified(name: str) -> None:
    if name in ("Optimizer", "LBFGS", "SparseAdam"):
        pytest.skip("no optimizer of its own, or one that cannot be used here")
    cls: Any = getattr(torch.optim, name)
    made = cls([nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    assert gradient_scaling_of(made) == ("linear" if name in ("SGD", "ASGD") else "adaptive")


@pytest.mark.parametrize(
    ("name", "response"),
    [
        *((name, "adaptive") for name in ("FusedAdam", "Lamb", "DistributedShampoo", "Lion", "AdaFactorBigVision")),
        ("LARS", "linear"),
        ("Lars", "linear"),
        ("Mine", "unknown"),
    ],
)
def test_optimizers_of_other_libraries_are_classified_by_name(name: str, response: str) -> None:
    assert gradient_scaling_of(optimizer(name)) == response


def test_derived_or_wrapping_optimizer_is_classified_by_its_base() -> None:
    assert gradient_scaling_of(optimizer("Mine", torch.optim.SGD)) == "linear"
    assert gradient_scaling_of(optimizer("Mine", torch.optim.AdamW)) == "adaptive"
    sam = optimizer("SAM")
    sam.base_optimizer = optimizer("Mine", torch.optim.SGD)  # type: ignore[attr-defined]
    assert gradient_scaling_of(sam) == "linear"


def test_adaptive_optimizer_among_several_forbids_sparse_gradients() -> None:
    sgd, adam = optimizer("Mine", torch.optim.SGD), optimizer("Other", torch.optim.Adam)
    assert sparse_gradient_objection([]) == sparse_gradient_objection([sgd]) == ""
    assert sparse_gradient_objection([sgd, adam]).startswith("Other divides by the size of recent gradients")
    assert "Mine responds" in sparse_gradient_objection([optimizer("Mine")])


def train(cls: type[Optimizer], exchange: Any) -> tuple[list[str], list[str]]:
    lines = Lines().lines
    model = mlp()
    ddp, state = wrap(model, HierConfig(exchange=exchange, inter_gbps=1e-3 if exchange == "auto" else None))
    made = cls(model.parameters(), lr=0.01)  # type: ignore[call-arg, arg-type]
    state.watch([made])
    loop(ddp, state, made, range(5))
    return [state.path(group).name for group in state.layout.settled], [line for line in lines if "exchange=" in line]


@pytest.mark.parametrize(
    ("cls", "exchange", "path", "said"),
    [
        (torch.optim.SGD, "auto", "sparse", None),
        (torch.optim.AdamW, "auto", "dense16", "exchange='auto' sends all entries: AdamW divides by"),
        (torch.optim.AdamW, "sparse", "sparse", "exchange='sparse': AdamW divides by"),
        (torch.optim.AdamW, "dense16", "dense16", None),
    ],
)
def test_auto_sends_everything_with_adaptive_optimizers(
    ranks: RunRanks, cls: type[Optimizer], exchange: str, path: str, said: str | None
) -> None:
    """The link is so slow that "auto" would choose sparse messages for any other optimizer."""
    for rank, (paths, lines) in enumerate(ranks(train, cls, exchange, nodes=2, devices=1)):
        assert paths == [path]
        found = [line for line in lines if "divides by" in line]
        assert len(found) == (1 if said and rank == 0 else 0)
        assert not found or found[0].startswith(said or "")

"""Which optimizers tolerate gradients whose entries arrive rarely, and what `exchange="auto"` makes of it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_sparse.gradients import HierConfig
from lightning_sparse.gradients.optimizers import objection, response_of
from tests.helpers.distributed import RunRanks
from tests.helpers.lines import Lines
from tests.strategy.models import loss_of, mlp, wrap


def optimizer(name: str, *bases: type[Optimizer]) -> Optimizer:
    parameters = [nn.Parameter(torch.zeros(2))]
    return type(name, bases or (Optimizer,), {})(parameters, {} if not bases else 0.1)


@pytest.mark.parametrize("name", [each for each in dir(torch.optim) if isinstance(getattr(torch.optim, each), type)])
def test_every_optimizer_of_torch_is_known(name: str) -> None:
    if name in ("Optimizer", "LBFGS", "SparseAdam"):
        pytest.skip("no optimizer of its own, or one that cannot be used here")
    cls: Any = getattr(torch.optim, name)
    made = cls([nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    assert response_of(made) == ("linear" if name in ("SGD", "ASGD") else "adaptive")


@pytest.mark.parametrize(
    ("name", "response"),
    [
        ("FusedAdam", "adaptive"),
        ("Lamb", "adaptive"),
        ("DistributedShampoo", "adaptive"),
        ("Lion", "adaptive"),
        ("AdaFactorBigVision", "adaptive"),
        ("LARS", "linear"),
        ("Lars", "linear"),
        ("Mine", "unknown"),
    ],
)
def test_others_are_known_by_name(name: str, response: str) -> None:
    assert response_of(optimizer(name)) == response


def test_derived_and_wrapping_ones_are_what_they_are_made_of() -> None:
    assert response_of(optimizer("Mine", torch.optim.SGD)) == "linear"
    assert response_of(optimizer("Mine", torch.optim.AdamW)) == "adaptive"
    sam = optimizer("SAM")
    sam.base_optimizer = optimizer("Mine", torch.optim.SGD)  # type: ignore[attr-defined]
    assert response_of(sam) == "linear"


def test_one_adaptive_optimizer_among_several_decides() -> None:
    sgd, adam = optimizer("Mine", torch.optim.SGD), optimizer("Other", torch.optim.Adam)
    assert objection([]) == objection([sgd]) == ""
    assert objection([sgd, adam]).startswith("Other divides by the size of recent gradients")
    assert "Mine responds" in objection([optimizer("Mine")])


def train(cls: type[Optimizer], exchange: Any) -> tuple[list[str], list[str]]:
    lines = Lines().lines
    model = mlp()
    ddp, state = wrap(model, HierConfig(exchange=exchange, inter_gbps=1e-3 if exchange == "auto" else None))
    made = cls(model.parameters(), lr=0.01)  # type: ignore[call-arg, arg-type]
    state.watch([made])
    for step in range(5):
        state.before_backward()
        loss_of(ddp, step, dist.get_rank()).backward()
        made.step()
        made.zero_grad()
    return [state.path(group).name for group in state.layout.settled], [line for line in lines if "exchange=" in line]


@pytest.mark.parametrize(
    ("cls", "exchange", "path", "said"),
    [
        (torch.optim.SGD, "auto", "sparse", None),
        (torch.optim.AdamW, "auto", "dense16", "exchange='auto' sends everything: AdamW divides by"),
        (torch.optim.AdamW, "sparse", "sparse", "exchange='sparse': AdamW divides by"),
        (torch.optim.AdamW, "dense16", "dense16", None),
    ],
)
def test_auto_leaves_nothing_out_where_the_optimizer_cannot_bear_it(
    ranks: RunRanks, cls: type[Optimizer], exchange: str, path: str, said: str | None
) -> None:
    """On a link so slow that anything else would be sparse."""
    for rank, (paths, lines) in enumerate(ranks(train, cls, exchange, nodes=2, devices=1)):
        assert paths == [path]
        found = [line for line in lines if "divides by" in line]
        assert len(found) == (1 if said and rank == 0 else 0)
        assert not found or found[0].startswith(said or "")

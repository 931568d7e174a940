"""Every strategy that sends everything equals DDP, in a plain loop, Fabric and a Trainer, on 2 x 2 ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.distributed import run_ranks
from tests.helpers.training import Case, Net, flat, loss_of, train

STEPS, MOMENTUM = 7, 0.9
EXACT: dict[str, Any] = {"density": 1.0, "value_dtype": "float32"}
CASES = [
    *(Case("hier", host, "file", EXACT, momentum=MOMENTUM) for host in ("trainer", "fabric", "loop")),
    Case("momentum", "loop", "file", EXACT, momentum=MOMENTUM),
    *(Case("local", host, "file", {**EXACT, "delay": 0}, momentum=0.0) for host in ("trainer", "fabric", "loop")),
    *(Case("fsdp-gradients", host, "file", {"exchange": "dense"}, momentum=MOMENTUM) for host in ("trainer", "fabric")),
    *(
        Case("fsdp-updates", host, "file", {"exchange": "dense", "delay": 0}, momentum=0.0)
        for host in ("loop", "trainer")
    ),
]


def plain(momentum: float) -> Tensor:
    """Train with DDP over all ranks."""
    model = Net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
    return flat(model)


def everything() -> tuple[dict[float, Tensor], list[Tensor]]:
    count = sum(p.numel() for p in Net().parameters())
    ddp = {momentum: plain(momentum) for momentum in (0.0, MOMENTUM)}
    return ddp, [train(case, STEPS).weights[:count] for case in CASES]


@pytest.fixture(scope="module")
def results() -> Any:
    return run_ranks(everything, nodes=2, devices=2, timeout=200)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{each.kind} {each.host}" for each in CASES])
def test_strategy_with_everything_sent_equals_ddp(results: Any, number: int) -> None:
    for ddp, found in results:
        torch.testing.assert_close(found[number], ddp[CASES[number].momentum], rtol=1e-6, atol=1e-6)

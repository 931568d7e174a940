"""Parameters, gradients and comparisons with the plain step, for tests of the sharded step on ranks.

Gradients are random and equal on all ranks, as after a reduction.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.pto import ShardedStep, communicator_of
from lightning_sparse.topology import discover
from tests.helpers.distributed import run_ranks
from tests.helpers.scenarios import Scenarios, returned

STEPS = 20
SHAPES = {1: (1, 1), 3: (1, 3), 4: (2, 2)}


def results_of(scenarios: Scenarios) -> Any:
    """Make a fixture that runs every scenario on 1, 3 and 4 ranks. It returns their results by rank."""

    @pytest.fixture(scope="module", params=[1, pytest.param(3, marks=pytest.mark.slow), 4])
    def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
        nodes, devices = SHAPES[request.param]
        return run_ranks(run_scenarios, scenarios, nodes=nodes, devices=devices, timeout=120)

    return results


def run_scenarios(scenarios: Scenarios) -> dict[str, Any]:
    topology = discover()
    return returned(scenarios, communicator_of(topology, "world"))


def parameters(odd: bool = True) -> list[nn.Parameter]:
    """Return two large and several small parameters. No size is a multiple of another."""
    g = torch.Generator().manual_seed(0)
    shapes = [(37, 13), (37,), (29, 37), (29,), (5, 29), (5,), (), (3, 2, 5, 5)]
    made = [nn.Parameter(torch.randn(shape, generator=g)) for shape in shapes]
    if odd:
        made[-1].data = made[-1].data.to(memory_format=torch.channels_last)
        made += [nn.Parameter(torch.randn(7, generator=g).to(t)) for t in (torch.float64, torch.bfloat16)]
    return made


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    """Set equal gradients on all ranks. One parameter is unused in every third step."""
    g = torch.Generator().manual_seed(100 + step)
    for index, p in enumerate(params):
        grad = torch.randn(p.shape, generator=g).to(p.dtype)
        p.grad = None if step % 3 == 1 and index == 3 else grad.contiguous(memory_format=layout_of(p))


def layout_of(p: Tensor) -> torch.memory_format:
    return torch.channels_last if p.dim() == 4 else torch.contiguous_format


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:3], "weight_decay": 0.01}, {"params": params[3:], "lr": 0.003}]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Return whether structures of tensors are equal bit by bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and bits(a) == bits(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def whole_state(optimizer: Any) -> Any:
    """Return the state_dict that rank 0 saves, on all ranks."""
    optimizer.consolidate_state_dict()
    held = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held)
    return held[0]


def train(params: list[nn.Parameter], optimizer: Optimizer, first: int = 0, last: int = STEPS) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    for step in range(first, last):
        set_gradients(params, step)
        grads = [p.grad for p in params]
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(params, grads, strict=True)), "the step replaced a gradient"
        scheduler.step()


def compare(
    cls: type[Optimizer], options: dict[str, Any], communicator: HierCommunicator, whole: bool = False, **more: bool
) -> str:
    """Return the differences from the plain step. With `whole`, no parameter may be stepped in parts."""
    ours, theirs = [[p for p in parameters() if cls is not Muon or p.dim() == 2] for _ in range(2)]
    sharded, plain = cls(groups(ours), **options), cls(groups(theirs), **options)
    step = ShardedStep(sharded, communicator, **more)
    train(ours, sharded)
    train(theirs, plain)
    wrong = [] if same(list(ours), list(theirs)) else ["parameters differ"]
    wrong += [] if same(whole_state(sharded), plain.state_dict()) else ["state differs"]
    own = {id(p): part for p, part in zip(ours, step.local_parts, strict=True) if part is not None}
    wrong += [] if {id(p) for p in sharded.state} <= own.keys() else ["foreign state"]
    sizes = {
        id(p): max([0, *(t.numel() for t in s.values() if isinstance(t, Tensor))]) for p, s in sharded.state.items()
    }
    wrong += [] if all(n <= max(1, own[i].end - own[i].begin) for i, n in sizes.items()) else ["state of others' parts"]
    alone = communicator.node.size == 1
    wrong += [] if alone or whole != any(len(parts) > 1 for parts in step.parts) else ["cut, or not"]
    return ", ".join(wrong)

"""The state that a joining device downloads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchft", reason="needs torchft")

from lightning_sparse.elastic.device_state import DeviceReceiver, snapshot_of
from lightning_sparse.elastic.snapshots import Download, SnapshotServer
from lightning_sparse.sharding import Part
from lightning_sparse.updates import optimizer_state
from lightning_sparse.updates.slices import Slices


class Scaled(nn.Module):
    """Has extra state of variable length, such as a list of scales."""

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self.scales = scales
        self.weight = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(scales[:1].clone(), requires_grad=False)

    def get_extra_state(self) -> Tensor:
        return self.scales

    def set_extra_state(self, state: Tensor) -> None:
        self.scales = state


def one_of(weight: Tensor, optimizer: torch.optim.Optimizer) -> Any:
    """Return a stand-in for a `LocalOptimizer`."""
    numel = weight.numel()
    state = SimpleNamespace(read_global=lambda: weight.detach().flatten(), slices=Slices([weight], [Part(0, 0, numel)]))
    return SimpleNamespace(
        optimizer=optimizer, parameters=[weight], state=state, stepped=lambda: [(weight, Part(0, 0, numel))]
    )


def downloaded(peer: nn.Module, peers: list[Any], joins: nn.Module, joining: list[Any]) -> DeviceReceiver:
    """Load the state of a peer into another device."""
    head = {"version": ("x", 1), "run": "x", "history": []}
    names = {id(p): name for each in (peer, joins) for name, p in each.named_parameters()}
    server = SnapshotServer("127.0.0.1")
    try:
        server.offer(["x"], snapshot_of(peers, peer, names, head))
        download = Download(server.address, "x", lambda: DeviceReceiver(joining, joins, names, joins=True))
        assert download.advance(5.0, 5.0)
    finally:
        server.close()
    download.receiver.install()
    return download.receiver


def test_joining_device_loads_extra_state_that_is_a_tensor_of_another_size() -> None:
    peer, joins = Scaled(torch.arange(2.0) + 5), Scaled(torch.zeros(4))
    ones = [one_of(each.weight, torch.optim.AdamW([each.weight])) for each in (peer, joins)]
    downloaded(peer, ones[:1], joins, ones[1:])
    assert torch.equal(joins.scales, peer.scales)
    assert torch.equal(joins.frozen, peer.frozen)


def trained(steps: int) -> tuple[nn.Module, list[Any]]:
    """A module with two optimizers, after some steps."""
    module = nn.Linear(3, 2)
    optimizers = [
        torch.optim.AdamW([module.weight], lr=0.1 / (steps + 1)),
        torch.optim.SGD([module.bias], lr=0.2, momentum=0.9),
    ]
    for _ in range(steps):
        module(torch.randn(4, 3)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return module, [one_of(module.weight, optimizers[0]), one_of(module.bias, optimizers[1])]


@pytest.mark.parametrize("by", ["index", "name"])
def test_whole_optimizer_state_is_loaded_for_the_parameters_of_the_optimizer(by: str) -> None:
    """The module has parameters before those of the optimizer, which are frozen."""
    pair = [nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)) for _ in range(2)]
    first, second = (torch.optim.AdamW(each[1].parameters(), lr=0.1 * (1 + place)) for place, each in enumerate(pair))
    pair[0](torch.ones(3, 2)).sum().backward()
    first.step()
    saved = first.state_dict()
    if by == "name":
        named = ["1.weight", "1.bias"]
        saved["state"] = {named[key]: each for key, each in saved["state"].items()}
        saved["param_groups"][0]["params"] = named
    names = {id(p): name for name, p in pair[1].named_parameters()}
    optimizer_state.load_whole(second, names, saved)
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    saved["param_groups"][0]["params"] = [0]
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, and has groups of \[2\]"):
        optimizer_state.load_whole(second, names, saved)


def test_joining_device_loads_the_states_of_all_optimizers() -> None:
    (peer, peers), (joins, joining) = trained(3), trained(0)
    received = downloaded(peer, peers, joins, joining)
    for weights, (theirs, mine) in zip(received.weights, zip(peers, joining, strict=True), strict=True):
        assert torch.equal(weights, theirs.parameters[0].detach().flatten())
        expected, found = theirs.optimizer.state_dict(), mine.optimizer.state_dict()
        torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
        assert found["param_groups"] == expected["param_groups"]

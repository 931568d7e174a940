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


def one_of(module: Scaled) -> Any:
    """Return a stand-in for a `LocalOptimizer`."""
    weight = module.weight
    state = SimpleNamespace(read_global=lambda: weight.detach(), slices=SimpleNamespace(numel=3))
    optimizer = torch.optim.AdamW([weight])
    return SimpleNamespace(
        optimizer=optimizer, parameters=[weight], state=state, stepped=lambda: [(weight, Part(0, 0, 3))]
    )


def test_joining_device_loads_extra_state_that_is_a_tensor_of_another_size() -> None:
    peer, joins = Scaled(torch.arange(2.0) + 5), Scaled(torch.zeros(4))
    head = {"version": ("x", 1), "run": "x", "history": []}
    server = SnapshotServer("127.0.0.1")
    try:
        server.offer(["x"], snapshot_of(one_of(peer), peer, {id(peer.weight): "weight"}, head))
        names = {id(joins.weight): "weight"}
        download = Download(server.address, "x", lambda: DeviceReceiver(one_of(joins), joins, names, joins=True))
        assert download.advance(5.0, 5.0)
        download.receiver.install()
    finally:
        server.close()
    assert torch.equal(joins.scales, peer.scales)
    assert torch.equal(joins.frozen, peer.frozen)

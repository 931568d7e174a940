"""Elastic nodes of two devices that share the model with FSDP2, in processes: killed, stopped, and back again."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torchft", reason="needs torchft")

from tests.helpers.nodes import Nodes, nodes_of
from tests.helpers.ports import free_port
from tests.updates.elastic_node import main
from tests.updates.test_elastic import check, of

pytestmark = pytest.mark.slow
DEVICES = 2
OPTIONS: dict[str, Any] = {"timeout": 3, "density": 0.1, "width": 67}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with nodes_of(main) as nodes:
        yield nodes


def start(nodes: Nodes, name: str, **more: Any) -> None:
    """Start both devices of a node."""
    port = free_port()
    for device in range(DEVICES):
        nodes.start(f"{name}{device}", device=device, devices=DEVICES, port=port, **OPTIONS, **more)


def kill(nodes: Nodes, name: str) -> None:
    for device in range(DEVICES):
        nodes.kill(f"{name}{device}")


def finish(nodes: Nodes, names: str) -> None:
    """End all nodes. Devices with the same index have equal weights in equal rounds, and no node has lost updates."""
    for name in names:
        for device in range(DEVICES):
            nodes.send(f"{name}{device}", signal.SIGTERM)
    for device in range(DEVICES):
        devices = [f"{name}{device}" for name in names]
        assert [nodes.join(each) for each in devices] == [0] * len(names)
        tokens = check(nodes, devices)  # type: ignore[arg-type]
        assert set.intersection(*map(set, tokens.values()))


@pytest.mark.timeout(600)
def test_nodes_of_two_devices_that_die_at_random_moments_come_back(nodes: Nodes) -> None:
    generator = random.Random(3)
    for name in "abc":
        start(nodes, name)
    nodes.wait_for("a0", of(3))
    for _ in range(20):
        name = generator.choice("abc")
        time.sleep(generator.uniform(0, 1))
        kill(nodes, name)
        time.sleep(generator.uniform(0, 2))
        start(nodes, name)  # while another may die
    for name in "abc":
        nodes.wait_for(f"{name}1", of(3), timeout=120)
    finish(nodes, "abc")


@pytest.mark.parametrize("stopped", [("c1",), ("c0", "c1")], ids=["one device", "the node"])
def test_stopped_node_of_two_devices_misses_rounds_and_comes_back(nodes: Nodes, stopped: tuple[str, ...]) -> None:
    for name in "abc":
        start(nodes, name)
    begun = nodes.wait_for("c0", of(3))["number"]
    for each in stopped:
        nodes.send(each, signal.SIGSTOP)
    without = nodes.wait_for("a0", of(2, begun))["number"]
    nodes.wait_for("a0", of(2, without + 10))
    for each in stopped:
        nodes.send(each, signal.SIGCONT)
    nodes.wait_for("c0", of(3, without))
    assert "has missed rounds" in nodes.output("c0")
    finish(nodes, "abc")

"""A node whose link is cut, in network namespaces."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torchft", reason="needs torchft")

from tests.helpers.nodes import Nodes, nodes_of
from tests.updates import elastic_node
from tests.updates.test_elastic import check, end, of

BRIDGE, GATEWAY = "ls-elastic", "10.77.0.1"
CUT_SECONDS = 20.0


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


def main(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """The same node, in the namespace of its name."""
    with open(f"/run/netns/ls-{name}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
    os.environ["GLOO_SOCKET_IFNAME"] = f"ls-{name}-1"
    elastic_node.main(name, lighthouse, options)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    try:
        ip(f"link add {BRIDGE} type bridge")
        ip(f"addr add {GATEWAY}/24 dev {BRIDGE}")
        ip(f"link set {BRIDGE} up")
        for place, name in enumerate("abc"):
            ip(f"netns add ls-{name}")
            ip(f"link add ls-{name}-0 type veth peer name ls-{name}-1 netns ls-{name}")
            ip(f"link set ls-{name}-0 master {BRIDGE} up")
            ip(f"-n ls-{name} addr add 10.77.0.{place + 2}/24 dev ls-{name}-1")
            ip(f"-n ls-{name} link set ls-{name}-1 up")
            ip(f"-n ls-{name} link set lo up")
        with nodes_of(main, host=GATEWAY) as nodes:
            yield nodes
    finally:
        for name in "abc":
            subprocess.run(["ip", "netns", "del", f"ls-{name}"], check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(240)
def test_a_node_whose_link_was_cut_comes_back_with_what_it_trained(nodes: Nodes) -> None:
    for name in "abc":
        nodes.start(name, timeout=5, density=0.1, pause=0.05)  # sums round in each step: few hundreds of them
    begun = nodes.wait_for("c", of(3))["number"]
    ip("link set ls-c-0 down")
    without = nodes.wait_for("a", of(2, begun))["number"]
    time.sleep(CUT_SECONDS)
    ip("link set ls-c-0 up")
    nodes.wait_for("c", of(3, without), timeout=90)
    assert "has missed rounds" in nodes.output("c")
    end(nodes, "abc")
    check(nodes, "abc")

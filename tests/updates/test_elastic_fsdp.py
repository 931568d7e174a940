"""Elastic nodes of two devices that shard the model with FSDP2. The tests kill, stop and restart their processes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchft", reason="needs torchft")

from torchft.coordination import LighthouseClient

from lightning_sparse.elastic.snapshots import Snapshot
from lightning_sparse.fsdp import mesh_of, shard
from lightning_sparse.lab.cluster import free_port
from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.helpers.distributed import run_ranks
from tests.helpers.nodes import Main, Nodes, nodes_of
from tests.updates.elastic_node import loss_of, main, toy
from tests.updates.test_elastic import check, of

pytestmark = pytest.mark.slow
DEVICES = 2
OPTIONS: dict[str, Any] = {"timeout": 3, "density": 0.1, "width": 67}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with nodes_of(main) as nodes:
        yield nodes


def start(nodes: Nodes, name: str, entry: Main = main, **more: Any) -> None:
    """Start both devices of a node."""
    port = free_port()
    for device in range(DEVICES):
        nodes.start(f"{name}{device}", entry, device=device, devices=DEVICES, port=port, **OPTIONS, **more)


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
        nodes.join(*devices)
        tokens = check(nodes, devices)  # type: ignore[arg-type]
        assert set.intersection(*map(set, tokens.values()))


def digests_of_fixed_nodes(steps: int, options: dict[str, Any]) -> list[str]:
    """Train on fixed nodes, and return a digest of this device's global weights after each step."""
    topology = discover()
    model, teacher = toy(0, OPTIONS["width"]), toy(-1)
    shard(model, mesh_of(topology))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    updates = LocalUpdates(model, optimizer, UpdatesConfig(**options), topology)
    data = torch.Generator().manual_seed(topology.rank)
    digests = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, teacher, data).backward()
        optimizer.step()
        updates.step()
        weights_S = updates.optimizers[0].state.read_global()
        digests.append(hashlib.sha1(weights_S.numpy().tobytes()).hexdigest()[:12])
    updates.close()
    return digests


@pytest.mark.parametrize("options", [{"step_ahead": 0.5}, {"step_ahead": 1.0, "sync_every": 2, "delay": 2}], ids=str)
def test_nodes_without_a_fault_match_the_weights_of_fixed_nodes(
    nodes: Nodes, options: dict[str, Any], tmp_path: Path
) -> None:
    """With ``step_ahead="auto"``, weights would differ: elastic nodes restart the measurement when they join."""
    steps, options, release = 30, {"density": 0.1, **options}, tmp_path / "release"
    fixed = run_ranks(digests_of_fixed_nodes, steps, options, nodes=3, devices=DEVICES, timeout=100)
    for index, name in enumerate("abc"):
        port = free_port()
        for device in range(DEVICES):
            place = {"device": device, "devices": DEVICES, "port": port, "data": DEVICES * index + device}
            more = {**place, "release": str(release), "steps": steps, "min_nodes": 3, "width": 67}
            nodes.start(f"{name}{device}", timeout=20, **more, **options)
        nodes.wait_for(f"{name}0", lambda report: "begins" in report)
    release.touch()  # a node that joins later would load the optimizer's state after a step
    for index, name in enumerate("abc"):
        for device in range(DEVICES):
            nodes.join(f"{name}{device}")
            found = {each["number"]: each["digest"] for each in nodes.reports(f"{name}{device}") if "digest" in each}
            expected = fixed[DEVICES * index + device]
            every = options.get("sync_every", 1)
            assert [found[number] for number in range(1, steps // every + 1)] == expected[every - 1 :: every]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"optimizers": 2}], ids=str)
def test_nodes_of_two_devices_killed_at_random_moments_rejoin(nodes: Nodes, options: dict[str, Any]) -> None:
    generator = random.Random(3)
    for name in "abc":
        start(nodes, name, **options)
    nodes.wait_for("a0", of(3))
    for _ in range(20):
        name = generator.choice("abc")
        time.sleep(generator.uniform(0, 1))
        kill(nodes, name)
        time.sleep(generator.uniform(0, 2))
        start(nodes, name, **options)  # while another may die
    for name in "abc":
        nodes.wait_for(f"{name}1", of(3))
    finish(nodes, "abc")


@pytest.mark.parametrize("stopped", [("c1",), ("c0", "c1")], ids=["one device", "the node"])
def test_stopped_node_of_two_devices_misses_rounds_and_rejoins(nodes: Nodes, stopped: tuple[str, ...]) -> None:
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


# -- wrong nodes, and deaths at the worst moment -----------------------------------------------------------------------


def with_another_torch(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    torch.__version__ = "2.0.0"
    main(name, lighthouse, options)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"density": 0.2}, "density=0.2, theirs 0.1"),
        ({"width": 70}, "module='4 tensors, .*, theirs '4 tensors, "),
        ({"devices": 1}, "devices=1, theirs 2"),
        ({"optimizers": 2}, r"optimizers=\['AdamW', 'SGD'\], theirs \['AdamW'\]"),
        ({"torch": "2.0.0"}, "torch='2.0.0', theirs '2"),
    ],
    ids=["options", "model", "devices", "optimizers", "torch"],
)
def test_node_that_differs_is_refused_and_nodes_of_two_devices_continue(
    nodes: Nodes, wrong: dict[str, Any], said: str
) -> None:
    for name in "ab":
        start(nodes, name)
    begun = nodes.wait_for("b0", of(2))["number"]
    wrong, entry = dict(wrong), with_another_torch if "torch" in wrong else main
    wrong.pop("torch", None)
    port, devices = free_port(), wrong.pop("devices", DEVICES)
    for device in range(devices):
        nodes.start(f"d{device}", entry, device=device, devices=devices, port=port, **{**OPTIONS, **wrong})
    for device in range(devices):
        nodes.join(f"d{device}", code=1)
        assert re.search(f"this node differs from the training nodes: .*{said}", nodes.output(f"d{device}"))
    number = nodes.reports("a0")[-1]["number"]
    for name in "ab":
        nodes.wait_for(f"{name}1", of(2, max(begun, number) + 5))
    finish(nodes, "ab")


def garbage(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """A program that is no node, in each quorum."""
    client = LighthouseClient(lighthouse, timedelta(seconds=5))
    status = {"token": 7, "number": "many", "facts": [], "sizes": 3, "progress": "x", "change": {}, **options}
    print(json.dumps({"begins": 0}), flush=True)
    while True:
        with suppress(RuntimeError, TimeoutError):
            client.quorum(name, timedelta(seconds=5), store_address="10.0.0.1:9", step=3, world_size=1, data=status)


@pytest.mark.parametrize("status", [{}, {"token": "x", "number": 10**9, "run": "y", "trains": True}], ids=str)
def test_nodes_of_two_devices_ignore_a_program_that_sends_garbage(nodes: Nodes, status: dict[str, Any]) -> None:
    for name in "ab":
        start(nodes, name)
    begun = nodes.wait_for("b0", of(2))["number"]
    nodes.start("d", garbage, **status)
    nodes.wait_for("a1", of(2, begun + 30))
    start(nodes, "c")
    nodes.wait_for("c1", of(3))
    nodes.kill("d")
    finish(nodes, "abc")


def dies_while_serving(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """The first device that serves a snapshot once the folder exists is killed during the download."""
    folder, read = Path(options.pop("folder")), Snapshot.read

    def dies(snapshot: Snapshot, begin: int) -> Iterator[memoryview]:
        yield next(read(snapshot, begin))[:100]
        if folder.exists():
            with suppress(FileExistsError):
                (folder / "dead").open("x").close()
                os.kill(os.getpid(), signal.SIGKILL)
        yield from read(snapshot, begin + 100)

    Snapshot.read = dies  # type: ignore[method-assign]
    main(name, lighthouse, options)


def test_node_joins_although_the_node_that_serves_its_snapshot_dies(nodes: Nodes, tmp_path: Path) -> None:
    folder = tmp_path / "armed"
    for name in "ab":
        start(nodes, name, dies_while_serving, folder=str(folder))
    nodes.wait_for("b0", of(2))
    folder.mkdir()
    start(nodes, "c")
    dead = nodes.wait_for_death(["a0", "a1", "b0", "b1"])[0]
    kill(nodes, dead)
    (alive,) = {"a", "b"} - {dead}
    joined = nodes.wait_for("c1", of(2))
    start(nodes, dead)
    nodes.wait_for(f"{dead}1", of(3, joined["number"]))
    nodes.wait_for(f"{alive}1", of(3, joined["number"]))
    finish(nodes, "abc")

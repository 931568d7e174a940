"""Loops of Fabric that come and go."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchft", reason="needs torchft")

from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from lightning_sparse.elastic import ElasticSampler
from lightning_sparse.flavours.lightning_fabric import MSTopKElasticStrategy
from tests.helpers.nodes import Nodes, nodes_of
from tests.updates.elastic_fabric import alone, main
from tests.updates.test_elastic import of, tokens_of
from tests.updates.test_elastic_trainer import drawn_in, start_two_devices


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with nodes_of(main) as nodes:
        yield nodes


@pytest.mark.slow
def test_a_loop_that_joins_goes_on_where_the_others_are(nodes: Nodes, tmp_path: Path) -> None:
    def start(name: str) -> None:
        nodes.start(name, folder=str(tmp_path / name), **{"with": {"timeout": 5, "density": 0.1}})

    for name in "ab":
        start(name)
    begun = nodes.wait_for("a", of(2))
    nodes.kill("b")
    alone = nodes.wait_for("a", lambda report: report.get("nodes") == 1 and report["number"] > begun["number"])
    (tmp_path / "b" / "last.ckpt").unlink(missing_ok=True)
    start("b")
    back = nodes.wait_for("b", of(2, alone["number"]))
    assert back["step"] > alone["step"]
    assert back["lr"] == pytest.approx(0.01 * 0.99 ** back["epoch"])
    for name in "ba":  # the one that has joined is ahead, by what the other may draw before the deal
        nodes.wait_for(name, lambda report: report.get("epoch", 0) > back["epoch"] + 1)
    for name in "ab":
        nodes.send(name, signal.SIGTERM)
    assert [nodes.join(name) for name in "ab"] == [0, 0]
    tokens_of(nodes, "ab")
    reports = [*nodes.reports("a"), *nodes.reports("b")]
    for epoch in range(back["epoch"], back["epoch"] + 2):
        drawn = drawn_in(epoch, reports)
        assert len(drawn) == len(set(drawn))
        assert len(drawn) == 1024 or epoch == back["epoch"]


@pytest.mark.slow
def test_loops_that_were_stopped_go_on_from_their_checkpoint(nodes: Nodes, tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": str(tmp_path), "with": {"timeout": 5, "density": 0.1}}
    nodes.start("a", **options)
    nodes.wait_for("a", lambda report: report.get("step", 0) > 45)
    nodes.kill("a")
    saved, before = torch.load(tmp_path / "last.ckpt", weights_only=False), nodes.reports("a")
    for name in "ab":
        nodes.start(name, **options)
    first = nodes.wait_for("b", of(2))
    assert first["step"] > saved["step"] > 0
    nodes.wait_for("a", lambda report: report.get("epoch", 0) > saved["epoch"])
    for name in "ab":
        nodes.send(name, signal.SIGTERM)
    assert [nodes.join(name) for name in "ab"] == [0, 0]
    tokens_of(nodes, "ab")
    trained = drawn_in(saved["epoch"], [each for each in before if each.get("step", 0) <= saved["step"]])
    after = drawn_in(saved["epoch"], [*nodes.reports("a")[len(before) :], *nodes.reports("b")])
    assert len({*trained, *after}) == len(trained) + len(after)


@pytest.mark.slow
def test_loops_of_two_devices(nodes: Nodes, tmp_path: Path) -> None:
    start_two_devices(nodes, tmp_path, **{"with": {"timeout": 5, "density": 0.1}})
    begun = nodes.wait_for("b0", of(2))
    nodes.wait_for("a0", of(2, begun["number"] + 10))
    for device in range(2):
        nodes.kill(f"b{device}")
    nodes.wait_for("a0", lambda report: report.get("nodes") == 1 and report["epoch"] > begun["epoch"] + 1)
    tokens = tokens_of(nodes, ("a0", "b0"))
    assert set(tokens["a0"]) & set(tokens["b0"])


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with nodes_of(alone) as nodes:
        nodes.start("a", folder=str(tmp_path_factory.mktemp("runs")))
        assert nodes.join("a", timeout=100) == 0, nodes.output("a")
        return nodes.reports("a")


def test_a_run_that_loads_weights_alone_draws_all_samples(two_runs: list[dict[str, Any]]) -> None:
    for run in two_runs[:2]:
        assert sorted(run["drawn"]) == list(range(64))


def test_all_modules_are_saved_as_of_one_round(two_runs: list[dict[str, Any]]) -> None:
    assert all(two_runs[0]["shown"])
    assert two_runs[0]["shown"]


def test_loaders_that_are_set_up_before_a_node_joins_have_an_order_of_its_own(two_runs: list[dict[str, Any]]) -> None:
    first, second = two_runs[2]["seeds"]
    assert first != second


def test_what_a_loop_deals_and_shares_wrongly_is_refused(two_runs: list[dict[str, Any]]) -> None:
    rules = [
        "shard_loader() of a DataLoader that draws samples of its own: give a DataLoader of torch with sampler=Elastic",
        "batches=0 must be a whole number of batches between two steps",
        "sync_state() of folder=PosixPath",
        "the other nodes share ['epoch'], and this one would go on without: call fabric.strategy.sync_state(state)",
    ]
    for refused, rule in zip(two_runs[0]["refused"], rules, strict=True):
        assert refused.startswith(rule)


def test_what_a_loop_does_in_the_wrong_order_is_refused(tmp_path: Path) -> None:
    strategy = MSTopKElasticStrategy(lighthouse="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="no optimizer is set up"):
        strategy.sync_state({})
    loader = DataLoader(range(8), sampler=ElasticSampler(range(8)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"call fabric.strategy.shard_loader\(loader\) instead"):
        strategy.process_dataloader(loader)
    strategy.engines.append(object())
    with pytest.raises(ValueError, match="is set up after another optimizer"):
        strategy.setup_optimizer(torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    with pytest.raises(ValueError, match="has joined others has their weights"):
        strategy.load_checkpoint(tmp_path / "any.ckpt", {})


def test_a_world_of_several_nodes_is_refused() -> None:
    strategy = MSTopKElasticStrategy(lighthouse="http://127.0.0.1:1")
    fabric: Any = Fabric(accelerator="cpu", devices=1, num_nodes=2, strategy=strategy)
    with pytest.raises(ValueError, match="num_nodes=2: each node that comes and goes is a run of its own"):
        fabric.launch()

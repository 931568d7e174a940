"""Trainers that come and go."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchft", reason="needs torchft")

from lightning_sparse.flavours.pytorch_lightning import MSTopKElasticStrategy
from lightning_sparse.strategy.elastic import ELASTIC_KEY
from tests.helpers.nodes import Nodes, nodes_of
from tests.helpers.ports import free_port
from tests.updates.elastic_trainer import main
from tests.updates.test_elastic import end, of, tokens_of


def drawn_in(epoch: int, reports: list[dict[str, Any]]) -> list[int]:
    """The samples of an epoch that nodes reported."""
    return [sample for each in reports if each.get("epoch") == epoch for sample in each.get("drawn", ())]


def start_two_devices(nodes: Nodes, folder: Path, **more: Any) -> None:
    """Start the nodes a and b of two devices each, whose processes are a0, a1, b0 and b1."""
    for name in "ab":
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "WORLD_SIZE": "2"}
        for device in range(2):
            place = {**env, "LOCAL_RANK": str(device), "RANK": str(device)}
            options = {"devices": 2, "env": place, "node": name, "folder": str(folder / name)}
            nodes.start(f"{name}{device}", **options, **more)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with nodes_of(main) as nodes:
        yield nodes


@pytest.mark.slow
def test_a_trainer_that_joins_goes_on_where_the_others_are(nodes: Nodes, tmp_path: Path) -> None:
    options: dict[str, Any] = {"timeout": 5, "density": 0.1}
    for name in "ab":
        nodes.start(name, folder=str(tmp_path / name), **options)
    begun = nodes.wait_for("b", of(2))["number"]
    nodes.kill("b")
    alone = nodes.wait_for("a", lambda report: report.get("nodes") == 1 and report["number"] > begun)
    nodes.start("b", folder=str(tmp_path / "fresh"), **options)
    back = nodes.wait_for("b", of(2, alone["number"]))
    assert back["step"] > alone["step"]  # its peer's progress, too
    assert back["lr"] == pytest.approx(0.01 * 0.99 ** back["epoch"])  # and the schedule
    end(nodes, "ab")
    tokens_of(nodes, "ab")


@pytest.mark.slow
def test_node_that_takes_over_writes_checkpoints_and_logs_that_old_checkpoints_stay(
    nodes: Nodes, tmp_path: Path
) -> None:
    for name in "ab":
        nodes.start(name, folder=str(tmp_path), timeout=5, density=0.1)
    begun = nodes.wait_for("b", of(2))["step"]
    step = nodes.wait_for("b", lambda report: report["step"] > begun + 10)["step"]  # a has saved since
    assert "writes checkpoints from now on" not in nodes.output("b")
    nodes.kill("a")
    alone = nodes.wait_for("b", lambda report: report["step"] > step and report["nodes"] == 1)["step"]
    nodes.wait_for("b", lambda report: report["step"] > alone + 20)  # b saves every 10 steps
    assert nodes.output("b").count(f"remove the checkpoints that it left in {tmp_path}") == 1
    end(nodes, "b")
    # ModelCheckpoint of b writes last-v1.ckpt if last.ckpt was there before its own first save.
    saved = [torch.load(each, weights_only=False)["global_step"] for each in tmp_path.glob("last*.ckpt")]
    assert max(saved) > step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "every"), [(25, 10), (95, 10), (70, 64)], ids=["first epoch", "second epoch", "saved after the last batch"]
)
def test_a_job_that_was_stopped_resumes_on_another_number_of_nodes(
    nodes: Nodes, tmp_path: Path, step: int, every: int
) -> None:
    options: dict[str, Any] = {"timeout": 5, "density": 0.1, "folder": str(tmp_path), "deal": True, "every": every}
    nodes.start("a", **options)
    nodes.wait_for("a", lambda report: report.get("step", 0) > step)
    nodes.kill("a")
    saved, before = torch.load(tmp_path / "last.ckpt", weights_only=False), nodes.reports("a")
    for name in "ab":
        nodes.start(name, **options)
    first = nodes.wait_for("b", of(2))
    assert first["step"] > saved["global_step"] > 0
    nodes.wait_for("a", lambda report: report.get("epoch", 0) > saved["epoch"] + 1)
    end(nodes, "ab")
    tokens_of(nodes, "ab")
    again = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert again[ELASTIC_KEY][3] == saved[ELASTIC_KEY][3] != "", "the name of the run"
    trained = drawn_in(saved["epoch"], [each for each in before if each.get("step", 0) <= saved["global_step"]])
    after = drawn_in(saved["epoch"], [*nodes.reports("a")[len(before) :], *nodes.reports("b")])
    assert len({*trained, *after}) == len(trained) + len(after), "the rest of the epoch, and nothing twice"
    assert len(trained) + len(after) >= 2048 - 3 * 32, "but for what was drawn, and not trained, when it was saved"
    following = drawn_in(saved["epoch"] + 1, [*nodes.reports("a")[len(before) :], *nodes.reports("b")])
    assert len(set(following)) == len(following) >= 2048 - 3 * 32, "but for what is drawn last"


@pytest.mark.slow
@pytest.mark.parametrize("place", [2048, 2047, 2048 + 7, 3 * 2048], ids=["none", "one", "next begun", "none of three"])
def test_elastic_job_resumes_where_no_batch_of_its_epoch_is_left(nodes: Nodes, tmp_path: Path, place: int) -> None:
    """Another node had drawn the samples when the checkpoint was written; EarlyStopping wants a validation."""
    options: dict[str, Any] = {"timeout": 5, "density": 0.1, "folder": str(tmp_path), "deal": True}
    nodes.start("a", steps=12, **options)
    assert nodes.join("a") == 0
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    saved[ELASTIC_KEY][2] = place
    torch.save(saved, tmp_path / "last.ckpt")
    nodes.start("a", epochs=place // 2048 + 2, stops_early=True, **options)
    assert nodes.join("a") == 0, nodes.output("a")[-2000:]
    after = [each for each in nodes.reports("a")[13:] if "drawn" in each]
    epoch = place // 2048
    assert {each["epoch"] for each in after} == {epoch, epoch + 1}
    last = next(each for each in after if each["epoch"] == epoch + 1)
    assert last["lr"] == pytest.approx(0.01 * 0.99 ** (epoch + 1)), "the schedule steps with each epoch"
    drawn = drawn_in(epoch, after)
    assert len(set(drawn)) == len(drawn) == 2048 * (epoch + 1) - place


@pytest.mark.slow
def test_a_node_trains_on_while_the_other_validates(nodes: Nodes, tmp_path: Path) -> None:
    options: dict[str, Any] = {"timeout": 4, "density": 0.1}
    nodes.start("a", folder=str(tmp_path / "a"), **options)
    nodes.start("b", folder=str(tmp_path / "b"), validation=6.0, **options)
    begun = nodes.wait_for("b", lambda report: report.get("validates", False))["number"]
    nodes.wait_for("a", lambda report: report["number"] > begun + 50)
    ended = nodes.wait_for("b", lambda report: "step" in report)
    assert ended["number"] > begun + 50
    assert "has missed rounds" not in nodes.output("b")
    end(nodes, "ab")
    tokens_of(nodes, "ab")


@pytest.mark.slow
@pytest.mark.parametrize("of_bundled", [False, True], ids=["ElasticSampler", "TokenDataModule"])
def test_samples_are_dealt_to_the_nodes_that_are_there(nodes: Nodes, tmp_path: Path, of_bundled: bool) -> None:
    size, order = 2048, {"deal": True}
    if of_bundled:
        size, order = 512, {"tokens": str(tmp_path / "ids.bin"), "epochs": 1000}
        np.append(np.arange(size).repeat(8), 0).astype(np.uint16).tofile(tmp_path / "ids.bin")
        (tmp_path / "ids.json").write_text('{"dtype": "uint16", "vocab_size": 512}')
    for name in "ab":
        nodes.start(name, folder=str(tmp_path / name), **order, timeout=5, density=0.1)
    begun = nodes.wait_for("a", of(2))["epoch"]
    for name in "ab":
        nodes.wait_for(name, lambda report: report.get("epoch", 0) > begun + 1)
        nodes.send(name, signal.SIGTERM)
    assert [nodes.join(name) for name in "ab"] == [0, 0]
    assert "has drawn more samples" not in nodes.output("a") + nodes.output("b")
    reports = [*nodes.reports("a"), *nodes.reports("b")]
    for epoch in range(max(each.get("epoch", 0) for each in reports) + 1):
        drawn = drawn_in(epoch, reports)
        assert len(drawn) == len(set(drawn)), "none twice, also where a node joined or left"
        assert len(drawn) == size or epoch != begun + 1


@pytest.mark.slow
def test_nodes_of_two_devices(nodes: Nodes, tmp_path: Path) -> None:
    start_two_devices(nodes, tmp_path, timeout=5, density=0.1, flush_every=4)
    begun = nodes.wait_for("b0", of(2))["number"]
    nodes.wait_for("a0", of(2, begun + 10))
    nodes.kill("b0")
    nodes.kill("b1")
    nodes.wait_for("a0", lambda report: report.get("nodes") == 1 and report["number"] > begun)
    tokens = tokens_of(nodes, ("a0", "b0"))
    assert set(tokens["a0"]) & set(tokens["b0"])


def test_without_a_lighthouse_the_error_tells_the_command() -> None:
    from lightning_sparse.elastic.lighthouse import Lighthouse

    with socket.socket() as held:  # so that no other test's lighthouse gets the port
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"no lighthouse answers at http://{address}: start one.*torchft_light"):
            Lighthouse(address, "a", timeout=1)


def test_bad_options_are_refused() -> None:
    for wrong, said in (
        ({"exchange": "regional"}, "exchange='regional' cannot be combined with MSTopKElasticStrategy"),
        ({"min_nodes": 0}, "min_nodes=0 must be a whole number"),
        ({"flush_every": 0}, "flush_every=0 must be a whole number of at least 1"),
        ({"timeout": -1}, "timeout=-1 must be a number above 0"),
    ):
        with pytest.raises(ValueError, match=said):
            MSTopKElasticStrategy(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_elastic_node_that_joins_keeps_the_weights_of_its_peers_whatever_its_hooks_set(
    nodes: Nodes, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"timeout": 5, "density": 0.1}
    nodes.start("a", folder=str(tmp_path / "a"), begins_with=1.0, **options)
    begun = nodes.wait_for("a", lambda report: report.get("step") == 2)
    assert begun["mean"] == pytest.approx(1.0, abs=0.1)  # at once: 10% of the weights would be 0.1
    nodes.start("b", folder=str(tmp_path / "b"), begins_with=50.0, **options)
    both = nodes.wait_for("b", of(2))
    assert both["mean"] < 2.0
    assert "their weights stay" in nodes.output("b")
    end(nodes, "ab")

"""Elastic nodes with Trainer and with a Fabric loop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchft", reason="needs torchft")

from lightning_fabric import Fabric
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter  # type: ignore[attr-defined]  # re-exported, unannounced
from torch.utils.data import DataLoader

from lightning_sparse.elastic import ElasticSampler, lighthouse
from lightning_sparse.elastic.lighthouse import Lighthouse
from lightning_sparse.flavours import lightning_fabric
from lightning_sparse.flavours.pytorch_lightning import MSTopKElasticStrategy
from lightning_sparse.lab.cluster import free_port
from lightning_sparse.strategy.elastic import ELASTIC_KEY
from tests.helpers.nodes import Main, Nodes, nodes_of
from tests.helpers.streams import signaled_in_write
from tests.updates.elastic_hosts import BATCH, SAMPLES, Toy, loop, train, train_with_states, two_runs
from tests.updates.test_elastic import end, of, tokens_of

HOSTS = {"Trainer": train, "Fabric": loop}
OPTIONS: dict[str, Any] = {"timeout": 5, "density": 0.1}
each_host = pytest.mark.parametrize("nodes", HOSTS, indirect=True)


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with nodes_of(HOSTS[getattr(request, "param", "Trainer")]) as nodes:
        yield nodes


def drawn_in(epoch: int, reports: list[dict[str, Any]]) -> list[int]:
    """The samples of an epoch that nodes reported."""
    return [sample for each in reports if each.get("epoch") == epoch for sample in each.get("drawn", ())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "tokens"), [("Trainer", False), ("Trainer", True), ("Fabric", False)], indirect=["nodes"]
)
def test_node_that_joins_takes_progress_and_its_share_of_samples(nodes: Nodes, tokens: bool, tmp_path: Path) -> None:
    size, options = SAMPLES, dict(OPTIONS)
    if tokens:
        size, options = 512, {**options, "tokens": str(tmp_path / "ids.bin"), "epochs": 1000}
        np.append(np.arange(size).repeat(8), 0).astype(np.uint16).tofile(tmp_path / "ids.bin")
        (tmp_path / "ids.json").write_text('{"dtype": "uint16", "vocab_size": 512}')
    for name in "ab":
        nodes.start(name, folder=str(tmp_path / name), **options)
    begun = nodes.wait_for("b", of(2))["number"]
    nodes.kill("b")
    alone = nodes.wait_for("a", lambda report: report.get("nodes") == 1 and report["number"] > begun)
    nodes.start("b", folder=str(tmp_path / "without a checkpoint"), **options)
    back = nodes.wait_for("b", of(2, alone["number"]))
    assert back["step"] > alone["step"]
    assert tokens or back["lr"] == pytest.approx(0.01 * 0.99 ** back["schedule_steps"])
    for name in "ba":  # node b is ahead by the samples that node a may draw before the new assignment
        nodes.wait_for(name, lambda report: report.get("epoch", 0) > back["epoch"] + 1)
    end(nodes, "ab")
    tokens_of(nodes, "ab")
    assert "has drawn more samples" not in nodes.output("a") + nodes.output("b")
    reports = [*nodes.reports("a"), *nodes.reports("b")]
    for epoch in range(max(each.get("epoch", 0) for each in reports) + 1):
        drawn = drawn_in(epoch, reports)
        assert len(drawn) == len(set(drawn))
        assert len(drawn) == size or epoch != back["epoch"] + 1


@pytest.mark.slow
@each_host
def test_node_that_joins_draws_no_sample_twice_with_a_limit_of_batches(nodes: Nodes, tmp_path: Path) -> None:
    """Each epoch leaves out samples, so nodes jump to the next epoch, several times per second."""
    options: dict[str, Any] = {**OPTIONS, "limit": 3}
    for name in "ab":
        nodes.start(name, folder=str(tmp_path / name), **options)
    for times in range(3):
        begun = nodes.wait_for("b", of(2))
        nodes.wait_for("a", lambda report, begun=begun: report.get("epoch", 0) > begun["epoch"] + 2)
        nodes.kill("b")
        nodes.wait_for("a", of(1, begun["number"]))
        nodes.start("b", folder=str(tmp_path / f"{times}"), **options)
    last = nodes.wait_for("b", of(2, begun["number"]))["epoch"]
    nodes.wait_for("b", lambda report: report.get("epoch", 0) > last + 2)
    end(nodes, "ab")
    tokens_of(nodes, "ab")
    assert "has drawn more samples" not in nodes.output("a") + nodes.output("b")
    reports = [*nodes.reports("a"), *nodes.reports("b")]
    for epoch in range(last + 2):
        drawn = drawn_in(epoch, reports)
        assert len(set(drawn)) == len(drawn)
    of_a = [drawn_in(epoch, nodes.reports("a")) for epoch in range(last + 2)]
    first, *later = dropwhile(lambda drawn: not drawn, of_a)
    assert len(first) <= 3 * BATCH, "node a may have joined in this epoch, if node b began the run"
    assert {len(drawn) for drawn in later} == {3 * BATCH}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"samples": SAMPLES - 1}, "this node has 1023 samples per epoch, but the training nodes have 1024"),
        ({"seed": 1}, "this node has another order of samples in epoch"),
    ],
    ids=["other size", "other seed"],
)
def test_node_with_other_data_is_refused(nodes: Nodes, tmp_path: Path, other: dict[str, Any], error: str) -> None:
    """The first node has a name that comes last."""
    nodes.start("b", folder=str(tmp_path / "b"), **OPTIONS)
    nodes.wait_for("b", lambda report: report.get("step", 0) > 5)
    nodes.start("a", folder=str(tmp_path / "a"), **OPTIONS, **other)
    nodes.join("a", code=1)
    assert error in nodes.output("a")
    number = nodes.reports("b")[-1]["number"]
    nodes.wait_for("b", of(1, number + 5))
    end(nodes, "b")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "step", "every"),
    [("Trainer", 12, 5), ("Trainer", 35, 32), ("Fabric", 45, 10)],
    indirect=["nodes"],
    ids=["Trainer, first epoch", "Trainer, saved after the last batch", "Fabric, second epoch"],
)
def test_job_that_was_killed_resumes_on_two_nodes(nodes: Nodes, tmp_path: Path, step: int, every: int) -> None:
    options: dict[str, Any] = {**OPTIONS, "folder": str(tmp_path), "every": every}
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
    if ELASTIC_KEY in saved:
        again = torch.load(tmp_path / "last.ckpt", weights_only=False)
        assert again[ELASTIC_KEY][3] == saved[ELASTIC_KEY][3] != "", "the name of the run"
    trained = drawn_in(saved["epoch"], [each for each in before if each.get("step", 0) <= saved["global_step"]])
    resumed = [*nodes.reports("a")[len(before) :], *nodes.reports("b")]
    after = drawn_in(saved["epoch"], resumed)
    assert len({*trained, *after}) == len(trained) + len(after) >= SAMPLES - 3 * BATCH, (
        "drawn, but not saved as trained"
    )
    following = drawn_in(saved["epoch"] + 1, resumed)
    assert len(set(following)) == len(following) >= SAMPLES - 3 * BATCH


@pytest.mark.slow
@each_host
def test_node_without_a_lighthouse_saves_its_own_weights_and_two_nodes_resume(nodes: Nodes, tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "folder": str(tmp_path), "every": 5}
    nodes.start("a", **options)
    begun = nodes.wait_for("a", lambda report: report.get("step", 0) > 10)["step"]
    nodes.darken()
    nodes.wait_for("a", lambda report: report.get("step", 0) > begun + 45)
    nodes.kill("a")
    dark = [each for each in nodes.reports("a") if each.get("step", 0) > begun + 20]
    assert len({each["digest"] for each in dark}) == len({each["token"] for each in dark}) == len(dark) > 10
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["global_step"] > begun + 20
    assert saved[ELASTIC_KEY][1] == dark[0]["number"]
    assert saved[ELASTIC_KEY][0] not in {each.get("token") for each in nodes.reports("a")}, "a version of its own"
    nodes.light()
    for name in "ab":
        nodes.start(name, **options)
    first = nodes.wait_for("b", of(2))
    assert first["step"] > saved["global_step"]
    end(nodes, "ab")
    tokens_of(nodes, "ab")


def saves_in_batches(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """Run a node that saves a file in each batch."""
    folder = Path(options["folder"])

    def save(toy: Toy, _: Any) -> None:
        toy.trainer.save_checkpoint(folder / f"{toy.trainer.global_step}.ckpt")

    Toy.on_before_optimizer_step = save  # type: ignore[assignment]
    train(name, lighthouse, options)


@pytest.mark.slow
def test_files_that_a_node_without_a_lighthouse_saves_in_batches_have_versions_of_their_own(
    nodes: Nodes, tmp_path: Path
) -> None:
    nodes.start("a", saves_in_batches, folder=str(tmp_path), **OPTIONS)
    begun = nodes.wait_for("a", lambda report: report.get("step", 0) > 5)["step"]
    nodes.darken()
    nodes.wait_for("a", lambda report: report.get("step", 0) > begun + 35)
    nodes.kill("a")
    versions: dict[str, Any] = {}
    for step in range(begun + 20, begun + 30):
        saved = torch.load(tmp_path / f"{step}.ckpt", weights_only=False)
        weights = torch.cat([each.flatten() for each in saved["state_dict"].values()])
        versions[saved[ELASTIC_KEY][0]] = weights
    assert len(versions) == 10
    assert len({each.numpy().tobytes() for each in versions.values()}) == 10


@pytest.fixture(scope="module")
def saved_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a job of one node and 12 steps."""
    folder = tmp_path_factory.mktemp("saved")
    with nodes_of(train) as nodes:
        nodes.start("a", steps=12, folder=str(folder), **OPTIONS)
        nodes.join("a")
    return folder / "last.ckpt"


@pytest.mark.slow
@pytest.mark.parametrize("place", [SAMPLES - 1, SAMPLES + 7, 3 * SAMPLES], ids=["one left", "next begun", "none left"])
def test_job_resumes_where_other_nodes_drew_the_epoch(
    nodes: Nodes, saved_job: Path, tmp_path: Path, place: int
) -> None:
    """Another node had drawn the samples when the checkpoint was written. EarlyStopping needs a validation."""
    saved, epoch = torch.load(saved_job, weights_only=False), place // SAMPLES
    saved[ELASTIC_KEY][2] = place
    torch.save(saved, tmp_path / "last.ckpt")
    nodes.start("a", epochs=epoch + 2, stops_early=True, folder=str(tmp_path), **OPTIONS)
    nodes.join("a")
    after = [each for each in nodes.reports("a") if "drawn" in each]
    assert {each["epoch"] for each in after} == {epoch, epoch + 1}
    last = next(each for each in after if each["epoch"] == epoch + 1)
    assert last["lr"] == pytest.approx(0.01 * 0.99 ** (epoch + 1)), "the schedule steps with each epoch"
    drawn = drawn_in(epoch, after)
    assert len(set(drawn)) == len(drawn) == SAMPLES * (epoch + 1) - place


@pytest.mark.slow
def test_node_that_takes_over_writes_checkpoints_and_logs_that_old_checkpoints_stay(
    nodes: Nodes, tmp_path: Path
) -> None:
    for name in "ab":
        nodes.start(name, folder=str(tmp_path), **OPTIONS)
    begun = nodes.wait_for("b", of(2))["step"]
    step = nodes.wait_for("b", lambda report: report["step"] > begun + 10)["step"]  # a has saved since
    assert "writes checkpoints from now on" not in nodes.output("b")
    nodes.kill("a")
    alone = nodes.wait_for("b", lambda report: report["step"] > step and report["nodes"] == 1)["step"]
    nodes.wait_for("b", lambda report: report["step"] > alone + 20)  # b saves every 10 steps
    assert nodes.output("b").count(f"remove the writer's checkpoints in {tmp_path}") == 1
    end(nodes, "b")
    # ModelCheckpoint of b writes last-v1.ckpt if last.ckpt was there before its own first save.
    saved = [torch.load(each, weights_only=False)["global_step"] for each in tmp_path.glob("last*.ckpt")]
    assert max(saved) > step


@pytest.mark.slow
def test_node_trains_while_another_node_validates_longer_than_the_timeout(nodes: Nodes, tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "timeout": 2}
    nodes.start("a", folder=str(tmp_path / "a"), **options)
    nodes.start("b", folder=str(tmp_path / "b"), release=str(tmp_path / "release"), **options)
    begun = nodes.wait_for("b", lambda report: report.get("validates", False))["number"]
    trained = nodes.wait_for("a", lambda report: report["number"] > begun + 150)["number"]  # a step takes 20 ms or more
    (tmp_path / "release").touch()
    assert nodes.wait_for("b", lambda report: "step" in report)["number"] >= trained
    assert "has missed rounds" not in nodes.output("b")
    end(nodes, "ab")
    tokens_of(nodes, "ab")


def stopped_in_a_write(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    sys.stdout = sys.stderr = signaled_in_write(signal.SIGTERM, '"step": 5')
    train(name, lighthouse, options)


@pytest.mark.slow
def test_sigterm_in_the_write_of_a_line_stops_a_node(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start("a", stopped_in_a_write, folder=str(tmp_path), **OPTIONS)
    nodes.join("a")
    assert "received SIGTERM: this node stops after this batch" in nodes.output("a")


@pytest.mark.slow
def test_node_that_joins_keeps_the_weights_of_its_peers_whatever_its_hooks_set(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start("a", folder=str(tmp_path / "a"), begins_with=1.0, **OPTIONS)
    begun = nodes.wait_for("a", lambda report: report.get("step") == 2)
    assert begun["mean"] == pytest.approx(1.0, abs=0.1)  # at once: 10% of the weights would be 0.1
    nodes.start("b", folder=str(tmp_path / "b"), begins_with=50.0, **OPTIONS)
    both = nodes.wait_for("b", of(2))
    assert both["mean"] < 2.0
    assert "dropped the change because" in nodes.output("b")
    end(nodes, "ab")


@pytest.mark.slow
def test_node_that_joins_restores_the_states_of_module_data_and_averages(nodes: Nodes) -> None:
    nodes.start("a", train_with_states, **OPTIONS)
    nodes.wait_for("a", lambda report: report.get("step", 0) > 20)
    nodes.start("b", train_with_states, **OPTIONS)
    nodes.wait_for("b", of(2))
    saved = [each["saved"] for each in nodes.reports("a") if "saved" in each]
    (begun,) = [each["begun"] for each in nodes.reports("b") if "begun" in each]
    assert begun[0] > 20
    assert begun in saved
    assert "WARNING" not in nodes.output("b")  # the callback has loaded weights, too, which is no change
    end(nodes, "ab")


@pytest.mark.slow
def test_hook_that_refuses_the_state_of_the_others_ends_the_node(nodes: Nodes) -> None:
    """In a notebook, the process continues. It must send no more heartbeats, or the others would wait for it."""
    nodes.start("a", train_with_states, **OPTIONS)
    nodes.wait_for("a", lambda report: report.get("step", 0) > 5)
    nodes.start("b", train_with_states, refuses=True, **OPTIONS)
    nodes.join("b")
    last = nodes.reports("b")[-1]
    assert last["refused"] == "this state is not for me"
    assert "lightning_sparse" not in last["threads"]
    end(nodes, "a")


@pytest.mark.slow
def test_batch_of_nan_leaves_weights_and_batch_norm_statistics_finite(nodes: Nodes) -> None:
    nodes.start("a", train_with_states, breaks_at=10, **OPTIONS)
    nodes.wait_for("a", lambda report: report.get("batches", 0) > 20)
    finite = {each["batches"]: each["finite"] for each in nodes.reports("a") if "batches" in each}
    assert not finite[11], "this batch was NaN"
    assert finite[20]
    end(nodes, "a")


def start_node(nodes: Nodes, name: str, folder: Path, entry: Main | None = None, **options: Any) -> None:
    """Start a node of two devices, as the processes name0 and name1."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    for device in range(2):
        place = {**env, "LOCAL_RANK": str(device), "RANK": str(device)}
        nodes.start(f"{name}{device}", entry, devices=2, env=place, node=name, folder=str(folder), **OPTIONS, **options)


@pytest.mark.slow
@each_host
@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_nodes_of_two_devices_continue_after_a_node_dies_and_rejoins(
    nodes: Nodes, fsdp: bool, optimizers: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"flush_every": 4, "fsdp": fsdp, "optimizers": optimizers}
    for name in "ab":
        start_node(nodes, name, tmp_path / name, **options)
    begun = nodes.wait_for("b0", of(2))
    nodes.wait_for("a0", of(2, begun["number"] + 10))
    for device in range(2):
        nodes.kill(f"b{device}")
    alone = nodes.wait_for("a0", lambda report: report.get("nodes") == 1 and report["epoch"] > begun["epoch"] + 1)
    start_node(nodes, "b", tmp_path / "again", **options)
    back = nodes.wait_for("b0", of(2, alone["number"]))
    assert back["step"] > alone["step"]
    nodes.wait_for("a0", of(2, back["number"] + 25))  # the nodes may miss some of these rounds
    nodes.send("b1", signal.SIGTERM)  # one device of the node
    nodes.join("b0", "b1")
    nodes.wait_for("a0", of(1, back["number"]))
    output = nodes.output("b0") + nodes.output("b1")
    assert "are not sent" not in output
    assert "has drawn more samples" not in output
    tokens = tokens_of(nodes, ("a0", "b0"))
    assert len(set(tokens["a0"]) & set(tokens["b0"])) > 10
    assert all(each.get("alike", True) for name in ("a0", "b0") for each in nodes.reports(name))


@pytest.mark.slow
def test_devices_of_a_node_end_the_epoch_together_even_if_one_has_fewer_batches(nodes: Nodes, tmp_path: Path) -> None:
    """They have drawn by different assignments if the node has missed rounds."""
    start_node(nodes, "a", tmp_path, fsdp=True, short=True, epochs=3)
    nodes.join("a0", "a1")
    steps = [each["step"] for each in nodes.reports("a0")]
    assert steps[-1] == 3 * (3 * SAMPLES // 4 // 2 // BATCH)


@pytest.mark.slow
@each_host
def test_killed_fsdp_job_resumes_on_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """Both nodes load the folder that the devices of the first node have written."""
    start_node(nodes, "a", tmp_path, fsdp=True, every=5)
    nodes.wait_for("a0", lambda report: report.get("step", 0) > 42)
    for device in range(2):
        nodes.kill(f"a{device}")
    assert (tmp_path / "last.ckpt").is_dir()
    before = nodes.reports("a0")
    for name in "ab":
        start_node(nodes, name, tmp_path, fsdp=True, every=10**6)
    first = nodes.wait_for("b0", of(2))
    assert first["step"] > 35
    nodes.wait_for("a0", of(2, first["number"] + 10))
    after = nodes.reports("a0")[len(before) :]
    saved = max(each["number"] for each in before if each.get("step", 0) % 5 == 0 and each["step"] <= 45)
    assert 0 < after[0]["number"] - saved < 15
    assert {each["digest"] for each in after}.isdisjoint({before[0]["digest"]})
    tokens_of(nodes, ("a0", "b0"))


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
def test_nodes_train_a_backbone_later_and_a_node_joins_after_that(nodes: Nodes, fsdp: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"unfreezes_at": 2, "fsdp": fsdp}
    for name in "ab":
        start_node(nodes, name, tmp_path / name, **options)
    begun = nodes.wait_for("b0", lambda report: report.get("nodes") == 2 and report.get("epoch", 0) > 3)["number"]
    for device in range(2):
        nodes.kill(f"b{device}")
    nodes.wait_for("a0", of(1, begun))
    start_node(nodes, "b", tmp_path / "again", **options)
    back = nodes.wait_for("b0", of(2, begun))
    # ``BackboneFinetuning`` stores the groups of its first epoch.
    assert back["lr"] == pytest.approx(0.01 * 0.99 ** back["schedule_steps"])
    nodes.wait_for("a0", of(2, back["number"] + 10))
    end(nodes, ("a0", "a1", "b0", "b1"))  # type: ignore[arg-type]
    assert nodes.output("a0").count("waits until the other nodes do the same") == 1
    assert nodes.output("b0").count("adds or unfreezes the parameters that the other nodes already train") == 1
    tokens = tokens_of(nodes, ("a0", "b0"))
    assert len(set(tokens["a0"]) & set(tokens["b0"])) > 20


@pytest.mark.slow
def test_node_that_trains_a_backbone_while_there_is_no_lighthouse_waits_for_it(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start("a", unfreezes_at=1, folder=str(tmp_path), **{**OPTIONS, "timeout": 0.5})
    nodes.wait_for("a", lambda report: report.get("step", 0) > 1)
    nodes.darken()
    until = time.monotonic() + 60
    while "the lighthouse sends no list of nodes. If it has ended, start it again" not in nodes.output("a"):
        assert time.monotonic() < until, nodes.output("a")[-2000:]
        time.sleep(0.1)
    nodes.light()
    nodes.wait_for("a", lambda report: report.get("epoch", 0) > 1)
    end(nodes, "a")


def dies_in_a_save(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """A device of the first node is killed while it writes the files of a checkpoint."""
    save, write_data, folder = torch.save, FileSystemWriter.write_data, Path(options["folder"])

    def kill_if_armed() -> None:
        if (folder / "armed").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def saved(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        if isinstance(args[0], dict) and "state_dict" in args[0]:
            kill_if_armed()

    def written(*args: Any, **kwargs: Any) -> Any:
        output = write_data(*args, **kwargs)
        kill_if_armed()
        return output

    torch.save, FileSystemWriter.write_data = saved, written  # type: ignore[method-assign]
    train(name, lighthouse, options)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
def test_node_that_dies_in_a_save_leaves_a_readable_checkpoint(nodes: Nodes, fsdp: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"fsdp": fsdp, "every": 10}
    start_node(nodes, "a", tmp_path, dies_in_a_save, **options)
    nodes.wait_for("a0", lambda report: report.get("step", 0) > 12)
    start_node(nodes, "b", tmp_path / "b", **options)
    begun = nodes.wait_for("b0", of(2))
    (tmp_path / "armed").touch()
    nodes.wait_for_death(["a0", "a1"])
    for device in range(2):
        nodes.kill(f"a{device}")
    (tmp_path / "armed").unlink()
    alone = nodes.wait_for("b0", of(1, begun["number"]))
    start_node(nodes, "a", tmp_path, **options)
    back = nodes.wait_for("a0", of(2, alone["number"]))
    nodes.wait_for("b0", of(2, back["number"] + 5))
    end(nodes, ("a0", "a1", "b0", "b1"))  # type: ignore[arg-type]
    tokens_of(nodes, ("a0", "b0"))
    # the job also resumes from the file alone
    start_node(nodes, "c", tmp_path, steps=back["step"] + 1000, **options)
    assert nodes.wait_for("c0", lambda report: "step" in report)["step"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"frozen": True}, {"optimizers": 2}], ids=str)
def test_file_of_nodes_without_shards_resumes_with_fsdp(nodes: Nodes, more: dict[str, Any], tmp_path: Path) -> None:
    nodes.start("a", folder=str(tmp_path), steps=20, **more, **OPTIONS)
    nodes.join("a")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    moments = [value["exp_avg"].norm() for value in saved["optimizer_states"][0]["state"].values()]
    start_node(nodes, "b", tmp_path, fsdp=True, steps=30, every=10**6, **more)
    nodes.join("b0", "b1")
    (begins,) = re.findall(r"moments (\[.*\])", nodes.output("b0"))
    assert json.loads(begins) == pytest.approx([float(each) for each in moments], rel=1e-5)
    assert nodes.reports("b0")[-1]["step"] >= 30


# -- without other nodes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with nodes_of(two_runs) as nodes:
        nodes.start("a", folder=str(tmp_path_factory.mktemp("runs")))
        nodes.join("a")
        return nodes.reports("a")


def test_fabric_run_that_loads_weights_alone_draws_all_samples(runs: list[dict[str, Any]]) -> None:
    for run in runs[:2]:
        assert sorted(run["drawn"]) == list(range(64))


def test_fabric_saves_all_modules_as_of_one_round(runs: list[dict[str, Any]]) -> None:
    assert all(runs[0]["shown"])
    assert runs[0]["shown"]


def test_fabric_loaders_set_up_before_a_node_joins_have_their_own_order(runs: list[dict[str, Any]]) -> None:
    first, second = runs[2]["seeds"]
    assert first != second


def test_fabric_calls_with_wrong_arguments_are_refused(runs: list[dict[str, Any]]) -> None:
    says = [
        "shard_loader() of a DataLoader that cannot draw assigned samples. Use torch's DataLoader with sampler=Elastic",
        "batches=0 must be",
        "sync_state() of folder=PosixPath",
        "the other nodes share ['epoch'], but this node does not. Call fabric.strategy.sync_state(state)",
    ]
    for begin, refused in zip(says, runs[0]["refused"], strict=True):
        assert refused.startswith(begin)


def test_fabric_calls_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    strategy = lightning_fabric.MSTopKElasticStrategy(lighthouse="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="no optimizer is set up"):
        strategy.sync_state({})
    loader = DataLoader(range(8), sampler=ElasticSampler(range(8)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shard_loader\(loader\)"):
        strategy.process_dataloader(loader)
    strategy.engines.append(object())
    with pytest.raises(ValueError, match="after the node has joined the others with its other optimizers"):
        strategy.setup_optimizer(torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    with pytest.raises(ValueError, match="has joined other nodes"):
        strategy.load_checkpoint(tmp_path / "any.ckpt", {})


def test_world_of_several_nodes_is_refused() -> None:
    strategy = lightning_fabric.MSTopKElasticStrategy(lighthouse="http://127.0.0.1:1")
    fabric: Any = Fabric(accelerator="cpu", devices=1, num_nodes=2, strategy=strategy)
    with pytest.raises(ValueError, match="num_nodes=2: each elastic node is a run of its own"):
        fabric.launch()


def test_node_that_starts_before_the_lighthouse_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torchft.coordination import LighthouseServer

    monkeypatch.setattr(lighthouse, "ANSWER_SECONDS", 0.1)
    caplog.set_level("INFO")
    port, connected = free_port(), Future[Lighthouse]()

    def connect() -> None:
        connected.set_result(Lighthouse(f"127.0.0.1:{port}", "a", timeout=1))

    threading.Thread(target=connect, daemon=True).start()
    while "waiting up to 60 s for it" not in caplog.text:
        time.sleep(0.01)
    server = LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=1)
    connected.result(100).leave()
    server.shutdown()


def test_missing_lighthouse_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lighthouse, "START_SECONDS", 0.5)
    with socket.socket() as held:  # no other test's lighthouse gets the port
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(
            ValueError, match=f"no lighthouse answers at .*{address}.*Start a lighthouse.*torchft_light"
        ):
            Lighthouse(address, "a", timeout=1)


def test_address_of_another_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lighthouse, "START_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:  # it accepts connections, and answers nothing
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"no lighthouse answers at .*{address}.*correct the address"):
            Lighthouse(address, "a", timeout=1)


@pytest.mark.parametrize(
    ("option", "value"), [("exchange", "regional"), ("min_nodes", 0), ("flush_every", 0), ("timeout", -1)]
)
def test_bad_option_is_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        MSTopKElasticStrategy(**{option: value})

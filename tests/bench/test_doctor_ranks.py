"""`lightning-sparse doctor` on ranks, and its look at the cache and at the environment."""

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
import torch

from lightning_sparse import cli
from lightning_sparse.cli import doctor, ranks
from lightning_sparse.cli.doctor import Finding, examine_cache
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.folders import cache_folder
from tests.helpers.distributed import run_ranks


def _doctor(*words: str) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = cli.main(["doctor", *words])
    return code, printed.getvalue()


def _doctor_of_another_torch() -> tuple[int, str]:
    if os.environ["RANK"] == "1":
        torch.__version__ = "2.11.0"  # type: ignore[misc]
    return _doctor("--json")


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({}, False),
        ({"RANK": "0"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, True),
    ],
)
def test_launchers_are_recognised(environment: dict[str, str], launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks.launched() == launched


def test_ranks_that_cannot_meet_are_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": ""}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"MASTER_ADDR, MASTER_PORT is not set.*torchrun"):
        ranks.join()


def test_on_two_nodes_it_measures_the_network_and_rank_0_alone_speaks() -> None:
    (code, said), (other_code, nothing) = run_ranks(_doctor, nodes=2, devices=1, init=False)
    assert code == other_code == 0, said
    assert nothing == ""
    lines = {line[5:].split("  ")[0].strip(): line for line in said.splitlines()}
    assert "2 node(s) x 1 device(s): hierarchical reduction, gloo" in lines["topology"]
    assert "Gbit/s per node" in lines["between nodes"]
    assert "inside a node" not in lines, "one device has nobody to talk to"
    assert "exchange='auto' chooses" in lines["25 MiB bucket at 1 %"]
    assert len(lines) < 30, "one screen"


def test_ranks_that_do_not_fit_together_are_bad() -> None:
    (code, said), (other_code, _) = run_ranks(_doctor_of_another_torch, nodes=1, devices=2, init=False)
    assert code == other_code == 1
    found = {each["subject"]: each for each in json.loads(said)}
    assert found["torch differs"]["status"] == "bad"
    assert found["torch differs"]["message"].endswith("2.11.0 on ranks 1")
    assert found["links"]["status"] == "note", "one node has no network between nodes"


# -- the cache ---------------------------------------------------------------------------------------------------------


def by_subject(cache_dir: Path) -> dict[str, Finding]:
    return {each.subject: each for each in examine_cache(str(cache_dir))}


def test_a_cache_that_is_not_there_yet(tmp_path: Path) -> None:
    found = by_subject(tmp_path / "new" / "cache")
    assert found["disk cache"].status in ("ok", "note")
    assert "the folder will be created" in found["disk cache"].message
    assert "cached" not in found
    assert not (tmp_path / "new").exists(), "looking makes nothing"


def test_what_is_cached_is_listed(tmp_path: Path) -> None:
    cache_folder(CacheConfig(source="/data/flowers", cache_dir=str(tmp_path)))
    assert by_subject(tmp_path)["cached"].message.startswith("/data/flowers: 0.00 GB, empty")
    old = tmp_path / "v0-0123456789abcdef"
    old.mkdir()
    (old / "cache.json").write_text(json.dumps({"source": "/data/old"}))
    marks = [each.status for each in examine_cache(str(tmp_path)) if each.subject == "cached"]
    assert sorted(marks) == ["note", "ok"]


def test_a_network_file_system_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "file_system", lambda _: "nfs4")
    assert by_subject(tmp_path)["disk cache"].status == "bad"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert by_subject(tmp_path / "file")["disk cache"].status == "bad"


# -- the environment ---------------------------------------------------------------------------------------------------


def test_settings_that_go_badly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", *doctor.SLOW_SETTINGS):
        monkeypatch.delenv(name, raising=False)
    assert list(doctor._settings()) == []
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert {each.subject: each.status for each in doctor._settings()} == {
        "NCCL_SOCKET_IFNAME": "bad",
        "CUDA_LAUNCH_BLOCKING": "note",
    }


def test_a_negated_interface_needs_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    assert "NCCL_SOCKET_IFNAME" not in {each.subject for each in doctor._settings()}

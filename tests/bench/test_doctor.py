"""`lightning-sparse doctor`: what it finds here and on ranks, and what it says of machines that lack something."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from lightning_sparse import cli
from lightning_sparse.cli import doctor
from lightning_sparse.cli.doctor import CheckResult, check_cache, report, run_checks
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.folders import cache_folder
from lightning_sparse.exchange.rates import Link, Rates
from lightning_sparse.topology import Topology
from tests.helpers.distributed import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def marks(findings: list[CheckResult]) -> dict[str, str]:
    return {each.subject: each.status for each in findings}


def said(findings: list[CheckResult], subject: str) -> str:
    return next(each.message for each in findings if each.subject == subject)


@pytest.mark.parametrize(("cast", "choice"), [(1e-9, "chooses dense16"), (1.0, "chooses dense: plain DDP is as fast")])
def test_what_is_said_of_a_network_is_what_auto_does(cast: float, choice: str) -> None:
    topology = Topology(((0,), (1,), (2,), (3,)), 0)
    rates = Rates(Link(0.0, 8e-9), Link(0.0, 0.0), select=1.0, cast=cast)
    assert doctor.check_paths(topology, rates).message.endswith(choice)


def test_the_command() -> None:
    without = {name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID")}
    command = [sys.executable, "-m", "lightning_sparse.cli", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env=without)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "strategies 'mstopk_hier', 'mstopk_local', 'mstopk_fsdp', 'mstopk_elastic' are registered" in done.stdout
    assert "torchrun ... --no-python lightning-sparse doctor" in done.stdout, "how to get the network part"
    assert len(done.stdout.splitlines()) < 25, "one screen"


def test_the_command_for_scripts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["doctor", "--json"]) == 0
    assert {each["status"] for each in json.loads(capsys.readouterr().out)} <= {"ok", "note"}


def test_the_nodes_of_a_lighthouse(monkeypatch: pytest.MonkeyPatch) -> None:
    coordination = pytest.importorskip("torchft.coordination", reason="needs torchft")
    server = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    address = f"127.0.0.1:{urlsplit(server.address()).port}"
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
    assert said(run_checks(), "lighthouse") == f"{address}; nodes of its last quorum: none yet"
    client = coordination.LighthouseClient(f"http://{address}", timedelta(seconds=5))
    client.quorum("rack 7:abc", timeout=timedelta(seconds=5), step=1234)
    assert said(run_checks(), "lighthouse") == f"{address}; nodes of its last quorum: rack 7 (1,234 rounds)"
    server.shutdown()


def test_a_lighthouse_that_does_not_answer_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"127.0.0.1:{probe.getsockname()[1]}")
        (found,) = [each for each in run_checks() if each.subject == "lighthouse"]
    assert found.status == "bad"
    assert "start one there with `torchft_lighthouse" in found.message


def test_an_address_that_is_none_or_of_another_service_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            with other.accept()[0] as peer:
                peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                peer.recv(1024)

        threading.Thread(target=greet, daemon=True).start()
        for address in (f"127.0.0.1:{other.getsockname()[1]}", "http://head:port", "http://"):
            monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
            (found,) = doctor.check_lighthouse()
            assert found.status == "bad", address


def test_each_line_has_its_mark_subject_and_text() -> None:
    lines = report([CheckResult("ok", "a", "fine"), CheckResult("bad", "longer", "broken")]).splitlines()
    assert lines == ["ok   a       fine", "bad  longer  broken"]


def test_an_old_torch_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    found = run_checks()
    assert marks(found)["torch"] == "bad"
    assert "needs 2.11" in said(found, "torch")


def test_without_lightning_and_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    found = run_checks()
    assert marks(found)["lightning"] == "bad"
    assert all(marks(found).get(name) == "note" for name, (extra, _) in doctor.EXTRAS.items() if extra != "dali")
    assert ("nvidia-dali-cuda130" in marks(found)) == torch.cuda.is_available()
    assert "pip install lmdb" in said(found, "lmdb")


def test_a_package_that_breaks_on_import_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    found = run_checks()
    for package in doctor.IMPORT_FIXES:
        if doctor._version(package) is not None:
            assert "bad" in [each.status for each in found if each.subject == package]
    assert marks(found)["lightning"] == "bad"


@pytest.mark.slow
def test_kernels_that_were_not_compiled_are_told_with_the_reason() -> None:
    code = "from lightning_sparse.cli.doctor import *; print(report(run_checks()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "LIGHTNING_SPARSE_KERNELS": "torch"},
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if "CPU kernels" in line)
    assert line.startswith("note")
    assert "LIGHTNING_SPARSE_KERNELS" in line


def test_little_shared_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 64 << 20

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage)
    found = run_checks()
    assert marks(found)["shared memory"] == "note"
    assert "--shm-size" in said(found, "shared memory")


# -- on ranks ----------------------------------------------------------------------------------------------------------


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
    assert doctor.is_launched() == launched


def test_ranks_that_cannot_meet_are_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": ""}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"MASTER_ADDR, MASTER_PORT is not set.*torchrun"):
        doctor.join_ranks()


def test_on_two_nodes_it_measures_the_network_and_rank_0_alone_speaks() -> None:
    (code, said), (other_code, nothing) = run_ranks(_doctor, nodes=2, devices=1, init=False)
    assert code == other_code == 0, said
    assert nothing == ""
    lines = {line[5:].split("  ")[0].strip(): line for line in said.splitlines()}
    assert "2 node(s) x 1 device(s): reduces inside each node, then between nodes, gloo" in lines["topology"]
    assert "Gbit/s per node" in lines["between nodes"]
    assert "inside a node" not in lines, "one device has nobody to talk to"
    assert "exchange='auto' chooses" in lines["25 MiB bucket at 1%"]
    assert len(lines) < 30, "one screen"


def test_ranks_that_do_not_fit_together_are_bad() -> None:
    (code, said), (other_code, _) = run_ranks(_doctor_of_another_torch, nodes=1, devices=2, init=False)
    assert code == other_code == 1
    found = {each["subject"]: each for each in json.loads(said)}
    assert found["torch differs"]["status"] == "bad"
    assert found["torch differs"]["message"].endswith("2.11.0 on ranks 1")
    assert found["links"]["status"] == "note", "one node has no network between nodes"


# -- the cache ---------------------------------------------------------------------------------------------------------


def by_subject(cache_dir: Path) -> dict[str, CheckResult]:
    return {each.subject: each for each in check_cache(str(cache_dir))}


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
    marks = [each.status for each in check_cache(str(tmp_path)) if each.subject == "cached"]
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
    assert list(doctor.check_environment()) == []
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert {each.subject: each.status for each in doctor.check_environment()} == {
        "NCCL_SOCKET_IFNAME": "bad",
        "CUDA_LAUNCH_BLOCKING": "note",
    }


def test_a_negated_interface_needs_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    assert "NCCL_SOCKET_IFNAME" not in {each.subject for each in doctor.check_environment()}

"""`lightning-sparse doctor` on this machine, on ranks, and on machines with faults."""

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
from lightning_sparse._autoload import CLASSES
from lightning_sparse.cli import doctor
from lightning_sparse.cli.doctor import CheckResult, check_cache, report, run_checks
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.folders import cache_folder
from lightning_sparse.exchange.rates import Link, Rates
from lightning_sparse.topology import Topology
from tests.helpers.distributed import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def result_of(findings: list[CheckResult], subject: str) -> CheckResult:
    return next(each for each in findings if each.subject == subject)


@pytest.mark.parametrize(("cast", "choice"), [(1e-9, "chooses dense16"), (1.0, "chooses dense: plain DDP is as fast")])
def test_path_check_names_the_choice_of_auto(cast: float, choice: str) -> None:
    topology = Topology(((0,), (1,), (2,), (3,)), 0)
    rates = Rates(Link(0.0, 8e-9), Link(0.0, 0.0), select=1.0, cast=cast)
    assert doctor.check_paths(topology, rates).message.endswith(choice)


@pytest.fixture
def not_launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_doctor_prints_at_most_one_screen(not_launched: pytest.MonkeyPatch) -> None:
    """Without compiled kernels, it names the reason."""
    not_launched.setenv("LIGHTNING_SPARSE_KERNELS", "torch")
    command = [sys.executable, "-m", "lightning_sparse.cli", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"strategies {', '.join(map(repr, CLASSES))} are registered" in done.stdout
    assert "torchrun ... --no-python lightning-sparse doctor" in done.stdout, "the command for the network part"
    assert len(done.stdout.splitlines()) < 25
    kernels = next(line for line in done.stdout.splitlines() if "CPU kernels" in line)
    assert kernels.startswith("note")
    assert "LIGHTNING_SPARSE_KERNELS" in kernels


def test_command_prints_json(not_launched: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    assert {each["status"] for each in json.loads(capsys.readouterr().out)} <= {"ok", "note"}


def test_doctor_lines_have_status_subject_and_message() -> None:
    lines = report([CheckResult("ok", "a", "fine"), CheckResult("bad", "longer", "broken")]).splitlines()
    assert lines == ["ok   a       fine", "bad  longer  broken"]


# -- faults ------------------------------------------------------------------------------------------------------------


def test_lighthouse_is_shown_with_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    coordination = pytest.importorskip("torchft.coordination", reason="needs torchft")
    server = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    address = f"127.0.0.1:{urlsplit(server.address()).port}"
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
    (empty,) = doctor.check_lighthouse()
    assert empty.message == f"{address}; nodes of its last quorum: none yet"
    client = coordination.LighthouseClient(f"http://{address}", timedelta(seconds=5))
    client.quorum("rack 7:abc", timeout=timedelta(seconds=5), step=1234)
    found = result_of(run_checks(), "lighthouse")
    assert found.message == f"{address}; nodes of its last quorum: rack 7 (1,234 rounds)"
    server.shutdown()


def test_address_without_a_lighthouse_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server listens, another service answers, or the address is invalid."""
    with socket.socket() as unused, socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            with other.accept()[0] as peer:
                peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                peer.recv(1024)

        unused.bind(("127.0.0.1", 0))
        threading.Thread(target=greet, daemon=True).start()
        ports = [each.getsockname()[1] for each in (unused, other)]
        for address in (*(f"127.0.0.1:{port}" for port in ports), "http://head:port", "http://"):
            monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
            (found,) = doctor.check_lighthouse()
            assert found.status == "bad", address
            assert str(ports[0]) not in address or "torchft_lighthouse" in found.message


def test_old_torch_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    found = result_of(run_checks(), "torch")
    assert found.status == "bad"
    assert "needs 2.11" in found.message


def test_missing_lightning_is_bad_and_missing_extras_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    found = run_checks()
    assert result_of(found, "lightning").status == "bad"
    extras = [name for name, (extra, _) in doctor.EXTRAS.items() if extra != "dali"]
    assert {result_of(found, name).status for name in extras} == {"note"}
    assert ("nvidia-dali-cuda130" in {each.subject for each in found}) == torch.cuda.is_available()
    assert "pip install lmdb" in result_of(found, "lmdb").message


def test_package_that_breaks_on_import_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    found = run_checks()
    for package in doctor.IMPORT_FIXES:
        if doctor._version(package) is not None:
            assert "bad" in [each.status for each in found if each.subject == package]
    assert result_of(found, "lightning").status == "bad"


def test_little_shared_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 64 << 20

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage)
    found = result_of(run_checks(), "shared memory")
    assert found.status == "note"
    assert "--shm-size" in found.message


def test_bad_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", *doctor.SLOW_SETTINGS):
        monkeypatch.delenv(name, raising=False)
    assert list(doctor.check_environment()) == []
    settings = {"NCCL_SOCKET_IFNAME": "nosuch0", "GLOO_SOCKET_IFNAME": "lo", "CUDA_LAUNCH_BLOCKING": "1"}
    for name, value in {**settings, "NCCL_P2P_DISABLE": "0"}.items():
        monkeypatch.setenv(name, value)
    found = {each.subject: each.status for each in doctor.check_environment()}
    assert found == {"NCCL_SOCKET_IFNAME": "bad", "CUDA_LAUNCH_BLOCKING": "note"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    assert "NCCL_SOCKET_IFNAME" not in {each.subject for each in doctor.check_environment()}


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
def test_launcher_is_recognized(environment: dict[str, str], launched: bool, not_launched: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        not_launched.setenv(name, value)
    assert doctor.is_launched() == launched


def test_ranks_without_an_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": ""}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"MASTER_ADDR, MASTER_PORT is not set.*torchrun"):
        doctor.join_ranks()


@pytest.mark.parametrize(("gpus", "device"), [("0,0", "cuda:0"), (None, "cpu")])
def test_rank_in_lab_with_shared_gpus_joins_on_its_gpu(
    gpus: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    if gpus is not None:
        monkeypatch.setenv("LIGHTNING_SPARSE_LAB_GPUS", gpus)
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor.torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(doctor.dist, "init_process_group", lambda _: None)
    monkeypatch.setattr(doctor, "discover", lambda: None)
    assert str(doctor.join_ranks()[1]) == device


def test_two_nodes_measure_the_network_and_rank_0_prints() -> None:
    (code, said), (other_code, nothing) = run_ranks(_doctor, nodes=2, devices=1, init=False)
    assert code == other_code == 0, said
    assert nothing == ""
    lines = {line[5:].split("  ")[0].strip(): line for line in said.splitlines()}
    assert "2 node(s) x 1 device(s): reduces inside each node, then between nodes, gloo" in lines["topology"]
    assert "Gbit/s per node" in lines["between nodes"]
    assert "inside a node" not in lines, "each node has one device"
    assert "exchange='auto' chooses" in lines["25 MiB bucket at 1%"]
    assert len(lines) < 30


def test_ranks_with_different_torch_are_bad() -> None:
    (code, said), (other_code, _) = run_ranks(_doctor_of_another_torch, nodes=1, devices=2, init=False)
    assert code == other_code == 1
    found = {each["subject"]: each for each in json.loads(said)}
    assert found["torch differs"]["status"] == "bad"
    assert found["torch differs"]["message"].endswith("2.11.0 on ranks 1")
    assert found["links"]["status"] == "note", "one node has no network between nodes"


# -- the cache ---------------------------------------------------------------------------------------------------------


def by_subject(cache_dir: Path) -> dict[str, CheckResult]:
    return {each.subject: each for each in check_cache(str(cache_dir))}


def test_missing_cache_folder_is_not_created(tmp_path: Path) -> None:
    found = by_subject(tmp_path / "new" / "cache")
    assert found["disk cache"].status in ("ok", "note")
    assert "the folder will be created" in found["disk cache"].message
    assert "cached" not in found
    assert not (tmp_path / "new").exists()


def test_cached_sources_are_listed(tmp_path: Path) -> None:
    cache_folder(CacheConfig(source="/data/flowers", cache_dir=str(tmp_path)))
    assert by_subject(tmp_path)["cached"].message.startswith("/data/flowers: 0.00 GB, empty")
    old = tmp_path / "v0-0123456789abcdef"
    old.mkdir()
    (old / "cache.json").write_text(json.dumps({"source": "/data/old"}))
    statuses = [each.status for each in check_cache(str(tmp_path)) if each.subject == "cached"]
    assert sorted(statuses) == ["note", "ok"]


def test_network_file_system_or_file_as_cache_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert by_subject(tmp_path / "file")["disk cache"].status == "bad"
    monkeypatch.setattr(doctor, "file_system", lambda _: "nfs4")
    assert by_subject(tmp_path)["disk cache"].status == "bad"

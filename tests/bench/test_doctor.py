"""`lightning-sparse doctor`: what it finds here, and what it says of machines that lack something."""

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
from lightning_sparse.cli.doctor import Finding, examine, report
from lightning_sparse.exchange.rates import Link, Rates
from lightning_sparse.topology import Topology

ROOT = Path(__file__).resolve().parents[2]


def marks(findings: list[Finding]) -> dict[str, str]:
    return {each.subject: each.status for each in findings}


def said(findings: list[Finding], subject: str) -> str:
    return next(each.message for each in findings if each.subject == subject)


@pytest.mark.parametrize(("cast", "choice"), [(1e-9, "chooses dense16"), (1.0, "chooses dense: plain DDP is as fast")])
def test_what_is_said_of_a_network_is_what_auto_does(cast: float, choice: str) -> None:
    topology = Topology(((0,), (1,), (2,), (3,)), 0)
    rates = Rates(Link(0.0, 8e-9), Link(0.0, 0.0), select=1.0, cast=cast)
    assert doctor.advice(topology, rates).message.endswith(choice)


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
    assert said(examine(), "lighthouse") == f"{address}; nodes of its last quorum: none yet"
    client = coordination.LighthouseClient(f"http://{address}", timedelta(seconds=5))
    client.quorum("rack 7:abc", timeout=timedelta(seconds=5), step=1234)
    assert said(examine(), "lighthouse") == f"{address}; nodes of its last quorum: rack 7 (1,234 rounds)"
    server.shutdown()


def test_a_lighthouse_that_does_not_answer_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"127.0.0.1:{probe.getsockname()[1]}")
    (found,) = [each for each in examine() if each.subject == "lighthouse"]
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
            (found,) = doctor._lighthouse()
            assert found.status == "bad", address


def test_each_line_has_its_mark_subject_and_text() -> None:
    lines = report([Finding("ok", "a", "fine"), Finding("bad", "longer", "broken")]).splitlines()
    assert lines == ["ok   a       fine", "bad  longer  broken"]


def test_an_old_torch_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    found = examine()
    assert marks(found)["torch"] == "bad"
    assert "needs 2.11" in said(found, "torch")


def test_without_lightning_and_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    found = examine()
    assert marks(found)["lightning"] == "bad"
    assert {marks(found)[name] for name in doctor.EXTRAS} == {"note"}
    assert "pip install lmdb" in said(found, "lmdb")


def test_a_package_that_breaks_on_import_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    found = examine()
    for package in doctor.BUILT_FOR:
        if doctor._version(package) is not None:
            assert "bad" in [each.status for each in found if each.subject == package]
    assert marks(found)["lightning"] == "bad"


@pytest.mark.slow
def test_kernels_that_were_not_compiled_are_told_with_the_reason() -> None:
    code = "from lightning_sparse.cli.doctor import *; print(report(examine()))"
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
    found = examine()
    assert marks(found)["shared memory"] == "note"
    assert "--shm-size" in said(found, "shared memory")

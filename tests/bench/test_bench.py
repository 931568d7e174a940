"""`lightning-sparse bench`: the smallest sizes, real processes where ranks are needed; no assertion about time.

The order is by cost: rows, then files and pictures, then ranks, then a cluster that is played on this machine.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparse import cli
from lightning_sparse.bench import data, exchange, kernels, processes, report
from lightning_sparse.bench.processes import own_process
from tests.helpers.distributed import run_ranks

TINY: list[kernels.Case] = [(10_000, 0.01, "gaussian"), (10_000, 0.01, "layered")]
WAYS = {
    "no synchronisation",
    "hook that does nothing",
    "DDP",
    "2-D dense",
    "2-D dense, 16-bit",
    "ours 1 %",
    "ours 1 %, at once",
}
WAYS |= {"ours 1 %, taken apart", "ours 0.1 %", "regional 1 %", "auto 1 %", "updates 1 %"}


def test_kernels_are_timed_next_to_their_floors() -> None:
    more = {"nothing": lambda: None}
    rows = kernels.measure(TINY, "cpu", repeats=2, more=lambda x, k: more)
    names = [row["method"] for row in rows if row["distribution"] == "gaussian"]
    assert names[:9] == ["sum", "read", "copy", "add", "select", "compress", "round", "change", "write"]
    assert names[9] == "nothing"
    assert {row["repeats"] for row in rows} == {2}
    assert all(row["x sum"] == 1 for row in rows if row["method"] == "sum")


@pytest.mark.parametrize("name", sorted(kernels.DISTRIBUTIONS))
def test_distributions_have_the_length_that_is_asked_for(name: str) -> None:
    x = kernels.DISTRIBUTIONS[name](1000, torch.Generator().manual_seed(0))
    assert x.shape == (1000,)
    assert x.isfinite().all()


def test_kernels_command_writes_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "QUICK", TINY)
    assert cli.main(["bench", "kernels", "--quick", "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert "compress" in capsys.readouterr().out
    record = json.loads((tmp_path / "kernels.json").read_text())
    assert record["command"].startswith("lightning-sparse bench kernels --quick")
    assert {"date", "hardware", "versions", "commit", "threads", "kernels", "rows"} <= set(record)


def test_an_installed_copy_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lie inside a repository of the user's, whose commit says nothing."""
    monkeypatch.setattr(report, "HERE", tmp_path / "report.py")
    assert report.commit() == "unknown"


@pytest.mark.slow
def test_data_times_every_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = data.generated(tmp_path / "pictures", of_each=32)
    monkeypatch.setattr(data, "TIERS", ["storage", "memory decoded"])
    monkeypatch.setattr(data, "backends", lambda device: ["torch"])
    words = ["bench", "data", "--quick", "--pictures", str(pictures), "--out", str(tmp_path)]
    assert cli.main(words) == 0
    rows = {row["row"]: row for row in json.loads((tmp_path / "data.json").read_text())["rows"]}
    assert set(rows) == {"storage, torch", "memory decoded, torch"}
    assert rows["storage, torch"]["images"] == 64
    assert all(row["per_cpu_second"] > 0 for row in rows.values())


def test_pictures_that_are_no_image_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "data", "--pictures", str(tmp_path)]) == 2
    assert "no folder train/" in capsys.readouterr().err


def end(how: int) -> None:
    """As the kernel ends a process (a signal, below 0), or as a library that calls exit()."""
    os.kill(os.getpid(), -how) if how < 0 else os._exit(how)


@pytest.mark.parametrize(
    ("how", "said"), [(-signal.SIGKILL, "SIGKILL.*memory is short"), (-signal.SIGSEGV, "SIGSEGV"), (3, "status 3")]
)
def test_a_process_that_dies_is_named_with_how_it_ended(how: int, said: str) -> None:
    with own_process() as call, pytest.raises(RuntimeError, match=rf"process of the row 'x' \(pid \d+\).*{said}"):
        call("the row 'x'", end, how)


def test_a_process_serves_until_it_dies() -> None:
    with own_process() as call:
        assert call("a sum", sum, (1, 2)) == 3
        with pytest.raises(TypeError):  # the error of the work itself
            call("a sum", sum, 1)
        with pytest.raises(RuntimeError, match="process of the end .* SIGKILL"):
            call("the end", end, -signal.SIGKILL)


# -- ranks -------------------------------------------------------------------------------------------------------------


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
    assert processes.launched() == launched


def test_ranks_that_cannot_meet_are_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": ""}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"MASTER_ADDR, MASTER_PORT is not set.*torchrun"):
        processes.join()


def _exchange(folder: str) -> int:
    exchange.QUICK = [torch.Size((100, 10))] * 3
    exchange.SETTLING = 2
    return cli.main(["bench", "exchange", "--quick", "--out", folder])


@pytest.mark.parametrize(("nodes", "devices"), [pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)])
def test_exchange_on_the_ranks_it_is_started_on(tmp_path: Path, nodes: int, devices: int) -> None:
    assert run_ranks(_exchange, str(tmp_path), nodes=nodes, devices=devices, init=False) == [0] * nodes * devices
    record: dict[str, Any] = json.loads((tmp_path / "exchange.json").read_text())
    assert record["cluster"].startswith(f"{nodes} node(s) x {devices} device(s)")
    rows = {row["way"]: row for row in record["rows"]}
    assert set(rows) == WAYS | ({"flat top-k 1 %"} if devices > 1 else set())
    assert rows["no synchronisation"]["sync s"] == 0
    assert rows["ours 1 %, taken apart"]["compress s"] > 0
    assert rows["ours 1 %"]["received by a device, bytes, planned"] > 0
    assert rows["2-D dense"]["received by a device, bytes, planned"] == 4 * 3000 // devices
    assert rows["2-D dense, 16-bit"]["received by a device, bytes, planned"] == 2 * 3000 // devices


@pytest.mark.slow
def test_exchange_emulates_a_cluster_without_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("lightning_sparse.cli.bench.unavailable_reason", lambda: "this user is not root")
    assert cli.main(["bench", "exchange", "--quick", "--out", str(tmp_path)]) == 0
    said = capfd.readouterr()
    assert "note: cannot limit link rates (this user is not root)" in said.err
    assert "ours 1 %" in said.out
    record = json.loads((tmp_path / "exchange.json").read_text())
    assert "over loopback" in record["cluster"]


def _pto(folder: str) -> int:
    from lightning_sparse.bench import pto

    pto.shapes_of = lambda model: [torch.Size((30, 10)), torch.Size((10,))]  # type: ignore[assignment]
    return cli.main(["bench", "pto", "--quick", "--out", folder])


def test_pto_on_the_ranks_it_is_started_on(tmp_path: Path) -> None:
    assert run_ranks(_pto, str(tmp_path), nodes=2, devices=1, init=False) == [0, 0]
    rows = json.loads((tmp_path / "pto.json").read_text())["rows"]
    assert {row["optimizer"] for row in rows} == {"SGD", "AdamW"}
    found = {row["way"]: row for row in rows if row["optimizer"] == "AdamW"}
    assert set(found) == {"plain", "pto world", "pto compute", "pto auto", "pto node"}
    assert found["plain"]["faster"] == 1
    assert found["plain"]["parameters"] == 310
    assert found["pto world"]["shared"]
    assert found["pto world"]["state_MB"] < found["plain"]["state_MB"]

"""Each benchmark runs once with its smallest sizes."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import processes
from benchmarks.data import loaders, tiers
from benchmarks.exchange import gradients, join, kernels, pto
from lightning_sparse.topology import Topology
from tests.helpers.distributed import run_ranks

TINY: list[kernels.Case] = [(10_000, 0.01, "gaussian"), (10_000, 0.01, "layered")]


def test_kernels_record_names_command_commit_hardware_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "QUICK", TINY)
    monkeypatch.setattr(sys, "argv", ["kernels", str(tmp_path), "--quick", "--no-compile"])
    kernels.main()
    assert "mstopk 30" in capsys.readouterr().out
    record = json.loads((tmp_path / "kernels.json").read_text())
    assert {row["method"] for row in record["rows"]} >= {"sum", "select", "compress", "sum 4 2bit", "round"}
    assert record["command"].endswith(f"{tmp_path.name} --quick --no-compile"), "a path of this machine is recorded"
    assert {"date", "hardware", "versions", "commit", "threads", "kernels", "rows"} <= set(record)
    assert "argpartition" in (tmp_path / "kernels.md").read_text()


@pytest.mark.slow
def test_data_benchmark_times_each_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = loaders.generated(tmp_path / "images", of_each=32)
    monkeypatch.setattr(tiers, "TIERS", ("storage", "memory decoded"))
    monkeypatch.setattr(tiers, "has_dali", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tiers", str(tmp_path), str(images), "--quick"])
    tiers.main()
    rows = {row["row"]: row for row in json.loads((tmp_path / "data.json").read_text())["rows"]}
    assert set(rows) == {"storage, torch", "memory decoded, torch"}
    assert rows["storage, torch"]["images"] == 64
    assert all(row["per_cpu_second"] > 0 for row in rows.values())


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_join_benchmark_measures_both_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchft", reason="needs torchft")
    monkeypatch.setattr(sys, "argv", ["join", str(tmp_path), "--millions", "1"])
    join.main()
    rows = json.loads((tmp_path / "join.json").read_text())["rows"]
    assert [(row["node"], row["device"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for row in rows:
        assert 0 < row["joining"] < 2 * row["training"]
    joining = rows[2:]
    assert all(row["received"] > 12 * row["numel"] and row["seconds"] > 0 for row in joining)


# -- rows in a process of their own ------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_row_in_its_own_process_returns_raises_or_reports_its_exit() -> None:
    assert processes.alone("a sum", sum, (1, 2)) == 3
    with pytest.raises(TypeError):
        processes.alone("a sum", sum, 1)
    with pytest.raises(RuntimeError, match=r"process of the row 'x' \(pid \d+\).*SIGKILL.*memory is short"):
        processes.alone("the row 'x'", die)


# -- ranks -------------------------------------------------------------------------------------------------------------


def _benchmark(module: Any, *words: str) -> None:
    gradients.QUICK = [torch.Size((100, 10))] * 3
    gradients.SETTLING, gradients.BESIDE, gradients.MOST_REPEATS = 2, 3, 3
    pto.shapes_of = lambda model: [torch.Size((30, 10)), torch.Size((10,))]  # type: ignore[assignment]
    sys.argv = [module.__name__, *words, "--quick"]
    module.main()


def _gradients(folder: str) -> None:
    _benchmark(gradients, folder)


def _pto(folder: str) -> None:
    _benchmark(pto, folder)


def test_gradients_benchmark_runs_on_ranks(tmp_path: Path) -> None:
    run_ranks(_gradients, str(tmp_path), nodes=2, devices=2, init=False)
    rows = {row["way"]: row for row in json.loads((tmp_path / "exchange.json").read_text())["rows"]}
    theirs = {"DDP", "bf16 hook", "fp16 hook", "PowerSGD r1", "PowerSGD r4"}
    assert set(rows) == {gradients.NONE, gradients.NOTHING, *gradients.UPDATES, *gradients.OURS, *theirs}
    assert {row["cluster"] for row in rows.values()} == {"2x2"}
    assert rows[gradients.NONE]["sync s"] == 0
    planned = {way: row.get(f"received by {gradients.PLANNED}") for way, row in rows.items()}
    assert planned["ours 1 %"] > 0
    assert planned["2-D dense"] == 4 * 3000 // 2
    assert planned["2-D dense, 16-bit"] == 2 * 3000 // 2


def test_pto_benchmark_runs_on_ranks(tmp_path: Path) -> None:
    run_ranks(_pto, str(tmp_path), nodes=2, devices=1, init=False)
    rows = json.loads((tmp_path / "pto.json").read_text())["rows"]
    assert {row["optimizer"] for row in rows} == {"SGD", "AdamW"}
    found = {row["way"]: row for row in rows if row["optimizer"] == "AdamW"}
    assert set(found) == {"plain", "pto world", "pto compute", "pto auto", "pto node", "zero"}
    assert found["plain"]["faster"] == 1
    assert found["plain"]["parameters"] == 310
    assert found["pto world"]["shared"]
    assert found["pto world"]["state_MB"] < found["plain"]["state_MB"]


def place(topology: Topology, device: torch.device, gbps: float | None, word: str) -> list[dict[str, Any]]:
    """Return this rank's arguments and cluster."""
    processes.set_rate(10.0)
    return [{"said": word, "given": gbps, "ranks": topology.world_size, "node": topology.num_devices}]


@pytest.mark.parametrize("reason", [None, pytest.param("this user is not root", id="without root")])
@pytest.mark.slow
def test_benchmark_emulates_a_cluster(
    reason: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if reason is None and processes.unavailable_reason() is not None:
        pytest.skip("links cannot be shaped here")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(processes, "unavailable_reason", lambda: reason)
    (row,) = processes.on_clusters(place, "hello", clusters=["1x2"], gbps=[1.0]) or []
    rate = 1.0 if reason is None else None
    assert row == {"cluster": "1x2", "gbps": rate, "said": "hello", "given": rate, "ranks": 2, "node": 2}
    assert (reason is not None) == ("note: cannot limit link rates (this user is not root)" in capfd.readouterr().err)

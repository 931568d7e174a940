"""Verdicts of the parts of the GPU session that start real ranks. `test_gpu_session.py` runs the parts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import nccl, parity
from benchmarks.gpu.methods import COMPARED, DDP, EXACT, METHODS


def trainings(**changed: Any) -> list[dict[str, Any]]:
    """Return equal rows for all methods on the CPU and on a GPU, with these changes on the GPU."""
    rows: list[dict[str, Any]] = [
        {
            "device": device,
            "cluster": "2x2",
            "method": method,
            "losses": [2.0, 1.0],
            "equal weights": True,
            "like DDP": method in EXACT,
        }
        for device in ("cpu", "cuda")
        for method in COMPARED
    ]
    for row in rows:
        if row["device"] == "cuda" and row["method"] == changed.get("method"):
            row.update(changed)
    return rows


@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({}, set()),
        ({"method": "mstopk_local 1%", "equal weights": False}, {"ranks"}),
        ({"method": next(iter(EXACT)), "losses": [2.0, 1.00001]}, {"ddp"}),
        ({"method": "mstopk_local 1%", "losses": [2.0, 1.00001]}, set()),
        ({"method": "mstopk_local 1%", "losses": [2.02, 1.0]}, {"cpu"}),
        ({"method": "mstopk_local 1%", "losses": [2.0, float("nan")]}, {"cpu"}),
    ],
)
def test_parity_names_the_training_that_differs(changed: dict[str, Any], failed: set[str]) -> None:
    claims = parity.check(trainings(**changed))
    assert claims.keys() == parity.PARITY.claims.keys()
    assert {name for name, (verdict, _) in claims.items() if verdict != "held"} == failed
    assert all(changed["method"] in claims[name][1] for name in failed)


def test_parity_without_a_gpu_gives_no_verdict_on_it() -> None:
    rows = [row for row in trainings() if row["device"] == "cpu"]
    assert parity.check(rows)["cpu"][0] == "not run"


def times(**ms: float) -> list[dict[str, Any]]:
    """Return rows of all methods for 10 Gbit/s, 1 ms per step unless given by the first word of the method."""
    return [
        {"gbps": 10.0, "method": name, "ms": value, "lowest ms": value, "highest ms": value, "received bytes": 2e6}
        for name in METHODS
        for value in [ms.get(name.split()[0], 1.0)]
    ]


def test_step_time_verdicts_use_the_smallest_factor() -> None:
    claims = nccl.check(times(DDP=6.0, mstopk_hier=2.9, bf16=1.5))
    assert claims == {
        "ddp_10": ("held", f"mstopk_hier 1% is 2.07 times as fast as {DDP}"),
        "others_10": ("held", "mstopk_local 1% is 1.00 times as fast as PowerSGD r4"),
    }
    assert nccl.check(times(DDP=6.0, mstopk_hier=3.1))["ddp_10"][0] == "not held"
    assert nccl.check(times(mstopk_local=1.1))["others_10"][0] == "not held"


def test_step_times_on_loopback_give_no_verdict() -> None:
    rows = [{**row, "gbps": None} for row in times()]
    assert nccl.check(rows) == {}
    assert "loopback" in nccl.table(rows)

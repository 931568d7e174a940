"""The simulated workers of the frontier train each method, and their results become a table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from benchmarks.convergence.text import CharacterTransformer, Corpus
from benchmarks.frontier import runs
from benchmarks.frontier.models import Models
from benchmarks.frontier.runs import ROWS, Finished, Run, Size, train, windows
from lightning_sparse.kernels import message_bytes
from lightning_sparse.kernels.wire import TWO_BIT

CPU = torch.device("cpu")
TINY = Size(16, 1, 2, 12)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.frontier.runs.SIZES", {"0.1M": TINY})


@pytest.fixture
def corpus() -> Corpus:
    positions_N = torch.randint(11, (4000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return Corpus(positions_N[:3000], positions_N[3000:], 11)


def test_simulated_models_have_the_gradients_of_their_modules(corpus: Corpus) -> None:
    torch.manual_seed(0)
    module = CharacterTransformer(11, 16, 2, 2)
    models = Models(module, 3, CPU)
    ((x_MBL, y_MBL),) = windows(corpus, 0, 1, 6, 3)
    models.backward(x_MBL, y_MBL)
    for worker in range(3):
        module.zero_grad()
        F.cross_entropy(module(x_MBL[worker]).flatten(0, 1), y_MBL[worker].flatten()).backward()
        expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        torch.testing.assert_close(models.grad_MN[worker], expected)


@pytest.mark.parametrize("row", list(ROWS))
def test_row_trains_and_counts_its_bits(row: str, corpus: Corpus) -> None:
    record = train(Run(row, 0.01, ROWS[row].trials[0][1], 0, workers=2, steps=30), corpus, CPU)
    assert record["val_bits"] < 4.2  # uniform predictions have 3.46 bits
    assert (record["bits_per_parameter"] == 0) == row.startswith("one node alone")
    assert record["bits_per_parameter"] <= 32


def test_updates_send_the_messages_of_the_library(corpus: Corpus) -> None:
    """12 exchanges of 1%. Exchanges 1, 2, 4 and 8 send an fp32 sample for `step_ahead` too."""
    record = train(Run("updates 1%", 0.01, {"density": 0.01}, 0, workers=4), corpus, CPU)
    numel = record["parameters"]
    samples = 4 * 4 * len(range(0, numel, -(-numel // 2048)))
    sent = record["bits_per_parameter"] * numel * TINY.steps / 8
    assert sent == pytest.approx(12 * message_bytes(numel, -(-numel // 100), TWO_BIT) + samples, abs=16)
    assert record["received_bits"] == pytest.approx(3 * record["bits_per_parameter"])


def test_finished_run_is_kept_and_a_run_on_another_text_is_refused(tmp_path: Path, corpus: Corpus) -> None:
    finished, run = Finished(tmp_path / "runs.jsonl"), Run("dense", 0.01, {}, 0)
    runs.work_through([run], finished, corpus, CPU)
    kept = finished.file.read_text()
    runs.work_through([run], finished, corpus, CPU)
    with pytest.raises(ValueError, match="on another text"):
        runs.work_through([run], finished, Corpus(corpus.train_N[:2000], corpus.val_N, 11), CPU)
    assert finished.file.read_text() == kept


def record_of(row: str, seed: int, lr: float, bits: float) -> dict[str, Any]:
    run = asdict(Run(row, lr, {}, seed))
    sent: dict[str, Any] = {"bits_per_parameter": 0.5, "received_bits": 1.5, "parameters": 10, "characters": 768}
    return {**run, **sent, "seconds": 1.0, "commit": "abc", "val_bits": bits, "train_nats": 1.0}


def test_table_takes_the_best_setting_and_differences_of_equal_seeds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.frontier.report import write_report

    ends = [("dense", 0, 0.1, 2.0), ("dense", 0, 0.2, 2.5), ("dense", 1, 0.1, 3.0)]
    ends += [("updates 1%", 0, 0.1, 2.3), ("updates 1%", 0, 0.2, 2.25), ("updates 1%", 1, 0.2, 3.25)]
    (tmp_path / "runs.jsonl").write_text("\n".join(json.dumps(record_of(*each)) for each in ends) + "\n")
    write_report(tmp_path)
    written = (tmp_path / "results.md").read_text()
    assert "| updates 1% | 0.5 | 1.5 | 2.750 | +0.250 ± 0.000 | +10.0 | 2 | 2 | lr 0.2 |" in written
    assert all((tmp_path / f"results{end}.svg").exists() for end in ("", "-seconds"))

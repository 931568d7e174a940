"""Benchmarks make tables and plots of their records, and keep finished runs."""

import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORDS = BENCHMARKS / "results" / "convergence-2026-11-20.json"


def test_published_table_matches_its_records() -> None:
    pytest.importorskip("PIL")
    from benchmarks.convergence.images import ACCURACY
    from benchmarks.convergence.report import summarize, table

    record = json.loads(RECORDS.read_text())
    rows = summarize(record["runs"], ACCURACY)
    assert rows == record["rows"]
    assert table(rows, ACCURACY) in RECORDS.with_suffix(".md").read_text()


def a_record(config: str, seed: int, bits: float, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    history = [{"step": 40, "train_loss": 1.0, "val_bits": bits, "bytes_per_node": 1000.0}]
    settings = {"lr": 0.1, "epochs": 1}
    made = {"config": config, "seed": seed, "settings": settings, "seconds": 1.0, "commit": "abc", "parameters": 10}
    return {**made, "arguments": arguments, "history": history}


def test_report_takes_differences_of_equal_seeds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.convergence.report import write_report
    from benchmarks.convergence.text import BITS

    pairs = {("dense", 0): 2.0, ("1%", 0): 2.25, ("dense", 1): 3.0, ("1%", 1): 3.25, ("1%", 2): 9.0}
    written = write_report([a_record(*key, bits) for key, bits in pairs.items()], tmp_path, BITS)
    assert "| 1% | 3 | 4.833 | +0.250 ± 0.000 |" in written
    assert "validation loss, bits per character" in written
    assert "Bits after the last epoch; lower is better." in (tmp_path / "results.md").read_text()
    assert (tmp_path / "results.svg").exists()


def test_methods_worse_than_the_single_node_baseline_are_named() -> None:
    from benchmarks.convergence.report import against_alone, verdict
    from benchmarks.convergence.text import BITS

    alone, alone4 = {"alone": True}, {"alone": True, "nodes": 4}
    records = [a_record("dense", seed, 2.0) for seed in (0, 1)]
    records += [a_record("one node alone", seed, 2.5, alone) for seed in (0, 1)]
    records += [a_record("one node alone-4x1", 0, 2.9, alone4)]
    records += [a_record("1%", 0, 2.6, {"density": 0.01}), a_record("1%", 1, 2.8, {"density": 0.01})]
    records += [a_record("1%-4x1", 0, 2.6, {"density": 0.01, "nodes": 4}), a_record("4%", 7, 9.0, {"density": 0.04})]
    gains = {config: round(gain, 6) for config, (gain, _) in against_alone(records, BITS).items()}
    assert gains == {"dense": 0.5, "1%": -0.2, "1%-4x1": 0.3}
    assert [line for line in verdict(records, BITS) if line.startswith("- ")] == ["- 1%: by 0.200 ± 1.271"]
    assert verdict(records[:2], BITS) == []
    assert "Every row is better" in verdict(records[:4], BITS)[0]


@pytest.mark.slow
def test_finished_runs_are_kept_and_other_settings_are_refused(tmp_path: Path) -> None:
    from benchmarks.convergence.runs import execute
    from benchmarks.convergence.text import TASK, TextSettings, read_library, save_corpus

    corpus = save_corpus(read_library(), tmp_path)
    settings = TextSettings(lr=4e-3, epochs=1, text="any", steps_per_epoch=12, global_batch=8)
    runs = [TASK.run(config, 0, settings) for config in ("dense", "1%", "one node alone")]
    records = execute(TASK, runs, corpus, tmp_path / "runs")
    dense, sparse, alone = (record["history"][0] for record in records)
    assert alone["bytes_per_node"] == 0
    assert 4 < alone["val_bits"] < 8
    assert alone["val_bits"] not in (dense["val_bits"], sparse["val_bits"])
    assert sparse["bytes_per_node"] < dense["bytes_per_node"] / 2  # rounds before DDP's buckets settle are dense
    assert sparse["val_bits"] != dense["val_bits"]
    assert 4 < sparse["val_bits"] < 8  # 6.6 if all characters are equally likely
    assert execute(TASK, runs, tmp_path / "not there", tmp_path / "runs") == records
    with pytest.raises(ValueError, match="was made with"):
        execute(TASK, [TASK.run("dense", 0, TextSettings(lr=1e-3, text="any"))], corpus, tmp_path / "runs")


# -- plots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exchange-8x1-2026-11-22", "frontier-2026-11-26", "kernels-2026-11-21"])
def test_plot_is_drawn_from_its_record(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    published, file = BENCHMARKS / "results" / f"{name}.svg", tmp_path / f"{name}.svg"
    plots.draw(file, json.loads(published.with_suffix(".json").read_text()))
    drawn = file.read_text()
    assert drawn.startswith("<?xml")
    assert "#ffffff" not in drawn, "the background must be transparent"
    assert len(drawn) == pytest.approx(len(published.read_text()), rel=0.1)


def test_plot_has_a_record_and_a_benchmark_that_draws_it() -> None:
    from benchmarks.plots import BY, GONE, SUFFIXES

    for file in (BENCHMARKS / "results").glob("*.[sp][vn]g"):
        assert file.name.startswith((*BY, *GONE)), file
        records = [file.name.removesuffix(suffix) + ".json" for suffix in SUFFIXES if file.name.endswith(suffix)]
        assert any((file.parent / record).exists() for record in records), file


# -- elastic nodes -----------------------------------------------------------------------------------------------------


def said(step: int, time: float, token: str, digest: str) -> dict[str, Any]:
    return {"step": step, "time": time, "token": token, "digest": digest, "rounds_lost": 0}


ELASTIC = "benchmarks.exchange.elastic"


def test_different_digests_of_one_round_are_counted() -> None:
    compared = pytest.importorskip(ELASTIC, reason="needs torchft").compared
    first = [said(1, 0.0, "a", "1"), said(2, 1.0, "b", "2"), said(3, 2.0, "c", "3")]
    second = [said(1, 0.0, "a", "1"), said(2, 1.0, "b", "other")]
    found = compared({0: first, 1: second})
    assert (found["rounds"], found["compared"], found["different"]) == (3, 2, 1)


def test_lost_seconds_exceed_the_usual_steps() -> None:
    lost = pytest.importorskip(ELASTIC, reason="needs torchft").lost
    times = [0.0, 1.0, 2.0, 8.0, 9.0, 10.0, 11.0]
    lines = [said(step, time, "", "") for step, time in enumerate(times)]
    found = lost({0: lines, 1: lines[:3]}, [(2.5, "kill", 1), (9.5, "start", 1)])
    assert found["step s"] == 1.0
    assert [each["seconds"] for each in found["lost"]] == [5.0, 0.0]
    assert len(lost({0: lines}, [(2.5, "kill", 1), (2.6, "start", 1)])["lost"]) == 1

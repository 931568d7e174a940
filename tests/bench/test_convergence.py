"""The convergence benchmarks: what their tables are made of, without training; and one run on real ranks, twice."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORDS = BENCHMARKS / "results" / "convergence-2026-11-20.json"


def test_a_published_table_comes_out_of_its_records_again() -> None:
    pytest.importorskip("PIL")
    from benchmarks.convergence.images import ACCURACY
    from benchmarks.convergence.report import summarise, table

    record = json.loads(RECORDS.read_text())
    rows = summarise(record["runs"], ACCURACY)
    assert rows == record["rows"]
    assert table(rows, ACCURACY) in RECORDS.with_suffix(".md").read_text()


def a_record(config: str, seed: int, bits: float, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    history = [{"step": 40, "train_loss": 1.0, "val_bits": bits, "bytes_per_node": 1000.0}]
    settings = {"lr": 0.1, "epochs": 1}
    made = {"config": config, "seed": seed, "settings": settings, "seconds": 1.0, "commit": "abc", "parameters": 10}
    return {**made, "arguments": arguments, "history": history}


def test_differences_are_taken_seed_by_seed_and_the_report_says_what_is_better(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.convergence.report import write_report
    from benchmarks.convergence.text import BITS

    pairs = {("dense", 0): 2.0, ("1%", 0): 2.25, ("dense", 1): 3.0, ("1%", 1): 3.25, ("1%", 2): 9.0}
    written = write_report([a_record(*key, bits) for key, bits in pairs.items()], tmp_path, BITS)
    assert "| 1% | 3 | 4.833 | +0.250 ± 0.000 |" in written
    assert "val bits/char" in written
    assert "Bits after the last epoch; lower is better." in (tmp_path / "results.md").read_text()
    assert (tmp_path / "bits.png").exists()


def test_what_is_worse_than_one_node_alone_is_named() -> None:
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


def test_the_best_is_the_lowest_where_lower_is_better_and_never_what_diverged() -> None:
    from benchmarks.convergence.text import BITS

    assert BITS.best({"0.1": 3.0, "0.2": 2.0, "0.4": math.nan}) == "0.2"
    with pytest.raises(ValueError, match="not a number for any of"):
        BITS.best({"0.4": math.nan})


def test_the_corpus_is_cut_into_windows_and_their_next_characters(tmp_path: Path) -> None:
    from benchmarks.convergence.corpus import VALIDATION, described, read_library, save_corpus, start_of_windows

    text = read_library()
    assert text == read_library()
    assert "sha256" in described(text)
    corpus = torch.load(save_corpus(text, tmp_path), weights_only=False)
    assert (len(corpus.train_N), len(corpus.val_N)) == (len(text) - VALIDATION, VALIDATION)
    alphabet = sorted(set(text))
    assert corpus.num_symbols == len(alphabet)
    start_B = start_of_windows(corpus, 0, 1, (2, 3), 8)[1]
    x_BL, y_BL = corpus.windows(start_B, 8)
    for start, x, y in zip(start_B.tolist(), x_BL.tolist(), y_BL.tolist(), strict=True):
        assert bytes(alphabet[symbol] for symbol in x) == text[start : start + 8]
        assert bytes(alphabet[symbol] for symbol in y) == text[start + 1 : start + 9]
    assert not torch.equal(start_B, start_of_windows(corpus, 0, 2, (2, 3), 8)[1])
    x_NL, y_NL = corpus.val_windows(8)
    assert torch.equal(x_NL.flatten()[1:], y_NL.flatten()[:-1])
    assert bytes(alphabet[symbol] for symbol in x_NL[0].tolist()) == text[-VALIDATION:][:8]


def test_the_transformer_does_not_see_what_it_is_to_predict() -> None:
    from benchmarks.convergence.text import CONTEXT, CharacterTransformer

    torch.manual_seed(0)
    model = CharacterTransformer(10)
    assert sum(parameter.numel() for parameter in CharacterTransformer(100).parameters()) <= 150_000
    x_BL = torch.randint(10, (2, CONTEXT))
    other_BL = x_BL.clone()
    other_BL[:, 40:] = (x_BL[:, 40:] + 1) % 10
    before, after = model(x_BL), model(other_BL)
    assert torch.equal(before[:, :40], after[:, :40])
    assert (before[:, 40:] != after[:, 40:]).any(dim=-1).all()


def test_the_learning_rate_rises_falls_and_ends_near_zero() -> None:
    from benchmarks.convergence.text import scale

    factors = [scale(step, 40, 600) for step in range(600)]
    assert factors[0] == pytest.approx(1 / 40)
    assert factors.index(max(factors)) == 39
    assert 0 < factors[-1] < 1e-4


def test_a_name_with_a_slash_makes_one_file() -> None:
    from benchmarks.convergence.runs import Run

    assert Path(Run("dense, 1 Gbit/s", None, 0, None).file_name).parts == ("dense, 1 Gbit per s-seed0.json",)


@pytest.mark.slow
def test_runs_are_kept_and_others_settings_are_refused(tmp_path: Path) -> None:
    from benchmarks.convergence.corpus import read_library, save_corpus
    from benchmarks.convergence.runs import execute
    from benchmarks.convergence.text import TASK, TextSettings

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
    assert 4 < sparse["val_bits"] < 8  # 6.6 for all characters alike
    assert execute(TASK, runs, tmp_path / "not there", tmp_path / "runs") == records
    with pytest.raises(ValueError, match="was made with"):
        execute(TASK, [TASK.run("dense", 0, TextSettings(lr=1e-3, text="any"))], corpus, tmp_path / "runs")

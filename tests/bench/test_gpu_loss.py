"""The part `loss` of the GPU session compares equal numbers of trials, and keeps its finished runs if it is stopped."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.convergence.text import Corpus
from benchmarks.frontier.runs import SIZES, Run
from benchmarks.gpu import loss
from benchmarks.gpu import session as gpu_session
from benchmarks.gpu.loss import ALONE, BEST, CLAIMS, DENSE, FACTORS, claims_of, in_order, trials_of

CPU = torch.device("cpu")
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def losses_with(**changed: list[float]) -> dict[str, list[float]]:
    losses = {row: [1.7] for row in BEST}
    names = {"dense": DENSE, "alone": ALONE, "ours": "updates 1%", "diloco": "DiLoCo every 30, 4 bits"}
    return losses | {names[name]: values for name, values in changed.items()}


def test_trials_run_in_rounds_of_all_methods() -> None:
    for size, factors in FACTORS.items():
        assert size in SIZES
        trials = trials_of(factors, {"size": size})
        order = [run.row for run in in_order(trials)]
        assert order == list(BEST) * 3
        for runs in trials.values():
            first, above, below = (run.lr for run in runs)
            assert (above, below) == (2 * first, first / 2)
            assert len({json.dumps(run.options) for run in runs}) == 1


def test_best_settings_match_published_results() -> None:
    records = json.loads((RESULTS / "frontier-2026-11-26.json").read_text())["runs"]
    large = [each for each in records if each["size"] == "0.8M"]
    compared = set()
    for row, (lr, options) in BEST.items():
        tried = [each for each in large if each["row"] == row]
        if tried:
            best = min(tried, key=lambda each: float(each["val_bits"]))
            assert (best["lr"], {name: best["options"].get(name) for name in options}) == (lr, options)
            compared.add(row)
    assert BEST.keys() - compared == {"updates 3% every 10", "updates 10% every 30"}


@pytest.mark.parametrize(
    ("dense", "alone", "ours", "expected"),
    [
        (2.0, 2.5, 2.05, ("held", "+2.5%, single-node baseline +25.0%, one trial")),
        (2.0, 2.5, 2.1, ("not held", "+5.0%, single-node baseline +25.0%, one trial")),
        (2.0, 2.0, 2.05, ("not held", "+2.5%, single-node baseline +0.0%, one trial")),
    ],
)
def test_updates_must_end_near_dense_training_and_below_the_baseline(
    dense: float, alone: float, ours: float, expected: tuple[str, str]
) -> None:
    assert claims_of(losses_with(dense=[dense], alone=[alone], ours=[ours]))["1%"] == expected


def test_claim_without_a_run_of_each_method_is_not_run() -> None:
    claim = claims_of(losses_with(dense=[], alone=[]))["1%"]
    assert claim == ("not run", "no finished run of dense, one node alone")


def test_claim_compares_equal_numbers_of_trials() -> None:
    more_of_ours = losses_with(ours=[1.9, 1.6], diloco=[1.8])
    assert claims_of(more_of_ours)["DiLoCo"] == ("not held", "1.900 and 1.800 bits per character, one trial")
    equally_many = losses_with(ours=[1.9, 1.6], diloco=[1.8, 1.7])
    assert claims_of(equally_many)["DiLoCo"] == ("held", "1.600 and 1.700 bits per character, best of 2")


def test_claims_with_diverged_dense_training_are_not_held() -> None:
    assert claims_of(losses_with(dense=[float("inf")], alone=[1.9]))["1%"][0] == "not held"


def test_stopped_part_continues_after_its_last_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []
    characters = 1_934_464

    def train(run: Run, *_: Any) -> dict[str, Any]:
        trained.append(run.row)
        sent = {"bits_per_parameter": 0.5, "received_bits": 1.5, "parameters": 10, "characters": characters}
        return {**asdict(run), **sent, "val_bits": 2.0, "seconds": 1.0}

    monkeypatch.setattr("benchmarks.frontier.runs.train", train)
    monkeypatch.setattr(loss, "corpus_of", lambda _: Corpus(torch.zeros(characters), torch.zeros(1), 1))
    *_, (claims, losses) = islice(loss.loss("20M", tmp_path, CPU), 3)
    assert claims["1%"] == ("not held", "+0.0%, single-node baseline +0.0%, one trial")
    assert claims["SparseLoCo"][0] == "not run"
    assert [row for row, each in losses.items() if each] == list(BEST)[:3]
    assert "| dense | 0.5 | 1.5 | 2.000 |" in (tmp_path / "loss-20M.md").read_text()
    *_, (claims, _) = loss.loss("20M", tmp_path, CPU)
    assert trained == list(BEST)
    assert claims.keys() == CLAIMS.keys() == gpu_session.PARTS["loss"].claims.keys()

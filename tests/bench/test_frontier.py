"""The simulated workers of the frontier train each method by its rules, and their results become a table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.convergence.text import CONTEXT, CharacterTransformer, Corpus, start_of_windows
from benchmarks.frontier import runs, ways
from benchmarks.frontier.models import Models, Muon
from benchmarks.frontier.runs import LRS, ROWS, Finished, Run, Size, ranked, repeats, train, tuning, windows
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


def test_diverged_run_has_an_infinite_loss(corpus: Corpus) -> None:
    assert train(Run("dense", 1e30, {}, 0, workers=2, steps=3), corpus, CPU)["val_bits"] == float("inf")


# -- the rules of the methods -----------------------------------------------------------------------------------------


def two_models(num: int = 2) -> Models:
    torch.manual_seed(0)
    return Models(CharacterTransformer(11, 16, 1, 2), num, CPU)


def test_muon_steps_each_model_as_the_muon_of_torch(corpus: Corpus) -> None:
    models = two_models()
    optimizer = Muon(models, lr=0.1, weight_decay=0.01)
    models.flat_MN.grad = models.grad_MN
    place = next(each for name, each in models.places.items() if name.startswith("blocks") and len(each.shape) == 2)
    alone = torch.nn.Parameter(models.view(models.flat_MN, place)[1].clone())
    expected = torch.optim.Muon([alone], 0.1, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for x_MBL, y_MBL in windows(corpus, 0, 3, 4, 2):
        models.backward(x_MBL, y_MBL)
        alone.grad = models.view(models.grad_MN, place)[1].clone()
        optimizer.step()
        expected.step()
    difference = models.view(models.flat_MN, place)[1] - alone
    assert difference.abs().max() < 0.01, "three steps of about 0.015 per element; torch iterates in bfloat16"


def test_worker_reads_the_windows_of_a_rank(corpus: Corpus) -> None:
    starts = start_of_windows(corpus, 3, 0, (40, 8), CONTEXT)
    for step, (x_MBL, _) in enumerate(windows(corpus, 3, 5, 8, 4)):
        for rank in range(4):
            expected, _ = corpus.windows(starts[step][rank::4], CONTEXT)
            assert torch.equal(x_MBL[rank], expected)


def test_dense_training_equals_one_model_on_the_whole_batch(corpus: Corpus) -> None:
    two, one = (train(Run("dense", 0.01, {}, 0, workers=num), corpus, CPU)["val_bits"] for num in (2, 1))
    assert two == pytest.approx(one, rel=1e-4)


def test_workers_have_bit_identical_global_weights(corpus: Corpus) -> None:
    models = two_models(4)
    way = ways.Updates(models, density=0.05)
    generator = torch.Generator().manual_seed(1)
    for step in range(7):
        models.flat_MN += 0.01 * torch.randn(models.flat_MN.shape, generator=generator)
        way.after_step(step + 1, 0.0)
    first, *others = [state.read_global() for state in way.states]
    way.close()
    assert all(torch.equal(first, each) for each in others)
    assert not torch.equal(models.flat_MN[0], models.flat_MN[1])


def test_worker_that_fails_ends_the_run(corpus: Corpus) -> None:
    models = two_models(3)
    way = ways.Updates(models, density=0.05)
    way.states[1].exchange_step = lambda: (_ for _ in ()).throw(OSError("gone"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="gone"):
        way.after_step(1, 0.0)
    way.close()


def changed_by(models: Models, *changes: float) -> Tensor:
    start_N = models.flat_MN[0].clone()
    for row_N, change in zip(models.flat_MN, changes, strict=True):
        row_N += change
    return start_N


def test_outer_step_follows_nesterov_or_is_the_mean_without_momentum() -> None:
    models = two_models()
    mean = ways.Outer(models, every=1)
    start_N = changed_by(models, -0.1, -0.3)
    mean.after_step(1, 0.0)
    torch.testing.assert_close(models.flat_MN, (start_N - 0.2).expand(2, -1))

    models = two_models()
    diloco = ways.Outer(models, every=2, outer_lr=0.7, momentum=0.9)
    shared = torch.nn.Parameter(models.flat_MN[0].clone())
    outer = torch.optim.SGD([shared], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 7):
        changed_by(models, -0.01 * step, -0.03)
        if step % 2 == 0:
            shared.grad = shared.detach() - models.flat_MN.mean(0)
            outer.step()
        diloco.after_step(step, 0.0)
    torch.testing.assert_close(models.flat_MN[1], shared.detach())


def test_parts_of_streaming_diloco_take_turns() -> None:
    models = two_models()
    streaming = ways.Outer(models, every=4, parts=2)
    cut, same = round(models.numel / 2), []
    for step in range(1, 5):
        changed_by(models, -0.01, -0.03)
        streaming.after_step(step, 0.0)
        same.append([torch.equal(part[0], part[1]) for part in models.flat_MN.split([cut, models.numel - cut], 1)])
    assert same == [[False, False], [False, True], [False, False], [True, False]]


def test_sparse_outer_step_sends_its_error_later_with_decay() -> None:
    models = two_models()
    sparse = ways.SparseOuter(models, every=1, density=0.25, decay=0.5)
    start_N = models.flat_MN[0].clone()
    models.flat_MN[0, :10] -= 4.0
    models.flat_MN[0, -10:] -= 1e-6
    models.flat_MN[1].copy_(models.flat_MN[0])
    sparse.after_step(1, 0.0)
    torch.testing.assert_close(models.flat_MN[0, :10], start_N[:10] - 4.0, rtol=0.2, atol=0.2)
    kept_N = sparse._error_MN[0].clone()
    sparse.after_step(2, 0.0)  # the message holds half of the kept error
    sent_N = 0.5 * kept_N - sparse._error_MN[0]
    assert sent_N.any()
    assert sparse._error_MN[0].abs().sum() < 0.5 * kept_N.abs().sum() + 1e-6


def test_sparse_outer_step_divides_an_element_by_its_senders() -> None:
    models = two_models()
    sparse = ways.SparseOuter(models, every=1, density=0.01)
    start_N, k = models.flat_MN[0].clone(), sparse._path.k
    models.flat_MN[0, :k] -= 1.0
    models.flat_MN[1, k // 2 : k // 2 + k] -= 3.0
    sparse.after_step(1, 0.0)
    changed_N = start_N - models.flat_MN[0]
    expected = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(torch.tensor([k // 2, k - k // 2, k // 2]))
    torch.testing.assert_close(changed_N[: len(expected)], expected)
    assert not changed_N[len(expected) :].any()


def test_e3m0_keeps_a_sign_and_a_power_of_two() -> None:
    rows_MN = torch.tensor([[1.0, -0.6, 0.26, 0.0, 2**-6.4, 2**-6.6], [3.0, 100.0, -0.5, 64.0, 1.0, 2.0]])
    expected = [[1.0, -0.5, 0.25, 0.0, 2**-6, 0.0], [4.0, 128.0, 0.0, 64.0, 0.0, 2.0]]
    torch.testing.assert_close(ways.e3m0(rows_MN), torch.tensor(expected))
    models = two_models()
    diloco = ways.Outer(models, every=2, momentum=0.5, bits=4)
    changed_by(models, -0.5, -0.25)
    diloco.after_step(2, 0.0)
    assert diloco.bits == 4 * models.numel


def test_powersgd_is_exact_for_gradients_of_low_rank() -> None:
    models = two_models()
    way = ways.PowerSGD(models, rank=2, start=0)
    generator = torch.Generator().manual_seed(2)
    gradients = torch.zeros_like(models.grad_MN)
    for place in models.places.values():
        if len(place.shape) == 2:
            left = torch.randn(place.shape[0], 1, generator=generator)
            right = torch.randn(2, 1, place.shape[1], generator=generator)
            Models.view(gradients, place).copy_(left * right)  # the mean is of rank 1
        else:
            Models.view(gradients, place).normal_(generator=generator)
    mean_N = gradients.mean(0)
    models.grad_MN.copy_(gradients)
    way.before_step()
    torch.testing.assert_close(models.grad_MN, mean_N.expand(2, -1), rtol=1e-3, atol=1e-4)
    assert 0 < way.bits < 32 * models.numel


def test_demo_that_sends_all_coefficients_loses_nothing() -> None:
    basis = ways.cosines(8)
    torch.testing.assert_close(basis @ basis.T, torch.eye(8))
    models = two_models()
    way = ways.DeMo(models, density=1.0, decay=1.0)
    models.grad_MN.normal_(generator=torch.Generator().manual_seed(3))
    before_N, mean_N = models.flat_MN[0].clone(), models.grad_MN.sum(0)
    way.after_step(1, 0.5)
    torch.testing.assert_close(models.flat_MN, (before_N - 0.5 * mean_N.sign()).expand(2, -1))
    assert way._momentum_MN.abs().max() < 1e-4


def test_methods_have_equally_many_trials() -> None:
    for name, row in ROWS.items():
        twice = any("every" in each or "sync_every" in each for _, each in row.trials) and "%" in name
        assert len(row.trials) == len(LRS) * (1 + twice)
        assert len({str(each) for each in row.trials}) == len(row.trials)


def test_best_trial_is_repeated_with_other_seeds(tmp_path: Path) -> None:
    finished = Finished(tmp_path / "runs.jsonl")
    trials = tuning("dense")
    for index, run in enumerate(trials):
        assert repeats("dense", finished, (1, 2)) == []
        assert len(ranked("dense", finished)) == index
        finished.add(run, {**asdict(run), "val_bits": 2.0 + abs(index - 3)})
    again = Finished(tmp_path / "runs.jsonl")
    assert again.records == finished.records
    assert [(run.lr, run.seed) for run in repeats("dense", again, (1, 2))] == [(LRS[3], 1), (LRS[3], 2)]
    assert [lr for lr, _ in ranked("dense", again)] == [LRS[3], LRS[2], LRS[4], LRS[1], LRS[0]]


# -- results -----------------------------------------------------------------------------------------------------------


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

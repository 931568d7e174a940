"""The strategy in a real Trainer, 2 nodes x 2 devices on Gloo, in both flavours: every entry point, and statistics."""

import importlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.lines import Lines
from tests.helpers.scenarios import Scenarios
from tests.strategy.trainers import (
    Results,
    ddp,
    dense_one,
    fitted,
    lightning_of,
    ours,
    plain_module,
    results_of,
    same_on_all_ranks,
    sparse,
    trainer,
    weights,
)

SCENARIOS = Scenarios()
scenario = SCENARIOS.add
results = results_of(SCENARIOS)


# -- every entry point, twice ------------------------------------------------------------------------------------------


@scenario
def life(flavour: str) -> dict[str, Any]:
    lines = Lines()
    module = plain_module(flavour)
    strategy = sparse(flavour)
    views: list[bool] = []
    look = importlib.import_module(lightning_of(flavour).__name__ + ".callbacks").LambdaCallback(
        on_train_start=lambda trainer, _: views.append(trainer.strategy.model.gradient_as_bucket_view)
    )
    t = trainer(flavour, strategy, limit_val_batches=2, max_epochs=1, max_steps=-1, callbacks=[look])
    t.validate(module, verbose=False)
    t.fit(module)
    first, rounds = weights(module).clone(), strategy.hier_state.round
    residual = strategy.hier_state.residual_norm()
    t.test(module, verbose=False)
    predictions = t.predict(module)
    t.fit_loop.max_epochs = 2
    t.fit(module)
    return {
        "weights": weights(module), "moved": not torch.equal(first, weights(module)), "rounds": rounds,
        "rounds_after": strategy.hier_state.round, "predictions": len(predictions), "residual": float(residual),
        "lines": list(lines.lines), "sent": strategy.hier_state.exchange.stats.density, "views": views,
    }  # fmt: skip


def test_fit_validate_test_predict_and_a_second_fit(results: Results) -> None:
    assert same_on_all_ranks(results, "life")
    life = results[0]["life"]
    assert life["moved"]
    assert life["predictions"] == 6
    assert life["rounds"] == 6
    assert life["rounds_after"] == 12, "the second fit went on with the same state"
    assert life["residual"] > 0
    assert life["sent"] < 0.2, "after the second wrap the one big bucket was split into the settled groups, sparse"
    assert sum("hierarchical reduction" in line for line in life["lines"]) == 1
    assert not results[1]["life"]["lines"], "ranks other than 0 are quiet"
    assert life["views"] == [True, True], "gradients lie in the buckets"


@scenario
def idle(flavour: str) -> list[str]:
    lines, module = Lines(), plain_module(flavour)
    first, *others = module.parameters()
    module.configure_optimizers = lambda: torch.optim.SGD(others, lr=0.05)
    for requires_grad in (True, False):
        first.requires_grad_(requires_grad)
        fitted(flavour, sparse(flavour), module, max_steps=1)
    return [line for line in lines.lines if "in no optimizer" in line]


def test_parameters_that_nobody_steps_are_told_of(results: Results) -> None:
    assert len(results[0]["idle"]) == 1, "a frozen one is as it should be"
    assert "net.0.weight" in results[0]["idle"][0]
    assert not results[1]["idle"]


@scenario
def parity(flavour: str) -> dict[str, Tensor]:
    pairs = {}
    for name, options in {
        "plain": {},
        "accumulation": {"accumulate_grad_batches": 3},
        "clipping": {"gradient_clip_val": 0.05},
        "bf16-mixed": {"precision": "bf16-mixed"},
    }.items():
        pairs[name] = weights(fitted(flavour, dense_one(flavour), **options))
        pairs[name + " ddp"] = weights(fitted(flavour, ddp(flavour), **options))
    return pairs


@pytest.mark.parametrize("name", ["plain", "accumulation", "clipping", "bf16-mixed"])
def test_density_one_equals_ddp_in_a_trainer(results: Results, name: str) -> None:
    for each in results:
        torch.testing.assert_close(each["parity"][name], each["parity"][name + " ddp"], rtol=1e-5, atol=1e-6)
    assert same_on_all_ranks(results, "parity", name)


@SCENARIOS.slow
def sparse_features(flavour: str) -> dict[str, Tensor]:
    return {
        "accumulation": weights(fitted(flavour, sparse(flavour), accumulate_grad_batches=2)),
        "clipping": weights(fitted(flavour, sparse(flavour), gradient_clip_val=0.05)),
        "bf16-mixed": weights(fitted(flavour, sparse(flavour), precision="bf16-mixed")),
        "bf16-true": weights(fitted(flavour, sparse(flavour), precision="bf16-true")),
        "static_graph": weights(fitted(flavour, sparse(flavour, static_graph=True))),
        "string": weights(fitted(flavour, "mstopk_hier")),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulation", "clipping", "bf16-mixed", "bf16-true", "static_graph", "string"])
def test_sparse_rounds_leave_all_ranks_equal(results: Results, name: str) -> None:
    assert same_on_all_ranks(results, "sparse_features", name)
    assert results[0]["sparse_features"][name].isfinite().all()


# -- statistics --------------------------------------------------------------------------------------------------------


@scenario
def statistics(flavour: str) -> dict[str, Any]:
    callback, lines = ours(flavour).CommStatsCallback(prog_bar=True), Lines()
    # Two epochs with a validation after each, which drops the gradients.
    short = {"limit_train_batches": 5, "limit_val_batches": 1, "log_every_n_steps": 50}
    t = trainer(flavour, sparse(flavour), callbacks=[callback], **short)
    t.fit(plain_module(flavour))
    wrong = trainer(flavour, ddp(flavour), callbacks=[callback])
    try:
        wrong.fit(plain_module(flavour))
        refused = ""
    except ValueError as error:
        refused = str(error)
    logged = {k: float(v) for k, v in t.callback_metrics.items()}
    return {"logged": logged, "refused": refused, "lines": list(lines.lines), "bar": sorted(t.progress_bar_metrics)}


def test_the_callback_logs_bytes_density_and_residual(results: Results) -> None:
    for each in results:
        logged = each["statistics"]["logged"]
        assert 0.05 <= logged["comm/density"] < 0.2
        assert logged["comm/effective_density"] == pytest.approx(2 * logged["comm/density"], rel=1e-4), "two nodes"
        assert logged["comm/bytes_between_nodes"] > 0
        of_two = 2e-6 * logged["comm/bytes_between_nodes"]
        assert logged["comm/MB_into_node"] == pytest.approx(of_two, rel=1e-4), "two devices"
        assert [name for name in each["statistics"]["bar"] if name.startswith("comm/")] == ["comm/MB_into_node"]
        assert logged["comm/residual_norm"] > 0
        assert 0.1 < logged["comm/residual_to_gradient"] < 100
        assert "use strategy='mstopk_hier'" in each["statistics"]["refused"]


def test_the_callback_sums_the_fit_up_on_rank_0(results: Results) -> None:
    summaries = [[line for line in each["statistics"]["lines"] if "exchanged" in line] for each in results]
    assert [len(each) for each in summaries] == [1, 0, 0, 0]
    table = summaries[0][0]
    assert "in 10 rounds" in table
    assert re.search(r"received a round +0\.\d\d\d MB; plain DDP 0\.\d\d\d MB, [1-9][\d.]* times the bytes", table), (
        table
    )
    assert "70.0% sparse, 30.0% dense" in table, "the first rounds wait for the layout"
    assert re.search(r"between nodes +(?!0\.0 )[\d.]+ ms a round", table), table
    assert re.search(r"not sent yet +norm [\d.e-]+, [\d.]+ times that of the gradient", table), table


def test_the_callback_forgets_the_norm_of_the_last_fit() -> None:
    flavour = "pytorch_lightning"
    callback = ours(flavour).CommStatsCallback()
    callback._norms = {"comm/residual_norm": torch.ones(())}
    fake = SimpleNamespace(strategy=ours(flavour).MSTopKHierStrategy())
    callback.on_fit_start(fake, None)
    assert callback._norms == {}


# -- a second fit of a module that was changed -------------------------------------------------------------------------


@scenario
def replaced_head(flavour: str) -> dict[str, Any]:
    lines = Lines()
    module, strategy = plain_module(flavour), sparse(flavour)
    t = trainer(flavour, strategy)
    t.fit(module)
    module.net[4] = nn.Linear(29, 3)
    t.fit_loop.epoch_loop.max_steps, t.fit_loop.max_epochs = 20, 9
    t.fit(module)
    return {"weights": weights(module), "rounds": strategy.hier_state.round, "lines": lines.lines}


def test_a_layer_may_be_replaced_between_fits(results: Results) -> None:
    assert same_on_all_ranks(results, "replaced_head")
    assert all(each["replaced_head"]["rounds"] == 10 for each in results), "a new state counts from the start"
    assert sum("parameters were replaced" in line for line in results[0]["replaced_head"]["lines"]) == 1

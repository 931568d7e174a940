"""The strategy in a real Trainer, 2 nodes x 2 devices on Gloo, with both Lightning packages.

Every entry point, statistics, and models with special requirements.
"""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.lines import Lines, raised
from tests.helpers.scenarios import Scenarios
from tests.strategy.models import mlp
from tests.strategy.trainers import (
    Results,
    ddp,
    dense_one,
    fitted,
    gan,
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
def life(package: str) -> dict[str, Any]:
    lines = Lines()
    module = plain_module(package)
    strategy = sparse(package)
    views: list[bool] = []
    look = importlib.import_module(lightning_of(package).__name__ + ".callbacks").LambdaCallback(
        on_train_start=lambda trainer, _: views.append(trainer.strategy.model.gradient_as_bucket_view)
    )
    t = trainer(package, strategy, limit_val_batches=2, max_epochs=1, max_steps=-1, callbacks=[look])
    t.validate(module, verbose=False)
    t.fit(module)
    first, rounds = weights(module).clone(), strategy.engine.round
    residual = strategy.engine.residual_norm()
    t.test(module, verbose=False)
    predictions = t.predict(module)
    t.fit_loop.max_epochs = 2
    t.fit(module)
    return {
        "weights": weights(module), "moved": not torch.equal(first, weights(module)), "rounds": rounds,
        "rounds_after": strategy.engine.round, "predictions": len(predictions), "residual": float(residual),
        "lines": list(lines.lines), "sent": strategy.engine.exchange.stats.density, "views": views,
    }  # fmt: skip


def test_fit_validate_test_predict_and_a_second_fit(results: Results) -> None:
    assert same_on_all_ranks(results, "life")
    life = results[0]["life"]
    assert life["moved"]
    assert life["predictions"] == 6
    assert life["rounds"] == 6
    assert life["rounds_after"] == 12, "the second fit continued with the same state"
    assert life["residual"] > 0
    assert life["sent"] < 0.2, "after the second wrap the one big bucket was split into the settled sparse groups"
    assert sum("reduces inside each node, then between nodes" in line for line in life["lines"]) == 1
    assert not results[1]["life"]["lines"], "ranks other than 0 are quiet"
    assert life["views"] == [True, True], "gradients lie in the buckets"


@scenario
def idle(package: str) -> list[str]:
    lines, module = Lines(), plain_module(package)
    first, *others = module.parameters()
    module.configure_optimizers = lambda: torch.optim.SGD(others, lr=0.05)
    for requires_grad in (True, False):
        first.requires_grad_(requires_grad)
        fitted(package, sparse(package), module, max_steps=1)
    return [line for line in lines.lines if "in no optimizer" in line]


@scenario
def manual_batch_norm(package: str) -> list[str]:
    lines = Lines()
    for automatic in (True, False):
        module = plain_module(package, nn.Sequential(nn.Linear(13, 11), nn.BatchNorm1d(11)))
        module.automatic_optimization = automatic
        if not automatic:
            module.training_step = lambda batch, batch_idx, on=module: on.manual_backward(on.net(batch).square().mean())
        fitted(package, sparse(package), module, max_steps=-1, max_epochs=1, limit_train_batches=1)
    return [line for line in lines.lines if "DDP does not broadcast buffers" in line]


def test_batch_norm_in_manual_optimization_warns_of_different_ranks(results: Results) -> None:
    assert [len(each["manual_batch_norm"]) for each in results] == [1, 0, 0, 0]


def test_parameters_in_no_optimizer_are_logged(results: Results) -> None:
    assert len(results[0]["idle"]) == 1, "frozen parameters are not logged"
    assert "net.0.weight" in results[0]["idle"][0]
    assert not results[1]["idle"]


@scenario
def parity(package: str) -> dict[str, Tensor]:
    pairs = {}
    for name, options in {
        "accumulation and clipping": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
        "bf16-mixed": {"precision": "bf16-mixed"},
    }.items():
        pairs[name] = weights(fitted(package, dense_one(package), **options))
        pairs[name + " ddp"] = weights(fitted(package, ddp(package), **options))
    return pairs


@pytest.mark.parametrize("name", ["accumulation and clipping", "bf16-mixed"])
def test_density_one_equals_ddp_in_a_trainer(results: Results, name: str) -> None:
    for each in results:
        torch.testing.assert_close(each["parity"][name], each["parity"][name + " ddp"], rtol=1e-5, atol=1e-6)
    assert same_on_all_ranks(results, "parity", name)


@SCENARIOS.slow
def sparse_features(package: str) -> dict[str, Tensor]:
    return {
        "string": weights(fitted(package, "mstopk_hier", accumulate_grad_batches=2, precision="bf16-mixed")),
        "static_graph": weights(fitted(package, sparse(package, static_graph=True), precision="bf16-true")),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["static_graph", "string"])
def test_sparse_rounds_leave_all_ranks_equal(results: Results, name: str) -> None:
    assert same_on_all_ranks(results, "sparse_features", name)
    assert results[0]["sparse_features"][name].isfinite().all()


# -- statistics --------------------------------------------------------------------------------------------------------


@scenario
def statistics(package: str) -> dict[str, Any]:
    callback, lines = ours(package).CommStatsCallback(prog_bar=True), Lines()
    # two epochs, each with a validation, which drops the gradients
    short = {"limit_train_batches": 5, "limit_val_batches": 1, "log_every_n_steps": 50}
    t = trainer(package, sparse(package), callbacks=[callback], **short)
    t.fit(plain_module(package))
    refused = raised(trainer(package, ddp(package), callbacks=[callback]).fit, plain_module(package))
    logged = {k: float(v) for k, v in t.callback_metrics.items()}
    return {"logged": logged, "refused": refused, "lines": list(lines.lines), "bar": sorted(t.progress_bar_metrics)}


def test_stats_callback_logs_bytes_density_and_residual(results: Results) -> None:
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
        assert "Use strategy='mstopk_hier'" in each["statistics"]["refused"]


def test_stats_callback_logs_a_summary_on_rank_0(results: Results) -> None:
    summaries = [[line for line in each["statistics"]["lines"] if "traffic of one device" in line] for each in results]
    assert [len(each) for each in summaries] == [1, 0, 0, 0]
    table = summaries[0][0]
    assert "in 10 steps" in table
    assert re.search(r"received per step +[\d.]+ k?B; plain DDP [\d.]+ k?B, [1-9][\d.]* times the bytes", table), table
    assert "70.0% sparse, 30.0% dense" in table, "rounds are dense until the layout settles"
    assert re.search(r"between nodes +(?!0\.0 )[\d.]+ ms per step", table), table
    assert re.search(r"not sent yet +norm [\d.e-]+, [\d.]+ times that of the gradient", table), table


def test_stats_callback_forgets_the_norm_of_the_last_fit() -> None:
    package = "pytorch_lightning"
    callback = ours(package).CommStatsCallback()
    callback._norms = {"comm/residual_norm": torch.ones(())}
    fake = SimpleNamespace(strategy=ours(package).MSTopKHierStrategy())
    callback.on_fit_start(fake, None)
    assert callback._norms == {}


# -- a second fit of a changed module ----------------------------------------------------------------------------------


@scenario
def replaced_head(package: str) -> dict[str, Any]:
    lines = Lines()
    module, strategy = plain_module(package), sparse(package)
    t = trainer(package, strategy)
    t.fit(module)
    module.net[4] = nn.Linear(29, 3)
    t.fit_loop.epoch_loop.max_steps, t.fit_loop.max_epochs = 20, 9
    t.fit(module)
    return {"weights": weights(module), "rounds": strategy.engine.round, "lines": lines.lines}


def test_layer_replaced_between_fits_starts_a_new_state(results: Results) -> None:
    assert same_on_all_ranks(results, "replaced_head")
    assert all(each["replaced_head"]["rounds"] == 10 for each in results), "a new state counts from the start"
    assert sum("parameters were replaced" in line for line in results[0]["replaced_head"]["lines"]) == 1


@scenario
def scaled(package: str) -> dict[str, Any]:
    """Fit in 16-mixed; in one step the forward pass of one rank overflows."""
    plugin = importlib.import_module(lightning_of(package).__name__ + ".plugins").MixedPrecision
    precision = plugin("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    module, strategy = plain_module(package, by_step=True), sparse(package)

    def overflow(_: Any, __: Any, out: Tensor) -> Tensor:
        return out * float("inf") if module.trainer.global_step == 5 and module.global_rank == 3 else out

    module.net.register_forward_hook(overflow)
    fitted(package, strategy, module, plugins=[precision])
    norm = float(strategy.engine.residual_norm())
    return {"weights": weights(module), "scale": precision.scaler.get_scale(), "norm": norm}


def test_16_mixed_skips_an_overflow_on_all_ranks_and_keeps_residuals_unscaled(results: Results) -> None:
    assert same_on_all_ranks(results, "scaled")
    for each in (found["scaled"] for found in results):
        assert each["weights"].isfinite().all()
        assert each["scale"] == results[0]["scaled"]["scale"] < 2.0**16
        assert 0 < each["norm"] < 10, "a scaled residual would be thousands of times larger"


# -- several optimizers ------------------------------------------------------------------------------------------------


@scenario
def gans(package: str) -> dict[str, Any]:
    lines = Lines()
    out: dict[str, Any] = {}
    for name, toggled, strategy in [
        ("toggled", True, dense_one), ("toggled ddp", True, ddp), ("untoggled", False, sparse),
        ("untoggled ddp", False, ddp), ("toggled sparse", True, sparse),
    ]:  # fmt: skip
        chosen = strategy(package, find_unused_parameters=True)
        out[name] = weights(fitted(package, chosen, gan(package, toggled), max_steps=24, max_epochs=9))
        out[name + " density"] = getattr(chosen, "engine", None) and chosen.engine.exchange.stats.density
    return {**out, "lines": list(lines.lines)}


def test_gan_equals_ddp_toggled_at_density_one_and_untoggled_exactly(results: Results) -> None:
    for each in results:
        torch.testing.assert_close(each["gans"]["toggled"], each["gans"]["toggled ddp"], rtol=1e-5, atol=1e-6)
        assert torch.equal(each["gans"]["untoggled"], each["gans"]["untoggled ddp"])
        assert each["gans"]["toggled sparse density"] < 0.3
        assert torch.equal(each["gans"]["toggled sparse"], results[0]["gans"]["toggled sparse"])
    assert sum("toggle_optimizer" in line for line in results[0]["gans"]["lines"]) == 1


# -- models with special requirements ----------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return out


class Complex(nn.Module):
    """Has a complex parameter, a double-precision parameter, and ordinary layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = mlp()
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.precise = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.phase.abs() * self.precise
        return out


@SCENARIOS.slow
def models(package: str) -> dict[str, Any]:
    plain = weights(fitted(package, sparse(package)))
    checkpointed = weights(fitted(package, sparse(package), plain_module(package, Checkpointed())))
    compiled = plain_module(package)
    # torch's DDPOptimizer splits the graph at buckets and needs them at least as large as its first bucket
    large = {"bucket_cap_mb": 25}
    trainer(package, dense_one(package, **large)).fit(torch.compile(compiled, backend="aot_eager"))
    uncompiled = weights(fitted(package, dense_one(package, **large)))
    module = plain_module(package, Complex())
    strategy = dense_one(package)
    fitted(package, strategy, module, max_steps=8)
    reference = plain_module(package, Complex())
    fitted(package, ddp(package), reference, max_steps=8)
    return {
        "checkpointed": torch.equal(plain, checkpointed),
        "uncompiled": uncompiled,
        "compiled": weights(compiled),
        "double": (module.net.precise.detach(), reference.net.precise.detach()),
        "phase": (torch.view_as_real(module.net.phase.detach()), torch.view_as_real(reference.net.phase.detach())),
    }


@pytest.mark.slow
def test_activation_checkpointing_changes_nothing(results: Results) -> None:
    assert all(each["models"]["checkpointed"] for each in results)


@pytest.mark.slow
def test_compiled_model_equals_the_eager_model(results: Results) -> None:
    for each in results:
        torch.testing.assert_close(each["models"]["compiled"], each["models"]["uncompiled"], rtol=1e-4, atol=1e-5)
    assert same_on_all_ranks(results, "models", "compiled")


@pytest.mark.slow
def test_double_and_complex_parameters_are_reduced_densely(results: Results) -> None:
    for each in results:
        for name in ("double", "phase"):
            torch.testing.assert_close(*each["models"][name], rtol=1e-5, atol=1e-6)


# -- ranks that Lightning spawns, which receive a pickled strategy -----------------------------------------------------

SCRIPT = """
import warnings
import pytorch_lightning as pl
from tests.strategy.trainers import data
from torch import nn


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(13, 5)

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        from torch.optim import SGD
        return SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="mstopk_hier_spawn", max_steps=2, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )
    trainer.fit(Module(), data())
    print("it", trainer.state.status.value)
"""


@pytest.mark.slow
def test_spawned_ranks_train_and_log_the_topology_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "it finished" in done.stdout
    assert done.stderr.count("1 node(s) x 2 device(s)") == 1, done.stderr

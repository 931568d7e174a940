"""The strategy under Lightning Fabric, with both Lightning packages, on real ranks."""

import os
import warnings
from importlib import import_module
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse.gradients.config import Warmup
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import Lines
from tests.strategy.models import batch, flat_parameters, mlp

PACKAGES = {"lightning_fabric": "lightning_fabric", "lightning.fabric": "fabric"}
STEPS = 8


def fabric_with(package: str, strategy: Any, **options: Any) -> Any:
    warnings.simplefilter("ignore")
    fabric = import_module(package).Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy=strategy, **options)
    fabric.launch()
    return fabric


def of_class(name: str, package: str, **options: Any) -> Any:
    return getattr(import_module(f"lightning_sparse.flavours.{PACKAGES[package]}"), name)(
        **{"density": 0.05, **options}
    )


def ours(package: str, **options: Any) -> Any:
    return of_class("MSTopKHierStrategy", package, **{"exchange": "sparse", **options})


def prepared(fabric: Any, lr: float = 0.1) -> tuple[Any, Any]:
    model = mlp()
    return fabric.setup(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))  # type: ignore[no-any-return]


def train(fabric: Any, model: Any, optimizer: Any, first: int, last: int, accumulate: int = 1) -> None:
    for step in range(first, last):
        for part in range(accumulate):
            x, y = batch(step * accumulate + part, fabric.global_rank)
            with fabric.no_backward_sync(model, enabled=part < accumulate - 1):
                fabric.backward(nn.functional.mse_loss(model(x), y) / accumulate)
        optimizer.step()
        optimizer.zero_grad()


def run(package: str, strategy: Any, accumulate: int = 1, **options: Any) -> Tensor:
    fabric = fabric_with(package, strategy, **options)
    model, optimizer = prepared(fabric)
    train(fabric, model, optimizer, 0, STEPS, accumulate)
    return flat_parameters(model)


def everything(package: str, folder: str) -> dict[str, Any]:
    os.chdir(folder)
    exact = {"density": 1.0, "value_dtype": "float32"}
    found: dict[str, Any] = {
        "accumulated": [run(package, each, accumulate=3) for each in ("ddp", ours(package, **exact))],
        "bf16": run(package, ours(package), precision="bf16-mixed"),
        "saves": saves(package),
        "two": two_modules(package),
        "skipped": skipped(package),
        "again": set_up_again(package),
        "gone": gone(package),
        "weights": weights_alone(package),
    }
    by_string = fabric_with(package, "mstopk_hier")
    model, optimizer = prepared(by_string)
    train(by_string, model, optimizer, 0, STEPS)
    state = by_string.strategy.engines[0]
    found["string"] = (type(by_string.strategy).__module__, state.round, state.exchange.stats.rounds)
    return found


def saves(package: str) -> bool:
    """Save twice to one path, with and without optimizer, and load into a trained model. Return whether it resumed."""
    fabric = fabric_with(package, ours(package))
    model, optimizer = prepared(fabric)
    train(fabric, model, optimizer, 0, 5)
    for _ in range(2):  # the second save replaces the first
        fabric.save("saved.ckpt", {"model": model, "optimizer": optimizer, "step": 5})
    train(fabric, model, optimizer, 5, STEPS)
    whole = flat_parameters(model)
    other = fabric_with(package, ours(package))
    model, optimizer = prepared(other)
    train(other, model, optimizer, 20, 25)
    rest = other.load("saved.ckpt", {"model": model, "optimizer": optimizer})
    assert rest == {"step": 5}, rest
    train(other, model, optimizer, rest["step"], STEPS)
    resumed = torch.equal(whole, flat_parameters(model))
    if fabric.global_rank == 0:
        assert len(os.listdir("saved.ckpt.residual")) == 1
    fabric.barrier()
    fabric.save("saved.ckpt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert os.path.exists("saved.ckpt.residual"), "an optimizer's state dict counts as the optimizer"
    fabric.barrier()
    fabric.save("saved.ckpt", {"model": model})
    if fabric.global_rank == 0:
        assert not os.path.exists("saved.ckpt.residual"), "a checkpoint without an optimizer has no residuals"
    return resumed


def two_modules(package: str) -> list[Tensor]:
    """Step two modules and optimizers in turn, as a GAN does; return the weights of DDP and of ours at density 1."""
    ends = []
    for strategy in ("ddp", ours(package, density=1.0, value_dtype="float32")):
        fabric = fabric_with(package, strategy)
        pairs = [prepared(fabric), prepared(fabric)]
        for step in range(2 * STEPS):
            model, optimizer = pairs[step % 2]
            train(fabric, model, optimizer, step, step + 1)
        ends.append(torch.cat([flat_parameters(model) for model, _ in pairs]))
    return ends


def skipped(package: str) -> bool:
    """Put an inf into the data of one rank. The scaler must skip the step, and no residual may change."""
    precision = import_module(f"{package}.plugins.precision").MixedPrecision
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    fabric = fabric_with(package, ours(package), plugins=[precision("16-mixed", "cpu", scaler=scaler)])
    model, optimizer = prepared(fabric)
    train(fabric, model, optimizer, 0, 5)
    state = fabric.strategy.engines[0]
    state.commit_round()
    before = {group: shard.clone() for group, shard in state.store.committed.items()}
    weights = flat_parameters(model)
    x, y = batch(5, fabric.global_rank)
    if fabric.global_rank == 3:
        x[0, 0] = float("inf")
    fabric.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    state.commit_round()
    kept = all(torch.equal(shard, state.store.committed[group]) for group, shard in before.items())
    return kept and torch.equal(weights, flat_parameters(model)) and float(state.residual_norm()) > 0


def set_up_again(package: str) -> dict[str, Any]:
    """Set up a module again, the second time after its optimizer. It keeps its residual."""
    fabric = fabric_with(package, ours(package))
    model = mlp()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(fabric, wrapped, optimizer, 0, 6)
    (state,) = fabric.strategy.engines
    before, waits = state.round, float(state.residual_norm())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped = fabric.setup_module(model)
    train(fabric, wrapped, optimizer, 6, 9)
    first_device_wants = fabric.strategy.engines == [state] and state.round == before + 3 and waits > 0
    other = mlp(1)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(other.parameters(), lr=0.1))
    wrapped = fabric.setup_module(other)  # set up after its optimizer, whose steps count nevertheless
    train(fabric, wrapped, optimizer, 0, 5)
    second = fabric.strategy.engines[1]
    second.commit_round()
    waited = {group: shard.clone() for group, shard in second.store.committed.items()}
    x, y = batch(5, fabric.global_rank)
    fabric.backward(nn.functional.mse_loss(wrapped(x), y))
    optimizer.zero_grad()
    second.commit_round()
    kept = all(torch.equal(shard, second.store.committed[group]) for group, shard in waited.items())
    return {"goes on": first_device_wants, "thrown away": bool(waited) and kept}


def gone(package: str) -> dict[str, Any]:
    """Deleted modules leave no state. A resumed module loads its own state, independent of the order of setup."""
    fabric = fabric_with(package, ours(package))
    idle = nn.Linear(3, 2)
    fabric.setup(idle, torch.optim.SGD(idle.parameters(), lr=0.1))  # has had no round at the time of the save
    small = nn.Linear(13, 5)
    wrapped, stepper = fabric.setup(small, torch.optim.SGD(small.parameters(), lr=0.1))
    train(fabric, wrapped, stepper, 0, 6)
    model, optimizer = prepared(fabric)
    train(fabric, model, optimizer, 0, 6)
    fabric.save("two.ckpt", {"model": model, "optimizers": [optimizer.state_dict()]})
    waits = fabric.strategy.engines[2].residual_norm()
    del small, wrapped, stepper
    pairs = [prepared(fabric), (model, optimizer), idle]
    other = fabric_with(package, ours(package))
    resumed, _ = prepared(other)
    other.load("two.ckpt", {"model": resumed, "optimizers": []})
    (state,) = other.strategy.engines
    lines, third = Lines(), fabric_with(package, ours(package))
    narrow = nn.Linear(13, 5, bias=False)
    unlike, stepper = third.setup(narrow, torch.optim.SGD(narrow.parameters(), lr=0.1))
    third.load("two.ckpt", {"model": unlike, "optimizers": []}, strict=False)
    train(third, unlike, stepper, 0, 2)
    told = [line for line in lines.lines if line.startswith("2 residual(s) of")]
    return {
        "told": len(told) == (third.global_rank == 0),
        "states": len(fabric.strategy.engines) == len(pairs),
        "own": torch.equal(state.residual_norm(), waits) and bool(waits > 0),
    }


def weights_alone(package: str) -> bool:
    """Load the weights of another run during training; the residuals must not change."""
    fabric = fabric_with(package, ours(package))
    model, optimizer = prepared(fabric)
    fabric.save("early.ckpt", {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, 0, 6)
    (state,) = fabric.strategy.engines
    before = state.residual_norm()
    fabric.load("early.ckpt", {"model": mlp()}, strict=False)
    return bool(before > 0) and torch.equal(before, state.residual_norm()) and state.round == 6


@pytest.fixture(scope="module", params=["lightning.fabric", pytest.param("lightning_fabric", marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fabric")
    return run_ranks(everything, request.param, str(folder), nodes=2, devices=2, timeout=120, init=False)


@pytest.mark.parametrize("name", ["accumulated", "two"])
def test_fabric_at_density_one_equals_ddp(results: list[dict[str, Any]], name: str) -> None:
    for each in results:
        torch.testing.assert_close(each[name][0], each[name][1], rtol=1e-5, atol=1e-6)


def test_fabric_in_bf16_keeps_ranks_equal(results: list[dict[str, Any]]) -> None:
    assert all(torch.equal(each["bf16"], results[0]["bf16"]) for each in results)


@pytest.mark.parametrize("name", ["saves", "skipped", "weights"])
def test_fabric_saves_resume_and_skipped_steps_move_no_residual(results: list[dict[str, Any]], name: str) -> None:
    assert all(each[name] for each in results)


@pytest.mark.parametrize("name", ["again", "gone"])
def test_fabric_modules_set_up_again_or_deleted_keep_their_own_states(results: list[dict[str, Any]], name: str) -> None:
    for each in results:
        assert all(each[name].values()), each[name]


def test_fabric_finds_the_strategy_by_name(results: list[dict[str, Any]]) -> None:
    module, rounds, counted = results[0]["string"]
    assert module.startswith("lightning_sparse.flavours.")
    assert rounds == counted == STEPS


def test_fabric_bad_options_are_refused() -> None:
    for package in PACKAGES:
        for option, value, says in (
            ("density", 2, r"density=2 must be a number in \(0, 1\]"),
            ("desity", 0.1, r"has no option desity=0.1. Did you mean density\?"),
            ("ddp_comm_hook", len, "cannot be combined with MSTopKHierStrategy"),
        ):
            with pytest.raises(ValueError, match=says):
                ours(package, **{option: value})
        assert ours(package).config.warmup_epochs is None


def test_warmup_in_epochs_warns_once_if_the_epoch_is_unknown() -> None:
    warmup, said = Warmup(epochs=2), Mock()
    assert warmup.density_now(0.01, None, 5, said) == warmup.density(0.01, 0, 5)
    assert "warmup_epochs=2, but the epoch is not set" in said.call_args.args[0]
    said.reset_mock()
    assert warmup.density_now(0.01, 2, 5, said) == 0.01
    assert Warmup(rounds=8).density_now(0.01, None, 5, said) > 0.01
    said.assert_not_called()


def test_fabric_set_epoch_reaches_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = ours("lightning_fabric", warmup_epochs=2)
    strategy.engines.append(type("State", (), {})())
    strategy.set_epoch(3)
    assert strategy.engines[0].epoch == 3
    assert dist.is_initialized() is False

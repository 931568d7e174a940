"""Models that need care in a real Trainer, 2 nodes x 2 devices on Gloo, in both flavours of Lightning."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.lines import Lines
from tests.helpers.scenarios import Scenarios
from tests.strategy.models import mlp
from tests.strategy.trainers import (
    Branches,
    Results,
    ddp,
    dense_one,
    fitted,
    gan,
    lightning_of,
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


# -- unused and frozen parameters --------------------------------------------------------------------------------------


@scenario
def unused(flavour: str) -> dict[str, Any]:
    strategy = sparse(flavour, find_unused_parameters=True)
    module = plain_module(flavour, Branches())
    seen: dict[str, Any] = {}

    class Watch(lightning_of(flavour).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step in (6, 14):
                state = strategy.hier_state
                state.settle()
                seen[f"never {trainer.global_step}"] = pl_module.net.never.weight.detach().clone()
                seen[f"residual {trainer.global_step}"] = _piece(state, "net.never.weight")
                seen[f"sometimes {trainer.global_step}"] = pl_module.net.sometimes.weight.detach().clone()

    pl_sgd = torch.optim.SGD
    module.configure_optimizers = lambda: pl_sgd(module.parameters(), lr=0.05)
    frozen = module.net.frozen.weight.detach().clone()
    fitted(flavour, strategy, module, max_steps=14, max_epochs=9, callbacks=[Watch()])
    return {**seen, "weights": weights(module), "frozen": torch.equal(frozen, module.net.frozen.weight)}


def _piece(state: Any, name: str) -> Tensor:
    """This device's part of one parameter's residual."""
    store = state.store
    for group, shard in store.current.items():
        pieces = group.shard_slices([name], store.device_index, store.num_devices) if name in group.names else []
        for _, here, _ in pieces:
            return shard[here].clone()
    return torch.zeros(0)


def test_unused_and_frozen_parameters(results: Results) -> None:
    assert same_on_all_ranks(results, "unused")
    waiting = 0.0
    for each in results:
        unused = each["unused"]
        assert unused["frozen"]
        assert torch.equal(unused["never 6"], unused["never 14"]), "a parameter that no rank used has moved"
        assert torch.equal(unused["residual 6"], unused["residual 14"]), "its residual was added to or spent"
        assert not torch.equal(unused["sometimes 6"], unused["sometimes 14"]), "one rank's use must reach all"
        waiting += float(unused["residual 6"].abs().sum())
    assert waiting > 0, "the test says nothing if no residual waited"


# -- several optimizers ------------------------------------------------------------------------------------------------


@scenario
def gans(flavour: str) -> dict[str, Any]:
    lines = Lines()
    out: dict[str, Any] = {}
    for name, toggled, strategy in [
        ("toggled", True, dense_one), ("toggled ddp", True, ddp), ("untoggled", False, sparse),
        ("untoggled ddp", False, ddp), ("toggled sparse", True, sparse),
    ]:  # fmt: skip
        chosen = strategy(flavour, find_unused_parameters=True)
        out[name] = weights(fitted(flavour, chosen, gan(flavour, toggled), max_steps=24, max_epochs=9))
        out[name + " density"] = getattr(chosen, "hier_state", None) and chosen.hier_state.exchange.stats.density
    return {**out, "lines": list(lines.lines)}


def test_a_gan_equals_ddp_toggled_at_density_one_and_untoggled_exactly(results: Results) -> None:
    for each in results:
        torch.testing.assert_close(each["gans"]["toggled"], each["gans"]["toggled ddp"], rtol=1e-5, atol=1e-6)
        assert torch.equal(each["gans"]["untoggled"], each["gans"]["untoggled ddp"])
        assert each["gans"]["toggled sparse density"] < 0.3
        assert torch.equal(each["gans"]["toggled sparse"], results[0]["gans"]["toggled sparse"])
    assert sum("toggle_optimizer" in line for line in results[0]["gans"]["lines"]) == 1


# -- models that need care ---------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return out


class Complex(nn.Module):
    """A complex parameter and one in double precision beside an ordinary layer."""

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
def models(flavour: str) -> dict[str, Any]:
    plain = weights(fitted(flavour, sparse(flavour)))
    checkpointed = weights(fitted(flavour, sparse(flavour), plain_module(flavour, Checkpointed())))
    compiled = plain_module(flavour)
    # torch's DDPOptimizer, which cuts the graph at buckets, wants them no smaller than its first
    large = {"bucket_cap_mb": 25}
    trainer(flavour, dense_one(flavour, **large)).fit(torch.compile(compiled, backend="aot_eager"))
    uncompiled = weights(fitted(flavour, dense_one(flavour, **large)))
    module = plain_module(flavour, Complex())
    strategy = dense_one(flavour)
    fitted(flavour, strategy, module, max_steps=8)
    reference = plain_module(flavour, Complex())
    fitted(flavour, ddp(flavour), reference, max_steps=8)
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
def test_a_compiled_model_trains_alike(results: Results) -> None:
    for each in results:
        torch.testing.assert_close(each["models"]["compiled"], each["models"]["uncompiled"], rtol=1e-4, atol=1e-5)
    assert same_on_all_ranks(results, "models", "compiled")


@pytest.mark.slow
def test_double_and_complex_parameters_go_dense(results: Results) -> None:
    for each in results:
        for name in ("double", "phase"):
            torch.testing.assert_close(*each["models"][name], rtol=1e-5, atol=1e-6)

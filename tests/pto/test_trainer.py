"""PTOCallback in a Trainer on 2 nodes x 2 devices gives the run without the callback, bit for bit.

A scenario fits twice, without and with the callback, and compares the saved parameters, optimizer states, schedulers
and scaler. One start of ranks runs all scenarios.
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.distributed import run_ranks
from tests.helpers.lines import raised
from tests.helpers.scenarios import Scenarios, returned
from tests.pto.steps import same
from tests.strategy.trainers import Branches, ddp, gan, lightning_of, ours, plain_module, ranks, sparse, trainer

STEPS = 12
KEYS = ("state_dict", "optimizer_states", "lr_schedulers", "MixedPrecision", "global_step")
SCENARIOS = Scenarios()
scenario = SCENARIOS.add
FEW = ("plain", "hierarchical")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenarios")


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the results of all scenarios, by rank."""
    names = list(SCENARIOS.wanted(request))
    shape = {"nodes": 2, "devices": 2, "timeout": 250, "init": False}
    return run_ranks(run_scenarios, "pytorch_lightning", str(folder), names, **shape)


def run_scenarios(package: str, folder: str, names: list[str]) -> dict[str, Any]:
    import warnings

    os.chdir(folder)
    warnings.simplefilter("ignore")
    return returned({name: SCENARIOS[name] for name in names}, package)


# -- harness -----------------------------------------------------------------------------------------------------------


def module_with(package: str, optimizers: Callable[[Any], Any], net: nn.Module | None = None) -> Any:
    module = plain_module(package, net, by_step=True)
    module.configure_optimizers = lambda: optimizers(module)
    return module


def adamw(module: Any) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def momentum(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def fit(
    package: str, module: Any, scope: str | None, strategy: Any = None, resume: str | None = None, **options: Any
) -> tuple[Any, Any]:
    """Return the trainer after a fit, and its callback, if any."""
    pto = ours(package).PTOCallback(scope) if scope else None
    callbacks = [*options.pop("callbacks", []), *([pto] if pto else [])]
    given = {"max_steps": STEPS, "max_epochs": -1, **ranks(), "callbacks": callbacks, **options}
    t = trainer(package, strategy or ddp(package), **given)
    t.fit(module, ckpt_path=resume)
    return t, pto


def saved(t: Any, path: str = "compared.ckpt") -> Any:
    """Return the checkpoint of the trainer on every rank."""
    t.save_checkpoint(path)
    return loaded(path)


def loaded(path: str) -> Any:
    dist.barrier()
    checkpoint = torch.load(path, weights_only=True)
    dist.barrier()
    return {key: checkpoint[key] for key in KEYS if key in checkpoint}


def equal(package: str, make: Callable[[], Any], scope: str = "node", **options: Any) -> str:
    """Return the differences between the fits without and with the callback."""
    made = {name: value if callable(value) else (lambda value=value: value) for name, value in options.items()}
    plain, _ = fit(package, make(), None, **{name: value() for name, value in made.items()})
    expected = saved(plain)
    t, pto = fit(package, make(), scope, **{name: value() for name, value in made.items()})
    found = saved(t)
    wrong = [key for key in KEYS if not same(found.get(key), expected.get(key))]
    wrong += [f"{sum(map(shared, pto.steps))} is shared"] * (not all(map(shared, pto.steps)))
    norms = residual_norm(plain), residual_norm(t)
    wrong += [f"residuals {norms}"] * (norms[0] != norms[1])
    return ", ".join(wrong)


def residual_norm(t: Any) -> float:
    """Return the norm of the residuals, 0 for DDP."""
    state = getattr(t.strategy, "engine", None)
    if state is None:
        return 0.0
    norm = float(state.residual_norm())
    assert norm > 0 or t.num_nodes == 1
    return norm


def shared(step: Any) -> bool:
    """Return whether this rank stepped its parameters and has state of no other parameters."""
    own = {id(p): part for p, part in zip(step.parameters, step.local_parts, strict=True) if part is not None}
    foreign = {id(p) for p in step.optimizer.state} - own.keys()
    numel = sum(part.end - part.begin for part in own.values())
    return step.active and step.steps > 0 and not foreign and numel < sum(p.numel() for p in step.parameters)


# -- features ----------------------------------------------------------------------------------------------------------


@scenario
def plain(package: str) -> dict[str, str]:
    return {
        "node": equal(package, lambda: module_with(package, adamw)),
        "world": equal(package, lambda: module_with(package, momentum), scope="world"),
    }


@SCENARIOS.slow
def in_16_bit(package: str) -> dict[str, str]:
    return {
        precision: equal(package, lambda: module_with(package, adamw), precision=precision)
        for precision in ("bf16-true", "bf16-mixed")
    }


@SCENARIOS.slow
def accumulation(package: str) -> dict[str, str]:
    def make() -> Any:
        return module_with(package, adamw)

    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    return {
        "clipping": equal(package, make, accumulate_grad_batches=2, max_steps=10, gradient_clip_val=0.05),
        "clipping by value": equal(package, make, strategy=lambda: "ddp", **by_value),
    }


@SCENARIOS.slow
def half(package: str) -> dict[str, Any]:
    """Let the forward pass of one rank overflow in one step, which no rank may make."""
    from pytorch_lightning.plugins.precision import MixedPrecision

    def precision() -> Any:
        return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=6))]

    def make(fused: bool = False) -> Any:
        def optimizers(module: Any) -> Any:
            return torch.optim.Adam(module.parameters(), lr=0.01, fused=fused)

        def overflow(_: Any, __: Any, out: Tensor) -> Tensor:
            return out * float("inf") if module.trainer.global_step == 5 and module.global_rank == 3 else out

        module = module_with(package, optimizers)
        module.net.register_forward_hook(overflow)
        return module

    def hier() -> Any:
        return sparse(package)

    return {
        "scaler, fused": equal(package, lambda: make(fused=True), plugins=precision, scope="world"),
        "scaler, hierarchical": equal(package, make, plugins=precision, strategy=hier, gradient_clip_val=0.1),
    }


@SCENARIOS.slow
def schedules(package: str) -> dict[str, Any]:
    """Train with parameter groups, a scheduler by step, and an average of the weights."""
    averaging = lightning_of(package).callbacks.EMAWeightAveraging

    def optimizers(module: Any) -> Any:
        first, *rest = module.parameters()
        optimizer = torch.optim.RMSprop([{"params": [first], "lr": 0.01}, {"params": rest}], lr=0.003, momentum=0.5)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    callbacks = {"callbacks": lambda: [averaging(decay=0.7)]}
    return {"groups, scheduler and average": equal(package, lambda: module_with(package, optimizers), **callbacks)}


@SCENARIOS.slow
def several(package: str) -> dict[str, Any]:
    """Train with two optimizers and closures in manual optimization, and unused parameters."""

    def closures() -> Any:
        class Manual(type(plain_module(package))):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False

            def training_step(self, batch: Tensor, index: int) -> None:
                optimizer = self.optimizers()

                def closure() -> Tensor:
                    optimizer.zero_grad()
                    loss = self.net(batch).square().mean()
                    self.manual_backward(loss)
                    return loss

                optimizer.step(closure=closure)

        return Manual()

    unused = {"strategy": lambda: ddp(package, find_unused_parameters=True)}
    return {
        "two optimizers": equal(package, lambda: gan(package, toggled=True), **unused, scope="world"),
        "closures": equal(package, closures),
        "unused": equal(package, lambda: module_with(package, momentum, Branches()), **unused),
    }


@scenario
def hierarchical(package: str) -> dict[str, Any]:
    """Check that residuals equal the residuals of the run without the callback."""
    makes = {"node": adamw, "world": momentum}
    return {
        scope: equal(package, partial(module_with, package, make), scope=scope, strategy=lambda: sparse(package))
        for scope, make in makes.items()
    }


ALL_SLOW = ("in_16_bit", "accumulation", "half", "schedules", "several")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ALL_SLOW]


@pytest.mark.parametrize("name", ["plain", "hierarchical", *SLOW])
def test_run_equals_the_run_without_the_callback(results: list[dict[str, Any]], name: str) -> None:
    for each in results:
        assert set(each[name].values()) == {""}, each[name]


@pytest.mark.slow
def test_other_lightning_package_equals_the_run_without_the_callback(folder: Path) -> None:
    for each in run_ranks(run_scenarios, "lightning", str(folder), FEW, nodes=1, devices=2, timeout=120, init=False):
        assert {value for name in FEW for value in each[name].values()} == {""}, each


# -- checkpoints -------------------------------------------------------------------------------------------------------


@scenario
def checkpoints(package: str) -> dict[str, Any]:
    """Compare the checkpoints of a fit, and of a run that resumes twice: with, without and with the callback.

    The reference resumes, too, because DDP starts every fit with other buckets, which changes bits.
    """
    saving = lightning_of(package).callbacks.ModelCheckpoint

    def chain(name: str, *scopes: str | None) -> tuple[Any, Any]:
        each = saving(dirpath=name, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        first = {"callbacks": [each], "enable_checkpointing": True, "max_steps": 6}
        path = None
        for scope, last in zip(scopes, (first, {"max_steps": 9}, {"max_steps": STEPS}), strict=True):
            t, pto = fit(package, module_with(package, adamw), scope, resume=path, **last)
            path = f"{name}.ckpt"
            found = saved(t, path)
        return found, pto

    expected, _ = chain("plain", None, None, None)
    found, pto = chain("pto", "node", None, "world")
    return {
        "during": all(same(loaded(f"pto/step={n}.ckpt"), loaded(f"plain/step={n}.ckpt")) for n in (3, 6)),
        "resumed": same(found, expected),
        "shared": all(map(shared, pto.steps)),
        "whole": len(expected["optimizer_states"][0]["state"]) == 6,
    }


def test_checkpoints_and_resumed_runs_equal_runs_without_the_callback(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert each["checkpoints"] == {"during": True, "resumed": True, "shared": True, "whole": True}


def test_two_ranks_resume_a_checkpoint_of_four(results: list[dict[str, Any]], folder: Path) -> None:
    for each in run_ranks(on_fewer, str(folder), nodes=1, devices=2, timeout=100, init=False):
        assert each["equal"]
        assert each["shared"]
    assert len(results) == 4


def on_fewer(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    found = []
    for scope, path in ((None, "plain/step=6.ckpt"), ("node", "pto/step=6.ckpt")):
        t, pto = fit("pytorch_lightning", module_with("pytorch_lightning", adamw), scope, resume=path, max_steps=12)
        found.append(saved(t, "fewer.ckpt"))
    return {"equal": same(*found), "shared": all(map(shared, pto.steps))}


@scenario
def second_fit(package: str) -> dict[str, Any]:
    """Fit twice with the same Trainer, callback and optimizer object."""
    out = []
    for scope in (None, "node"):
        module = module_with(package, lambda module: module.own)
        module.own = momentum(module)
        t, pto = fit(package, module, scope, max_steps=5)
        t.fit_loop.epoch_loop.max_steps = 9
        t.fit(module)
        out.append(saved(t))
    return {"equal": same(*out), "shared": all(map(shared, pto.steps)), "steps": pto.steps[0].steps}


def test_second_fit_continues(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert each["second_fit"] == {"equal": True, "shared": True, "steps": 9}


# -- refusals ----------------------------------------------------------------------------------------------------------


@scenario
def refusals(package: str) -> dict[str, Any]:
    said = {}
    for name, cls in (("lbfgs", torch.optim.LBFGS), ("adam", torch.optim.Adam)):
        twice = [ours(package).PTOCallback("world")] if name == "adam" else []
        module = module_with(package, lambda m, cls=cls: cls(m.parameters()))
        said[name] = raised(fit, package, module, "node", callbacks=twice)
    return said


def test_refusals_are_raised_on_every_rank(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert "cannot shard the step of LBFGS" in each["refusals"]["lbfgs"]
        assert "the step of Adam is already sharded. Use one PTOCallback" in each["refusals"]["adam"]


class FSDPStrategy:
    model = nn.Linear(1, 1)


def test_strategies_other_than_ddp_are_refused() -> None:
    t = SimpleNamespace(world_size=2, strategy=FSDPStrategy())
    with pytest.raises(ValueError, match="FSDPStrategy does not provide. Use strategy='ddp' or 'mstopk_hier'"):
        ours("pytorch_lightning").PTOCallback().on_fit_start(t, nn.Linear(1, 1))


def test_single_rank_is_not_sharded() -> None:
    pto = ours("pytorch_lightning").PTOCallback()
    pto.on_fit_start(SimpleNamespace(world_size=1, strategy=FSDPStrategy()), nn.Linear(1, 1))
    assert pto.steps == []


def test_log_lines_are_shown_with_ddp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("handlers", []), ("propagate", False), ("level", logging.WARNING)):
        monkeypatch.setattr(logging.getLogger("lightning_sparse"), name, value)
    pto = ours("pytorch_lightning").PTOCallback()
    pto.on_fit_start(SimpleNamespace(world_size=1, strategy=None), nn.Linear(1, 1))
    assert capsys.readouterr().err == "PTOCallback: one rank, nothing to share\n"

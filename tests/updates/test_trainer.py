"""`strategy="mstopk_local"` in a Trainer: callbacks, loggers, and validation with the global weights."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.distributed import run_ranks
from tests.helpers.lines import raised
from tests.helpers.scenarios import Scenarios
from tests.strategy.trainers import (
    Results,
    ddp,
    fitted,
    gan,
    lightning_of,
    ours,
    plain_module,
    results_of,
    same_on_all_ranks,
    trainer,
    weights,
)  # fmt: skip

scenarios = Scenarios()
results = results_of(scenarios)


def local(package: str, **options: Any) -> Any:
    return ours(package).MSTopKLocalStrategy(**{"density": 0.05, **options})


class Net(nn.Module):
    """Has batch norm, tied weights and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        self.first, self.norm, self.last = nn.Linear(13, 13), nn.BatchNorm1d(13), nn.Linear(13, 13)
        self.last.weight = self.first.weight
        self.register_buffer("constant", torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()) * self.constant


def adamw_module(package: str, net: nn.Module | None = None, **options: Any) -> Any:
    base = type(plain_module(package, net or nn.Linear(13, 5)))

    class Module(base):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            trained = [p for p in self.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=0.01, **options)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)}

    return Module()


@scenarios.add
def views(package: str) -> dict[str, Any]:
    """Return the weights that each hook and each phase sees."""
    seen: dict[str, list[Tensor]] = {}

    class See(lightning_of(package).Callback):  # type: ignore[misc]
        def note(self, where: str, module: Any) -> None:
            seen.setdefault(where, []).append(torch.cat([weights(module), module.net.norm.running_mean]))

        def on_before_zero_grad(self, trainer: Any, module: Any, *_: Any) -> None:
            self.note("training", module)

        def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            self.note("validation", module)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.note("epoch end", module)
            self.note("checkpoint", module)
            state = trainer.strategy.lightning_module_state_dict()
            names = [name for name, _ in module.named_parameters()]
            seen["checkpoint"][-1] = torch.cat([*(state[n].flatten() for n in names), state["net.norm.running_mean"]])

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 2:
                state = trainer.strategy.lightning_module_state_dict()
                assert state["net.first.weight"].data_ptr() == state["net.last.weight"].data_ptr()
                seen.setdefault("mid-epoch checkpoint", []).append(state["net.first.weight"].flatten())

    module = adamw_module(package, Net())
    options: dict[str, Any] = {"limit_val_batches": 1, "max_steps": -1, "max_epochs": 2, "limit_train_batches": 6}
    trainer(package, local(package), callbacks=[See()], **options).fit(module)
    seen["end"] = [torch.cat([weights(module), module.net.norm.running_mean])]
    return {**seen, "constant": module.net.constant}


def test_hooks_and_phases_see_the_global_weights(results: Results) -> None:
    for where in ("validation", "epoch end", "checkpoint", "mid-epoch checkpoint", "end"):
        for each in results:
            assert all(torch.equal(a, b) for a, b in zip(each["views"][where], results[0]["views"][where], strict=True))
    assert torch.equal(results[0]["views"]["epoch end"][0], results[0]["views"]["checkpoint"][0])
    assert results[0]["views"]["constant"] == torch.tensor(0.1)
    of_nodes = [results[rank]["views"]["training"][-1] for rank in (0, 2)]
    assert not torch.equal(*of_nodes), "each node trains its own model"


@scenarios.add
def everything_sent(package: str) -> dict[str, Any]:
    exact = {"density": 1.0, "value_dtype": "float32", "delay": 0, "bucket_cap_mb": 0.002}

    class Plain(type(plain_module(package))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    options = {"accumulate_grad_batches": 2}
    return {
        "ours": weights(fitted(package, local(package, **exact), Plain(), **options)),
        "ddp": weights(fitted(package, ddp(package), Plain(), **options)),
    }


def test_updates_with_everything_sent_equal_ddp_with_accumulation(results: Results) -> None:
    for each in results:
        found = each["everything_sent"]
        torch.testing.assert_close(found["ours"], found["ddp"], rtol=1e-6, atol=1e-6)


@scenarios.add
def ways_to_train(package: str) -> dict[str, Tensor]:
    callbacks = importlib.import_module(lightning_of(package).__name__ + ".callbacks")
    runs: dict[str, Any] = {
        "by name": (
            adamw_module(package),
            {"strategy": "mstopk_local", "gradient_clip_val": 0.1, "precision": "bf16-mixed"},
        ),
        "gan": (gan(package, True), {"strategy": local(package, find_unused_parameters=True)}),
        "averaging at epochs": (
            adamw_module(package, Net()),
            {"max_steps": -1, "max_epochs": 4, "limit_train_batches": 4,
             "callbacks": [callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=2)]},
        ),
        "frozen, then unfrozen": (adamw_module(package), {"callbacks": [unfreezing(package)]}),
        "fused": (adamw_module(package, fused=True), {"strategy": local(package, sync_every=3)}),
        "muon": (muon_module(package), {}),
    }  # fmt: skip
    if hasattr(callbacks, "WeightAveraging"):
        averaging = callbacks.WeightAveraging(use_buffers=True)
        runs["averaging at steps"] = (adamw_module(package, Net()), {"limit_val_batches": 1, "callbacks": [averaging]})
    found = {}
    for name, (module, options) in runs.items():
        strategy = options.pop("strategy", None) or local(package)
        begin = weights(module).clone()
        trainer(package, strategy, **options).fit(module)
        found[name] = weights(module).float()
        assert not torch.equal(begin.float(), found[name]), name
        assert found[name].isfinite().all(), name
    return found


@scenarios.add
def shown_at_the_end_of_steps(package: str) -> dict[str, Tensor]:
    """Stop a training by its number of steps, during an epoch."""
    seen = {}

    class See(lightning_of(package).Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen["weights"] = weights(module).clone()

    fitted(package, local(package), adamw_module(package), callbacks=[See()], max_steps=7)
    return seen


@scenarios.add
def buffers_that_come_late(package: str) -> dict[str, Tensor]:
    """Train with pruning, which adds masks as buffers while callbacks see the global weights."""
    callbacks = importlib.import_module(lightning_of(package).__name__ + ".callbacks")
    module = adamw_module(package, nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 5)))
    pruning = callbacks.ModelPruning("l1_unstructured", amount=0.3)
    fitted(package, local(package), module, callbacks=[pruning], max_steps=-1, max_epochs=3, limit_train_batches=4)
    return {"weights": weights(module)}


@scenarios.add
def no_optimizers(package: str) -> dict[str, Tensor]:
    class Module(type(plain_module(package, Net()))):  # type: ignore[misc]
        def configure_optimizers(self) -> None: ...

    module = Module()
    fitted(package, local(package), module, max_steps=-1, max_epochs=1, limit_train_batches=3)
    return {"weights": weights(module)}


@pytest.mark.parametrize("scenario", ["shown_at_the_end_of_steps", "buffers_that_come_late", "no_optimizers"])
def test_fit_leaves_the_global_weights_on_all_ranks(results: Results, scenario: str) -> None:
    assert same_on_all_ranks(results, scenario)


@scenarios.add
def communication_hook(package: str) -> list[int]:
    """Return the group size that a communication hook gets. Lightning registers the hook only on CUDA."""
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks")
    hook = hooks.default_hooks.fp16_compress_hook
    sizes = []
    for state in (None, hooks.powerSGD_hook.PowerSGDState(process_group=None)):
        strategy = local(package, ddp_comm_hook=hook, ddp_comm_state=state)
        fitted(package, strategy, adamw_module(package), max_steps=1)
        group = strategy._ddp_comm_state if state is None else strategy._ddp_comm_state.process_group
        sizes.append(group.size())
    return sizes


def test_communication_hook_stays_inside_the_node(results: Results) -> None:
    assert all(each["communication_hook"] == [2, 2] for each in results)


def unfreezing(package: str) -> Any:
    callbacks = importlib.import_module(lightning_of(package).__name__ + ".callbacks")

    class Unfreeze(callbacks.BaseFinetuning):  # type: ignore[misc, name-defined]
        def freeze_before_training(self, module: Any) -> None:
            module.extra = nn.Linear(3, 3)  # the weights of rank 0 are used
            self.freeze([module.extra])

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if trainer.global_step == 4:
                for parameter in module.extra.parameters():
                    parameter.requires_grad = True
                trainer.optimizers[0].add_param_group({"params": list(module.extra.parameters()), "lr": 0.1})

        def finetune_function(self, *_: Any) -> None: ...

    return Unfreeze()


def muon_module(package: str) -> Any:
    base = type(plain_module(package, nn.Linear(13, 5, bias=False)))

    class Module(base):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            return torch.optim.Muon(self.parameters(), lr=0.01)

    return Module()


@pytest.mark.parametrize(
    "name",
    [
        "by name", "gan", "averaging at epochs", "averaging at steps", "fused", "frozen, then unfrozen", "muon",
    ],
)  # fmt: skip
def test_fit_with_other_features_leaves_equal_weights_on_all_ranks(results: Results, name: str) -> None:
    if name not in results[0]["ways_to_train"]:
        pytest.skip("this Lightning has no WeightAveraging")
    assert same_on_all_ranks(results, "ways_to_train", name)


@scenarios.add
def averaged(package: str) -> dict[str, float]:
    """Return the distance between a fit's final weights and the weights that a callback averaged."""
    callbacks = importlib.import_module(lightning_of(package).__name__ + ".callbacks")
    kinds = [callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=2)]
    kinds += [callbacks.WeightAveraging()] if hasattr(callbacks, "WeightAveraging") else []
    off = {}
    for each in kinds:
        module = adamw_module(package)
        strategy = local(package, density=1.0, value_dtype="float32", delay=0, outer_lr=1.5)
        trainer(package, strategy, max_steps=-1, max_epochs=4, limit_train_batches=4, callbacks=[each]).fit(module)
        average = nn.utils.parameters_to_vector(each._average_model.parameters())
        off[type(each).__name__] = float((weights(module) - average).abs().max())
    return off


def test_fit_with_averaging_ends_with_the_average(results: Results) -> None:
    for each in results:
        assert max(each["averaged"].values()) < 1e-6


@scenarios.add
def with_pto(package: str) -> str:
    t = trainer(package, local(package), callbacks=[ours(package).PTOCallback()])
    return raised(t.fit, adamw_module(package))


def test_pto_callback_is_refused(results: Results) -> None:
    for each in results:
        assert "PTOCallback needs equal gradients on all ranks" in each["with_pto"]
        assert "Remove the callback" in each["with_pto"]


@scenarios.add
def statistics(package: str) -> dict[str, float]:
    module = adamw_module(package)
    t = trainer(package, local(package), callbacks=[ours(package).CommStatsCallback()])
    t.fit(module)
    return {name: float(value) for name, value in t.callback_metrics.items()}


def test_statistics_are_logged(results: Results) -> None:
    logged = results[0]["statistics"]
    assert 0.04 < logged["comm/density"] < 0.08
    assert logged["comm/bytes_between_nodes"] > 0
    assert logged["comm/pending_norm"] > 0


class Teacher(nn.Module):
    """A net and a copy of it that no optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.teacher, self.frozen = nn.Linear(13, 5), nn.Linear(13, 5), nn.Linear(13, 5)
        for parameter in (*self.teacher.parameters(), *self.frozen.parameters()):
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x) - self.teacher(x) + self.frozen(x)
        return result


@scenarios.add
def teacher(package: str) -> dict[str, Any]:
    class Follow(lightning_of(package).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            for taught, own in zip(module.net.teacher.parameters(), module.net.net.parameters(), strict=True):
                taught.data.lerp_(own.data, 0.1)

    net, seen = Teacher(), []
    module = adamw_module(package, net)
    module.validation_step = lambda batch, batch_idx: seen.append(weights(net.teacher).clone())
    before = weights(net.frozen).clone()
    trainer(package, local(package), callbacks=[Follow()], limit_val_batches=1).fit(module)
    return {"seen": seen, "end": weights(net.teacher), "frozen": torch.equal(before, weights(net.frozen))}


def test_teacher_weights_are_averaged(results: Results) -> None:
    for each in (result["teacher"] for result in results):
        assert each["seen"]
        assert all(torch.equal(*pair) for pair in zip(each["seen"], results[0]["teacher"]["seen"], strict=True))
        assert torch.equal(each["end"], results[0]["teacher"]["end"])
        assert each["frozen"]


def skipping(folder: str) -> str:
    module = adamw_module("pytorch_lightning")
    module.automatic_optimization = False

    def training_step(batch: Tensor, batch_idx: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.net(batch).square().mean())
        if batch_idx != 3 or module.global_rank == 0:
            optimizer.step()

    module.training_step = training_step
    return raised(fitted, "pytorch_lightning", local("pytorch_lightning"), module, devices=1)


def test_step_skipped_by_one_node_is_an_error(tmp_path: Path) -> None:
    for said in run_ranks(skipping, str(tmp_path), nodes=2, devices=1, timeout=100, init=False):
        assert "node 0 in batch 4 with optimizer 0, node 1 in batch 5" in said

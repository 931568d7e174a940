"""A user's hooks see the global weights, except within a training batch, and may change them."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sparse.topology import Topology
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import Lines, raised
from tests.helpers.scenarios import Scenarios
from tests.helpers.training import results_in_one_start
from tests.strategy.trainers import ddp, fitted, lightning_of, ours, plain_module, ranks, trainer, weights
from tests.updates.hook_programs import PACKAGE, Program, play_all, program
from tests.updates.test_trainer import adamw_module, local

SCENARIOS = Scenarios()
scenario = SCENARIOS.add
results = results_in_one_start(SCENARIOS)
Results = list[dict[str, Any]]
MORE = int(os.environ.get("HOOK_PROGRAMS", 40))  # number of programs in the slow test
AT_ONCE = 20  # programs per start of ranks: each program creates process groups, whose threads stay


def check(seed: int, of_ranks: list[tuple[dict[str, Any], dict[str, Any] | None]]) -> None:
    given = program(seed)
    for found, due in of_ranks:
        assert found["error"] == "", (seed, given)
        if due is not None:
            same_as_ddp(seed, given, found, due)
    (first, _), *others = of_ranks
    for other, _ in others:
        assert [where for where, _ in other["seen"]] == [where for where, _ in first["seen"]], (seed, given)
        for (where, one), (_, another) in zip(first["seen"], other["seen"], strict=True):
            if not where.startswith("after") and all(act.alike for act in given.acts):
                assert torch.equal(one, another), (seed, where, given)
        assert torch.equal(first["weights"], other["weights"]), (seed, given)


def same_as_ddp(seed: int, given: Program, found: dict[str, Any], due: dict[str, Any]) -> None:
    assert [where for where, _ in found["seen"]] == [where for where, _ in due["seen"]], (seed, given)
    pairs = [*zip(found["seen"], due["seen"], strict=True), (("end", found["weights"]), ("end", due["weights"]))]
    for number, ((where, one), (_, other)) in enumerate(pairs):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (seed, number, where, (one - other).abs().max(), given)


@pytest.mark.parametrize(
    ("nodes", "devices", "begin", "count"),
    [
        (2, 1, 0, 12),
        (2, 2, 100, 6),
        *(pytest.param(2, 1, 1000 + at, AT_ONCE, marks=pytest.mark.slow) for at in range(0, MORE, AT_ONCE)),
    ],
)
def test_random_hooks_give_the_result_of_ddp(nodes: int, devices: int, begin: int, count: int, tmp_path: Path) -> None:
    seeds = range(begin, begin + count)
    many: dict[str, Any] = {"nodes": nodes, "devices": devices, "timeout": 60 + 5 * count, "init": False}
    everyone = run_ranks(play_all, seeds, str(tmp_path), **many)
    for seed, of_ranks in zip(seeds, zip(*everyone, strict=True), strict=True):
        check(seed, list(of_ranks))


@scenario
def changed_at_start(_: str) -> list[Tensor]:
    """Return the weights of fits in which a hook sets the initial weights, and of a fit that starts with them."""
    results = []
    for hook in ("on_fit_start", "on_train_start", None):
        module = adamw_module(PACKAGE)

        def set_weights(module: Any = module) -> None:
            nn.utils.vector_to_parameters(torch.linspace(-1, 1, weights(module).numel()), module.parameters())

        if hook is None:
            set_weights()
        else:
            setattr(module, hook, set_weights)
        fitted(PACKAGE, local(PACKAGE), module, devices=1)
        results.append(weights(module))
    return results


def test_weights_that_a_hook_sets_before_training_are_global_at_once(results: Results) -> None:
    for *late, early in (each["changed_at_start"] for each in results):
        assert all(torch.equal(each, early) for each in late)


@scenario
def exported_and_final(folder: str) -> dict[str, Any]:
    """Return the difference between weights in a save hook and in the file, the last saved and the final weights."""
    pl = lightning_of(PACKAGE)
    module, differences = adamw_module(PACKAGE), []

    def on_save_checkpoint(checkpoint: dict[str, Any]) -> None:
        held = dict(module.named_parameters())
        differences.append(max(float((checkpoint["state_dict"][n] - held[n]).abs().max()) for n in held))

    module.on_save_checkpoint = on_save_checkpoint
    savers = [pl.callbacks.ModelCheckpoint(folder, str(every), every_n_train_steps=every) for every in (2, 7)]
    options = {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 7, "enable_checkpointing": True}
    trainer(PACKAGE, local(PACKAGE), callbacks=savers, devices=1, **options).fit(module)
    last = torch.load(f"{folder}/7.ckpt", weights_only=False)["state_dict"]
    return {"differences": differences, "last": torch.cat([last[n].flatten() for n, _ in module.named_parameters()]),
            "end": weights(module)}  # fmt: skip


def test_save_hook_sees_the_saved_weights_and_the_last_save_is_final(results: Results) -> None:
    for found in (each["exported_and_final"] for each in results):
        assert len(found["differences"]) == 4
        assert max(found["differences"]) == 0.0
        assert torch.equal(found["last"], found["end"])


@scenario
def pruned(_: str) -> tuple[int, int]:
    """Return the number of pruned weights that are zero after a fit with sparse messages, and the number pruned."""
    callbacks = importlib.import_module(f"{lightning_of(PACKAGE).__name__}.callbacks")
    module, masks = adamw_module(PACKAGE, nn.Linear(13, 29)), []

    class Prune(callbacks.ModelPruning):  # type: ignore[misc, name-defined]
        def make_pruning_permanent(self, pruned: Any) -> None:
            masks.append(dict(pruned.named_buffers())["net.weight_mask"].clone())
            super().make_pruning_permanent(pruned)

    options = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 5, "devices": 1}
    pruning = Prune("l1_unstructured", parameters_to_prune=[(module.net, "weight")], amount=0.3)
    fitted(PACKAGE, local(PACKAGE), module, callbacks=[pruning], **options)
    return int((module.net.weight[masks[0] == 0] == 0).sum()), int((masks[0] == 0).sum())


def test_pruned_weights_stay_zero_after_the_fit(results: Results) -> None:
    for zeros, masked in (each["pruned"] for each in results):
        assert zeros == masked > 0


@scenario
def averaged_by_a_callback(_: str) -> tuple[Tensor, list[Tensor]]:
    """Return a callback's average over steps, and the weights that it saw in each step."""
    seen: list[Tensor] = []

    class Average(lightning_of(PACKAGE).Callback):  # type: ignore[misc]
        mean: Tensor | None = None

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append(weights(module).clone())
            self.mean = seen[-1] if self.mean is None else self.mean.lerp(seen[-1], 0.1)

    average = Average()
    fitted(PACKAGE, local(PACKAGE), adamw_module(PACKAGE), callbacks=[average], devices=1)
    assert average.mean is not None
    return average.mean, seen


def test_callback_that_averages_sees_the_same_weights_on_all_nodes(results: Results) -> None:
    (mean, seen), (other, others) = (each["averaged_by_a_callback"] for each in results)
    assert torch.equal(mean, other)
    assert all(torch.equal(*pair) for pair in zip(seen, others, strict=True))
    assert not torch.equal(seen[0], seen[-1])


@scenario
def changed_unlike(_: str) -> dict[str, tuple[str, list[str], Tensor]]:
    hooks = ("on_train_epoch_start", "on_train_end", "on_train_batch_end")
    return {hook: changed_unlike_in(hook) for hook in hooks}


def changed_unlike_in(hook: str) -> tuple[str, list[str], Tensor]:
    """Add noise that differs by node in a hook. Return the error, the warnings and the weights."""
    lines, module = Lines(), adamw_module(PACKAGE)

    def add_noise(*_: Any) -> None:
        chance = torch.Generator().manual_seed(torch.distributed.get_rank())
        for parameter in module.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=chance)

    setattr(module, hook, add_noise)
    options = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 4, "devices": 1}
    error = raised(fitted, PACKAGE, local(PACKAGE), module, **options)
    return error, [line for line in lines.lines if "a hook changed the weights" in line], weights(module)


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_end"])
def test_change_that_differs_between_nodes_is_averaged_with_a_warning(results: Results, hook: str) -> None:
    (error, warnings, one), (_, _, other) = (each["changed_unlike"][hook] for each in results)
    assert error == ""
    assert len(warnings) == 1
    assert torch.equal(one, other)


@scenario
def switched_for_validation(folder: str) -> dict[str, Any]:
    """Train a module that validates with other weights on each node. Return the weights that it sees and saves."""
    seen, module = {}, adamw_module(PACKAGE)

    def move(sign: float) -> None:
        for parameter in module.parameters():
            parameter.data += sign * (1 + int(os.environ["RANK"]))

    evaluate, train, validate = (
        module.on_validation_model_eval,
        module.on_validation_model_train,
        module.validation_step,
    )
    module.on_validation_model_eval = lambda: (seen.setdefault("before", weights(module)), evaluate(), move(1.0))
    module.validation_step = lambda *args: (seen.setdefault("validated", weights(module)), validate(*args))[1]
    module.on_validation_end = lambda: module.trainer.save_checkpoint(f"{folder}/validated.ckpt")
    module.on_validation_model_train = lambda: (move(-1.0), train())
    fitted(PACKAGE, local(PACKAGE), module, devices=1, limit_val_batches=1, max_steps=4, val_check_interval=2)
    saved = torch.load(f"{folder}/validated.ckpt", weights_only=True)["state_dict"]
    return {**seen, "saved": torch.cat([each.flatten() for each in saved.values()]), "after": weights(module)}


def test_weights_replaced_for_validation_are_averaged_over_nodes(results: Results) -> None:
    one, other = (each["switched_for_validation"] for each in results)
    assert torch.allclose(one["validated"], one["before"] + 1.5)
    assert torch.equal(one["validated"], other["validated"])
    assert torch.equal(one["after"], other["after"])
    assert (one["saved"] - one["after"] - 1.5).abs().max() < 0.1


def test_change_that_differs_between_nodes_between_batches_is_an_error(results: Results) -> None:
    for said, _, _ in (each["changed_unlike"]["on_train_batch_end"] for each in results):
        assert "the global weights differ between nodes: on_train_batch_start or on_train_batch_end" in said


@scenario
def shown_between_steps(_: str) -> dict[str, list[Tensor]]:
    """Return the final weights. The global weights are never shown, or shown after each step."""
    found, rank = {}, dist.get_rank()
    for kind in ("never", "compared", "as on a GPU"):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(41, 30), nn.Linear(30, 7))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        updates = LocalUpdates(model, optimizer, UpdatesConfig(), Topology(((0,), (1,)), rank))
        if kind == "as on a GPU":
            updates._may_be_changed = lambda: True  # type: ignore[method-assign]
        for _ in range(9):
            optimizer.zero_grad()
            model(torch.randn(5, 41)).square().sum().backward()
            optimizer.step()
            updates.step()
            own = [p.detach().clone() for p in model.parameters()]
            if kind != "never":
                updates.swap_in_global_weights(wait=False)
                assert not all(map(torch.equal, own, model.parameters()))
                updates.swap_in_local_weights()
                assert all(map(torch.equal, own, model.parameters()))
        updates.finish()
        found[kind] = [p.detach() for p in model.parameters()]
    return found


def test_shown_weights_that_no_hook_changed_are_put_back_exactly(results: Results) -> None:
    for found in (each["shown_between_steps"] for each in results):
        assert all(map(torch.equal, found["compared"], found["never"]))
        assert all(map(torch.equal, found["as on a GPU"], found["never"]))


@scenario
def with_a_callback_of_rank_0(_: str) -> Tensor:
    """Train with a callback that only one rank has, such as a callback that prints."""

    class Prints(lightning_of(PACKAGE).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None: ...

    callbacks = [Prints()] if os.environ["RANK"] == "0" else []
    return weights(fitted(PACKAGE, local(PACKAGE), adamw_module(PACKAGE), callbacks=callbacks, **ranks()))


def test_callback_on_one_rank_keeps_collectives_in_order(results: Results, shards: Results) -> None:
    for of_cluster in (results, shards):
        first, *others = (each["with_a_callback_of_rank_0"] for each in of_cluster)
        assert all(torch.equal(first, other) for other in others)


@scenario
def saved_after_a_search(folder: str) -> list[float]:
    """Return how far each checkpoint is from the global weights in a fit that starts with a learning-rate search."""
    callbacks, module = importlib.import_module(f"{lightning_of(PACKAGE).__name__}.callbacks"), adamw_module(PACKAGE)
    module.lr, differences = 0.01, []

    class Saver(callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
        def _save_checkpoint(self, trainer: Any, path: str) -> None:
            super()._save_checkpoint(trainer, path)
            saved = torch.load(path, weights_only=False)["state_dict"]
            with trainer.strategy.global_weights():
                held = dict(module.named_parameters())
                differences.append(max(float((saved[n] - held[n]).abs().max()) for n in held))

    search, saver = callbacks.LearningRateFinder(num_training_steps=8), Saver(folder, every_n_train_steps=2)
    options = {"enable_checkpointing": True, "default_root_dir": folder, "devices": 1}
    trainer(PACKAGE, local(PACKAGE), callbacks=[search, saver], **options).fit(module)
    return differences


def test_saves_after_a_search_for_a_learning_rate_have_the_global_weights(results: Results) -> None:
    for differences in (each["saved_after_a_search"] for each in results):
        assert len(differences) > 2
        assert max(differences) == 0.0


def scaled_after_validation(name: str) -> Tensor:
    """Return the weights of a fit with a hook that scales the weights after each validation."""
    module = plain_module(PACKAGE, nn.Sequential(nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 5)), by_step=True)

    @torch.no_grad()
    def scale(*_: Any) -> None:
        for parameter in module.parameters():
            parameter.mul_(0.9)

    module.on_validation_end = scale
    strategy = ddp(PACKAGE)
    if name == "updates":
        strategy = ours(PACKAGE).MSTopKFSDPStrategy(density=1.0, value_dtype="float32", delay=0)
    elif name == "gradients":
        strategy = ours(PACKAGE).MSTopKFSDPStrategy(send="gradients", exchange="dense")
    torch.manual_seed(0)
    for layer in (module.net[0], module.net[2]):
        layer.reset_parameters()
    fitted(PACKAGE, strategy, module, **ranks(), max_steps=-1, max_epochs=2, limit_train_batches=3, limit_val_batches=1)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def scaled_after_validations(_: str) -> dict[str, Tensor]:
    return {name: scaled_after_validation(name) for name in ("updates", "gradients", "ddp")}


OF_TWO_DEVICES = Scenarios()
for each in (with_a_callback_of_rank_0, scaled_after_validations):
    OF_TWO_DEVICES.add(each)
shards = results_in_one_start(OF_TWO_DEVICES, devices=2)


@pytest.mark.parametrize("send", ["updates", "gradients"])
def test_changes_of_shards_after_validation_are_kept(shards: Results, send: str) -> None:
    for found in (each["scaled_after_validations"] for each in shards):
        assert torch.allclose(found[send], found["ddp"], rtol=1e-4, atol=1e-5)

"""Resume: bit-identical on the same cluster; on another one the mean of what is pending is kept."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.distributed import RanksFailed, RunRanks, run_ranks
from tests.helpers.lines import Lines, raised
from tests.helpers.scenarios import Scenarios
from tests.strategy.kills import FLAVOUR, Kill, fit_on, patience, whole_and_killed
from tests.strategy.trainers import ddp, lightning_of, plain_module, ranks, sparse, trainer, weights
from tests.updates.runs import adamw, mean_over_nodes, start
from tests.updates.test_properties import whole_pending
from tests.updates.test_trainer import local

STEPS = 12
SHAPES = [(2, 2), (3, 1), (4, 1)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 37), nn.BatchNorm1d(37), nn.Tanh(), nn.Linear(37, 5))


def module() -> Any:
    class Module(type(plain_module(FLAVOUR, net(), by_step=True))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def fit(folder: str, kill: Kill | None, options: dict[str, Any], every: int = 1, steps: int = STEPS) -> dict[str, Any]:
    """Train with a checkpoint after every step, or every so many, from the last one if there is one."""
    precision = options.pop("precision", "32-true")
    strategy, trained = local(FLAVOUR, timeout=patience(kill), **options), module()
    fit_on(folder, strategy, trained, kill, every, steps, max_steps=STEPS, precision=precision)
    buffers = torch.cat([each.flatten().double() for each in trained.buffers()])
    return {"weights": weights(trained), "buffers": buffers, "steps": strategy.engine.steps}


CASES: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((2, 2), {}),
    ((3, 1), {"step_ahead": 0.4, "precision": "16-mixed"}),
    ((4, 1), {"sync_every": 3, "density": 0.2}),
    ((4, 1), {"sync_every": 3, "density": 0.2, "delay": 2, "step_ahead": 0.5, "outer_lr": 1.5}),
    ((2, 2), {"delay": 0, "precision": "bf16-true"}),
    ((2, 2), {"value_dtype": "bfloat16"}),
    ((2, 2), {"exchange": "regional", "shard_optimizer": False}),
]
MORE: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((4, 1), {"step_ahead": 0.4, "value_dtype": "float32"}),
    ((2, 2), {"density": 0.02, "value_dtype": "bfloat16"}),
    ((3, 1), {"exchange": "dense16"}),
    ((2, 2), {"delay": 0, "step_ahead": 0.5, "sync_every": 2}),
    ((4, 1), {"density": 0.2, "precision": "bf16-true"}),
    ((2, 2), {"sync_every": 3, "step_ahead": 1.0, "precision": "64-true"}),
]


def whole_and_resumed(folder: str, cases: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each case a run, and one of which the last steps are another Trainer's."""
    ends = []
    for number, options in enumerate(cases):
        whole = fit(f"{folder}/whole{number}", None, dict(options), every=7)
        fit(f"{folder}/{number}", None, dict(options), every=7, steps=7)
        ends.append((whole, fit(f"{folder}/{number}", None, dict(options), every=7)))
    return ends


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_resumed_run_is_bit_identical(shape: tuple[int, int], tmp_path: Path) -> None:
    nodes, devices = shape
    cases = [options for each, options in CASES if each == shape]
    many: dict[str, Any] = {"nodes": nodes, "devices": devices, "timeout": 100, "init": False}
    for rank, ends in enumerate(run_ranks(whole_and_resumed, str(tmp_path), cases, **many)):
        for options, (whole, resumed) in zip(cases, ends, strict=True):
            same_ends(whole, resumed, f"rank {rank}, {options}")


def same_ends(one: dict[str, Any], other: dict[str, Any], which: str) -> None:
    assert one["steps"] == other["steps"] == STEPS, which
    assert torch.equal(one["weights"], other["weights"]), which
    assert torch.equal(one["buffers"], other["buffers"]), which


QUICK = ["before its side file"]


@pytest.mark.parametrize(
    ("shape", "options", "points"),
    [
        (*CASES[0], QUICK),
        *(pytest.param(*case, ["in a step", *QUICK], marks=pytest.mark.slow) for case in CASES + MORE),
    ],
    ids=str,
)
def test_a_killed_run_goes_on_bit_identically(
    shape: tuple[int, int], options: dict[str, Any], points: list[str], tmp_path: Path
) -> None:
    """By a rank of chance, in a step and in the middle of a save; at all points in tests/strategy/test_sabotage.py."""
    nodes, devices = shape
    chance = random.Random(f"{shape} {options}")
    steps = {"in a step": chance.randrange(2, 7), QUICK[0]: chance.randrange(7, 11)}
    kills = [Kill(point, chance.randrange(1, nodes * devices), steps[point]) for point in points]
    both = whole_and_killed(fit, tmp_path, kills, options, nodes=nodes, devices=devices, timeout=100)
    for rank, (whole, resumed) in enumerate(both):
        same_ends(whole, resumed, f"rank {rank}")


def look(folder: str, begin: int | None, end: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the global weights and the mean pending updates, after the resume and at the end, which is saved."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    class Look(lightning_of(FLAVOUR).Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step not in (begin, end):
                return
            updates = trainer.strategy.engine
            with updates.global_weights():
                shared = weights(updates.module).clone()
            found[trainer.global_step] = shared, mean_over_nodes(whole_pending(updates))
            if trainer.global_step == end:
                trainer.save_checkpoint(f"{folder}/{end}.ckpt")

    t = trainer(FLAVOUR, local(FLAVOUR), max_steps=end + 1, max_epochs=-1, callbacks=[Look()], **ranks())
    t.fit(module(), ckpt_path=None if begin is None else f"{folder}/{begin}.ckpt")
    return found


def test_on_another_cluster_shared_weights_and_the_mean_of_what_is_pending_stay(tmp_path: Path) -> None:
    before = run_ranks(look, str(tmp_path), None, 4, nodes=2, devices=2, timeout=100, init=False)[0]
    for (nodes, devices), begin in (((4, 1), 4), ((2, 1), 7)):
        many: dict[str, Any] = {"nodes": nodes, "devices": devices, "timeout": 100, "init": False}
        everyone = run_ranks(look, str(tmp_path), begin, begin + 3, **many)
        for found in everyone:
            assert torch.equal(found[begin][0], before[begin][0])
            torch.testing.assert_close(found[begin][1], before[begin][1], rtol=1e-6, atol=1e-7)
        before = everyone[0]


def begins_with(folder: str, step: int) -> Tensor:
    """The weights that a run resumed on one node begins with."""
    found = []

    class Begin(lightning_of(FLAVOUR).Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, trained: Any) -> None:
            found.append(weights(trained).clone())

    t = trainer(FLAVOUR, local(FLAVOUR), max_steps=step + 1, max_epochs=-1, callbacks=[Begin()], **ranks())
    t.fit(module(), ckpt_path=f"{folder}/{step}.ckpt")
    return found[0]


def test_on_one_node_the_mean_of_what_was_pending_is_in_the_weights(tmp_path: Path) -> None:
    shared, pending = run_ranks(look, str(tmp_path), None, 4, nodes=2, devices=2, timeout=100, init=False)[0][4]
    for begin in run_ranks(begins_with, str(tmp_path), 4, nodes=1, devices=2, timeout=100, init=False):
        torch.testing.assert_close(begin.double(), shared.double() - pending, rtol=1e-6, atol=1e-7)


def global_weights_in(side_file: dict[str, Any]) -> torch.Tensor:
    """Return the first piece of the global weights."""
    piece: torch.Tensor = next(value for name, value in side_file.items() if name.startswith("shared/"))
    return piece


@pytest.mark.parametrize("damage", ["missing", "zeroed"])
def test_without_the_file_of_one_rank_all_go_on_from_the_weights(damage: str, tmp_path: Path) -> None:
    many: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 60, "init": False}
    run_ranks(fit, str(tmp_path), None, {"sync_every": 2}, 1, 5, **many)
    (lost,) = tmp_path.glob("last.ckpt.residual/*/rank00003.pt")
    if damage == "missing":
        lost.unlink()
    else:  # inside a tensor: torch.load reads it without a word
        content = bytearray(lost.read_bytes())
        place = content.index(global_weights_in(torch.load(lost)).numpy().tobytes())
        content[place : place + 256] = bytes(256)
        lost.write_bytes(content)
    results = run_ranks(fit, str(tmp_path), None, {"sync_every": 2}, **many)
    assert all(torch.equal(each["weights"], results[0]["weights"]) for each in results)
    assert {each["steps"] for each in results} == {STEPS - 5}


def test_nodes_that_read_other_weights_are_told_apart(tmp_path: Path) -> None:
    many: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 60, "init": False}
    run_ranks(fit, str(tmp_path), None, {}, 1, 5, **many)
    (other,) = tmp_path.glob("last.ckpt.residual/*/rank00003.pt")
    content = torch.load(other)
    global_weights_in(content).add_(1e-7)
    torch.save(content, other)
    with pytest.raises(RanksFailed, match="nodes have different global weights after") as failed:
        run_ranks(fit, str(tmp_path), None, {}, **many)
    assert len(failed.value.raised) == 4  # nobody waits for the others
    assert not failed.value.hung


def saved_bytes(options: dict[str, Any], count: int) -> tuple[float, float]:
    """Bytes an element of what is saved after some steps: in pieces, and besides these."""
    ddp, optimizer, updates = start(adamw, nn.Linear(200, 300), **options)
    for step in range(count):
        optimizer.zero_grad()
        torch.manual_seed(step + 7 * torch.distributed.get_rank())
        ddp(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()
        updates.step()
    state, numel = updates.state(), updates.optimizers[0].state.slices.numel
    beside = [each.nbytes for each in state.own["optimizers"][0].values() if isinstance(each, Tensor)]
    return sum(piece.tensor.nbytes for of in state.pieces.values() for piece in of) / numel, sum(beside) / numel


@pytest.mark.parametrize(
    ("options", "count", "bytes_an_element", "beside"),
    [({}, 6, 8, 0.6), ({"delay": 0}, 6, 8, 0.1), ({"sync_every": 4}, 6, 8, 13), ({"exchange": "regional"}, 6, 12, 0.1)],
)
def test_a_save_takes_two_tensors(
    ranks: RunRanks, options: dict[str, Any], count: int, bytes_an_element: int, beside: float
) -> None:
    """And small patches, but for one between two exchanges; with another exchange than "sparse" it takes three."""
    for found in ranks(saved_bytes, options, count, nodes=2, devices=2):
        assert found[0] == bytes_an_element
        assert found[1] < beside


# -- what a checkpoint holds besides, and who else reads it ------------------------------------------------------------

SCENARIOS = Scenarios()


def all_of(scenarios: dict[str, Any], folder: str) -> dict[str, Any]:
    return {name: scenario(f"{folder}/{name}") for name, scenario in scenarios.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each returned in a folder of its own, by rank of one start of 2 x 2."""
    folder = str(tmp_path_factory.mktemp("scenarios"))
    return run_ranks(all_of, dict(SCENARIOS), folder, nodes=2, devices=2, timeout=150, init=False)


@SCENARIOS.add
def changed_by_a_callback(folder: str) -> list[Tensor]:
    """A callback changes global weights and buffers before they are saved; a whole run, and one that is resumed."""
    pl = lightning_of(FLAVOUR)

    class Change(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_end(self, trainer: Any, trained: Any) -> None:
            with torch.no_grad():
                trained.net[0].weight[:2] = 0
                trained.net[1].running_mean.zero_()

    ends = []
    for path in (None, f"{folder}/epoch=0.ckpt"):
        saver = pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1, enable_version_counter=False)
        options = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 4, "enable_checkpointing": True}
        trained = module()
        callbacks = [Change(), saver]
        trainer(FLAVOUR, local(FLAVOUR), callbacks=callbacks, **options, **ranks()).fit(trained, ckpt_path=path)
        ends.append(weights(trained))
    return ends


def test_what_a_callback_changed_before_a_save_is_resumed(results: list[dict[str, Any]]) -> None:
    assert all(torch.equal(*each["changed_by_a_callback"]) for each in results)


@SCENARIOS.add
def in_another_layout(folder: str) -> tuple[Tensor, Tensor]:
    """Return the global weights at a save, and the initial weights of a model in channels_last."""
    found = []

    class Look(lightning_of(FLAVOUR).Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, trained: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                with trainer.strategy.global_weights():
                    found.append(weights(trained))
                trainer.save_checkpoint(f"{folder}/3.ckpt")

    for path in (None, f"{folder}/3.ckpt"):
        torch.manual_seed(0)
        convolutions = nn.Conv2d(1, 4, 2), nn.Conv2d(4, 5, 2)
        trained = plain_module(FLAVOUR, nn.Sequential(nn.Unflatten(1, (1, 13, 1)), nn.Upsample((3, 4)), *convolutions))
        if path:
            trained.to(memory_format=torch.channels_last)
        t = trainer(FLAVOUR, local(FLAVOUR), max_steps=4, max_epochs=-1, callbacks=[Look()], **ranks())
        t.fit(trained, ckpt_path=path)
    return found[0], found[1]


def test_in_another_memory_layout(results: list[dict[str, Any]], tmp_path: Path) -> None:
    of_one_device = run_ranks(in_another_layout, str(tmp_path), nodes=4, devices=1, timeout=60, init=False)
    for saved, begins_with in (*of_one_device, *(each["in_another_layout"] for each in results)):
        assert torch.equal(saved, begins_with)


@SCENARIOS.add
def numpy_schedule(folder: str) -> list[Tensor]:
    """A whole run and a resumed one, with a learning rate that is a number of NumPy."""

    class Save(lightning_of(FLAVOUR).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(f"{folder}/3.ckpt")

    class Module(type(module())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=np.float64(0.01))

    ends = []
    for path in (None, f"{folder}/3.ckpt"):
        trained = Module()
        t = trainer(FLAVOUR, local(FLAVOUR), max_steps=6, max_epochs=-1, callbacks=[Save()], **ranks())
        t.fit(trained, ckpt_path=path, **({"weights_only": False} if path else {}))
        ends.append(weights(trained))
    return ends


def test_numbers_of_numpy_in_an_optimizer(results: list[dict[str, Any]]) -> None:
    assert all(torch.equal(*each["numpy_schedule"]) for each in results)


@SCENARIOS.add
def array_in_a_group(folder: str) -> str:
    class Module(type(module())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([{"params": self.parameters(), "sizes": np.arange(3)}])

    t = trainer(FLAVOUR, local(FLAVOUR), max_steps=2, **ranks())
    t.fit(Module())
    return raised(t.save_checkpoint, f"{folder}/saved.ckpt")


def test_a_save_that_could_not_be_resumed_is_refused(results: list[dict[str, Any]]) -> None:
    assert all("numpy.ndarray, which a safe load refuses" in each["array_in_a_group"] for each in results)


@SCENARIOS.add
def elsewhere(folder: str) -> tuple[Tensor, list[Tensor], list[str]]:
    """A checkpoint of updates, taken up by plain DDP and by the strategy of gradients."""
    path, lines, found = f"{folder}/saved.ckpt", Lines(), []
    t = trainer(FLAVOUR, local(FLAVOUR), max_steps=6, **ranks())
    trained = module()
    t.fit(trained)
    t.save_checkpoint(path)
    for strategy in (ddp(FLAVOUR), sparse(FLAVOUR)):
        other = module()
        trainer(FLAVOUR, strategy, max_steps=6, **ranks()).fit(other, ckpt_path=path)
        found.append(weights(other))
    return weights(trained), found, list(lines.lines)


def test_other_strategies_take_its_weights(results: list[dict[str, Any]]) -> None:
    for saved, found, _ in (each["elsewhere"] for each in results):
        assert all(torch.equal(saved, each) for each in found)
    assert any("was saved by a strategy that exchanges updates" in line for line in results[0]["elsewhere"][2])

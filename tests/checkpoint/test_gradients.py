"""Checkpoints of gradients: residuals on some ranks only, loads during a fit, files of a save."""

import os
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.checkpoint import side_files as saves
from lightning_sparse.checkpoint.restore import check_version
from lightning_sparse.checkpoint.state import Piece, State, flattened, read_slice, sum_slice_over_nodes
from lightning_sparse.fsdp import residual_of
from lightning_sparse.strategy import HierConfig, HierState
from lightning_sparse.topology import Topology, discover
from tests.helpers.distributed import RunRanks
from tests.helpers.lines import Lines
from tests.helpers.scenarios import Scenarios
from tests.helpers.training import results_in_one_start
from tests.strategy.models import (
    flat_grads,
    go_on,
    loop,
    loss_of,
    mlp,
    node_residual,
    save,
    sum_over_nodes,
    wrap,
)
from tests.strategy.trainers import lightning_of, plain_module, sparse, trainer, weights
from tests.strategy.trainers import ranks as cluster


def fit(last: int, resume: str | None = None) -> tuple[Any, Any]:
    module, strategy = plain_module("pytorch_lightning", by_step=True), sparse("pytorch_lightning")
    t = trainer("pytorch_lightning", strategy, max_steps=last, max_epochs=-1, **cluster())
    t.fit(module, ckpt_path=resume)
    return t, module


FITS = Scenarios()
fits = results_in_one_start(FITS)


def test_resume_of_an_earlier_checkpoint_forgets_later_residuals(fits: list[dict[str, Any]]) -> None:
    """The same Trainer returns to a checkpoint from before the first sparse round."""
    for again, fresh in (each["go_back"] for each in fits):
        assert torch.equal(again, fresh)


@FITS.add
def go_back(folder: str) -> tuple[Tensor, Tensor]:
    path = f"{folder}/early.ckpt"
    t, module = fit(2)
    t.save_checkpoint(path)
    for resume in (None, path):
        t.fit_loop.epoch_loop.max_steps = 12
        t.fit(module, ckpt_path=resume)
    return weights(module), weights(fit(12, resume=path)[1])


def test_checkpoint_loaded_within_a_fit_replaces_residuals_at_once(fits: list[dict[str, Any]]) -> None:
    """A learning-rate search loads a checkpoint in this way. A checkpoint of plain DDP leaves no residuals."""
    for found, left_over in (each["back_and_on"] for each in fits):
        saved, later, loaded, plain = found
        assert saved.abs().max() > 0
        assert not torch.equal(saved, later)
        assert torch.equal(saved, loaded)
        assert not plain.any()
        assert not left_over, "the next fit would use it"


@FITS.add
def back_and_on(folder: str) -> tuple[list[Tensor], bool]:
    path, residuals = f"{folder}/saved.ckpt", []

    class Back(lightning_of("pytorch_lightning").Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            state = trainer.strategy.engine
            if trainer.global_step in (6, 9):
                state.commit_round()
                residuals.append(node_residual(module, state))
            if trainer.global_step == 6:
                trainer.save_checkpoint(path)
            if trainer.global_step == 9:
                trainer.strategy.load_checkpoint(path)
                residuals.append(node_residual(module, state))
                assert state.round == 6
                saved = torch.load(path, weights_only=True)
                del saved[saves.CHECKPOINT_KEY]
                torch.save(saved, plain := f"{folder}/plain{trainer.global_rank}.ckpt")
                trainer.strategy.load_checkpoint(plain)
                residuals.append(node_residual(module, state))

    module, strategy = plain_module("pytorch_lightning", by_step=True), sparse("pytorch_lightning")
    trainer("pytorch_lightning", strategy, max_steps=10, max_epochs=-1, callbacks=[Back()], **cluster()).fit(module)
    return residuals, bool(strategy._side_files.loaded) or strategy._resumes


def save_by_hand(path: str) -> Tensor:
    model = mlp()
    ddp, state = wrap(model, HierConfig(density=0.05, exchange="sparse", warmup_epochs=0), bucket_cap_mb=0.002)
    for step in range(7):
        model.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
    state.commit_round()
    save(state, path)
    return sum_over_nodes(node_residual(model, state), state)


def test_resume_on_one_node_applies_residuals_once(ranks: RunRanks, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    waited = ranks(save_by_hand, path, nodes=2, devices=2)[0]
    for thrown_away, first, second in ranks(apply_on_one_node, path, nodes=1, devices=2):
        assert waited.abs().max() > 0
        torch.testing.assert_close(thrown_away, waited, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(first, waited, rtol=1e-5, atol=1e-7)
        assert torch.count_nonzero(second) == 0


def apply_on_one_node(path: str) -> list[Tensor]:
    """Return the additions to the mean gradient in three rounds; the first round is discarded."""
    model, plain = mlp(), mlp()
    state = HierState(model, HierConfig(density=0.05, exchange="sparse", warmup_epochs=0), discover())
    go_on(state, path)
    ddp, _ = wrap(model, state.config, state=state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state.watch([optimizer])
    reference = torch.nn.parallel.DistributedDataParallel(plain)
    added = []
    for step in range(3):
        for each in (model, plain):
            each.zero_grad()
        state.before_backward()
        loss_of(ddp, step, dist.get_rank()).backward()
        loss_of(reference, step, dist.get_rank()).backward()
        added.append((flat_grads(model) - flat_grads(plain)).double())
        if step > 0:
            optimizer.step()
    return added


def test_symlink_is_followed_by_reads_and_replaced_by_saves(tmp_path: Path) -> None:
    state, beside = HierState(mlp(), HierConfig(), Topology(((0,),), 0)), saves.SideFiles("gradients")
    best, last = str(tmp_path / "best.ckpt"), str(tmp_path / "last.ckpt")

    def save(path: str) -> str:
        save_id = str(beside.metadata_of(state)["save_id"])
        saves.write_side_file({}, save_id, path, 0)
        saves.remove_side_files(path, but=[save_id])
        return save_id

    first = save(best)
    os.symlink("best.ckpt", last)
    assert saves.read_side_file(last, first, 0)
    state.round += 1
    second = save(last)
    os.unlink(last)  # Lightning writes a new file and moves it there
    assert saves.read_side_file(last, second, 0)
    assert saves.read_side_file(best, first, 0)


def test_side_files_are_replaced_and_removed_with_their_checkpoint(fits: list[dict[str, Any]]) -> None:
    for each in (of_rank["come_and_go"] for of_rank in fits):
        assert each["after first"] == each["after second"] == 2, "the files of the older save are removed"
        assert each["first"] != each["second"]
        assert each["weights only"] == 0
        assert each["removed"] == []
        assert each["changed"] or each["rank"] != 0


@FITS.add
def come_and_go(folder: str) -> dict[str, Any]:
    lines = Lines()
    path = Path(folder) / "saved.ckpt"
    residuals = Path(folder) / "saved.ckpt.residual"
    t, module = fit(5)
    out: dict[str, Any] = {"rank": dist.get_rank()}

    def files() -> list[str]:
        dist.barrier()
        found = sorted(str(each.relative_to(residuals)) for each in residuals.rglob("*.pt"))
        dist.barrier()
        return found

    t.save_checkpoint(path)
    out["first"], out["after first"] = files(), len(files())
    t.fit_loop.epoch_loop.max_steps = 8
    t.fit(module)
    t.save_checkpoint(path)
    out["second"], out["after second"] = files(), len(files())
    t.save_checkpoint(Path(folder) / "light.ckpt", weights_only=True)
    out["weights only"] = len(list(Path(folder).glob("light.ckpt.*")))
    other = sparse("pytorch_lightning", density=0.5)
    resumed = trainer("pytorch_lightning", other, max_steps=9, max_epochs=-1, **cluster())
    resumed.fit(plain_module("pytorch_lightning"), ckpt_path=path)
    out["changed"] = any("options differ from the saved run" in line for line in lines.lines)
    dist.barrier()
    t.strategy.remove_checkpoint(path)
    dist.barrier()
    out["removed"] = [each.name for each in Path(folder).iterdir() if each.name.startswith("saved")]
    return out


# -- a residual on only one device of a node ---------------------------------------------------------------------------


def test_residual_of_one_device_survives_other_groups_and_clusters(ranks: RunRanks, tmp_path: Path) -> None:
    """Only one parameter has a residual, because its gradient was discarded, and it lies on one device.

    With other groups or another topology, no rank may wait for the other device, and the residual must survive.
    """
    path = str(tmp_path / "run.ckpt")
    everyone = ranks(keep_one_parameter, path, nodes=2, devices=2)
    assert [held for held, _, _ in everyone] == [False, True] * 2
    for _, before, after in everyone:
        assert before.abs().sum() > 0
        torch.testing.assert_close(after, before)
    for parked in ranks(parked_elsewhere, path, nodes=3, devices=1):
        torch.testing.assert_close(3 * parked, everyone[0][1].float())


def keep_one_parameter(path: str) -> tuple[bool, Tensor, Tensor]:
    model, topology = mlp(), discover()
    sparse = HierConfig(density=0.05, exchange="sparse", value_dtype="float32", warmup_epochs=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ddp, state = wrap(model, sparse, topology)
    state.watch([optimizer])

    def step(index: int, *, drop: bool = False) -> None:
        state.before_backward()
        loss_of(ddp, index, dist.get_rank()).backward()
        if drop:
            model[0].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
        state.commit_round()

    for index in range(6):
        step(index)
    state.config = state.exchange.choice.config = HierConfig(exchange="dense")
    step(6, drop=True)
    held, before = bool(state.store.committed), of_bias(state)
    save(state, path)
    model[4].bias.requires_grad_(False)  # changes the buckets and the groups
    ddp, _ = wrap(model, sparse, topology, state=state)
    state.before_backward()
    loss_of(ddp, 7, dist.get_rank()).backward()
    optimizer.zero_grad()  # discarded: residuals stay, in the new groups
    state.commit_round()
    return held, before, of_bias(state)


def of_bias(state: HierState) -> Tensor:
    """Return the residual of one parameter, summed over nodes."""
    total = torch.zeros(37, dtype=torch.float64)
    for group, shard in state.store.committed.items():
        for _, here, there in group.shard_slices(["0.bias"], state.topology.device_index, state.topology.num_devices):
            total[there] += shard[here]
    dist.all_reduce(total)
    return total


def parked_elsewhere(path: str) -> Tensor:
    _, state = wrap(mlp(), HierConfig())
    go_on(state, path)
    return state.store.by_name["0.bias"]


# -- incompatible checkpoints ------------------------------------------------------------------------------------------


def test_early_format_is_refused() -> None:
    early = {"version": 4, "kind": "gradients", "save_id": "x-1", "nodes": [[0]]}
    beside = saves.SideFiles("gradients")
    beside.load({saves.CHECKPOINT_KEY: [early]}, "early.ckpt", 0)
    with pytest.raises(ValueError, match="has format 4 .* remove the entry 'lightning_sparse'"):
        check_version(beside.loaded[0])


def test_state_of_another_memory_format_does_not_fit() -> None:
    model = torch.nn.Conv2d(3, 4, 2)
    state = HierState(model, HierConfig(), Topology(((0,),), 0))
    saved = state.state()
    assert state.fits(state.metadata(), saved)
    again = HierState(model.to(memory_format=torch.channels_last), HierConfig(), Topology(((0,),), 0))
    assert not again.fits(state.metadata(), saved)


def test_node_without_a_quantity_counts_as_zero() -> None:
    some = State({"residual": [Piece("w", 0, 2, torch.ones(2))]}, {"w": ([2], [0])})
    for nodes in ([[some], []], [[State()], [some]]):
        found = sum_slice_over_nodes(nodes, residual_of, "w", 0, 2, ([2], [0]))
        assert found is not None
        assert found.tolist() == [1.0, 1.0]


def test_resume_without_momentum_and_one_file_converts_residuals(ranks: RunRanks, tmp_path: Path) -> None:
    """As with all files, the result is the sum over nodes in the units of SGD's momentum, not the separate pieces."""
    path = str(tmp_path / "saved.ckpt")
    ranks(save_with_momentum, path, nodes=2, devices=1)
    next((tmp_path / "saved.ckpt.residual").rglob("rank00001.pt")).unlink()
    for said in ranks(go_on_without_momentum, path, nodes=2, devices=1):
        assert any("is kept, divided equally" in line for line in said)
        assert any("1 side file(s)" in line for line in said)


def save_with_momentum(path: str) -> None:
    model = mlp()
    ddp, state = wrap(model, HierConfig(density=0.05, exchange="sparse", warmup_epochs=0, momentum_correction=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state.watch([optimizer])
    loop(ddp, state, optimizer, range(4))
    save(state, path)


def go_on_without_momentum(path: str) -> list[str]:
    _, state = wrap(mlp(), HierConfig(density=0.05, exchange="sparse", warmup_epochs=0))
    return go_on(state, path)


# -- ranges of parameters ----------------------------------------------------------------------------------------------


@given(st.data())
def test_slice_of_pieces_equals_slice_of_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    saved, now = (list(data.draw(st.permutations(range(len(shape))))) for _ in range(2))
    whole = torch.arange(1.0, prod(shape) + 1).view(shape)
    numel, flat = whole.numel(), flattened(whole, (shape, saved))
    edges = st.integers(0, numel)
    cuts = sorted({0, numel, *data.draw(st.lists(edges, max_size=5))})
    devices = [State(layouts={"w": (shape, saved)}) for _ in range(data.draw(st.integers(1, 3)))]
    missing = torch.zeros(numel, dtype=torch.bool)
    for first, last in zip(cuts, cuts[1:], strict=False):
        index = data.draw(st.integers(-1, len(devices) - 1))
        if index < 0:
            missing[first:last] = True
        else:
            devices[index].pieces.setdefault("residual", []).append(Piece("w", first, last, flat[first:last]))
    begin, end = sorted(data.draw(st.tuples(edges, edges)))
    flat[missing] = 0.0
    there = flat.view([shape[dim] for dim in saved]).permute([saved.index(dim) for dim in range(len(shape))])
    expected = flattened(there, (shape, now))[begin:end]
    found = read_slice(devices, residual_of, "w", begin, end, (shape, now))
    assert torch.equal(torch.zeros(end - begin) if found is None else found, expected)
    assert read_slice(devices, residual_of, "other", begin, end, (shape, now)) is None
    assert read_slice(devices, residual_of, "w", begin, end, ([*shape, 2], [*now, len(now)])) is None

"""Checkpoints that are folders: killed while they are written, not written, not seen. Damage: test_sabotage.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.checkpoint import folder as folders
from tests.fsdp.runs import whole
from tests.fsdp.test_trainer import fitted, fsdp, module
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import raised
from tests.strategy.kills import FLAVOUR, Kill, fit_on, whole_and_killed

POINTS = ["before its side file", "meta.pt", "its name", "the old one goes"]


def fit(folder: str, kill: Kill | None, send: str) -> Tensor:
    """Train with a checkpoint of the same name after every step, from the last one if there is one."""
    strategy = fsdp(FLAVOUR, send=send, **({"exchange": "sparse"} if send == "gradients" else {}))
    return whole(fit_on(folder, strategy, module(FLAVOUR), kill, max_steps=10).lightning_module).clone()


@pytest.mark.slow
@pytest.mark.parametrize("send", ["updates", "gradients"])
def test_a_killed_run_goes_on_bit_identically(send: str, tmp_path: Path) -> None:
    kills = [Kill(point, 3 if point == POINTS[0] else 0, 2 * number + 1) for number, point in enumerate(POINTS)]
    for one, other in whole_and_killed(fit, tmp_path, kills, send, nodes=2, devices=2, timeout=120):
        assert torch.equal(one, other)
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["last.ckpt", "whole"]


def not_written(folder: str) -> tuple[str, bool]:
    t = fitted(FLAVOUR, fsdp(FLAVOUR))
    path = Path(folder) / "last.ckpt"
    t.save_checkpoint(path)
    before = {each.name: each.stat().st_mtime_ns for each in path.iterdir()}
    if t.global_rank == 0:
        torch.save = no_space
    said = raised(t.save_checkpoint, path)
    return said, before == {each.name: each.stat().st_mtime_ns for each in path.iterdir()}


def no_space(*_: Any, **__: Any) -> None:
    raise OSError("no space left")


def test_a_rank_that_cannot_write_fails_all_and_leaves_what_was_there(tmp_path: Path) -> None:
    said = run_ranks(not_written, str(tmp_path), nodes=2, devices=1, timeout=100, init=False)
    assert all(kept for _, kept in said)
    assert "no space left" in said[0][0]
    assert "rank could not write" in said[1][0]


def not_shared(folder: str) -> tuple[str, list[str]]:
    mine = Path(folder) / f"node{dist.get_rank()}"
    mine.mkdir()
    try:
        with folders.atomic_directory(mine / "last.ckpt", torch.device("cpu")) as partial:
            (partial / "file").write_text("written")
    except RuntimeError as error:
        return str(error), [each.name for each in mine.iterdir()]
    return "saved", []


def test_a_folder_that_nodes_do_not_share_is_refused(tmp_path: Path) -> None:
    zero, one = run_ranks(not_shared, str(tmp_path), nodes=2, devices=1)
    assert "rank could not write" in zero[0]
    assert "all nodes share" in one[0]
    assert "last.ckpt" not in zero[1] + one[1]


def unseen_and_read(folder: str, blind: int) -> str:
    path = Path(folder) / "last.ckpt"
    saver = fitted(FLAVOUR, fsdp(FLAVOUR))
    saver.save_checkpoint(path)
    if saver.global_rank == blind:
        Path.is_file = lambda self: False  # type: ignore[method-assign]
        folders.FileSystemReader.read_metadata = no_file
    return raised(fitted, FLAVOUR, fsdp(FLAVOUR), module(FLAVOUR, 5), str(path))  # all its steps are done


def no_file(*_: Any) -> None:
    raise FileNotFoundError("a folder of another node")


@pytest.mark.slow
@pytest.mark.parametrize("blind", [0, 1])
def test_a_folder_that_one_rank_does_not_see_is_an_error_on_all(blind: int, tmp_path: Path) -> None:
    said = run_ranks(unseen_and_read, str(tmp_path), blind, nodes=2, devices=1, timeout=100, init=False)
    assert "FileNotFoundError: a folder of another node" in said[blind]
    assert "another rank says where" in said[1 - blind]


@pytest.mark.parametrize("exchanged", [True, False])
def test_a_folder_takes_the_place_of_another(exchanged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchanged:  # as on file systems that cannot
        monkeypatch.setattr(folders, "_swap_atomically", lambda *_: False)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    if not exchanged:  # and a kill left what it had moved away
        (tmp_path / ".old.old").mkdir()
        (tmp_path / ".old.old" / "earlier").write_text("earlier")
    folders._replace(tmp_path / "old", tmp_path / "new")
    assert [each.name for each in tmp_path.rglob("*")] == ["old", "new"]
    file = tmp_path / "file.ckpt"
    file.write_text("an earlier checkpoint")
    folders._replace(file, tmp_path / "old")
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["file.ckpt", "new"]

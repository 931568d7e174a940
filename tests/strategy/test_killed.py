"""A job that is killed, in a step or at any point of saving, and started again: it ends as if nothing had happened.

Ranks are real processes that SIGKILL themselves; what the others do is what they would do on a cluster.
"""

import os
import random
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparse.strategy import saves
from lightning_sparse.strategy.saves import StoreBarrier
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.lines import Lines
from tests.strategy.models import node_residual
from tests.strategy.test_resume import _ranks
from tests.strategy.trainers import lightning_of, plain_module, sparse, trainer, weights

STEPS = 12
SHAPES = [(2, 2), (1, 3), (2, 3)]
POINTS = ["in a step", "before its side file", "before the main file", "after the main file"]


def fit(folder: str, precision: str, kill: dict[str, Any] | None, patience: float = 100) -> dict[str, Any]:
    """Train with a checkpoint after every step, from the last one if there is one."""
    pl = lightning_of("pytorch_lightning")
    saver = pl.callbacks.ModelCheckpoint(folder, filename="last", every_n_train_steps=1, enable_version_counter=False)
    strategy = sparse("pytorch_lightning", timeout=timedelta(seconds=patience))
    path = f"{folder}/last.ckpt"
    options: dict[str, Any] = {"callbacks": [saver, *([Killer(kill)] if kill else [])], "enable_checkpointing": True}
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        options["plugins"] = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    t = trainer("pytorch_lightning", strategy, max_steps=STEPS, max_epochs=-1, **_ranks(), **options)
    module = plain_module("pytorch_lightning", by_step=True)
    t.fit(module, ckpt_path=path if os.path.exists(path) else None)
    state = t.strategy.hier_state
    state.settle()
    return {"weights": weights(module), "residual": node_residual(module, state), "round": state.round}


def Killer(kill: dict[str, Any]) -> Any:
    pl = lightning_of("pytorch_lightning")

    class _Killer(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step != kill["step"] or trainer.global_rank != kill["rank"]:
                return
            if kill["point"] == "in a step":
                die()
            elif kill["point"] == "before its side file":
                saves.write_side_file = die
            elif kill["point"] == "before the main file":
                trainer.strategy.checkpoint_io.save_checkpoint = die
            else:
                saves.remove_side_files = die

    return _Killer()


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("nodes", "devices", "precision"),
    [
        (2, 2, "32-true"),
        *(
            pytest.param(*shape, precision, marks=pytest.mark.slow)
            for shape in SHAPES
            for precision in ("32-true", "16-mixed")
            if (shape, precision) != ((2, 2), "32-true")
        ),
    ],
)
def test_a_killed_run_goes_on_bit_identically(nodes: int, devices: int, precision: str, tmp_path: Path) -> None:
    """Killed at each point in turn, each time in a later step, by a rank of chance where any may be hit."""
    chance = random.Random(f"{nodes} {devices} {precision}")
    ranks = {"nodes": nodes, "devices": devices, "timeout": 100, "init": False}
    (tmp_path / "whole").mkdir()
    whole = run_ranks(fit, str(tmp_path / "whole"), precision, None, **ranks)
    for number, point in enumerate(POINTS):
        anyone = point in ("in a step", "before its side file")
        rank = chance.randrange(1, nodes * devices) if anyone else 0
        kill = {"point": point, "step": 4 + 2 * number, "rank": rank}
        with pytest.raises(RanksFailed) as failed:
            run_ranks(fit, str(tmp_path), precision, kill, 4, **ranks)
        assert failed.value.killed.keys() == {rank}
        assert not failed.value.hung
    for one, other in zip(whole, run_ranks(fit, str(tmp_path), precision, None, **ranks), strict=True):
        assert one["round"] == other["round"]
        assert torch.equal(one["weights"], other["weights"])
        assert torch.equal(one["residual"], other["residual"])


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run_ranks(fit, str(tmp_path / "whole"), "32-true", None, nodes=2, devices=1, timeout=100, init=False)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    # torch 2.15 gives the second life the store of the first one, where Gloo finds addresses of the dead; plain
    # all_reduce fails there, too.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(
        [*words, "-m", "tests.strategy.elastic_script", str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank, one in enumerate(whole):
        other = torch.load(tmp_path / f"result{rank}.pt")
        assert other["restarts"] == 1
        assert one["round"] == other["round"]
        assert torch.equal(one["weights"], other["weights"])
        assert torch.equal(one["residual"], other["residual"])


def test_a_checkpoint_is_not_replaced_by_one_that_lacks_residuals(tmp_path: Path) -> None:
    """The rank that does not answer is alive, only too late; the saves before and after it are whole."""
    said = run_ranks(late_rank, str(tmp_path), nodes=2, devices=1, timeout=100, init=False)
    assert "rank(s) 1 did not write their residuals" in said[0]
    assert "stays as it was" in said[0]
    assert said[1] == "late"


def late_rank(folder: str) -> str:
    fit(folder, "32-true", None)
    path = Path(folder) / "last.ckpt"
    before = path.read_bytes()
    t = trainer("pytorch_lightning", sparse("pytorch_lightning", timeout=timedelta(seconds=2)), max_steps=2, **_ranks())
    t.fit(plain_module("pytorch_lightning"))
    if t.global_rank == 1:
        return "late"
    try:
        t.strategy.save_checkpoint(t._checkpoint_connector.dump_checkpoint(), path)
    except RuntimeError as error:
        assert path.read_bytes() == before
        return str(error)
    return "saved"


def test_a_rank_that_cannot_write_tells_the_others(tmp_path: Path) -> None:
    """All of them, long before the timeout of 100 s, and the checkpoint that was there stays."""
    said = run_ranks(full_disk, str(tmp_path), nodes=3, devices=1, timeout=60, init=False)
    assert said[1] == "no space left"
    for other in (said[0], said[2]):
        assert "a rank could not write its residuals" in other
        assert "OSError: no space left" in other


def full_disk(folder: str) -> str:
    fit(folder, "32-true", None)
    path = Path(folder) / "last.ckpt"
    before = path.read_bytes()
    t = trainer(
        "pytorch_lightning", sparse("pytorch_lightning", timeout=timedelta(seconds=100)), max_steps=2, **_ranks()
    )
    t.fit(plain_module("pytorch_lightning"))
    if t.global_rank == 1:
        saves.write_side_file = no_space
    try:
        t.strategy.save_checkpoint(t._checkpoint_connector.dump_checkpoint(), path)
    except (RuntimeError, OSError) as error:
        assert path.read_bytes() == before
        return str(error)
    return "saved"


def no_space(*_: Any) -> None:
    raise OSError("no space left")


def test_paths_may_differ_by_rank(tmp_path: Path) -> None:
    """Ray gives each worker a folder of its own; rank 0 must not wait for a path that no other rank knows, and does not
    see what is to be removed there."""
    assert run_ranks(own_folders, str(tmp_path), nodes=2, devices=1, timeout=100, init=False) == ["saved", "saved"]
    for rank in range(2):
        saved = list((tmp_path / f"worker{rank}").glob("last.ckpt.residual/*/rank*.pt"))
        assert {each.name for each in saved} == {f"rank0000{rank}.pt"}
        assert len(saved) == (1 if rank == 0 else 2), "the last one stays until another main file is there"


def own_folders(folder: str) -> str:
    t = trainer(
        "pytorch_lightning", sparse("pytorch_lightning", timeout=timedelta(seconds=10)), max_steps=2, **_ranks()
    )
    t.fit(plain_module("pytorch_lightning"))
    lines = Lines().lines
    for _ in range(4):  # the same name, again and in the same round
        path = f"{folder}/worker{t.global_rank}/last.ckpt"
        t.strategy.save_checkpoint(t._checkpoint_connector.dump_checkpoint(), path)
    assert lines == []
    return "saved"


@pytest.mark.parametrize(("devices", "unseen"), [(1, "1"), pytest.param(2, "2, 3", marks=pytest.mark.slow)])
def test_a_folder_that_nodes_do_not_share_is_noticed_at_the_first_save(
    devices: int, unseen: str, tmp_path: Path
) -> None:
    """One path, another folder on each node: here each rank's is relative to the working directory of its node."""
    found = run_ranks(one_path_two_folders, str(tmp_path), nodes=2, devices=devices, timeout=100, init=False)
    lines, kept = zip(*found, strict=True)
    assert [f"the side files of rank(s) {unseen} are not in" in line for line in lines[0]] == [True]
    assert not any(lines[1:])
    files = [devices] * devices + [2 * devices] * devices  # another node's last save stays until the next one
    assert [len(names) for names in kept] == files


def one_path_two_folders(folder: str) -> tuple[list[str], list[str]]:
    t = trainer(
        "pytorch_lightning", sparse("pytorch_lightning", timeout=timedelta(seconds=10)), max_steps=2, **_ranks()
    )
    t.fit(plain_module("pytorch_lightning"))
    os.makedirs(f"{folder}/node{t.node_rank}", exist_ok=True)
    os.chdir(f"{folder}/node{t.node_rank}")
    lines = Lines().lines
    for name in ("first.ckpt", "first.ckpt", "first.ckpt", "second.ckpt"):
        t.save_checkpoint(name)
    return lines, [each.name for each in Path("first.ckpt.residual").rglob("*.pt")]


def test_a_rank_that_does_not_see_the_checkpoint_fails_all(tmp_path: Path) -> None:
    """Where nodes do not share the folder, ``ckpt_path="last"`` finds it on one of them: all say so, none waits."""
    run_ranks(fit, str(tmp_path), "32-true", None, nodes=2, devices=1, timeout=100, init=False)
    for said in run_ranks(seen_by_one, str(tmp_path), nodes=2, devices=1, timeout=60, init=False):
        assert "rank(s) 1 loaded no checkpoint and rank 0" in said


def seen_by_one(folder: str) -> str:
    t = trainer("pytorch_lightning", sparse("pytorch_lightning"), max_steps=STEPS + 2, **_ranks())
    path = f"{folder}/last.ckpt" if os.environ["RANK"] == "0" else None
    try:
        t.fit(plain_module("pytorch_lightning"), ckpt_path=path)
    except ValueError as error:
        return str(error)
    return "resumed"


def test_one_rank_waits_for_all() -> None:
    store = torch.distributed.HashStore()
    second = timedelta(seconds=1)
    barrier = StoreBarrier("save", 3, store)
    for rank in (0, 2):
        StoreBarrier("save", 3, store).arrive(rank)
    assert barrier.wait(second) == [1]
    for rank in range(3):
        barrier.arrive(rank)
    assert barrier.wait(second) == []
    assert barrier.wait(second / 10) == [0, 1, 2], "what is over is forgotten"
    named = [StoreBarrier("names", 2, store) for _ in range(2)]
    for rank, each in enumerate(named):
        each.arrive(rank, f"loss={rank}.ckpt")
    assert named[0].wait(second) == []
    assert named[0].names == ["loss=0.ckpt", "loss=1.ckpt"]

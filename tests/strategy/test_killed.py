"""A job that is killed, in a step or at any point of saving, and started again: it ends as if nothing had happened.

Ranks are real processes that SIGKILL themselves; what the others do is what they would do on a cluster.
"""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparse.checkpoint import side_files as saves
from lightning_sparse.checkpoint.verdict import decide
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import Lines, raised
from tests.strategy.kills import FLAVOUR, Kill, fit_on, patience, whole_and_killed
from tests.strategy.models import node_residual
from tests.strategy.trainers import plain_module, ranks, sparse, trainer, weights

STEPS = 12
SHAPES = [(2, 2), (1, 3), (2, 3)]


def fit(folder: str, kill: Kill | None, precision: str = "32-true", seconds: float | None = None) -> dict[str, Any]:
    """Train with a checkpoint after every step, from the last one if there is one."""
    strategy = sparse(FLAVOUR, timeout=timedelta(seconds=seconds) if seconds else patience(kill))
    module = plain_module(FLAVOUR, by_step=True)
    t = fit_on(folder, strategy, module, kill, max_steps=STEPS, precision=precision)
    state = t.strategy.engine
    state.commit_round()
    return {"weights": weights(module), "residual": node_residual(module, state), "round": state.round}


def same_ends(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["round"] == other["round"]
    assert torch.equal(one["weights"], other["weights"])
    assert torch.equal(one["residual"], other["residual"])


QUICK = ["before its side file", "before the main file"]
POINTS = ["in a step", QUICK[0], "after its side file", QUICK[1], "after the main file"]
SLOW = [(*shape, precision, POINTS) for shape in SHAPES for precision in ("32-true", "16-mixed")]


@pytest.mark.parametrize(
    ("nodes", "devices", "precision", "points"),
    [(2, 2, "32-true", QUICK), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_killed_run_goes_on_bit_identically(
    nodes: int, devices: int, precision: str, points: list[str], tmp_path: Path
) -> None:
    """Killed at each point in turn, each time in a later step, by a rank of chance where any may be hit."""
    chance = random.Random(f"{nodes} {devices} {precision}")
    kills = []
    for number, point in enumerate(points):
        rank = 0 if "main" in point else chance.randrange(1, nodes * devices)
        kills.append(Kill(point, rank, 3 + 2 * number))
    many: dict[str, Any] = {"nodes": nodes, "devices": devices, "timeout": 100}
    for one, other in whole_and_killed(fit, tmp_path, kills, precision, **many):
        same_ends(one, other)


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run_ranks(fit, str(tmp_path / "whole"), None, nodes=2, devices=1, timeout=100, init=False)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    # torch 2.15 gives the second life the store of the first one, where Gloo finds addresses of the dead; plain
    # all_reduce fails there, too.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(
        [*words, "-m", "tests.strategy.test_killed", str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank, one in enumerate(whole):
        other = torch.load(tmp_path / f"result{rank}.pt")
        assert other["restarts"] == 1
        same_ends(one, other)


def main(folder: str) -> None:
    """One rank under torchrun; in the first of its lives one of them dies. One agent starts all, each a node."""
    os.environ.update(GROUP_RANK=os.environ["LOCAL_RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    result = fit(folder, None if restarts else Kill("in a step", rank=1, step=6), seconds=20)
    torch.save({**result, "restarts": restarts}, f"{folder}/result{os.environ['RANK']}.pt")


def two_steps(seconds: float) -> Any:
    """A Trainer after a fit, in which ranks wait for each other for so long."""
    t = trainer(FLAVOUR, sparse(FLAVOUR, timeout=timedelta(seconds=seconds)), max_steps=2, **ranks())
    t.fit(plain_module(FLAVOUR))
    return t


def save(t: Any, path: Path | str) -> None:
    t.strategy.save_checkpoint(t._checkpoint_connector.dump_checkpoint(), path)


@pytest.mark.parametrize(("nodes", "seconds"), [(2, 2.0), (3, 100.0)])
def test_a_checkpoint_is_not_replaced_by_one_that_lacks_residuals(nodes: int, seconds: float, tmp_path: Path) -> None:
    """Of a rank that is alive, only too late; or that cannot write, which tells the others long before the timeout. The
    save that was there stays."""
    first, missing, *others = run_ranks(
        saved_by_others, str(tmp_path), seconds, nodes=nodes, devices=1, timeout=60, init=False
    )
    if not others:
        assert missing == "late"
        assert "rank(s) 1 did not write their residuals" in first
        assert "stays as it was" in first
        return
    assert missing == "no space left"
    for other in (first, *others):
        assert "a rank could not write its residuals" in other
        assert "OSError: no space left" in other


def saved_by_others(folder: str, seconds: float) -> str:
    fit(folder, None)
    path = Path(folder) / "last.ckpt"
    before = path.read_bytes()
    t = two_steps(seconds)
    if t.global_rank == 1:
        if seconds < 10:
            return "late"
        saves.write_side_file = no_space
    said = raised(save, t, path)
    assert path.read_bytes() == before
    return said


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
    t = two_steps(seconds=10)
    lines = Lines().lines
    for _ in range(4):  # the same name, again and in the same round
        path = f"{folder}/worker{t.global_rank}/last.ckpt"
        save(t, path)
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
    t = two_steps(seconds=10)
    os.makedirs(f"{folder}/node{t.node_rank}", exist_ok=True)
    os.chdir(f"{folder}/node{t.node_rank}")
    lines = Lines().lines
    for name in ("first.ckpt", "first.ckpt", "first.ckpt", "second.ckpt"):
        t.save_checkpoint(name)
    return lines, [each.name for each in Path("first.ckpt.residual").rglob("*.pt")]


def test_a_rank_that_does_not_see_the_checkpoint_fails_all(tmp_path: Path) -> None:
    """Where nodes do not share the folder, ``ckpt_path="last"`` finds it on one of them: all say so, none waits."""
    run_ranks(fit, str(tmp_path), None, nodes=2, devices=1, timeout=100, init=False)
    for said in run_ranks(seen_by_one, str(tmp_path), nodes=2, devices=1, timeout=60, init=False):
        assert "rank(s) 1 loaded no checkpoint and rank 0" in said


def seen_by_one(folder: str) -> str:
    t = trainer(FLAVOUR, sparse(FLAVOUR), max_steps=STEPS + 2, **ranks())
    path = f"{folder}/last.ckpt" if os.environ["RANK"] == "0" else None
    return raised(t.fit, plain_module(FLAVOUR), ckpt_path=path)


def test_saves_leave_nothing_in_the_store(tmp_path: Path) -> None:
    for keys in run_ranks(keys_after_saves, str(tmp_path), nodes=2, devices=1, timeout=100, init=False):
        assert keys[0] == keys[-1], "two saves stay until two others are over"


def keys_after_saves(folder: str) -> list[int]:
    t = two_steps(seconds=10)
    found = []
    for _ in range(6):
        t.save_checkpoint(f"{folder}/last.ckpt")
        torch.distributed.barrier()
        found.append(torch.distributed.distributed_c10d._get_default_store().num_keys())
        torch.distributed.barrier()
    return found[2:]


def test_ranks_that_stop_waiting_at_different_times_reach_one_verdict() -> None:
    """Rank 1 reports after rank 0 has judged without it, and sees all reports, but the verdict is rank 0's."""
    found = run_ranks(late_report, nodes=3, devices=1, timeout=60)
    assert [verdict for verdict, _ in found] == ["missing: 1"] * 3
    assert None in [found[0][1][1], found[2][1][1]]
    assert found[1][1] == ["report 0", "report 1", ""]


def late_report() -> tuple[str, list[str | None]]:
    def judge(reports: Sequence[str | None]) -> str:
        missing = [str(rank) for rank, report in enumerate(reports) if report is None]
        return f"missing: {', '.join(missing)}" if missing else ""

    rank = torch.distributed.get_rank()
    if rank == 1:
        torch.distributed.distributed_c10d._get_default_store().wait(["save/verdict"], timedelta(seconds=30))
    report = "" if rank == 2 else f"report {rank}"  # an empty one counts, too
    verdict, reports = decide("save", report, judge, timedelta(seconds=3))
    return verdict, list(reports)


@pytest.mark.parametrize("rank_0", [None, '{"path": "a.ckpt", "error": "", "replaces": true}'])
def test_checkpoint_stays_if_a_rank_is_missing_and_rank_0_may_replace_it(rank_0: str | None) -> None:
    """Only rank 0 knows whether it would replace a checkpoint. If its report is late, the others assume so."""
    other = '{"path": "a.ckpt", "error": "", "replaces": false}'
    assert "the existing checkpoint stays" in saves._verdict("a.ckpt", [rank_0, other, None])
    assert saves._verdict("a.ckpt", [other, other, None]) == ""


if __name__ == "__main__":
    main(sys.argv[1])

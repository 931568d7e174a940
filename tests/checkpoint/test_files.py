"""Side files: the verdict of ranks on a save, nodes that do not share a folder, and a restart by torchrun."""

import os
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
from tests.helpers.scenarios import Scenarios
from tests.helpers.training import results_in_one_start
from tests.strategy.kills import PACKAGE, Kill, fit_on, patience
from tests.strategy.models import node_residual
from tests.strategy.trainers import plain_module, ranks, sparse, trainer, weights

STEPS = 12


def fit(folder: str, kill: Kill | None, seconds: float | None = None) -> dict[str, Any]:
    """Train from the last checkpoint, if any, with a checkpoint after every step."""
    strategy = sparse(PACKAGE, timeout=timedelta(seconds=seconds) if seconds else patience(kill))
    module = plain_module(PACKAGE, by_step=True)
    t = fit_on(folder, strategy, module, kill, max_steps=STEPS)
    state = t.strategy.engine
    state.commit_round()
    return {"weights": weights(module), "residual": node_residual(module, state), "round": state.round}


def same_ends(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["round"] == other["round"]
    assert torch.equal(one["weights"], other["weights"])
    assert torch.equal(one["residual"], other["residual"])


@pytest.mark.slow
def test_run_restarted_by_torchrun_resumes_bit_identically(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run_ranks(fit, str(tmp_path / "whole"), None, nodes=2, devices=1, timeout=100, init=False)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    # After the restart, torch 2.15 reuses the store, where Gloo finds addresses of dead processes. A plain all_reduce
    # fails there, too.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(
        [*words, "-m", "tests.checkpoint.test_files", str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank, one in enumerate(whole):
        other = torch.load(tmp_path / f"result{rank}.pt")
        assert other["restarts"] == 1
        same_ends(one, other)


def main(folder: str) -> None:
    """Run one rank under torchrun as a node of its own. Rank 1 dies before the restart."""
    os.environ.update(GROUP_RANK=os.environ["LOCAL_RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    result = fit(folder, None if restarts else Kill("in a step", rank=1, step=6), seconds=20)
    torch.save({**result, "restarts": restarts}, f"{folder}/result{os.environ['RANK']}.pt")


def two_steps(seconds: float) -> Any:
    """Return a Trainer after a fit, whose ranks wait at most `seconds` for each other."""
    t = trainer(PACKAGE, sparse(PACKAGE, timeout=timedelta(seconds=seconds)), max_steps=2, **ranks())
    t.fit(plain_module(PACKAGE))
    return t


def save(t: Any, path: Path | str) -> None:
    t.strategy.save_checkpoint(t._checkpoint_connector.dump_checkpoint(), path)


def test_save_that_lacks_residuals_of_a_late_rank_keeps_the_last_save(tmp_path: Path) -> None:
    first, late = run_ranks(saved_by_others, str(tmp_path), nodes=2, devices=1, timeout=60, init=False)
    assert late == "late"
    assert "rank(s) 1 did not write their state" in first
    assert "the existing checkpoint stays" in first


def saved_by_others(folder: str) -> str:
    path = Path(folder) / "last.ckpt"
    t = two_steps(seconds=2)
    save(t, path)
    before = path.read_bytes() if t.global_rank == 0 else b""
    if t.global_rank == 1:
        return "late"
    said = raised(save, t, path)
    assert path.read_bytes() == before
    return said


SCENARIOS = Scenarios()
results = results_in_one_start(SCENARIOS)


def test_save_to_paths_that_differ_by_rank_works(results: list[dict[str, Any]]) -> None:
    """Ray gives each worker its own folder. Rank 0 must not wait for a path that no other rank knows."""
    for rank, saved in enumerate(each["own_folders"] for each in results):
        assert set(saved) == {f"rank0000{rank}.pt"}
        assert len(saved) == (1 if rank == 0 else 2), "the last save stays until another main file exists"


@SCENARIOS.add
def own_folders(folder: str) -> list[str]:
    t = two_steps(seconds=10)
    lines = Lines().lines
    for _ in range(4):  # save again to the same path, in the same round
        path = f"{folder}/worker{t.global_rank}/last.ckpt"
        save(t, path)
    assert lines == []
    return [each.name for each in Path(folder).glob(f"worker{t.global_rank}/last.ckpt.residual/*/rank*.pt")]


def test_folder_that_nodes_do_not_share_is_logged_at_the_first_save(results: list[dict[str, Any]]) -> None:
    not_shared([each["one_path_two_folders"] for each in results], 1, "1")


@pytest.mark.slow
def test_folder_that_nodes_of_two_devices_do_not_share_is_logged(tmp_path: Path) -> None:
    found = run_ranks(one_path_two_folders, str(tmp_path), nodes=2, devices=2, timeout=100, init=False)
    not_shared(found, 2, "2, 3")


def not_shared(found: list[tuple[list[str], list[str]]], devices: int, unseen: str) -> None:
    lines, kept = zip(*found, strict=True)
    assert [f"the side files of rank(s) {unseen} are not in" in line for line in lines[0]] == [True]
    assert not any(lines[1:])
    files = [devices] * devices + [2 * devices] * devices  # on the other node, the last save stays until the next save
    assert [len(names) for names in kept] == files


@SCENARIOS.add
def one_path_two_folders(folder: str) -> tuple[list[str], list[str]]:
    """Save to one path, relative to the working directory of each node."""
    t = two_steps(seconds=10)
    os.makedirs(f"{folder}/node{t.node_rank}", exist_ok=True)
    os.chdir(f"{folder}/node{t.node_rank}")
    lines = Lines().lines
    for name in ("first.ckpt", "first.ckpt", "first.ckpt", "second.ckpt"):
        t.save_checkpoint(name)
    return list(lines), [each.name for each in Path("first.ckpt.residual").rglob("*.pt")]


def test_checkpoint_that_one_rank_does_not_see_is_an_error_on_all(results: list[dict[str, Any]]) -> None:
    """If nodes do not share the folder, ``ckpt_path="last"`` finds the checkpoint on one node only."""
    assert all("rank(s) 1 loaded no checkpoint and rank 0" in each["seen_by_one"] for each in results)


@SCENARIOS.add
def seen_by_one(folder: str) -> str:
    two_steps(10).save_checkpoint(f"{folder}/last.ckpt")
    t = trainer(PACKAGE, sparse(PACKAGE), max_steps=4, **ranks())
    path = f"{folder}/last.ckpt" if os.environ["RANK"] == "0" else None
    return raised(t.fit, plain_module(PACKAGE), ckpt_path=path)


def test_saves_leave_no_keys_in_the_store(results: list[dict[str, Any]]) -> None:
    for keys in (each["keys_after_saves"] for each in results):
        assert keys[0] == keys[-1], "the keys of two saves stay until two other saves are complete"


@SCENARIOS.add
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
    """Rank 1 reports after rank 0 has decided without it. Rank 1 sees all reports, but the verdict of rank 0 counts."""
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
    report = "" if rank == 2 else f"report {rank}"  # an empty report counts, too
    verdict, reports = decide("save", report, judge, timedelta(seconds=3))
    return verdict, list(reports)


@pytest.mark.parametrize("rank_0", [None, '{"path": "a.ckpt", "error": "", "replaces": true}'])
def test_checkpoint_stays_if_a_rank_is_missing_and_rank_0_may_replace_it(rank_0: str | None) -> None:
    """Only rank 0 knows whether it would replace a checkpoint. If its report is late, the other ranks assume so."""
    other = '{"path": "a.ckpt", "error": "", "replaces": false}'
    assert "the existing checkpoint stays" in saves._verdict("a.ckpt", [rank_0, other, None])
    assert saves._verdict("a.ckpt", [other, other, None]) == ""
    failed = other.replace('""', '"OSError: no space left"')
    assert "could not write its state for a.ckpt (OSError: no space left)" in saves._verdict(
        "a.ckpt", [rank_0, failed, other]
    )


def test_rank_that_reports_after_the_verdict_does_not_wait() -> None:
    """After a failure, ranks fail one after the other. Each of them would wait for reports that never come."""
    assert run_ranks(report_after_the_verdict, nodes=3, devices=1, timeout=60) == ["missing", "missing", ""]


def report_after_the_verdict() -> str:
    rank, verdict = torch.distributed.get_rank(), ""
    for reporting, timeout in ((0, timedelta(seconds=0.5)), (1, timedelta(hours=1))):
        if rank == reporting:
            verdict, _ = decide("late", "here", lambda reports: "missing" if None in reports else "", timeout)
        torch.distributed.barrier()
    return verdict


if __name__ == "__main__":
    main(sys.argv[1])

"""The spawn helper: results in order, the environment of each rank, and the three ways to fail, told apart."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers import distributed
from tests.helpers.distributed import RanksFailed, run_ranks

pytestmark = pytest.mark.timeout(120)


def _sum_of_ranks() -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total


def _environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def _raise_on(rank: int) -> None:
    print(f"rank {os.environ['RANK']} was here", flush=True)
    if dist.get_rank() == rank:
        raise RuntimeError("no such shard")
    time.sleep(60)


def _kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _leave_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def _wait_for_nobody(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def _unpicklable() -> object:
    return lambda: None


def _modules() -> bool:
    return "tests.lab.test_run_ranks" in sys.modules


def test_results_come_back_in_rank_order():
    results = run_ranks(_sum_of_ranks, nodes=2, devices=2)
    assert [rank for rank, _ in results] == [0, 1, 2, 3]
    assert all(total.item() == 6.0 for _, total in results)


def test_each_rank_sees_its_place():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
    results = run_ranks(_environment, *names, nodes=2, devices=2, init=False)
    assert results == [
        ["0", "4", "0", "2", "0", "0"],
        ["1", "4", "1", "2", "0", "0"],
        ["2", "4", "0", "2", "1", "1"],
        ["3", "4", "1", "2", "1", "1"],
    ]


def test_placement_scatters_and_unbalances_ranks():
    results = run_ranks(_environment, "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", placement=[[0, 2], [1]])
    assert results == [["0", "0", "2"], ["0", "1", "1"], ["1", "0", "2"]]


def test_placement_must_name_each_rank_once():
    with pytest.raises(ValueError, match="each rank from 0 to 2 once"):
        run_ranks(_environment, placement=[[0, 0], [1]])


def test_environment_is_the_callers(monkeypatch):
    monkeypatch.setenv("LS_CALLER", "now")
    results = run_ranks(_environment, "LS_CALLER", "LS_MORE", "MASTER_PORT", nodes=1, env={"LS_MORE": "x"}, init=False)
    assert [row[:2] for row in results] == [["now", "x"], ["now", "x"]]
    removed = run_ranks(_environment, "MASTER_PORT", nodes=1, devices=1, env={"MASTER_PORT": None}, init=False)
    assert removed == [[None]]


def test_raised_names_the_rank_and_its_traceback(monkeypatch):
    monkeypatch.setattr(distributed, "GRACE_S", 1.0)  # rank 0 would use all of it
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="no such shard") as caught:
        run_ranks(_raise_on, 1, nodes=1, devices=2)
    assert list(caught.value.raised) == [1]
    assert "_raise_on" in caught.value.raised[1]
    assert "rank 1 was here" in caught.value.raised[1]
    assert not caught.value.killed
    assert not caught.value.hung
    assert caught.value.stopped == [0]
    assert time.monotonic() - started < 40


def test_killed_names_the_signal():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_kill_on, 0, nodes=2, devices=1)
    assert caught.value.killed[0].startswith("SIGKILL")
    assert not caught.value.hung


def test_leaving_without_a_result_is_a_kind_of_killed():
    with pytest.raises(RanksFailed, match="exit code 3") as caught:
        run_ranks(_leave_on, 1, nodes=2, devices=1)
    assert list(caught.value.killed) == [1]


@pytest.mark.slow
def test_hung_shows_the_stack():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_wait_for_nobody, 1, nodes=1, devices=2, timeout=8)
    assert list(caught.value.hung) == [1]
    assert "_wait_for_nobody" in caught.value.hung[1]
    assert not caught.value.raised
    assert not caught.value.killed


def test_a_result_that_cannot_travel_is_raised():
    with pytest.raises(RanksFailed, match="pickle") as caught:
        run_ranks(_unpicklable, nodes=1, devices=1)
    assert list(caught.value.raised) == [0]


def test_fresh_interpreters_on_demand():
    assert run_ranks(_modules, nodes=1, devices=1, start_method="spawn") == [True]

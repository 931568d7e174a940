"""The spawn helper: results in order, the environment of each rank, and the three ways to fail, told apart."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.helpers import distributed
from tests.helpers.distributed import RanksFailed, run_ranks

pytestmark = pytest.mark.timeout(120)


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


def _wait_for_nobody(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def _unpicklable() -> object:
    return lambda: None


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
